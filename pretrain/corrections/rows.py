"""Measured runs of public tables, with predicted passes, as the correction network learns them."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks.measured_world.engines import median_pass_s
from benchmarks.measured_world.servers import asked_of, set_up
from benchmarks.measured_world.serving_runs import Run
from gdp.corrections.features import EngineStack, Pass, format_class
from gdp.corrections.passes import Residuals, Times, residuals, scaled
from gdp.corrections.process import Lesson
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import ROUNDS, Arrival, Traffic
from gdp.targets.vllm.scheduler import VllmScheduler
from pretrain.corrections.stacks import stack_features

LEAST_SHOWN = 0.02
"""Passes that measured times show less are not learned from."""


@dataclass(frozen=True, eq=False)
class Row:
    """A measured run: its passes as predicted, and how its times follow from them."""

    source: str
    model: str
    stack: EngineStack
    memory_bytes: float  # of its card
    format: str
    passes: tuple[Pass, Pass]  # prefill, decode
    measured: Times
    predict: Callable[[float, float], Times]  # by residuals of prefill and decode
    found: Residuals
    load: tuple[object, ...]  # rows of one load differ in GPUs and requests
    run: Run | None = None

    @property
    def group(self) -> tuple[str, str, str]:
        """Stack, model and format."""
        return self.stack.key, self.model, self.format

    @property
    def architecture(self) -> str:
        """The model, or another that takes equal time: a server of R1 may draft where V3's do not,
        so that its runs are none of theirs, but neither is learned from to predict the other."""
        return self.model.replace("DeepSeek-R1", "DeepSeek-V3")

    def stack_features(self, asked: Pass) -> Float[np.ndarray, "G"]:
        """Features of the stack under a pass."""
        return stack_features(self.stack, self.memory_bytes, asked)

    @property
    def lessons(self) -> list[Lesson]:
        """The passes that the times show."""
        both = zip(self.passes, self.found[:2], self.found.shown, strict=True)
        return [Lesson(*one) for one in both if one[2] >= LEAST_SHOWN]


def rows_of(paths: Iterable[Path], kept_in: Path | None = None) -> list[Row]:
    """Rows of files of `benchmarks.measured_world passes`; residuals are kept in a file."""
    known: dict[str, Any] = {}
    if kept_in is not None and kept_in.is_file():
        known = {d["key"]: d for d in map(json.loads, kept_in.open())}
    documents = [row for path in paths for row in map(json.loads, path.open()) if "why" not in row]
    found = []
    for document in documents:
        if document["source"] == "llama":
            found.append(_llama_row(document))
            continue
        run = Run(**document["run"])
        key = f"{document['source']} {json.dumps(document['run'])}"
        predict, measured = _served(document, run)
        if key in known:
            own = known[key]
            solved = Residuals(own["prefill"], own["decode"], tuple(own["shown"]))
        else:
            solved = residuals(predict, measured)
            if kept_in is not None:
                with kept_in.open("a") as file:
                    file.write(json.dumps({"key": key, **solved._asdict()}) + "\n")
        found.append(_row(document, run, predict, measured, solved.under_load()))
    return found


def _row(
    document: Mapping[str, Any], run: Run, predict: Callable[[float, float], Times],
    measured: Times, solved: Residuals,
) -> Row:  # fmt: skip
    stack = EngineStack(**{**document["stack"], "version": document["version"]})
    prefill, decode = (Pass(**own) for own in document["passes"])
    return Row(
        document["source"], model_name(run.model), stack, float(document["memory_bytes"]),
        run.precision or f"class {format_class(decode.bits)}", (prefill, decode),
        measured, predict, solved, run.load, run,
    )  # fmt: skip


def _llama_row(document: Mapping[str, Any]) -> Row:
    """A row of llama-bench, which tells one pass; the other one is never looked at."""
    one = Pass(**document["pass"])
    stack = EngineStack(**{**document["stack"], "host": document["machine"]})
    memory_bytes = float(document["memory_bytes"])
    predicted_s, measured_s = float(document["predicted_s"]), float(document["measured_s"])
    residual, is_prefill = math.log(measured_s / predicted_s), one.prefill
    shown = (1.0, 0.0) if is_prefill else (0.0, 1.0)
    measured = Times(measured_s, math.nan) if is_prefill else Times(math.nan, measured_s)

    def predict(prefill: float, decode: float) -> Times:
        return Times(predicted_s * math.exp(prefill), predicted_s * math.exp(decode))

    both = Residuals(residual * is_prefill, residual * (not is_prefill), shown)
    return Row(
        f"llama, {document['test']}, {document['kind']}", document["model"], stack,
        memory_bytes, document["format"], (one, one), measured, predict, both,
        (stack.key, document["model"]),
    )  # fmt: skip


def model_name(name: str) -> str:
    """A model without its organisation and the words of its training and format."""
    last = name.rpartition("/")[2]
    for word in ("-Instruct", "-2507", "-Thinking", "-FP8", "-it", "Meta-"):
        last = last.replace(word, "")
    return last


def _served(document: Mapping[str, Any], run: Run) -> tuple[Callable[[float, float], Times], Times]:
    """(times by residuals, measured times): through the simulator of the run's traffic."""
    engine = ServingEngine(**{**document["engine"], "watts": None}, scheduler=VllmScheduler())
    if document["source"] == "silicon":
        engine, traffic = set_up(engine, run), asked_of(run)

        def clients(prefill: float, decode: float) -> Times:
            served = serve(traffic, scaled(engine, prefill, decode))
            return Times(served.first_token.mean_s, served.token.mean_s)

        return clients, Times(run.first_s, run.token_s)
    step_s = float(document["step_s"])
    if document["source"] == "mlenergy":

        def between(prefill: float, decode: float) -> Times:
            return Times(1.0, median_pass_s(scaled(engine, prefill, decode), run))

        return between, Times(math.nan, run.token_s)
    users = int(document["users"])
    engine = engine._replace(requests_at_once=users)
    asked = Traffic((Arrival(0.0, run.prompt, run.new),) * (ROUNDS * users), users)

    def users_of(prefill: float, decode: float) -> Times:
        own = scaled(engine, prefill, decode)
        served = serve(in_steady_state(asked, own), own)
        return Times(served.first_token.median_s, math.exp(decode) * step_s)

    return users_of, Times(document["ttft_s"], run.token_s)
