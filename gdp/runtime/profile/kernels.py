"""Which nodes of a model each kernel of ONNX Runtime's optimised form stands for.

Optimised forms keep little of the names: a fused kernel carries the tag of one node it replaced, or
the name of the tensor it makes, and blocked layouts rename tensors too. What is left delimits each
kernel: it stands for the nodes between the tensors it makes and those that other kernels make.
"""

import re

import onnx

_TAG = re.compile(r"gdp([0-9]+)_")
HELPERS = frozenset({"ReorderInput", "ReorderOutput"})
"""Kernels that only change a tensor's layout for a neighbour."""


def tagged(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes are named by position, so that their names are found in kernels' names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for i, node in enumerate(copy.graph.node):
        node.name = f"gdp{i}_"
    return copy


def kernel_nodes(model: onnx.ModelProto, optimised: onnx.ModelProto) -> list[list[int]]:
    """For every node of the optimised form, the nodes of the tagged model that it stands for.

    A helper gets the nodes of the kernel it serves. Nodes folded away belong to no kernel.
    """
    return _Matching(model.graph, optimised.graph).match()


class _Matching:
    """The two graphs by name, and who claims which node."""

    def __init__(self, graph: onnx.GraphProto, optimised: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.kernels = list(optimised.node)
        self.maker = {name: i for i, n in enumerate(self.nodes) for name in n.output if name}
        self.kernel_of_value = {n: k for k, x in enumerate(self.kernels) for n in x.output if n}
        self.owner: dict[int, int] = {}

    def match(self) -> list[list[int]]:
        """Nodes of the model by kernel, in order of kernels."""
        for k, kernel in enumerate(self.kernels):
            for tag in _TAG.findall(kernel.name):
                self.owner.setdefault(int(tag), k)
        ends = [self._ends(kernel) for kernel in self.kernels]
        made = set(self.kernel_of_value)
        for k, found in enumerate(ends):
            for node in found:
                made.update(self.nodes[node].output)
                self.owner.setdefault(node, k)
        for k, found in enumerate(ends):
            for node in {*found, *(int(tag) for tag in _TAG.findall(self.kernels[k].name))}:
                if self.owner.get(node) == k:
                    self._claim_behind(node, k, made)
        self._claim_rest()
        of_kernel: list[list[int]] = [[] for _ in self.kernels]
        for node, k in sorted(self.owner.items()):
            of_kernel[k].append(node)
        return [found or self._served(k, of_kernel) for k, found in enumerate(of_kernel)]

    def _ends(self, kernel: onnx.NodeProto) -> list[int]:
        """The nodes that make what the kernel makes."""
        if kernel.op_type in HELPERS:
            return []
        # A kernel in a blocked layout is named after the tensor that it made before it was moved
        # there; additions and activations that it took up later follow in `_claim_rest`.
        blocked = re.fullmatch(r"(.*?)(_bn|_mul)?_nchwc(_[0-9]+)?", kernel.name)
        names = [blocked[1]] if blocked else list(kernel.output)
        return [self.maker[name] for name in names if name in self.maker]

    def _claim_behind(self, node: int, k: int, made: set[str]) -> None:
        """Claim what leads to a node, as far back as the tensors that some kernel makes, or as the
        node that gave the kernel its type."""
        core = self.kernels[k].op_type.removeprefix("Fused")
        stack = [node]
        while stack:
            here = self.nodes[stack.pop()]
            if here.op_type == core:
                continue
            for name in here.input:
                before = self.maker.get(name)
                if before is not None and name not in made and before not in self.owner:
                    self.owner[before] = k
                    stack.append(before)

    def _claim_rest(self) -> None:
        """Nodes in no kernel yet follow the last kernel they read from: additions and activations
        that a fusion took up, and dropped views."""
        for i, node in enumerate(self.nodes):
            if i not in self.owner:
                before = [self.maker[n] for n in node.input if n in self.maker]
                owners = [self.owner[b] for b in before if b in self.owner]
                if owners:
                    self.owner[i] = max(owners)

    def _served(self, k: int, of_kernel: list[list[int]]) -> list[int]:
        """The nodes of the kernel that a helper works for: the maker's, or the first reader's."""
        kernel = self.kernels[k]
        made_by = [self.kernel_of_value.get(name) for name in kernel.input]
        makers = [of_kernel[m] for m in made_by if m is not None and of_kernel[m]]
        readers = [
            of_kernel[r]
            for r, other in enumerate(self.kernels)
            if of_kernel[r] and set(other.input) & set(kernel.output)
        ]
        order = readers + makers if kernel.op_type == "ReorderInput" else makers + readers
        return order[0] if order else []
