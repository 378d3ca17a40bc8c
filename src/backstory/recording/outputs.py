r"""What loss a model's outputs go into, seen from the gradient that comes back to them in the first step.

With f the outputs, w the weight of a sample and δ = ∂L/∂f,

    cross-entropy   δ = w (softmax f − y),  y one label of each sample; or smoothed labels, a distribution that is the same for all samples but
                                            for its order, where predictions differ enough to tell it from a loss k times as small, k < 1,
                                            whose (1 − k) softmax f + k y varies with them
    bce             δ = w c (σ(f) − y),     y 0 or 1,  c = 1 or one over the number of outputs

so y, computed from δ, tells. From there on f and δ of every step say how much of each sample's Gauss-Newton matrix its gradient holds
(`maths.gauss_newton`), and some steps of each window give rows for the rest. Squared error cannot be told: any δ would do.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..capture.hooks import HALF, logits_of
from .loss_terms import LossTerms, terms_of

MOST = 32  # outputs of a sample: so many more backward passes a seen step has
SURE = 5  # times `close` that a loss of another size would make smoothed labels vary
CLOSE = {True: 2e-2, False: 1e-3}  # how far y may be from what it must be, in half precision and else


class Loss(NamedTuple):
    """The loss that a model's outputs go into."""

    kind: str
    reduction: str  # of a sample's own terms
    entries: int  # outputs of a sample

    @property
    def inner(self) -> float:
        """c: what each of a sample's own terms counts."""
        return 1.0 if self.reduction == "sum" else 1 / self.entries


class Seen(NamedTuple):
    """The outputs of a micro-batch, and the gradient that came back to them."""

    f: Tensor
    delta: Tensor  # with the samples' weights and the loss scale


class OutputWatch:
    """Sees the outputs of a model, once for each micro-batch, and the gradient that comes back to them."""

    def __init__(self, model: nn.Module, on_outputs: Callable[[Tensor], None], is_ours: Callable[[], bool]) -> None:
        self._model, self._on_outputs, self._is_ours = model, on_outputs, is_ours
        self._handle: RemovableHandle | None = None
        # outputs and the gradients that came back to them, with how often they had been changed in place
        self._seen: list[tuple[Tensor, list[Tensor], int]] = []
        self._terms: list[list[LossTerms | None]] = []  # of each call of the model, what each backward pass showed
        self.looking = True  # for the loss

    def attach(self) -> None:
        """Install the hook."""
        hook = torch.compiler.disable(self._after_forward)
        self._handle = self._model.register_forward_hook(hook)

    def detach(self) -> None:
        """Remove it."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def begin(self) -> None:
        """A new step."""
        self._seen.clear()
        self._terms.clear()

    def _after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        outputs = logits_of(out)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad or self._is_ours():
            return
        if self.looking:
            self._look(outputs)
        else:
            back: list[Tensor] = []
            outputs.register_hook(lambda delta: None if self._is_ours() else back.append(delta.detach()))
            self._seen.append((outputs.detach(), back, outputs._version))
            self._on_outputs(outputs)

    def _look(self, outputs: Tensor) -> None:
        """Keep what is small; of the rest only how much its terms weigh."""
        back, terms, version = list[Tensor](), list[LossTerms | None](), outputs._version
        values, small = outputs.detach(), outputs.dim() > 0 and outputs[0].numel() <= MOST

        def see(delta: Tensor) -> None:
            if self._is_ours():
                return
            with torch.no_grad():
                terms.append(terms_of(values, delta.detach()) if values._version == version else None)
            back.append(delta.detach() if small else delta.detach().new_zeros(()))

        outputs.register_hook(see)
        self._seen.append((values if small else values.new_zeros(()), back, version))
        self._terms.append(terms)

    def terms(self, sizes: Sequence[int]) -> list[LossTerms] | None:
        """How much the terms of the loss weigh, of each micro-batch; None where that cannot be told of all of them."""
        seen = [x[0] for x in self._terms if len(x) == 1 and x[0] is not None]
        fits = len(seen) == len(self._terms) and [len(x.weight) for x in seen] == list(sizes)
        return seen if fits and seen else None

    def taken(self, sizes: Sequence[int]) -> list[Seen] | None:
        """What was seen of micro-batches of these sizes; None unless each had its outputs once, and they stayed as they were."""
        if len(sizes) != len(self._seen):
            return None
        fits = (
            len(back) == 1 and f.dim() > 0 and len(f) == size and f._version == version and back[0].shape == f.shape
            for (f, back, version), size in zip(self._seen, sizes, strict=True)
        )
        return [Seen(f.clone(), back[0]) for f, back, _ in self._seen] if all(fits) else None

    def loss(self, weights: Sequence[Tensor]) -> Loss | None:
        """The loss of the step, from the weights (with the loss scale) of each micro-batch's samples; None where it cannot be told."""
        self.looking = False
        seen = self.taken([len(weight) for weight in weights])
        if seen is None or not all(bool((weight > 0).all()) for weight in weights):
            return None
        found = {loss_of(x.f, x.delta, weight) for x, weight in zip(seen, weights, strict=True)}
        return found.pop() if len(found) == 1 else None


def loss_of(outputs: Tensor, delta: Tensor, weight: Tensor) -> Loss | None:
    """What a micro-batch shows."""
    entries = outputs[0].numel()
    if entries > MOST:
        return None
    close, f = CLOSE[outputs.dtype in HALF or delta.dtype in HALF], outputs.double().cpu()
    back = delta.double().cpu() / weight.double().cpu().reshape(-1, *[1] * (f.dim() - 1))
    if f.dim() == 2 and entries > 1:
        y = f.softmax(1) - back
        shape, spread = y.sort(1).values, f.softmax(1).sort(1).values  # of the labels, and of the predictions
        whole = bool(((y.sum(1) - 1).abs() < close).all()) and bool((y > -close).all())
        alike = bool(((shape - shape[0]).abs() < close).all())
        smoothing = 1 - float(shape[:, -1].min())
        told = smoothing < close or smoothing * float((spread.amax(0) - spread.amin(0)).max()) > SURE * close
        if whole and alike and told:
            return Loss("cross-entropy", "sum", entries)
    for reduction, c in {"sum": 1.0, "mean": 1 / entries}.items():
        y = f.sigmoid() - back / c
        if bool((y * (1 - y)).abs().max() < close):
            return Loss("bce", reduction, entries)
    return None
