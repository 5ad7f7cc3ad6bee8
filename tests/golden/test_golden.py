"""The recorded answers hold; `python -m tests.golden.record` records them anew."""

import pytest
from golden import answers, runs

RECORDED = answers.load()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", runs.NAMES)
def test_the_answer_is_as_recorded(name: str) -> None:
    if module := runs.missing(name):
        pytest.skip(f"{module} is not installed")
    assert name in RECORDED, f"never recorded: python -m tests.golden.record {name}"
    recorded = dict(RECORDED[name])
    libraries = recorded.pop("traced_with", {})
    found = list(answers.differences(recorded, runs.answer(name)))
    if found and libraries != (installed := runs.traced_with(name)):
        pytest.skip(f"recorded with {libraries}, installed is {installed}: the model is another")
    assert not found, "not as recorded:\n" + "\n".join(found)


def test_every_recorded_answer_has_its_case() -> None:
    assert sorted(RECORDED) == sorted(runs.NAMES)


@pytest.mark.parametrize(
    ("recorded", "found", "told"),
    [
        ({"a": 1.0, "b": [1, "x"]}, {"a": 1.0 + 5e-10, "b": [1, "x"]}, []),
        ({"a": 1.0}, {"a": 1.0 + 2e-9}, ["a: 1.0 -> 1.000000002 (+2e-07%)"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 -> 3 (+50%)"]),
        ({"a": 10**9}, {"a": 10**9 + 1}, ["a: 1000000000 -> 1000000001 (+1e-07%)"]),
        ({"a": 1}, {"b": True}, ["a: 1 -> nothing", "b: nothing -> True"]),
        ({"a": "0*3"}, {"a": "0*2 1"}, ["a: '0*3' -> '0*2 1'"]),
        ({"a": 1}, {"a": True}, ["a: 1 -> True"]),
    ],
)
def test_differences_are_told_one_by_one(recorded: object, found: object, told: list[str]) -> None:
    assert list(answers.differences(recorded, found)) == told
