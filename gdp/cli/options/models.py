"""Options that say which model, in which sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdp.base.errors import ArgumentError
from gdp.cli.options.decorators import alone, option, pass_dataclass, prefix_errors

if TYPE_CHECKING:
    from gdp.graph.op_graph import OpGraph
    from gdp.question.models import Model

_COUNT = click.IntRange(1, 2**31 - 1)


def _context(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A number of tokens, or "max"."""
    from gdp.base.units import whole_number
    from gdp.importers.spec import LONGEST

    if value is not None and value != LONGEST and whole_number(value) is None:
        raise click.BadParameter(f"{value!r} must be a number of tokens, or max")
    return value


CONTEXT_HELP = (
    "Tokens of each sequence that caches are reserved for, apart from those that are timed; max: "
    "the longest context that fits, in gdp place and gdp fit."
)
context = click.option("--context", metavar="N|max", callback=_context, help=CONTEXT_HELP)
"""Of a command that takes no `ModelOptions`."""


def parse_generate(text: str) -> dict[str, int]:
    """Sizes of a request from its text; raises `ValueError` for a malformed one.

    >>> parse_generate("prompt=2048,new=256")
    {'prompt': 2048, 'new': 256}
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        whole = value.isascii() and value.isdecimal() and len(value) <= 10 and int(value) >= 1
        if name not in ("prompt", "new", "batch", "requests") or name in sizes or not whole:
            raise ValueError(f"{part!r} must look like prompt=2048,new=256,batch=1")
        sizes[name] = int(value)
    if missing := sorted({"prompt", "new"} - sizes.keys()):
        raise ValueError(
            f"{text!r} must look like prompt=2048,new=256,batch=1: {missing[0]} misses"
        )
    return sizes


def load_with_progress(
    model: "Model", dims: "Mapping[str, int] | None" = None, room_bytes: int | None = None
) -> "OpGraph":
    """Import a model by `gdp.question.models.load`; report the stages of tracing on stderr."""
    from gdp.cli.show import told
    from gdp.question.models import load

    with told():
        return load(model, dims, room_bytes=room_bytes)


@dataclass(frozen=True)
class ModelOptions:
    """A model, and bindings of its symbolic dimensions."""

    spec: str = option(make=click.argument, metavar="MODEL")
    dims: tuple[str, ...] = option(
        "--dim", multiple=True, metavar="NAME=VALUE", help="Bind a dimension; ONNX models."
    )

    task: str | None = option("--task", metavar="TASK", help="Of hf: models, such as causal-lm.")
    batch: int | None = option("--batch", type=_COUNT, help="Samples; hf: and .gguf models.")
    sequence: int | None = option("--sequence", type=_COUNT, help="Tokens; hf: and .gguf models.")
    decode: bool = option(
        "--decode", is_flag=True, help="One token, with its cache; hf: and .gguf models."
    )
    generate: str | None = option(
        "--generate", metavar="prompt=2048,new=256,batch=1",
        help="A whole request, the prompt read once and so many tokens written; with requests=4, "
        "caches for so many in flight. hf: and .gguf models.",
    )  # fmt: skip

    context: str | None = option("--context", metavar="N|max", callback=_context, help=CONTEXT_HELP)

    quantize: str | None = option(
        "--quantize", metavar="SCHEME",
        help="Store weights so, instead of as the configuration says: nf4, nf4-double, int8, int4, "
        "gptq, awq, fp8, hqq, mxfp4, nvfp4, w8a8, w4a16 or none; hf: models.",
    )  # fmt: skip

    mmproj: str | None = option(
        "--mmproj", metavar="FILE",
        help="llama.cpp's image encoder, which gets a device of its own; .gguf models.",
    )  # fmt: skip
    image: int | None = option(
        "--image", type=_COUNT, metavar="PIXELS",
        help="Side of the image that it reads; default: as its file says.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Append task, batch, sequence, quantisation and decoding to the spec of the model."""
        from gdp.question.models import spec_of, with_options

        if isinstance(self, NamedModel) and not self.spec:
            if any(getattr(self, f.name) for f in fields(self)):
                raise click.UsageError("options of a model need --model")
            return
        if self.generate is not None:
            self._require_generating()
        try:
            spec = spec_of(with_options(
                self.spec, task=self.task, batch=self.batch, sequence=self.sequence,
                quantize=self.quantize, mmproj=self.mmproj, image=self.image, decode=self.decode,
            ))  # fmt: skip
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        if self.context is not None and self.generate is None:
            raise click.UsageError(
                "--context is for a whole request: give --generate, too; requests of --traffic say "
                "their tokens themselves"
            )
        if self.generate is not None:
            parts = self.generate.replace(" ", "").split(",")
            parts += [] if self.context is None else [f"context={self.context}"]
            spec += ("&" if "?" in spec else "?") + "&".join(parts)
        object.__setattr__(self, "spec", spec)

    def require_no_sizes(self, beside: str) -> None:
        """Raise `UsageError` if two options set tokens or sequences."""
        given = ("task", "batch", "sequence", "decode", "generate", "context")
        if name := next((name for name in given if getattr(self, name)), None):
            raise click.UsageError(f"{beside} says all tokens and requests: leave out --{name}")

    def _require_generating(self) -> None:
        from gdp.question.models import HF_PREFIX, is_gguf

        if not (self.spec.startswith(HF_PREFIX) or is_gguf(self.spec)):
            raise click.UsageError(
                f"--generate is for hf:CONFIG and .gguf models, not for {self.spec!r}"
            )
        given = ("sequence", "batch", "decode")
        if beside := next((name for name in given if getattr(self, name)), None):
            raise click.UsageError(
                f"--generate says all tokens and the batch: leave out --{beside}"
            )
        with prefix_errors("--generate"):
            parse_generate(self.generate or "")

    def load(self, room_bytes: int | None = None) -> "OpGraph":
        """Import the model by `gdp.question.models.load`; on a terminal, report its stages."""
        return load_with_progress(self.spec, self.bound(), room_bytes)

    @property
    def given(self) -> str | None:
        """The spec; None where `--model` was left out."""
        return self.spec or None

    @property
    def is_placement(self) -> bool:
        """True where the argument is a placement's file, which remembers its model."""
        from gdp.base.files.writing import is_written_by_gdp

        path = Path(self.spec)
        return path.is_file() and is_written_by_gdp(path, "placement")

    def bound(self) -> "Mapping[str, int]":
        """Sizes of the symbolic dimensions."""
        from gdp.question.models import with_dims

        return with_dims(self.dims)

    def beside(self, placement: str | None) -> tuple[str | None, str]:
        """Spec and placement of a verb with the arguments MODEL PLACEMENT, of which the first may
        be left out where the placement's file remembers it."""
        if placement is not None:
            return self.spec, placement
        if not self.is_placement:
            raise click.UsageError(f"{self.spec!r} is no placement: give MODEL PLACEMENT")
        return None, self.spec


@dataclass(frozen=True)
class NamedModel(ModelOptions):
    """A model as an option, where a placement is the argument."""

    spec: str = option(
        "--model", default="", metavar="MODEL",
        help="Default: the one that the placement was made for.",
    )  # fmt: skip


model, named_model = pass_dataclass("model", ModelOptions), pass_dataclass("model", NamedModel)
dims = alone(ModelOptions, "dims")
