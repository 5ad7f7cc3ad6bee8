"""Models cut to one block of each kind: the blocks that repeat, and a model that skips the others.

The layers of a list are of one kind where their modules are equal (classes, shapes, attributes, and
the entries of the configuration for them) and the model calls them with equal arguments: the result
of the layer before, and tensors that do not change from layer to layer. Of each kind the first and
the last layer stay in place; every other hands its input on, so that paths, indices, caches and the
configuration are those of the whole model. A run of the cut model on the meta device tells how
layers are called, and whether the model computes something between them.
"""

import functools
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FEWEST_LAYERS = 4
"""Shorter lists are traced whole."""
_MOST_KEPT = 0.75
_MOST_RUNS = 6
_INDEX = re.compile(r"(layer|block|idx|index|depth)")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST_NESTED = 6
_BEFORE = "the layer before"


class UncuttableError(Exception):
    """A model that must be traced whole; the message has the reason."""


class _Of(NamedTuple):
    """A tensor as the result of a layer."""

    stack: str
    layer: int
    place: str  # within what the layer returns


@dataclass(eq=False)
class Stack:
    """A list of layers that are called sequentially."""

    path: str  # of the list in the model
    layers: list[Any]
    owner: Any  # the list itself
    kinds: list[int]
    wanted: set[int] = field(default_factory=set)  # layers that others need besides the next one
    returned: dict[int, Any] = field(default_factory=dict)  # forms of results, by kind
    # Place of each part of a result, by kind: parts that share a storage have that of the first.
    places: dict[int, dict[str, str]] = field(default_factory=dict)
    is_called: bool = True

    def members(self) -> dict[int, list[int]]:
        """Layers of each kind, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, kind in enumerate(self.kinds):
            found[kind].append(i)
        return found

    @property
    def kept(self) -> list[int]:
        """The first and last layer of each kind, and those that are read from afar with the next;
        before one that is alone of its kind, the layer that it reads."""
        last = len(self.layers) - 1
        kept = {min(i + more, last) for i in self.wanted for more in (0, 1)}
        for own in self.members().values():
            kept |= {own[0], own[-1]} | ({max(own[0] - 1, 0)} if len(own) == 1 else set())
        return sorted(kept)

    @property
    def is_worth_it(self) -> bool:
        """True where enough layers are left out."""
        return len(self.kept) <= _MOST_KEPT * len(self.layers)

    def layer_of(self, path: str) -> int | None:
        """The layer that a module or weight of this path belongs to."""
        if not path.startswith(self.path + "."):
            return None
        index = path[len(self.path) + 1 :].partition(".")[0]
        return int(index) if index.isdigit() else None

    def renamed(self, path: str, layer: int) -> str:
        """The path in another layer."""
        rest = path[len(self.path) + 1 :].partition(".")[2]
        return f"{self.path}.{layer}" + (f".{rest}" if rest else "")


def find_stacks(model: Any) -> list[Stack]:
    """The outermost lists of layers in a model most of which are equal to others, by their modules
    alone."""
    import torch

    configs = _configs(model)
    stacks: list[Stack] = []

    def look(module: Any, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if isinstance(child, torch.nn.ModuleList) and len(child) >= FEWEST_LAYERS:
                layers = list(child)
                kinds = _numbered(
                    (_form(layer, i), _entries(configs, i, len(layers)))
                    for i, layer in enumerate(layers)
                )
                stack = Stack(inner, layers, child, kinds)
                if len({id(layer) for layer in layers}) == len(layers) and stack.is_worth_it:
                    stacks.append(stack)
                    continue
            look(child, inner)

    look(model, "")
    return stacks


def _configs(model: Any) -> list[Any]:
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in list(configs.values()):
        for value in getattr(config, "__dict__", {}).values():
            if hasattr(value, "to_diff_dict"):
                configs[id(value)] = value
    return list(configs.values())


def _entries(configs: Sequence[Any], layer: int, count: int) -> tuple[str, ...]:
    """Parts of configurations that are about one layer: entries of lists as long as there are
    layers, and whether lists of layers name it."""
    found = []
    for config in configs:
        for key, value in getattr(config, "__dict__", {}).items():
            if not isinstance(value, list | tuple) or key.startswith("_"):
                continue  # private ones are about the configuration itself
            if len(value) == count:
                found.append(f"{key}={value[layer]!r}")
            if _INDEX.search(key) and all(isinstance(i, int) for i in value):
                found.append(f"{key}:{layer in value or layer - count in value}")
    return tuple(found)


def _form(module: Any, index: int) -> Hashable:
    """All that a layer is, but for its own index and the values of its weights."""
    import torch

    base = torch.nn.Module.__dict__.keys() | vars(torch.nn.Module()).keys()
    attributes = tuple(
        (key, _value(key, value, index, 0))
        for key, value in vars(module).items()
        if key not in base
    )
    weights = tuple(
        (kind, name, tuple(t.shape), str(t.dtype))
        for kind, own in (("p", module._parameters), ("b", module._buffers))  # noqa: SLF001
        for name, t in own.items()
        if t is not None
    )
    hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))  # noqa: SLF001
    children = tuple((name, _form(child, index)) for name, child in module.named_children())
    return (type(module), module.training, attributes, weights, hooks, children)


def _value(key: str, value: Any, index: int, depth: int) -> Hashable:
    """An attribute in a form that compares equal if a forward pass cannot distinguish them."""
    import torch

    if isinstance(value, _PLAIN):
        own = type(value) is int and value == index and _INDEX.search(key)
        return "its index" if own else (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        return (id(value.untyped_storage()), tuple(value.shape), str(value.dtype))
    if hasattr(value, "to_diff_dict") or isinstance(value, torch.nn.Module) or depth > _MOST_NESTED:
        return id(value)
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), *(_value(key, part, index, depth + 1) for part in value))
    if isinstance(value, Mapping):
        parts = ((str(k), _value(str(k), part, index, depth + 1)) for k, part in value.items())
        return (type(value), *parts)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return ("partial", *(_value(key, part, index, depth + 1) for part in parts))
    if callable(value) and not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", None) or id(value)
    if inspect.isroutine(value) or isinstance(value, type):
        return (value.__qualname__, id(value) if "<" in value.__qualname__ else 0)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    held = getattr(value, "__dict__", None)
    if held is None:
        return id(value)
    return (type(value), *((k, _value(k, part, index, depth + 1)) for k, part in held.items()))


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested tuples, lists and dictionaries."""
    if isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves_of(part, f"{path}.{i}")
    elif type(value) is dict:
        for key, part in value.items():
            yield from leaves_of(part, f"{path}.{key}")
    else:
        yield path, value


