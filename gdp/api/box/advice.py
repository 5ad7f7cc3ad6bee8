"""What to drop, shrink or buy where no packing keeps every limit."""

from collections.abc import Iterator, Sequence

from gdp.api.box.answer import BoxAnswer
from gdp.api.box.models import BoxModel
from gdp.api.box.pricing import Priced, Pricer
from gdp.box.solve import Solution


def advice(
    answer: BoxAnswer, models: Sequence[BoxModel], pricer: Pricer,
    priced: Sequence[Sequence[Priced]], solution: Solution,
) -> Iterator[str]:  # fmt: skip
    """Sentences; none where every limit is kept."""
    return iter(())
