"""Folders of trials: a placement, a record of the prediction, and what was measured of it."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gdp.api.measured.settings import Figures, Predicted, Setting
from gdp.base.errors import ArgumentError
from gdp.base.files.reading import Kind, read_json
from gdp.corrections.run import MeasurementFileError
from gdp.targets.target import StartCommand

PLACEMENT, RECORD = "placement.json", "trial.json"
SCHEMA = 1
_KIND = Kind("record of a trial", MeasurementFileError, "give another folder (-o)")


class TrialRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file `trial.json`."""

    schema: int
    asked: dict[str, str]  # arguments, or their digests, by name
    trial: int
    setting: Setting
    layout: str
    predicted: Predicted
    gain: float | None  # expected, as a share of the best measured time; None of the first trial
    untried: int  # settings, this one among them
    start: list[StartCommand]
    benchmark: str


@dataclass(frozen=True)
class EngineTrial:
    """A trial, and what was measured of it."""

    record: TrialRecord
    folder: Path
    measured: tuple[Figures, ...] = ()

    @property
    def name(self) -> str:
        """Its number in words."""
        return f"trial {self.record.trial}"

    @property
    def text(self) -> str:
        """Its plan and settings in words."""
        return f"{self.record.layout}, {self.record.setting.text}"

    @property
    def result(self) -> Path:
        """The file that its benchmark writes."""
        return self.folder / "result.json"

    @property
    def results(self) -> list[Path]:
        """Files of all repetitions."""
        further = sorted(self.folder.glob("result-*.json"))
        return [path for path in (self.result, *further) if path.is_file()]

    @property
    def mean(self) -> Figures:
        """Means over the repetitions."""
        return Figures(*(statistics.fmean(column) for column in zip(*self.measured, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        record = self.record
        low, middle, high = (figures._asdict() for figures in record.predicted)
        return {
            "trial": record.trial, "layout": record.layout, **record.setting._asdict(),
            "predicted": middle, "expected_gain": record.gain,
            "intervals": {name: [low[name], high[name]] for name in middle},
            "measured": self.mean._asdict() if self.measured else None,
            "runs": len(self.measured), "placement": str(self.folder / PLACEMENT),
            "start": [one._asdict() for one in record.start], "benchmark": record.benchmark,
            "result": str(self.result),
        }  # fmt: skip


def read_trials(folder: Path, asked: Mapping[str, str]) -> list[EngineTrial]:
    """The trials of a folder in their order.

    Args:
        folder: Of all trials.
        asked: Arguments, or their digests, by name, which the trials were begun with.

    Raises:
        ArgumentError: They were begun with others.
    """
    trials: list[EngineTrial] = []
    while (own := folder / f"trial-{len(trials) + 1}").joinpath(RECORD).is_file():
        record = read_json(own / RECORD, _KIND, TrialRecord)
        other = [name for name, text in asked.items() if record.asked.get(name) != text]
        if record.schema != SCHEMA or other:
            raise ArgumentError(
                f"{folder} holds trials of another {' and '.join(other) or 'version of gdp'}; give "
                "another folder (-o), or the arguments that it was begun with"
            )
        trials.append(EngineTrial(record, own))
    return trials
