"""Labels: the best placement known of each instance, with its value and the effort it took.

One JSON object per line, so that files merge and diffs stay readable.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.errors import GdpError
from gdp.files.reading import Kind, decode_json, read_bytes
from gdp.files.writing import write_atomic
from gdp.learn.instances import Instance
from gdp.methods.priorities import timing
from gdp.policy.evaluate import judge
from gdp.policy.policy import pack, unpack
from gdp.problem.problem import Problem
from gdp.problem.symmetry import canonical

_KIND = Kind("file of labels", GdpError)
_LINE = Kind("label", GdpError)


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best placement seen of one instance, under the best of the policy's priorities."""

    instance: Instance
    digest: str  # first 16 digits of the graph's digest: a label of another version is dropped
    value_s: Annotated[float, msgspec.Meta(ge=0)]
    evaluations: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # simulated placements spent so far
    device: str  # base64 of zlib of one byte per op
    found_by: str = ""

    def __post_init__(self) -> None:
        """Raises `ValueError` on a row that `pack` cannot have written."""
        self.placement()

    def placement(self) -> Int[np.ndarray, "N"]:
        """The device of every op."""
        return unpack(self.device, "u1")


class LabelStore:
    """Labels by instance; `improve` only ever lowers a value."""

    def __init__(self, labels: list[Label]) -> None:
        self._labels = {label.instance.key: label for label in labels}

    def __len__(self) -> int:
        return len(self._labels)

    def instances(self) -> list[Instance]:
        """All that have a label, in the order they came."""
        return [label.instance for label in self._labels.values()]

    def get(self, instance: Instance, problem: Problem | None = None) -> Label | None:
        """The label, unless it was made for another version of the graph."""
        label = self._labels.get(instance.key)
        if label is None or (problem is not None and label.digest != _digest(problem)):
            return None
        return label

    def improve(
        self,
        instance: Instance,
        problem: Problem,
        device: Int[np.ndarray, "N"],
        *,
        evaluations: int,
        found_by: str,
    ) -> Label:
        """Keep a placement if it is better than what is known; the effort adds up either way."""
        device = canonical(problem, device, timing(problem).order)
        cost_s, feasible = judge(problem, device[None])
        known = self.get(instance, problem)
        effort = evaluations + (known.evaluations if known else 0)
        if known and (not feasible[0] or cost_s[0] >= known.value_s):
            label = msgspec.structs.replace(known, evaluations=effort)
        else:
            label = Label(
                instance=instance,
                digest=_digest(problem),
                value_s=float(cost_s[0]),
                evaluations=effort,
                device=pack(device, "u1"),
                found_by=found_by,
            )
        self._labels[instance.key] = label
        return label

    def merge(self, labels: list[Label]) -> None:
        """Take over the labels that are better than what is known of their instances."""
        for label in labels:
            known = self._labels.get(label.instance.key)
            if known is None or label.value_s < known.value_s:
                self._labels[label.instance.key] = label

    def all(self) -> list[Label]:
        """The labels, in the order they came."""
        return list(self._labels.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all labels, one line each."""
        lines = [msgspec.json.encode(label) + b"\n" for label in self._labels.values()]
        write_atomic(path, lines)


def load_labels(path: str | os.PathLike[str]) -> LabelStore:
    """The labels of a file; none where there is no file yet."""
    file = Path(path)
    if not file.exists():
        return LabelStore([])
    lines = read_bytes(file, _KIND).splitlines()
    return LabelStore(
        [
            decode_json(line, _LINE, Label, f"{path}, line {number},")
            for number, line in enumerate(lines, start=1)
        ]
    )


def _digest(problem: Problem) -> str:
    return problem.graph.digest[:16]
