"""Options that several commands share, as lists of click's own, and the types of their values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from gdp.base.errors import ArgumentError, GdpError
from gdp.base.rows import imported
from gdp.base.units import whole_number
from gdp.cli import show
from gdp.targets.table import PLANNERS

Option = Callable[[Callable[..., None]], Callable[..., None]]
OFFLOADING = [name for name, row in PLANNERS.items() if row.offloads]
BY_MODULE = [name for name, row in PLANNERS.items() if row.by_module]
_COUNT = click.IntRange(1, 2**31 - 1)


def stack(*options: Option) -> Option:
    """These options as one decorator, in their order."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


class ParsedValue(click.ParamType):
    """A value that a function of gdp, "module:function", reads; errors begin with the option."""

    name = "text"

    def __init__(self, function: str) -> None:
        self.function = function

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return imported(self.function)(value) if isinstance(value, str) else value
        except (GdpError, ValueError) as error:
            flag = "" if param is None else f"{param.opts[0]}: "
            raise click.UsageError(f"{flag}{error}") from None


class Context(click.ParamType):
    """A number of tokens, or "max"."""

    name = "tokens"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        from gdp.importers.spec import LONGEST

        tokens = LONGEST if value == LONGEST else whole_number(str(value))
        if tokens is None:
            self.fail(f"{value!r} must be a number of tokens, or max", param, ctx)
        return tokens


class ImageSize(click.ParamType):
    """A number of pixels, or the text of a request for images."""

    name = "image"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        pixels = whole_number(str(value))
        if pixels is None and "x" not in str(value):
            self.fail(
                f"{value!r} must be a number of pixels, or a size such as 1024x1024", param, ctx
            )
        return str(value) if pixels is None else pixels


