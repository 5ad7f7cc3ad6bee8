"""What is taken away from HSDAG and from gdp's policy, one part at a time, as cases."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.published import gdp_cases, hsdag_cases
from benchmarks.published.baselines.rows import Run, Runner, by_method, run_case
from benchmarks.published.cases import Case, Row
from gdp import api
from gdp.learn.finetune import FinetuneConfig
from gdp.policy.model.config import NetworkConfig, Params
from gdp.policy.policy import Policy, default_checkpoint, load_policy
from gdp.problem.problem import Problem

HSDAG_PROBLEMS = tuple((model, hsdag_cases.CLUSTERS[0]) for model in hsdag_cases.MODELS)
POLICY_PROBLEMS = (
    ("inception-v3", "cpu-server+2xflex-170"), ("bert-base", "cpu-server+2xflex-170"),
    ("transformer-xl-2", "equal"),
)  # fmt: skip
"""Two of families that the shipped policy was trained on, one of a family that was held out."""
COSTS = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 22)
"""Columns of an op's features that are seconds, or levels made of seconds."""
DEVICE_COSTS = (0, 1, 3, 4, 5, 6, 8)
"""Columns of a device's features that are speeds."""


class Form(NamedTuple):
    """A policy before it is adapted, and how it is."""

    policy: Policy
    config: FinetuneConfig


def forms() -> dict[str, Callable[[int], Form]]:
    """By row: the policy for a seed. Rows of `shipped` start from the pre-trained weights, those of
    `fresh` from fresh ones in which the part was never there."""
    found: dict[str, Callable[[int], Form]] = {}
    for name, change in SHIPPED.items():
        found[f"shipped{name}"] = functools.partial(_shipped, change)
    for name, (network, tuning) in FRESH.items():
        found[f"fresh{name}"] = functools.partial(_fresh, network, tuning)
    return found


def _shipped(change: Callable[[Form], Form], seed: int) -> Form:
    del seed
    return change(Form(load_policy(default_checkpoint()), ALONE))


def _fresh(network: dict[str, Any], tuning: dict[str, Any], seed: int) -> Form:
    from gdp.policy.model.network import init

    config = replace(NetworkConfig(), **network)
    return Form(Policy(config, init(config, seed)), replace(ALONE, **tuning))


ALONE = FinetuneConfig(portfolio=False, search=0.0)
"""No `auto` before and no search after, so that what differs is the policy's."""


def _without_attention(form: Form) -> Form:
    kept = {name: part for name, part in form.policy.params.items() if name != "attention"}
    return _changed(form, kept, attention_layers=0)


def _without_gates(form: Form) -> Form:
    """Gates at one, which they are in fresh weights; without them nothing explores in them."""

    def ungated(tree: Params) -> Params:
        return {
            name: ungated(part) if isinstance(part, dict) else part
            for name, part in tree.items()
            if name != "gate"
        }

    bare = _changed(form, ungated(form.policy.params), superposition=False)
    return bare._replace(config=replace(form.config, freedom="all", explore=0.0))


def _without_advice(form: Form) -> Form:
    return _changed(form, form.policy.params, advice=False)


def _zeroed(*paths: str, rows: tuple[int, ...] | None = None) -> Callable[[Form], Form]:
    """With the kernels (or rows of them) and their biases at zero before it is adapted."""

    def change(form: Form) -> Form:
        params = form.policy.params
        for path in paths:
            *outer, last = path.split("/")
            params = _put(params, [*outer, last], rows)
        return form._replace(policy=Policy(form.policy.config, params))

    return change


def _put(tree: Params, path: list[str], rows: tuple[int, ...] | None) -> Params:
    first, *rest = path
    if rest:
        return tree | {first: _put(tree[first], rest, rows)}
    array = np.array(tree[first])
    array[slice(None) if rows is None else list(rows)] = 0.0
    return tree | {first: array}


def _changed(form: Form, params: Params, **network: Any) -> Form:
    return form._replace(policy=Policy(replace(form.policy.config, **network), params))


def _both(*changes: Callable[[Form], Form]) -> Callable[[Form], Form]:
    return lambda form: functools.reduce(lambda so_far, change: change(so_far), changes, form)


def _unfollowed(form: Form) -> Form:
    return form._replace(config=replace(form.config, imitate=0.0))


SHIPPED: dict[str, Callable[[Form], Form]] = {
    "": lambda form: form,
    " without attention": _without_attention,
    " without gates": _without_gates,
    " without advice": _without_advice,
    " without imitation": _unfollowed,
    ", cost features zeroed": _both(
        _zeroed("enter/kernel", rows=COSTS), _zeroed("device_in/kernel", rows=DEVICE_COSTS)
    ),
    ", devices zeroed": _zeroed("device_in/kernel", "device_in/bias"),
    ", pair features zeroed": _zeroed("feature_head/dense/kernel"),
}
FRESH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    " without attention": ({"attention_layers": 0}, {}),
    " without gates": ({"superposition": False}, {"freedom": "all", "explore": 0.0}),
    " without cost features": ({"features": "published"}, {}),
    " without advice": ({"advice": False}, {}),
    " without imitation": ({}, {"imitate": 0.0}),
}
"""Changes to the network, and to how it is trained."""
SEARCH = "search alone"


def rows_of(model: str, cluster: str) -> dict[str, tuple[Runner, bool]]:
    """Every row of a problem."""
    if (model, cluster) in HSDAG_PROBLEMS:
        return hsdag_cases.hsdag_rows()
    searched = by_method(api.methods()["local_search"])
    return {name: (by_form(form), True) for name, form in forms().items()} | {
        SEARCH: (searched, True)
    }


def by_form(form: Callable[[int], Form]) -> Runner:
    """A policy adapted within the evaluations."""

    def run(problem: Problem, evaluations: int, seed: int) -> Run:
        from gdp.learn.finetune import finetune

        made, began_s = form(seed), time.process_time()
        config = replace(made.config, evaluations=evaluations)
        found = finetune(problem, made.policy, config=config, seed=seed)
        value_s = found.value_s if np.isfinite(found.value_s) else None
        return Run(value_s, found.evaluations, time.process_time() - began_s)

    return run


def run(case: Case) -> Row:
    """What one case makes."""
    home = hsdag_cases if case.model in hsdag_cases.MODELS else gdp_cases
    problem = home.prepared(case.model, case.cluster)
    return {"fused": problem.num_ops} | run_case(case, problem, rows_of(case.model, case.cluster))
