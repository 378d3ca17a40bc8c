r"""What the graph of a loss tells about the recorded layers' calls: how deep a backward pass must go, and how parameters are used.

A backward pass that only takes δ at the outputs of layers need not compute gradients of parameters, and ends at the *deepest* calls, from
which the loss depends on no other. The *highest* are those with no other between them and the loss. A parameter is *plain* where every operation that takes it is a call of one of torch's own
layers whose hooks are ours alone: our own rules then give its whole gradient.

A `corner` of a contribution is a few of its terms δ_s a_sᵀ (of a convolution δ alone), before anything is summed: linear in δ, and of all samples
alike.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ..capture.hooks import Tap
from ..maths import layers
from ..maths.layers import Contribution, Dense, Patches, Sum

Key = tuple[int, int]  # block, size of the corner
HALF = 0.05  # of a corner's norm, what half precision may round
FEW = 8  # positions, and entries of each side, in a corner; up to twice as many


class Graph(NamedTuple):
    """What a walk from the loss found."""

    deepest: list[GradientEdge]
    highest: list[GradientEdge]
    uses: Counter[int]  # id of a parameter -> operations that take it
    form: int  # the same where the same operations follow each other


def walk(loss: Tensor, calls: Sequence[GradientEdge]) -> Graph:
    """From the loss to the parameters; `calls` are the outputs of the recorded layers' calls."""
    nodes, uses = {call.node for call in calls}, Counter[int]()
    leads: dict[Node, bool] = {}  # whether a node leads to a call
    waiting: list[tuple[Node | None, bool]] = [(loss.grad_fn, False)]
    while waiting:
        node, seen = waiting.pop()
        if node is None:
            continue
        below = [x for x, _ in node.next_functions if x is not None]
        if seen:
            leads[node] = any(x in nodes or leads[x] for x in below)
            uses.update(id(x.variable) for x in below if hasattr(x, "variable"))
        elif node not in leads:
            leads[node] = False
            waiting += [(node, True), *((x, False) for x in below)]
    deepest = [call for call in calls if leads.get(call.node) is False]
    above = _above(loss, nodes)
    return Graph(deepest, [call for call in calls if call.node in above], uses, _form(leads))


def _above(loss: Tensor, calls: Collection[Node]) -> set[Node]:
    """The calls that can be reached from the loss without passing another."""
    seen, waiting = set[Node](), [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        if node not in calls:
            waiting += [x for x, _ in node.next_functions]
    return seen & set(calls)


def _form(nodes: Collection[Node]) -> int:
    number = {node: i for i, node in enumerate(nodes)}
    return hash(tuple((x.name(), *(-1 if y is None else number[y] for y, _ in x.next_functions)) for x in nodes))


def plain_blocks(tap: Tap, called: Mapping[int, int], uses: Mapping[int, int]) -> set[int]:
    """The blocks whose parameter is plain, where `called` counts the contributions to each."""
    blocks = tap.blocks
    odd = {n for module, (rule, of) in blocks.owners.items() if not _is_plain(tap, module, rule) for n in of.values()}
    odd |= {n for of in tap.general.values() for n in of.values()}
    counted = (i for i, b in enumerate(blocks.blocks) if uses.get(id(b.parameter), 0) == called.get(i, 0))
    return set(counted) - odd


def _is_plain(tap: Tap, module: nn.Module, rule: layers.Rule) -> bool:
    """Whether it is one of torch's own layers, with a rule of ours and with no hooks but the tap's."""
    own = type(module).__module__.startswith("torch.nn.modules.") and rule.__module__ == layers.__name__
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    return own and "forward" not in vars(module) and hooks == tap.hooks_on(module) and not module._backward_hooks


def corner(part: Contribution) -> Tensor:
    """Some terms of each sample's gradient, (B, n)."""
    if isinstance(part, Dense):
        return _some(part.grads.flatten(1), FEW * FEW)
    if isinstance(part, Sum):
        return _few(part.values).flatten(1)
    if isinstance(part, Patches):
        return _some(part.left.flatten(1), FEW * FEW)
    right = _few(part.right)  # (B, s, r)
    if not part.left.is_floating_point():
        return right.flatten(1)
    return (_few(part.left)[..., None] * right[:, :, None]).flatten(1)


def _few(x: Tensor) -> Tensor:
    """(B, S, d) -> some positions and entries."""
    return _some(_some(x.mT, FEW).mT, FEW)


def _some(x: Tensor, n: int) -> Tensor:
    return x[..., :: max(1, x.shape[-1] // n)]


def alike(first: Mapping[Key, Tensor], second: Mapping[Key, Tensor], factors: Tensor, rounded: Collection[int]) -> bool:
    """Whether each (B, n) of the second is the first's, times each sample's factor (B,), up to the rounding of its block."""
    return first.keys() == second.keys() and all(
        bool(
            (second[key] - (x := first[key] * factors.to(first[key])[:, None])).norm()
            <= _tolerance(key, x, rounded) * x.norm()
        )
        for key in first
    )


def _tolerance(key: Key, x: Tensor, rounded: Collection[int]) -> float:
    if key[0] in rounded:
        return HALF
    return 1e-8 if x.dtype == torch.float64 else 1e-3
