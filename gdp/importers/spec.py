"""Model specifications: a path or name, and options behind a question mark."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote

from gdp.base.errors import ModelError
from gdp.base.files.reading import is_there

HF_PREFIX = "hf:"
LONGEST = "max"
"""The context of a request that asks for the longest one that fits."""
_PLAIN = "/:,~@!*'()$"


@dataclass(frozen=True)
class ModelSpec(os.PathLike[str]):
    """A model by path or name, such as `hf:llama` or `model.gguf`, with its options.

    Its text, `hf:llama?prompt=64&new=8`, is what the command line and files of placements have. The
    options begin at the first question mark behind a path that exists, else at the first of all.

    >>> spec = ModelSpec.of("hf:llama?prompt=64&new=8&context=max")
    >>> spec.options
    {'prompt': '64', 'new': '8', 'context': 'max'}
    >>> str(spec.having(context=None, batch=2).by_default(new=4, dtype="float16"))
    'hf:llama?prompt=64&new=8&batch=2&dtype=float16'
    """

    path: str  # with its prefix, such as "hf:"
    options: Mapping[str, str] = field(default_factory=dict)  # in their order; "" for a flag

    @classmethod
    def of(cls, model: object) -> "ModelSpec":
        """The specification of a text or path; empty for a graph or a traced model.

        Raises:
            ModelError: An option is given twice.
        """
        if isinstance(model, ModelSpec):
            return model
        text = os.fspath(model) if isinstance(model, str | os.PathLike) else ""
        path, query = _split(text)
        given = parse_qsl(query, keep_blank_values=True)
        for name, count in Counter(name for name, _ in given).items():
            if count > 1:
                raise ModelError(f"{text!r} gives the option {name!r} {count} times, not once")
        return cls(path, dict(given))

    def having(self, **options: object) -> "ModelSpec":
        """A copy with other options, behind those that it keeps, and without those that are
        None; True is a flag."""
        kept = {name: value for name, value in self.options.items() if name not in options}
        given = {name: value for name, value in options.items() if value is not None}
        more = {name: "" if value is True else str(value) for name, value in given.items()}
        return ModelSpec(self.path, kept | more)

    def by_default(self, **options: object) -> "ModelSpec":
        """A copy with those options that it does not have yet."""
        return self.having(**{k: v for k, v in options.items() if k not in self.options})

    def __fspath__(self) -> str:
        """Its text."""
        parts = [
            quote(name) + (f"={quote(value, safe=_PLAIN)}" if value else "")
            for name, value in self.options.items()
        ]
        return self.path + ("?" if parts else "") + "&".join(parts)

    __str__ = __fspath__


def _split(text: str) -> tuple[str, str]:
    """(path, options) of a text; the longest path that exists may have question marks itself."""
    parts = text.split("?")
    for count in range(len(parts), 1, -1):
        path = "?".join(parts[:count])
        if is_there(path.removeprefix(HF_PREFIX)):
            return path, "?".join(parts[count:])
    return parts[0], "?".join(parts[1:])