def _arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(leaves_of({"args": args, "kwargs": kwargs}))


class _Input(NamedTuple):
    """A place in a layer's result that holds an input, or a tensor like it."""

    path: str
    is_fresh: bool


def _returned(result: Any, inputs: Mapping[str, Any]) -> Any:
    """The form of a layer's result, from which a skipped one makes its own."""
    import torch

    tensors = {p: t for p, t in inputs.items() if isinstance(t, torch.Tensor)}
    given: set[str] = set()

    def form(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            alike = [
                p for p, t in tensors.items() if (t.shape, t.dtype) == (part.shape, part.dtype)
            ]
            path = next((p for p in alike if _storage(tensors[p]) == _storage(part)), None)
            is_fresh = path is None
            if path is None:
                # New ones take the place of inputs in their order.
                path = next((p for p in alike if p not in given), None)
            if path is None:
                return None
            given.add(path)
            return _Input(path, is_fresh)
        if isinstance(part, _PLAIN):
            return part
        if type(part) in (tuple, list):
            return type(part)(map(form, part))
        raise UncuttableError(f"a layer returns a {type(part).__name__}")

    return form(result)


def _places(result: Any) -> dict[str, str]:
    """The place of each tensor of a result, or of the first one with the same storage."""
    first: dict[int, str] = {}
    tensors = ((path, leaf) for path, leaf in leaves_of(result) if _is_tensor(leaf))
    return {path: first.setdefault(_storage(leaf), path) for path, leaf in tensors}


def _made(form: Any, inputs: Mapping[str, Any], is_fresh: bool) -> Any:
    if isinstance(form, _Input):
        if form.path not in inputs:
            raise UncuttableError("layers of one kind are called in several ways")
        given = inputs[form.path]
        return given.new_empty(given.shape) if is_fresh and form.is_fresh else given
    if isinstance(form, tuple | list):
        return type(form)(_made(part, inputs, is_fresh) for part in form)
    return form


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _skipped(stack: Stack, index: int, seen: "_Seen | None") -> Any:
    """A module that hands its input on in the place of a layer, and has the layer's attributes."""
    import torch

    layer = stack.layers[index]

    class Skipped(torch.nn.Module):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(layer, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            inputs = _arguments(args, kwargs)
            form = stack.returned.get(stack.kinds[index], UncuttableError)
            if form is UncuttableError:
                raise UncuttableError("a layer is called before the first of its kind")
            if seen is None:
                return _made(form, inputs, False)
            seen.enter(stack, index, inputs)
            result = _made(form, inputs, True)
            seen.leave(stack, index, result)
            return result

    return Skipped().eval()


@contextmanager
def cut(stacks: Sequence[Stack], seen: "_Seen | None" = None) -> Iterator[None]:
    """The model with the layers that are not kept skipped; whole again behind it."""
    handles = []
    try:
        for stack in stacks:
            kept = set(stack.kept)
            for i, layer in enumerate(stack.layers):
                if i not in kept:
                    stack.owner._modules[str(i)] = _skipped(stack, i, seen)  # noqa: SLF001
                elif seen is not None:
                    handles += _watched(layer, stack, i, seen)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for stack in stacks:
            for i, layer in enumerate(stack.layers):
                stack.owner._modules[str(i)] = layer  # noqa: SLF001


def _watched(layer: Any, stack: Stack, index: int, seen: "_Seen") -> list[Any]:
    def before(module: Any, args: Any, kwargs: Any) -> None:
        del module
        seen.enter(stack, index, _arguments(args, kwargs))

    def after(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        del module
        form = _returned(result, _arguments(args, kwargs))
        stack.returned.setdefault(stack.kinds[index], form)
        stack.places.setdefault(stack.kinds[index], _places(result))
        seen.leave(stack, index, result)

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    ]


class _Seen:
    """One run of a cut model: the call of each layer, and the computation between layers."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self.stacks = {stack.path: stack for stack in stacks}
        self.calls: dict[str, list[tuple[int, dict[str, Hashable]]]] = {p: [] for p in self.stacks}
        self.looks = False  # at a run, and not at what makes it
        self.inside: Stack | None = None
        self.index = -1
        self.origin: dict[int, _Of] = {}  # of tensors, by their storage
        self.alive: list[Any] = []  # so that no storage is used again
        self.faults: dict[str, str] = {}
        # Layers that are read from afar, by the layer that reads them; -1: what is outside does.
        self.wanted: dict[str, dict[int, set[int]]] = {path: {} for path in self.stacks}

    def enter(self, stack: Stack, index: int, inputs: Mapping[str, Any]) -> None:
        """A layer is called."""
        if not self.looks:
            return
        if self.inside is not None:
            self.faults[stack.path] = f"{stack.path} is called within {self.inside.path}"
        self.inside, self.index = stack, index
        call = {path: self._called_with(stack, index, path, v) for path, v in inputs.items()}
        self.calls[stack.path].append((index, call))

    def leave(self, stack: Stack, index: int, result: Any) -> None:
        """A layer returns."""
        if not self.looks:
            return
        self.inside = None
        places = stack.places.get(stack.kinds[index], {})
        for path, leaf in leaves_of(result):
            if _is_tensor(leaf):
                self.alive.append(leaf)
                self.origin[_storage(leaf)] = _Of(stack.path, index, places.get(path, path))

    def _called_with(self, stack: Stack, index: int, path: str, value: Any) -> Hashable:
        if _is_tensor(value):
            self.alive.append(value)
            storage = _storage(value)
            origin: Hashable = self.origin.get(storage, storage)
            if isinstance(origin, _Of) and origin.stack == stack.path:
                before = origin.layer == index - 1
                origin = (_BEFORE, origin.place) if before else origin
            return (origin, tuple(value.shape), str(value.dtype))
        if isinstance(value, _PLAIN):
            return _value(path, value, index, 0)
        return getattr(value, "__qualname__", None) or type(value).__name__

    def mode(self) -> Any:
        """The mode that records the computation."""
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        seen = self

        class Watching(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                del types
                result = func(*args, **(kwargs or {}))
                given = [t for t in tree_leaves((args, kwargs or {})) if _is_tensor(t)]
                made = [t for t in tree_leaves(result) if _is_tensor(t)]
                seen.computed(func, given, made)
                return result

        return Watching()

    def computed(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        """An op ran."""
        storages = {_storage(t) for t in given}
        for origin in filter(None, map(self.origin.get, storages)):
            count = len(self.stacks[origin.stack].layers)
            own = self.inside is not None and self.inside.path == origin.stack
            if origin.layer < (self.index - 1 if own else count - 1):
                reader = self.index if own else -1
                self.wanted[origin.stack].setdefault(reader, set()).add(origin.layer)
        if self.inside is not None or not made:
            return
        writes = getattr(getattr(func, "_schema", None), "is_mutable", False)
        if not writes and all(_storage(t) in storages for t in made):
            return  # a view
        for path, calls in self.calls.items():
            if 0 < len(calls) < len(self.stacks[path].layers):
                name = getattr(func, "__name__", str(func))
                self.faults.setdefault(path, f"{name} is computed between layers of {path}")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def settle(stacks: list[Stack], make: Callable[[], Callable[[], object]]) -> list[Stack]:
    """The stacks that can be cut, with their kinds by how a run of the cut model calls the layers.

    Runs again with all that was found until nothing new is; raises `UncuttableError` where no stack
    is left.
    """
    for _ in range(_MOST_RUNS):
        if not stacks:
            raise UncuttableError("no list of layers repeats")
        before = [stack.kept for stack in stacks]
        seen = _Seen(stacks)
        for stack in stacks:
            stack.returned.clear()
            stack.places.clear()
        with cut(stacks, seen):
            run = make()
            seen.looks = True
            with seen.mode():
                run()
        for stack in stacks:
            _refine(stack, seen)
        left = [s for s in stacks if s.path not in seen.faults and (s.is_worth_it)]
        if len(left) == len(stacks) and before == [stack.kept for stack in stacks]:
            return stacks
        stacks = left
    raise UncuttableError("its layers are called in ever new ways")


def _refine(stack: Stack, seen: _Seen) -> None:
    """Distinguish kinds of layers by the calls of a run."""
    calls = seen.calls[stack.path]
    stack.is_called = bool(calls)
    if not calls:
        return
    if [i for i, _ in calls] != list(range(len(stack.layers))):
        seen.faults[stack.path] = f"layers of {stack.path} are not called in turn"
        return
    # The first layer reads what the model made before: in the place of the result of a layer.
    first, second = calls[0][1], calls[1][1]
    # Sources of the first layer by those of the second, and back: two tensors in the place of one
    # that the next layers read twice make another kind, and one in the place of two.
    pairs: tuple[dict[Hashable, Hashable], dict[Hashable, Hashable]] = ({}, {})
    for path, value in second.items():
        own = first.get(path)
        origin = value[0] if isinstance(value, tuple) else None
        if isinstance(own, tuple) and isinstance(origin, tuple) and origin[0] == _BEFORE:
            forth = pairs[0].setdefault(origin, own[0]) == own[0]
            back = pairs[1].setdefault(own[0], origin) == origin
            if forth and back:
                first[path] = (origin, *own[1:])
    mirrored = _mirror(stack, [call for _, call in calls])
    stack.kinds = _numbered(
        (kind, tuple(call.items())) for kind, (_, call) in zip(stack.kinds, calls, strict=True)
    )
    ends = {i for own in stack.members().values() for i in (own[0], own[-1])}
    for reader, layers in seen.wanted[stack.path].items():
        stack.wanted |= {i for i in layers if reader in ends or (reader, i) not in mirrored}


def _mirror(stack: Stack, calls: list[dict[str, Hashable]]) -> set[tuple[int, int]]:
    """(reader, layer) of skip connections in the form of a U, where each next layer reads one that
    is further back by one; their calls get the sum of the two indices as the common source."""
    pairs: dict[tuple[int, str], _Of] = {}
    for i, (one, other) in enumerate(itertools.pairwise(calls)):
        for path in one.keys() & other.keys():
            near, far = (v[0] if isinstance(v, tuple) else None for v in (one[path], other[path]))
            if not isinstance(near, _Of) or not isinstance(far, _Of) or near.stack != stack.path:
                continue
            if far == near._replace(layer=near.layer - 1):
                pairs |= {(i, path): near, (i + 1, path): far}
    for (i, path), origin in pairs.items():
        value = calls[i][path]
        assert isinstance(value, tuple)
        calls[i][path] = (("mirrored", i + origin.layer, origin.place), *value[1:])
    return {(i, origin.layer) for (i, _), origin in pairs.items()}


def _numbered(kinds: Iterable[Hashable]) -> list[int]:
    """A number for each kind."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]
