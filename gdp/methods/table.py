"""Every method by its command-line name. `gdp.solve` adds the trained policy."""

from gdp.methods.base import Method
from gdp.methods.exact.method import exact
from gdp.methods.pipeline.method import pipeline_dp
from gdp.methods.portfolio import HEURISTICS, auto
from gdp.methods.search.local_search import local_search

METHODS: dict[str, Method] = {
    **dict(HEURISTICS),
    "pipeline_dp": pipeline_dp,
    "exact": exact,
    "local_search": local_search,
    "auto": auto,
}