class ObjectiveChoice(click.Choice):
    """Objectives of the table, which is imported at the first use."""

    def __init__(self, *, general: bool) -> None:
        super().__init__(())
        self.general = general  # those alone that every method may place for

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the user may write."""
        from gdp.sim.objectives import OBJECTIVES, general_objectives

        return general_objectives() if self.general else tuple(OBJECTIVES)

    @choices.setter  # click.Choice sets it
    def choices(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, _: Sequence[str]
    ) -> None: ...


def parse_generate(text: str) -> Mapping[str, int]:
    """Sizes of a request from its text; raises `ArgumentError` for a malformed one.

    >>> parse_generate("prompt=2048,new=256")
    {'prompt': 2048, 'new': 256}
    """
    form, sizes = "prompt=2048,new=256,batch=1", dict[str, int]()
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        size = whole_number(value)
        if name not in ("prompt", "new", "batch", "requests") or name in sizes or size is None:
            raise ArgumentError(f"{part!r} must look like {form}")
        sizes[name] = size
    if missing := sorted({"prompt", "new"} - sizes.keys()):
        raise ArgumentError(f"{text!r} must look like {form}: {missing[0]} misses")
    return sizes


# Models.

DIMS = click.option(
    "--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Bind a dimension; ONNX models."
)
CONTEXT = click.option(
    "--context", metavar="N|max", type=Context(),
    help="Tokens of each sequence that caches are reserved for, apart from those that are timed; "
    "max: the longest context that fits, in gdp place and gdp fit.",
)  # fmt: skip
_OF_MODEL = [
    DIMS,
    click.option("--task", metavar="TASK", help="Of hf: models, such as causal-lm."),
    click.option("--batch", type=_COUNT, help="Samples; hf: and .gguf models."),
    click.option("--sequence", type=_COUNT, help="Tokens; hf: and .gguf models."),
    click.option(
        "--decode", is_flag=True, help="One token, with its cache; hf: and .gguf models."
    ),
    click.option(
        "--generate", metavar="prompt=2048,new=256,batch=1",
        type=ParsedValue(f"{__name__}:parse_generate"),
        help="A whole request, the prompt read once and so many tokens written; with requests=4, "
        "caches for so many in flight. hf: and .gguf models.",
    ),
    CONTEXT,
    click.option(
        "--quantize", metavar="SCHEME",
        help="Store weights so, instead of as the configuration says: nf4, nf4-double, int8, int4, "
        "gptq, awq, fp8, hqq, mxfp4, nvfp4, w8a8, w4a16 or none; hf: models.",
    ),
    click.option(
        "--mmproj", metavar="FILE",
        help="llama.cpp's image encoder, which gets a device of its own; .gguf models.",
    ),
    click.option(
        "--image", type=ImageSize(), metavar="PIXELS|REQUEST",
        help="Side of the image that it reads; default: as its file says. Of pipelines the images "
        "that they make, such as 1024x1024,steps=50,guidance=3.5,batch=1.",
    ),
]  # fmt: skip
VIDEO = click.option(
    "--video", metavar="REQUEST",
    help="Videos that a pipeline makes, such as 1280x720x129,steps=50.",
)  # fmt: skip
MODEL = [click.argument("spec", metavar="MODEL"), *_OF_MODEL]
NAMED_MODEL = [
    click.option(
        "--model", "spec", default="", metavar="MODEL",
        help="Default: the one that the placement was made for.",
    ),
    *_OF_MODEL,
]  # fmt: skip

# Machines.

MAX_MEMORY = click.option(
    "--max-memory", metavar="0=20GiB,cpu=30GiB", multiple=True,
    type=ParsedValue("gdp.cluster.file:parse_max_memory"),
    help="Memory limits by device; may be repeated.",
)  # fmt: skip
RESERVE = click.option(
    "--reserve", metavar="SIZE|0=2GiB,cpu=8GiB", multiple=True,
    type=ParsedValue("gdp.cluster.reserve:parse_reserve"),
    help="Memory kept free of each accelerator or device, for drivers and runtimes; default: "
    "what `gdp devices` shows. 0: none.",
)  # fmt: skip
BACKEND = click.option(
    "--backend", metavar="cuda|rocm|vulkan|sycl|metal",
    help="Backend of llama.cpp on all GPUs; default: cuda, rocm, sycl or metal, by the maker.",
)  # fmt: skip
POWER_LIMIT = click.option(
    "--power-limit", metavar="250W|0=250W", multiple=True,
    type=ParsedValue("gdp.cluster.file:parse_power_limit"),
    help="Watts that accelerators, or a device, draw at most; times are predicted without it.",
)  # fmt: skip
CLUSTER = [
    click.option(
        "--cluster", metavar="CLUSTER",
        help="TOML file, or preset such as cpu+2xt4-pcie4 or 2xcpu-core; default: this machine.",
    ),
    MAX_MEMORY, RESERVE, BACKEND, POWER_LIMIT,
]  # fmt: skip
ENGINE = [
    click.option(
        "--processes", type=click.IntRange(1), help="On this machine; default: one a core."
    ),
    click.option(
        "--ray", metavar="ADDRESS",
        help='A Ray cluster instead: HOST:PORT, "auto", or "local" for one here.',
    ),
]  # fmt: skip
"""Of commands with independent tasks, which `gdp.base.tasks.engine_of` runs."""

# Objective, costs, constraints and search.

OBJECTIVE = click.option(
    "--objective", type=ObjectiveChoice(general=True), default="latency", show_default=True
)
OWN_OBJECTIVE = click.option(
    "--objective", type=ObjectiveChoice(general=True), default=None,
    help="Default: the one that the placement was made for, else latency.",
)  # fmt: skip
PLACE_OBJECTIVE = click.option(
    "--objective", type=ObjectiveChoice(general=False), default="latency", show_default=True,
    help="docs/explanation/simulator.md says what each of them means.",
)  # fmt: skip
CHECKPOINT = click.option(
    "--checkpoint", metavar="CK", help="Policy checkpoint; default: the shipped one."
)
COSTS = click.option(
    "--costs", metavar="FILE",
    help="Folder of gdp calibrate, file of gdp tune --write-costs, shipped (without what was "
    "learned of this machine; default: with it), or datasheet (the roofline everywhere).",
)  # fmt: skip
_PIN = ParsedValue("gdp.placement.constraints:parse_pin")
CONSTRAINTS = [
    click.option(
        "--pin", "pins", multiple=True, type=_PIN, metavar="GLOB=DEVICE", help="Fix ops to devices."
    ),
    click.option(
        "--forbid", multiple=True, type=_PIN, metavar="GLOB=DEVICE", help="Keep ops off devices."
    ),
    click.option("--together", multiple=True, metavar="GLOB", help="Keep ops on one device."),
    click.option("--constraints", metavar="FILE", help="The same in a TOML file."),
    click.option(
        "--no-replicas", is_flag=True,
        help="For throughput: one device for each stage, none that take samples in turn.",
    ),
]  # fmt: skip
SEED = click.option("--seed", type=int, default=0, show_default=True)
SEARCH = [
    click.option(
        "--seconds", type=float, default=5.0, show_default=True,
        help="Search budget; not heeded beside --evaluations.",
    ),
    click.option(
        "--evaluations", type=int,
        help="Budget in placements that the search simulates; no clock enters the answer. 1,000 of "
        "1,000 ops take 0.1 CPU s for a latency, 0.01 for a pipeline; heuristics add 0.7, programs "
        "where memory binds 10. The answer says how many CPU seconds it took.",
    ),
    SEED,
    click.option(
        "--chains", type=click.IntRange(min=1),
        help="Searches side by side; answers depend on their number. Default: one a core, at most "
        "4, where --seconds end them; one with --evaluations.",
    ),
]  # fmt: skip
METHOD = [
    *SEARCH,
    click.option(
        "--method", default="auto", show_default=True,
        help="auto, or one of those that `gdp compare` lists.",
    ),
    click.option(
        "--simplicity", type=float, metavar="PERCENT",
        help="Of the time, that fewer transfers and cuts may cost; 0: the best placement found. "
        "[default: 2 with --method auto, else 0]",
    ),
]  # fmt: skip
DESTINATION = [
    click.option(
        "--for", "target", type=click.Choice(tuple(PLANNERS)),
        help="Answer what this runtime can follow.",
    ),
    click.option(
        "--granularity", type=click.Choice(["op", "module", "layer"]),
        help=f"What stays in one piece; default: op, for {' and '.join(BY_MODULE)} module.",
    ),
    click.option(
        "--offload", type=click.Choice(["cpu", "disk", "none"]),
        help=f"Where {' and '.join(OFFLOADING)} keeps weights that do not fit; default: cpu.",
    ),
]  # fmt: skip


def asking(objective: Option) -> list[Option]:
    """Options of a question, without those of its search."""
    return [*MODEL, *CLUSTER, objective, CHECKPOINT, COSTS, *CONSTRAINTS]


def about(model: Sequence[Option]) -> list[Option]:
    """Options of the question that a placement answers, whose model is an argument or an option."""
    return [*model, *CLUSTER, OWN_OBJECTIVE, COSTS]


# Traffic.

TRAFFIC = click.option(
    "--traffic", metavar="concurrency=32,prompt=2048,new=256",
    type=ParsedValue("gdp.sim.traffic_text:parse_traffic"),
    help="Requests that share the engine, instead of one: so many clients, or rate=2.5 requests a "
    "second; sizes may be ranges (512..2048); or a table of requests, FILE.csv with the columns "
    "at_s, prompt and new. hf: models --for vllm.",
)  # fmt: skip
DRAFT = click.option(
    "--draft", metavar="MODEL,tokens=K,acceptance=A",
    type=ParsedValue("gdp.api.traffic.drafting:parse_draft"),
    help="A small model that drafts K tokens a pass, where that is faster: hf: for --traffic, "
    ".gguf for a .gguf model and --generate; A is the probability that the first one is accepted.",
)  # fmt: skip
WITHIN = click.option(
    "--within", metavar="50ms|first=500ms,token=30ms",
    type=ParsedValue("gdp.sim.traffic_text:parse_within"),
    help="Time that one run may take, for --objective energy; or TTFT and TPOT that 95% of the "
    "requests of --traffic are to keep.",
)  # fmt: skip
SERVING = [
    TRAFFIC,
    DRAFT,
    WITHIN,
    click.option(
        "--no-disaggregation", "disaggregated", is_flag=True, flag_value=False, default=True,
        help="All GPUs prefill and decode the requests of --traffic: no disaggregated serving.",
    ),
]  # fmt: skip

PRICE = click.option(
    "--price", metavar="0.30/kWh", type=ParsedValue("gdp.cli.energy_text:parse_price"),
    help="Price of electricity, such as 0.30EUR/kWh: adds money per million tokens or runs.",
)  # fmt: skip

# Files that are written, and the output of a command.

REPORT = click.option("--report", metavar="R.html", help="Write an HTML report.")
TRACE = click.option(
    "--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule."
)
FORCE = click.option(
    "--force", is_flag=True, help="Write over, or among, files that gdp did not write."
)
AS_JSON = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object on stdout.",
    callback=lambda context, _, value: context.meta.update({show.AS_JSON: value}),
)  # fmt: skip


def output(metavar: str, text: str | None = None) -> Option:
    """The option of the path that a command writes, which has to be given without a text."""
    return click.option("-o", "--output", required=text is None, metavar=metavar, help=text)
