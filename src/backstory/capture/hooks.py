"""Hooks that read each layer call's inputs and output gradient while they pass.

The call's inputs are held only by the output's gradient hook: a forward pass that is never differentiated (evaluation)
leaves nothing behind, and an activation-checkpointed one counts once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError
from ..maths.layers import Contribution, Dense, Outer, Patches, Sum
from ..maths.projection import group_edges
from .general import Call as RepeatedCall
from .modules import Blocks
from .precision import HALF as HALF
from .precision import in_autocast, own_precision
from .repeated import Layer, Repeated

Sink = Callable[[int, int, Contribution, int | None], None]  # slot, block, contribution, its group of positions if one
Call = tuple[
    nn.Module, tuple[Tensor, ...], GradientEdge, torch.Size
]  # a recorded layer's call: module, inputs, its output's place


class Tap:
    """While `slot` is a number, every differentiated call of a recorded layer reaches `sink`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        sink: Sink,
        *,
        keep_calls: bool = False,
        groups: int = 1,
        batch_dim: int | None = None,
    ) -> None:
        self.model, self.blocks, self.sink = model, blocks, sink
        self.rules = dict(
            blocks.owners
        )  # of layers; what turns out to see no batch is repeated with the module around it
        self.layers: dict[nn.Module, Layer] = {}  # where the batch is, where that is not the first dimension alone
        self.groups = groups  # of positions, in which contributions will be taken apart
        self.keep_calls, self._calls = keep_calls, list[Call]()  # of the micro-batch under way
        self._repeated_calls: list[tuple[RepeatedCall, Sequence[GradientEdge]]] = []
        self.muted = False  # during a backward pass of our own
        self.slot: int | None = None  # the micro-batch that forward passes belong to now
        self.sizes: list[int] = []  # samples of each micro-batch of the step
        self.rounded: set[int] = set()  # blocks of which a call of this step ran in half precision, as under autocast
        self.passes: set[int] = set()  # the backward passes of this step that reached a recorded layer
        self.differentiable = False  # whether one of them was made to be differentiated again
        self.on_call: Callable[[nn.Module, tuple[Any, ...], Tensor], None] | None = (
            None  # sees each recorded call's arguments and output
        )
        self._names = {m: n for n, m in model.named_modules()}
        self._meaning: dict[nn.Module, str] = {}  # what a 1-d index of an embedding has turned out to be
        self.shared_statistics: set[str] = set()  # layers in which the samples of a batch have shared their statistics
        self.spread: set[nn.Module] = set()  # tables of positions, looked up for each sample instead of once
        self._handles: list[RemovableHandle] = []
        self._repeated = Repeated(self, blocks.general, batch_dim)

    @property
    def listens(self) -> bool:
        """Whether a forward pass now belongs to the step."""
        return self.slot is not None and not self.muted and torch.is_grad_enabled()

    def attach(self) -> None:
        """Install the hooks; torch.compile leaves them as they are, and breaks its graph there."""
        after, give = torch.compiler.disable(self._after_forward), torch.compiler.disable(self._give_batch)
        for module in self.blocks.owners:
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            if isinstance(module, nn.Embedding):
                self._handles.append(module.register_forward_pre_hook(give))
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                note = torch.compiler.disable(self._note_mixing)
                self._handles.append(module.register_forward_pre_hook(note))
        self._repeated.attach()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._repeated.detach()
        self.slot = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tap":
        return self  # a copy of the model made while recording keeps its hooks, and they find it unknown

    def begin(self) -> None:
        """A new step: no micro-batch yet."""
        self.slot, self.sizes, self.rounded = None, [], set()
        self.passes, self.differentiable = set(), False
        self._new_batch()

    def batch(self, size: int) -> int:
        """Forward passes from here on belong to a new micro-batch of `size` samples."""
        self.sizes.append(size)
        self.slot = len(self.sizes) - 1
        self._new_batch()
        return self.slot

    @property
    def general(self) -> Mapping[nn.Module, Mapping[str, int]]:
        """The modules whose calls are repeated, and the blocks of their parameters, as far as is known."""
        return self._repeated.general

    @property
    def edges(self) -> list[GradientEdge]:
        """The outputs of the recorded calls of the micro-batch under way, as places in the graph; with `keep_calls`."""
        calls, repeated = self._recorded_calls()
        return [edge for *_, edge, _ in calls] + [edge for _, several in repeated for edge in several]

    def _recorded_calls(self) -> tuple[list[Call], list[tuple[RepeatedCall, Sequence[GradientEdge]]]]:
        """Those of layers with rules, and those that are repeated: in the first pass calls of other modules were kept too."""
        calls = [x for x in self._calls if x[0] in self.rules]
        return calls, [x for x in self._repeated_calls if x[0].module in self._repeated.general]

    def hooks_on(self, module: nn.Module) -> tuple[int, int]:
        """How many hooks of ours, after its forward and before it, are on a layer that has a rule."""
        repeated, batch_norm = self._repeated.watches(module), isinstance(module, nn.modules.batchnorm._BatchNorm)
        return 1 + repeated, isinstance(module, nn.Embedding) + batch_norm + repeated

    def _new_batch(self) -> None:
        self._calls.clear()
        self._repeated_calls.clear()
        self._repeated.begin()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, calls of the model are our own."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before

    def keep(self, call: RepeatedCall, edges: Sequence[GradientEdge]) -> None:
        """A call that `extra_pass` will differentiate too."""
        if self.keep_calls:
            self._repeated_calls.append((call, edges))

    def takes(self) -> bool:
        """Whether the gradient that has just come back belongs to the step."""
        if self.slot is None or self.muted:
            return False  # a backward pass outside of any step, or one of our own
        self.passes.add(backward_pass())
        self.differentiable |= torch.is_grad_enabled()  # create_graph=True
        return True

    def extra_pass(self, outputs: Tensor, seed: Tensor, sink: Sink) -> None:
        """One more backward pass through the micro-batch under way, from `seed` at its outputs, into `sink`.

        `.grad`, buffers and random numbers stay as they are; the graph is kept for the user's own pass.
        """
        # a recomputed forward pass may call again
        (calls, repeated), slot = self._recorded_calls(), self.slot
        if slot is None or not (calls or repeated):
            return
        self.muted = True
        try:
            edges = [edge for *_, edge, _ in calls] + [edge for _, several in repeated for edge in several]
            with own_precision(outputs.device):
                deltas = torch.autograd.grad(outputs, edges, seed, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise UsageError(
                f"the extra backward pass for curvature failed ({error}). Call s.outputs() before backward(), which "
                "frees the graph. With activation checkpointing, pass use_reentrant=False."
            ) from error
        finally:
            self.muted = False
        for (module, inputs, _, shape), delta in zip(calls, deltas, strict=False):
            if delta is not None:
                self._contribute(module, inputs, delta.reshape(shape), slot, sink)
        rest = iter(deltas[len(calls) :])
        for call, several in repeated:
            own = [next(rest) for _ in several]
            if any(x is not None for x in own):
                self._repeated.contribute(call, own, slot, sink)

    def _give_batch(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Positions looked up once for the whole batch, (S,) or (1, S), are looked up for each sample instead.

        The values are the same; the gradient of the table can then be told apart by sample.
        """
        if not self.listens or self.slot is None or not args or not isinstance(args[0], Tensor):
            return None
        index, size = args[0], self.sizes[self.slot]
        once = index.dim() == 2 and len(index) == 1 and size > 1
        if once or (index.dim() == 1 and len(index) > 1 and size > 0 and self._is_positions(module, index, size)):
            self.spread.add(module)
            return (index.expand(size, -1), *args[1:])
        return None

    def _is_positions(self, module: nn.Module, index: Tensor, size: int) -> bool:
        """Whether a 1-d index holds positions 0 … S−1, rather than one index for each sample."""
        if not torch.equal(index, torch.arange(len(index), device=index.device)):
            self._meaning[module] = "samples"
            return False
        if len(index) != size:
            self._meaning[module] = "positions"
        elif module not in self._meaning:
            raise UsageError(
                f"embedding {self._names.get(module)!r} got the indices 0 … {size - 1} with a batch of {size} "
                "samples. These could be one index per sample, or positions shared by the whole batch. Pass "
                "positions with shape (1, S), or per-sample indices with shape (B, 1)."
            )
        return self._meaning[module] == "positions"

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.slot is None or self.muted or not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor) or not output.requires_grad or module not in self.rules:
            return
        slot = self.slot
        if self.on_call is not None:
            self.on_call(module, (*args, *kwargs.values()), output)
        inputs = tuple(_snapshot(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        made, shape = _made(module, output), output.shape
        if self.keep_calls:
            self._calls.append((module, inputs, get_gradient_edge(made), shape))
        made.register_hook(lambda delta: self._on_gradient(module, inputs, delta.reshape(shape), slot))

    def _on_gradient(self, module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor, slot: int) -> None:
        if module in self.rules and self.takes():
            self._contribute(module, inputs, delta, slot, self.sink)

    def _contribute(self, module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor, slot: int, sink: Sink) -> None:
        rule, numbers = self.rules[module]
        if module in self.layers:
            inputs, delta = self._moved(module, inputs, delta, self.sizes[slot])
        size, rows = self.sizes[slot], len(delta) if delta.dim() else 0
        if rows != size or (inputs and len(inputs[0]) != size):
            raise UsageError(
                f"layer {self._names[module]!r} returned a tensor of shape {tuple(delta.shape)}, but the step declares "
                f"{size} samples. Pass one id per sample in the batch, batch_dim= if the batch is another than the first "
                "dimension, or leave the layer out with layers=['!name']."
            )
        if any(x.dtype in HALF for x in (delta, *inputs)) or in_autocast(delta.device):
            self.rounded.update(numbers.values())
        with torch.no_grad(), own_precision(delta.device):
            wide, wide_delta = tuple(_widen(x) for x in inputs), _widen(delta.detach())
            for local, part in rule(module, wide, wide_delta).items():
                if local not in numbers:
                    continue
                checked = _checked(part, local, module)
                if isinstance(checked, Dense) and self.groups > 1 and wide_delta.dim() > 2 and wide_delta.shape[1] > 1:
                    for k, some in enumerate(self._groups_of(module, wide_delta)):
                        sink(slot, numbers[local], _checked(rule(module, wide, some)[local], local, module), k)
                else:
                    sink(slot, numbers[local], checked, None)

    def _moved(
        self, module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor, size: int
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What a layer got and gives, with the batch in the first dimension."""
        place = self.layers[module]

        def move(x: Tensor) -> Tensor:
            if x.dim() <= place.dim or x.shape[place.dim] % size or (not place.flat and x.shape[place.dim] != size):
                return x
            return x.unflatten(0, (size, -1)) if place.flat and not place.dim else x.movedim(place.dim, 0)

        return tuple(map(move, inputs)), move(delta)

    def _groups_of(self, module: nn.Module, delta: Tensor) -> Iterator[Tensor]:
        """For each group of positions, `delta` with all others at 0: a gradient that its rule wrote out has lost its positions."""
        delta = delta.contiguous()
        for lo, hi in group_edges(by_position(module, delta).shape[1], self.groups):
            some = torch.zeros_like(delta)
            by_position(module, some)[:, lo:hi] = by_position(module, delta)[:, lo:hi]
            yield some

    def _note_mixing(self, module: nn.Module, args: Any) -> None:
        if self.listens and (module.training or getattr(module, "running_mean", None) is None):
            self.shared_statistics.add(self._names[module])


def _made(module: nn.Module, output: Tensor) -> Tensor:
    """The tensor that gets the gradient of a layer's output, whatever is written into the output afterwards.

    The output of a Linear layer on sequences is a view; what changes a view in place cuts it off from the graph.
    """
    base = output._base if isinstance(module, nn.Linear) else None
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base


def logits_of(out: Any) -> Any:
    """The outputs of a model: its `logits`, where it returns several things by name."""
    return out.get("logits", out) if isinstance(out, dict) else getattr(out, "logits", out)


def backward_pass() -> int:
    """The number of the backward pass that is under way, inside a hook."""
    number: int = torch._C._current_graph_task_id()
    return number


def _checked(part: Contribution | Tensor, local: str, module: nn.Module) -> Contribution:
    if isinstance(part, Outer | Patches | Sum | Dense):
        return part
    expected = getattr(module, local).shape
    if part.shape[1:] != expected:
        raise UsageError(
            f"the rule for {type(module).__name__} must return per-sample gradients of shape (B, "
            f"{', '.join(map(str, expected))}) for {local!r}, got {tuple(part.shape)}."
        )
    return Dense(part)


def by_position(module: nn.Module, delta: Tensor) -> Tensor:
    """A view (B, S, d), positions in the order of the rules; convolutions have their channels first."""
    return delta.flatten(2).mT if isinstance(module, nn.modules.conv._ConvNd) else delta.flatten(1, -2)


def _snapshot(x: Tensor) -> Tensor:
    """An input as it is now: what autograd made is the step's own, but data may lie in a buffer that is used again."""
    return x.detach() if x.requires_grad else x.clone()


def _widen(x: Tensor) -> Tensor:
    """Half precision to float32: sums over positions and samples need it."""
    return x.float() if x.dtype in HALF else x
