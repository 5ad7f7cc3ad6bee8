"""Programs of models with many layers, listed from a trace of one layer of each kind.

The cut model (`gdp.importers.pytorch.cut`) is traced as it is; ops of a kept layer are repeated for
each layer of its kind, with the scope, the weights and the cache of that layer, between the layer
before and the one behind. The first and the last layer of a kind must have equal ops that read
equal things; whatever does not fit is told, and the model is traced whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from gdp.graph.op_graph import OUTPUT
from gdp.importers.program import Op, ProgramOps, Value
from gdp.importers.pytorch.cut import Stack, UncuttableError, cut, find_stacks, settle
from gdp.importers.pytorch.listing import ExportedOps


@dataclass
class Listed(ProgramOps):
    """The ops of a phase before they are a graph, with the weights by the paths of parameters."""

    parameters: int = 0
    state: list[tuple[Any, Any]] = field(default_factory=list)  # new values of buffers, and the old
    paths: dict[str, Value] = field(default_factory=dict)
    contexts: tuple[int, ...] = ()  # of `cache_at`, from prompt + new on


class Traces(NamedTuple):
    """A phase as it was traced: its listing, the parts that weights are found by, and its cache."""

    listing: ExportedOps
    state: list[tuple[Any, Any]]
    weights: Mapping[str, Value]  # by the paths of parameters and buffers
    cache: Sequence[tuple[str, Value]]  # states of the cache, by their path
    contexts: tuple[int, ...]  # at which the sizes of these states are known


def whole(traces: Traces) -> Listed:
    """The program of a model that was traced whole."""
    return _listed(traces, traces.listing, dict(traces.weights))


def _listed(
    traces: Traces, program: ProgramOps, paths: dict[str, Value],
    parameters: int | None = None,
) -> Listed:  # fmt: skip
    old = traces.listing
    return Listed(
        program.ops, program.weights, set(old.estimated), list(old.assumptions),
        program.caches, program.cache_at, None,
        old.parameters if parameters is None else parameters, traces.state, paths,
        traces.contexts,
    )  # fmt: skip


def repeated(
    model: Any, make: Callable[[], Callable[[], object]], trace: Callable[[], Traces]
) -> Listed:
    """The program of a phase, from a trace of the model cut to some of its layers.

    Args:
        model: On the meta device.
        make: Makes the phase from the model as it stands; the result runs it there.
        trace: Makes the phase from the model as it stands, and traces it.

    Raises:
        UncuttableError: The model must be traced whole.
    """
    stacks = settle(find_stacks(model), make)
    try:
        return _expanded(model, stacks, trace)
    except UncuttableError:
        # Nobody reads all that a last layer makes, and the trace may leave out what makes it.
        for stack in stacks:
            stack.kinds[-1] = max(stack.kinds) + 1
        return _expanded(model, settle(stacks, make), trace)


def _expanded(model: Any, stacks: Sequence[Stack], trace: Callable[[], Traces]) -> Listed:
    with cut(stacks):
        traces = trace()
    return _Expansion(model, stacks, traces).listed()


class _Own(NamedTuple):
    op: int  # of the layer
    out: int


class _Before(NamedTuple):
    op: int  # of the layer before
    out: int


class _Mirrored(NamedTuple):
    """The result of a layer further back, whose index and that of the reader have a sum."""

    total: int
    op: int
    out: int


class _Weight(NamedTuple):
    path: str  # of the first layer of the kind
    is_cache: bool
    like: Value


class _Fresh(NamedTuple):
    """A constant of one layer."""

    like: Value


Source = _Own | _Before | _Mirrored | _Weight | _Fresh | Value
"""Sources of an op of a layer; a `Value` is one for all layers."""


class _Segment(NamedTuple):
    """The ops of a kept layer: those at these positions of the listing."""

    start: int
    stop: int


class _Template(NamedTuple):
    layer: int  # whose ops are repeated
    sources: list[list[Source]]  # by op


class _Expansion:
    """Expansion of one listing of a cut model to that of the whole."""

    def __init__(self, model: Any, stacks: Sequence[Stack], traces: Traces) -> None:
        self.old, self.traces = traces.listing, traces
        if self.old.open_sizes or traces.state:
            raise UncuttableError("sizes depend on data" if self.old.open_sizes else "it has state")
        self.tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.parameters = {_storage(p): prod(p.shape) for p in model.parameters()}
        self.paths_of: dict[int, list[str]] = {}  # of the weights of the listing
        for path, value in traces.weights.items():
            self.paths_of.setdefault(id(value), []).append(path)
        self.state_of = {id(value): path for path, value in traces.cache}
        self.segments = {s.path: _segments(s, self.old.ops) for s in stacks if s.is_called}
        self.stacks = sorted(
            (s for s in stacks if s.is_called), key=lambda s: self.segments[s.path][0].start
        )
        self.new = ProgramOps()
        self.renewed: dict[int, Value] = {}  # by the values of the listing
        self.by_storage: dict[int, Value] = {}  # weights of the model
        self.by_state: dict[str, Value] = {}
        self.made: dict[tuple[str, int], list[list[Value]]] = {}  # results of each layer

    def listed(self) -> Listed:
        """The whole program."""
        position = 0
        for stack in self.stacks:
            segments = self.segments[stack.path]
            start, stop = segments[0].start, segments[stack.kept[-1]].stop
            if start < position:
                raise UncuttableError("two lists of layers run at the same time")
            self._as_it_is(range(position, start))
            self._repeat(stack)
            position = stop
        self._as_it_is(range(position, len(self.old.ops)))
        paths = {}
        for path, tensor in self.tensors.items():
            if (value := self.by_storage.get(_storage(tensor))) is not None:
                paths[path] = value
        return _listed(self.traces, self.new, paths, sum(self.parameters.values()))

    def _as_it_is(self, positions: range) -> None:
        """Ops outside of layers, which read only results of kept layers."""
        for op in (self.old.ops[position] for position in positions):
            for value in op.ins:
                self._require_kept(value)
            self._emit_kept(op)

    def _require_kept(self, value: Value, within: Stack | None = None) -> None:
        """Refuse if an op outside the stack reads a kept layer that represents skipped ones."""
        for stack in (s for s in self.stacks if s is not within):
            kept = stack.kept
            for layer, (start, stop) in self.segments[stack.path].items():
                last = layer == len(stack.layers) - 1
                if start <= value.maker < stop and not last and layer + 1 not in kept:
                    raise UncuttableError(f"what layer {layer} makes is read behind its list")

    def _repeat(self, stack: Stack) -> None:
        templates = {kind: self._template(stack, own) for kind, own in stack.members().items()}
        exports = self._exports(stack, templates)
        for layer, kind in enumerate(stack.kinds):
            template = templates[kind]
            segment = self.segments[stack.path][template.layer]
            ops = self.old.ops[segment.start : segment.stop]
            if layer == 0 or len(stack.members()[kind]) == 1:
                own = self.segments[stack.path][layer]
                kept = self.old.ops[own.start : own.stop]
                self.made[stack.path, layer] = [self._emit_kept(op) for op in kept]
                continue
            before = self.made[stack.path, layer - 1]
            here = exports[stack.kinds[layer - 1]]
            there = exports[stack.kinds[self._before(stack, template.layer)]]
            made: list[list[Value]] = []
            self.made[stack.path, layer] = made
            for op, sources in zip(ops, template.sources, strict=True):
                ins = []
                for source in sources:
                    if isinstance(source, _Own):
                        ins.append(made[source.op][source.out])
                    elif isinstance(source, _Before):
                        place = here[there.index((source.op, source.out))]
                        ins.append(before[place[0]][place[1]])
                    elif isinstance(source, _Mirrored):
                        far = self.made[stack.path, source.total - layer]
                        ins.append(far[source.op][source.out])
                    else:
                        ins.append(self._of_layer(stack, layer, source))
                scope = op.scope
                if stack.layer_of(scope) == template.layer:
                    scope = stack.renamed(scope, layer)
                made.append(self._emit(op, ins, scope))
            if layer in self.segments[stack.path]:
                # Other readers find the results of a kept layer by those of the trace.
                own = self.segments[stack.path][layer]
                for op, outs in zip(self.old.ops[own.start : own.stop], made, strict=True):
                    for old, new in zip(op.outs, outs, strict=True):
                        self.renewed[id(old)] = new

    def _before(self, stack: Stack, layer: int) -> int:
        """The kept layer before a kept one."""
        kept = stack.kept
        return kept[kept.index(layer) - 1]

    def _template(self, stack: Stack, members: Sequence[int]) -> _Template:
        """The ops of a kind, as its last layer has them; all kept ones must have the same."""
        kept = [layer for layer in members if layer in self.segments[stack.path]]
        if len(members) == 1:
            return _Template(members[0], [])
        last = kept[-1]
        sources: list[list[Source]] | None = None
        for other in kept[:-1]:
            found = self._common(stack, other, last)
            if sources is not None and found != sources:
                raise UncuttableError(f"layers {other} and {last} differ in what they read")
            sources = found
        if sources is None:
            raise UncuttableError("a kind has one layer in the trace")
        return _Template(last, sources)

    def _common(self, stack: Stack, one: int, other: int) -> list[list[Source]]:
        """Sources of the ops that two layers of a kind have in common."""
        segments = self.segments[stack.path]
        pair = segments[one], segments[other]
        first, second = (self.old.ops[s.start : s.stop] for s in pair)
        if len(first) != len(second):
            raise UncuttableError(f"layers {one} and {other} have different ops")
        sources = []
        for a, b in zip(first, second, strict=True):
            if _about(stack, one, a) != _about(stack, other, b) or len(a.ins) != len(b.ins):
                raise UncuttableError(f"layers {one} and {other} have different {a.op_type}")
            sources.append([
                self._source(stack, (one, other), v, w) for v, w in zip(a.ins, b.ins, strict=True)
            ])  # fmt: skip
        return sources

    def _source(self, stack: Stack, layers: tuple[int, int], v: Value, w: Value) -> Source:
        """The common source of a value that two layers of a kind read."""
        segments = self.segments[stack.path]
        one, other = layers
        if v is w:
            return v
        own = [
            _Own(x.maker - segments[layer].start, x.out)
            for layer, x in ((one, v), (other, w))
            if segments[layer].start <= x.maker < segments[layer].stop
        ]
        if own:
            if len(own) == 2 and own[0] == own[1]:
                return own[0]
            raise UncuttableError(f"layers {one} and {other} read different results of theirs")
        before = segments[self._before(stack, other)]
        if before.start <= w.maker < before.stop:
            place = _Before(w.maker - before.start, w.out)
            if one == 0:
                return place
            earlier = segments[self._before(stack, one)]
            if earlier.start <= v.maker < earlier.stop:
                return place
        far = [
            _Mirrored(reader + layer, x.maker - own.start, x.out)
            for reader, x in ((one, v), (other, w))
            for layer, own in segments.items()
            if own.start <= x.maker < own.stop
        ]
        if len(far) == 2 and far[0] == far[1]:
            return far[0]
        if v.maker < 0 and w.maker < 0 and (v.dims, v.dtype) == (w.dims, w.dtype):
            return self._weight(stack, layers, v, w)
        raise UncuttableError(f"layers {one} and {other} read different things")

    def _weight(self, stack: Stack, layers: tuple[int, int], v: Value, w: Value) -> Source:
        if v.weight is None and w.weight is None and id(v) not in self.paths_of:
            return _Fresh(w)
        own = (p for p in self.paths_of.get(id(v), ()) if stack.layer_of(p) == layers[0])
        path = next(own, None)
        if path is not None:
            renamed = stack.renamed(path, layers[1])
            if renamed in self.paths_of.get(id(w), ()):
                return _Weight(renamed, False, w)
        elif id(v) in self.state_of and id(w) in self.state_of:
            state = self.state_of[id(w)]
            if _moved(self.state_of[id(v)], layers[0], layers[1]) == state:
                return _Weight(state, True, w)
        elif not {id(v), id(w)} & (self.paths_of.keys() | self.state_of.keys()):
            return _Fresh(w)
        raise UncuttableError(f"layers {layers[0]} and {layers[1]} read different weights")

    def _exports(
        self, stack: Stack, templates: Mapping[int, _Template]
    ) -> dict[int, list[tuple[int, int]]]:
        """Results that the next layer reads, by kind, in order: as many of each kind."""
        found: dict[int, set[tuple[int, int]]] = {}
        segments = self.segments[stack.path]
        for kind, template in templates.items():
            members = [layer for layer in stack.members()[kind] if layer in segments and layer]
            for layer in members:
                before = segments[self._before(stack, layer)]
                own = found.setdefault(stack.kinds[self._before(stack, layer)], set())
                ops = self.old.ops[segments[layer].start : segments[layer].stop]
                for i, op in enumerate(ops):
                    for j, value in enumerate(op.ins):
                        alone = not template.sources or isinstance(template.sources[i][j], _Before)
                        if alone and before.start <= value.maker < before.stop:
                            own.add((value.maker - before.start, value.out))
        exports = {kind: sorted(places) for kind, places in found.items()}
        if len({len(places) for places in exports.values()}) > 1:
            raise UncuttableError("kinds of layers hand on different numbers of results")
        return exports

    def _of_layer(self, stack: Stack, layer: int, source: Source) -> Value:
        """A weight of a layer, or one shared by all layers."""
        if isinstance(source, Value):
            self._require_kept(source, stack)
            return self._renewed(source)
        if isinstance(source, _Fresh):
            return self._weight_like(source.like)
        assert isinstance(source, _Weight)
        if source.is_cache:
            # The first number in the path of a state is that of its layer.
            there = next(int(part) for part in source.path.split(".") if part.isdigit())
            path = _moved(source.path, there, layer)
            if path not in self.by_state:
                self.by_state[path] = self._weight_like(source.like)
            return self.by_state[path]
        return self._parameter(stack.renamed(source.path, layer), source.like)

    def _parameter(self, path: str, like: Value) -> Value:
        tensor = self.tensors.get(path)
        if tensor is None or tuple(tensor.shape) != like.dims:
            raise UncuttableError(f"{path} is not as that of another layer")
        storage = _storage(tensor)
        if storage not in self.by_storage:
            self.by_storage[storage] = self._weight_like(like)
        return self.by_storage[storage]

    def _renewed(self, old: Value) -> Value:
        """A value of the trace in the new program."""
        if id(old) not in self.renewed:
            if old.maker >= 0:
                raise UncuttableError("an op reads what comes behind it")
            path = self.paths_of.get(id(old), [""])[0]
            state = self.state_of.get(id(old))
            if path:
                new = self._parameter(path, old)
            elif state is not None:
                new = self.by_state.setdefault(state, self._weight_like(old))
            else:
                new = self._weight_like(old)
            self.renewed[id(old)] = new
        return self.renewed[id(old)]

    def _weight_like(self, old: Value) -> Value:
        weight = None if old.weight is None else (len(self.new.weights),)
        new = Value(old.dims, old.dtype, old.itemsize, -1, old.out, weight, old.backward, old.known)
        self.new.weights.append(new)
        if weight is not None and old.weight is not None and old.weight[0] in self.old.caches:
            self.new.caches.add(weight[0])
            if old.weight[0] in self.old.cache_at:
                self.new.cache_at[weight[0]] = self.old.cache_at[old.weight[0]]
        return new

    def _emit(self, op: Op, ins: list[Value], scope: str) -> list[Value]:
        maker = len(self.new.ops)
        outs = [
            Value(v.dims, v.dtype, v.itemsize, maker, v.out, None, v.backward, v.known)
            for v in op.outs
        ]
        self.new.ops.append(Op(
            op.op_type, scope, ins, outs, op.flop, op.traffic_bytes, op.backward, op.dtype,
            op.in_dims, op.attributes, op.name, shapes=op.shapes,
        ))  # fmt: skip
        return outs

    def _emit_kept(self, op: Op) -> list[Value]:
        """Emit an op unchanged from the trace."""
        outs = self._emit(op, [self._renewed(v) for v in op.ins], op.scope)
        self.renewed |= {id(old): new for old, new in zip(op.outs, outs, strict=True)}
        return outs


def _moved(path: str, layer: int, to: int) -> str:
    """The path of a state in the cache of another layer."""
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if place is None or int(parts[place]) != layer:
        raise UncuttableError(f"the state {path} is not that of layer {layer}")
    parts[place] = str(to)
    return ".".join(parts)


def _about(stack: Stack, layer: int, op: Op) -> tuple[Any, ...]:
    """All of an op but its inputs, with its scope less the layer's index."""
    scope = stack.renamed(op.scope, 0) if stack.layer_of(op.scope) == layer else op.scope
    outs = tuple((v.dims, v.dtype, v.itemsize, v.out, v.backward, v.known) for v in op.outs)
    return (
        op.op_type, scope, outs, op.flop, op.traffic_bytes, op.backward, op.dtype, op.in_dims,
        op.attributes, op.name,
    )  # fmt: skip


def _segments(stack: Stack, ops: Sequence[Op]) -> dict[int, _Segment]:
    """The ops of each kept layer, one layer behind the other."""
    positions: dict[int, list[int]] = {}
    for position, op in enumerate(ops):
        layer = stack.layer_of(op.scope)
        if layer is not None and op.op_type != OUTPUT:
            positions.setdefault(layer, []).append(position)
    if sorted(positions) != stack.kept:
        raise UncuttableError(f"some layer of {stack.path} has no ops of its own")
    segments = {layer: _Segment(own[0], own[-1] + 1) for layer, own in positions.items()}
    stop = segments[stack.kept[0]].start
    for layer in stack.kept:
        if segments[layer].start != stop:
            raise UncuttableError(f"ops stand between the layers of {stack.path}")
        stop = segments[layer].stop
    return dict(sorted(segments.items()))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
