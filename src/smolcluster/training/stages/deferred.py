"""A backward in two halves: the gradients of a stage's input now, those of its weights later.

Source: Zero Bubble Pipeline Parallelism (Qi et al., 2401.10241); the cut through autograd's graph is that of
`torch.distributed.pipelining`. A node of the graph is on the trunk if the input lies behind it. Where weights
branch off the trunk, the gradient that arrives is kept, and the branch alone is run later: nothing is
computed twice. A weight that branches off at more than one place, such as one that two layers share, gets its
gradient at once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradient: TypeAlias = Tensor | None
Entering: TypeAlias = Sequence[tuple[GradientEdge, Tensor]]
"""Where gradients enter a graph, and which."""


class Branch:
    """Weights that branch off at one node of the trunk, and the gradients that arrive there."""

    def __init__(self, node: Node, parameters: list[Tensor]) -> None:
        self._node, self._parameters = node, parameters
        self._arrived: Sequence[Gradient] = ()

    def keep(self, arrived: Sequence[Gradient]) -> None:
        """Called when the gradients of all the node's outputs are there."""
        self._arrived = arrived

    def run(self) -> None:
        edges = [GradientEdge(self._node, place) for place in range(len(self._arrived))]
        pairs = zip(edges, self._arrived, strict=True)
        add_gradients([(edge, each) for edge, each in pairs if each is not None], self._parameters)


@dataclass
class Deferred:
    """What is left of a backward: where it begins, and the weights that it is for."""

    branches: list[Branch]
    entering: Entering
    parameters: list[Tensor]
    """Of the part of the graph behind which no input lies."""

    def run(self) -> None:
        """Add the gradients of the weights that have been put off to their `grad`; once."""
        for branch in self.branches:
            branch.run()
        add_gradients(self.entering, self.parameters)


def backward_input(
    entering: Entering, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[Gradient], Deferred]:
    """The gradients of `inputs`, None where nothing depends on one, and what is left to do.

    `inputs` and `parameters` are leaves; to the `grad` of the latter is added, of some at once.
    """
    cut = _Cut([edge.node for edge, _ in entering], inputs, parameters)
    rest = cut.parameters_behind(each for each in cut.roots if each not in cut.trunk)
    behind = {node: cut.parameters_behind(cut.off_trunk(node)) for node in cut.trunk}
    places = Counter(leaf for leaves in (rest, *behind.values()) for leaf in leaves)
    at_once = [leaf for leaf, count in places.items() if count > 1]
    branches = []
    handles = []
    for node, leaves in behind.items():
        if own := [cut.leaves[leaf] for leaf in leaves if places[leaf] == 1]:
            branches.append(Branch(node, own))
            handles.append(node.register_prehook(branches[-1].keep))
    wanted = [*inputs, *(cut.leaves[leaf] for leaf in at_once)]
    try:
        found = _gradients(entering, wanted)
    finally:
        for handle in handles:
            handle.remove()
    for parameter, gradient in zip(wanted[len(inputs) :], found[len(inputs) :], strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    off_trunk = [(edge, each) for edge, each in entering if edge.node not in cut.trunk]
    later = [cut.leaves[leaf] for leaf in rest if places[leaf] == 1]
    return found[: len(inputs)], Deferred(branches, off_trunk, later)


def add_gradients(entering: Entering, parameters: Sequence[Tensor]) -> None:
    """Add the gradients of these leaves, and of no others, to their `grad`."""
    if entering and parameters:
        edges, values = zip(*entering, strict=True)
        torch.autograd.backward(edges, values, retain_graph=True, inputs=list(parameters))


def _gradients(entering: Entering, leaves: Sequence[Tensor]) -> list[Gradient]:
    if not entering or not leaves:
        return [None] * len(leaves)
    edges, values = zip(*entering, strict=True)
    return list(torch.autograd.grad(edges, leaves, values, retain_graph=True, allow_unused=True))


class _Cut:
    """Autograd's graph below some roots, cut into trunk and branches."""

    def __init__(
        self, roots: Iterable[Node], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        self.roots = list(dict.fromkeys(roots))
        self.leaves: Mapping[Node, Tensor] = {
            get_gradient_edge(each).node: each for each in parameters
        }
        self._below: dict[Node, list[Node]] = {}
        above: dict[Node, list[Node]] = defaultdict(list)
        waiting = list(self.roots)
        while waiting:
            node = waiting.pop()
            if node in self._below:
                continue
            self._below[node] = [each for each, _ in node.next_functions if each is not None]
            for each in self._below[node]:
                above[each].append(node)
            waiting += self._below[node]
        self.trunk = _closure([get_gradient_edge(each).node for each in inputs], above)

    def off_trunk(self, node: Node) -> list[Node]:
        """The first nodes of what branches off here."""
        return [each for each in self._below.get(node, ()) if each not in self.trunk]

    def parameters_behind(self, nodes: Iterable[Node]) -> list[Node]:
        """The parameters' nodes that can be reached from these, which are not on the trunk."""
        return [each for each in _closure(nodes, self._below) if each in self.leaves]


def _closure(nodes: Iterable[Node], edges: Mapping[Node, Sequence[Node]]) -> dict[Node, None]:
    """All nodes that can be reached, these among them, in the order in which they were found."""
    found: dict[Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += edges.get(node, ())
    return found
