r"""Do the samples of a batch affect each other's gradients? Looked for once, in the graph of the first step.

A row is ∂L/∂θ along the path of one sample. It is the sample's own gradient only where L = Σ w_z ℓ(f_z) and f_z depends on z alone. With A one
half of the batch, B the other, v random, f the model's outputs and a what its first layers make of the data,

    the loss mixes    where  ∂/∂f_B ⟨v, ∂L/∂f_A⟩ ≠ 0          InfoNCE, Cox, a root over the batch
    layers mix        where  ∂/∂a_B ⟨v, f_A⟩ ≠ 0              batch norm in training mode, a batch's mean, attention between samples

A model that is called twice in a micro-batch, whose calls no loss term compares (∂/∂f₂ ⟨v, ∂L/∂f₁⟩ = 0), may have seen other samples in the second
one: real and fake ones, whose gradients must not be added up under one id.

Both vanish to the last bit where samples are apart. Of a model that is not called itself, a takes the place of f, and the second derivative sees
both. Not seen: pair losses that are piecewise linear (hinge, triplet), and mixing before the first recorded layer. Not checked: where torch cannot
differentiate (twice), in words.

`.grad`, buffers and random numbers stay as they are; the user's graph is kept for the user's own pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.precision import own_precision

FOUND, APART = "found", "not found"
ADDED = (
    "the model is called more than once in a micro-batch, and the loss adds up what it makes of each call, so the gradients of all calls are "
    "added up under the ids of the batch. That is right where they are the same samples (two views of each). Where they are others "
    "(real and fake ones of a GAN), declare each call's with s.batch(ids), before it."
)
STATISTICS = "found, in layers that share statistics"
NOT_FIRST = "not checked: the batch is not the first dimension"
UNSEEN = "not checked: backward() was not seen"
DRAWS = 2  # halves of the batch
MOST = 32  # first layers' calls that are looked at
CLOSE = 1e-4  # part of a derivative that may cross between halves: rounding, where torch sums over the batch


class Mixing:
    """Looks once, at the first backward pass of the first step."""

    def __init__(
        self, model: nn.Module, quiet: Callable[[], Any], has_samples: Callable[[nn.Module], bool] = lambda m: True
    ) -> None:
        self._model, self._quiet = model, quiet  # a context in which no hook takes part
        self._has_samples = has_samples  # of a layer, once it was called: whether its first dimension is the batch
        self._outputs: list[Tensor] = []
        self._call: list[int] = []  # of the model, that gave each of them
        self._calls, self._passes = (
            0,
            0,
        )  # of the model on other inputs, and backward ones, in the micro-batch under way
        self._inputs: list[Tensor] = []  # of the first of them
        self.added = False  # whether calls of one micro-batch have nothing to do with each other
        self._used: list[Tensor] = []  # of the outputs, by the loss
        self._called: list[tuple[nn.Module, Tensor]] = []
        self._first: list[Tensor] = []
        self.rows = 0  # of the micro-batch under way
        self.same: Tensor | None = None  # (rows,) which sample each row belongs to, where a sample has several
        self.found: dict[str, str] | None = None  # what was found of "loss" and "layers"

    def begin(self, rows: int, same: Sequence[int] | None = None) -> None:
        """A new micro-batch."""
        self.rows = rows
        self.same = torch.arange(rows) if same is None else torch.tensor(same)
        self._calls = self._passes = 0
        self._inputs = []
        self.forget()

    def forget(self) -> None:
        """Let go of the graph."""
        self._outputs.clear()
        self._call.clear()
        self._inputs = []
        self._first.clear()
        self._called.clear()
        self._used = []

    def see_call(self, module: nn.Module, args: Sequence[Any], output: Tensor) -> None:
        """A call of a recorded layer: a first one, if what it gets does not depend on others."""
        known = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if self.rows == len(output) and len(self._called) < MOST and (not known or not self._called):
            self._called.append((module, output))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the step runs, `backward` looks first; always put back."""
        original = torch.autograd.backward
        handle = self._model.register_forward_hook(torch.compiler.disable(self._see_outputs), with_kwargs=True)

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self.found is None and (self._outputs or self._called):
                self._look(tensors, grad_tensors)
            self._passes += 1
            self.added |= self._calls > 1 and self._passes > 1
            original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original
            handle.remove()
            self.forget()

    def _see_outputs(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        seen = [x for x in _tensors(out) if x.requires_grad and x.dim() and len(x) == self.rows]
        inputs = [x.detach() for x in (*_tensors(args), *_tensors(kwargs))]
        if seen and (not self._calls or not _alike(inputs, self._inputs)):
            self._calls += 1
            self._inputs = self._inputs or inputs
        if self.found is None:
            self._outputs += seen
            self._call += [self._calls] * len(seen)

    def _look(self, tensors: Any, grad_tensors: Any) -> None:
        if self.same is None or len(self.same.unique()) < 2:
            self.found = dict.fromkeys(("loss", "layers"), "not checked: the first batch has one sample")
            return
        self._first = [x for module, x in self._called if self._has_samples(module)]
        self._used = self._outputs
        roots = [x for x in _several(tensors) if x is not None and x.requires_grad]
        given = [None] * len(roots) if grad_tensors is None else _several(grad_tensors)
        seeds = [torch.ones_like(x) if s is None else s.detach().clone() for x, s in zip(roots, given, strict=False)]
        with (
            self._quiet(),
            _untouched(self._model, [*self._outputs, *(x for _, x in self._called)]),
            own_precision(self._device()),
        ):
            self.found = {
                "loss": _tried(lambda: self._of_loss(roots, seeds)),
                "layers": _tried(self._of_layers),
            }

    def _of_loss(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> str:
        seeds = [
            x.requires_grad_() for x in seeds
        ]  # else what cannot be differentiated twice would pass for a constant
        points, grads = list[Tensor](), tuple[Tensor | None, ...]()
        for points in (self._outputs, self._first):  # the model's outputs, where the loss is made of them
            if points:
                grads = torch.autograd.grad(roots, points, seeds, create_graph=True, allow_unused=True)
            if any(g is not None for g in grads):
                break
        pairs = [(f, g) for f, g in zip(points, grads, strict=True) if g is not None]
        if not pairs:
            return "not checked: the loss is made of none of the model's outputs"
        if any(_ends(g) for _, g in pairs):
            return "not checked: a function of the loss cannot be differentiated twice"
        if points is self._outputs:
            self._used = [f for f, _ in pairs]
            self.added |= self._are_apart(
                [(call, *pair) for call, pair in zip(self._call, zip(points, grads, strict=True), strict=True)]
            )
        return self._crossing([g for _, g in pairs], [f for f, _ in pairs])

    def _are_apart(self, seen: Sequence[tuple[int, Tensor, Tensor | None]]) -> bool:
        """Whether the loss is a sum of what it makes of the model's calls, one by one."""
        used = [(call, f, g) for call, f, g in seen if g is not None]
        first = [g for call, _, g in used if call == used[0][0]]
        others = [f for call, f, _ in used if call != used[0][0]]
        if not others:
            return False
        generator = torch.Generator().manual_seed(1)
        v = [torch.randn(g.shape, generator=generator).to(g) for g in first]
        slopes = torch.autograd.grad(first, others, v, retain_graph=True, allow_unused=True)
        return not any(bool(x.any()) for x in slopes if x is not None)

    def _of_layers(self) -> str:
        if not self._first:
            return "not checked: no recorded layer was called before backward()"
        if not self._outputs:
            return "not checked: the model's outputs were not seen"
        return self._crossing(self._used, self._first)

    def _crossing(self, values: Sequence[Tensor], points: Sequence[Tensor]) -> str:
        """Whether values of one half of the samples depend on the points of the other half."""
        assert self.same is not None
        generator = torch.Generator().manual_seed(0)
        samples = self.same.unique()
        for _ in range(DRAWS if values else 0):
            half = samples[torch.randperm(len(samples), generator=generator)[: len(samples) // 2]]
            inside = torch.isin(self.same, half)
            v = [_masked(torch.randn(x.shape, generator=generator), x, inside) for x in values]
            slopes = torch.autograd.grad(values, points, v, retain_graph=True, allow_unused=True)
            parts = [x.detach().reshape(len(x), -1).double().cpu() for x in slopes if x is not None]
            if not all(bool(x.isfinite().all()) for x in parts):
                return "not checked: a derivative is NaN or Inf"
            own, across = (sum(float(x[rows].square().sum()) for x in parts) ** 0.5 for rows in (inside, ~inside))
            if across > CLOSE * own:
                return FOUND
        return APART

    def _device(self) -> torch.device:
        return (self._outputs or [x for _, x in self._called])[0].device


def _tried(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as error:  # whatever torch cannot differentiate (twice), or has no room for; training goes on
        return f"not checked: {str(error).partition(chr(10))[0][:160]}"


def _alike(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two calls of a model got the same."""
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _ends(gradient: Tensor) -> bool:
    """Whether a function that can be differentiated once only has made this gradient, which then looks like a constant."""
    todo, seen = [gradient.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::Error":
            return True
        seen.add(node)
        todo += [edge for edge, _ in node.next_functions]
    return False


def _masked(v: Tensor, like: Tensor, inside: Tensor) -> Tensor:
    return (v * inside.reshape(-1, *[1] * (v.dim() - 1))).to(like)


def _several(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


def _tensors(out: Any) -> list[Tensor]:
    """All in what a model returns."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, Mapping):
        return [x for value in out.values() for x in _tensors(value)]
    return [x for value in out for x in _tensors(value)] if isinstance(out, tuple | list) else []


@contextmanager
def _untouched(model: nn.Module, seen: Sequence[Tensor]) -> Iterator[None]:
    """Buffers, random numbers and what `retain_grad` keeps are put back: checkpointed modules are called again."""
    buffers = {x: x.detach().clone() for x in model.buffers()}
    kept = [(x, None if x.grad is None else x.grad.clone()) for x in seen if x.retains_grad]
    devices = sorted({x.device.index for x in seen if x.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for x, before in buffers.items():
                if not torch.equal(x, before):
                    x.copy_(before)
        for x, grad in kept:
            x.grad = grad
