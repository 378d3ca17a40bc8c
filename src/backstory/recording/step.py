r"""One optimizer step while it is being recorded: what the user declares, and what the hooks bring.

Backward passes give ∂L/∂s with the sample's weight inside, so what arrives is w_z g_z (times the loss scale of a
GradScaler). The weights are known when the step is complete; rows are then divided by them:

    mean         w = 1 / samples of the step          token-mean   w = 1 / tokens of the step, ℓ a sum over tokens
    sum          w = 1                                weights      as given with each batch
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.ids import as_text, check_unique, counts
from ..capture.modules import Block
from ..errors import NumericalError, UsageError
from ..maths.curvature import KINDS
from ..maths.encoding import all_finite
from ..maths.projection import Basis
from .adam import Seen
from .contributions import Gathered

if TYPE_CHECKING:
    from .curvature import CurvatureRows

OUTPUT_KINDS = (*KINDS, "other")
Ids = Iterable[int | str] | Tensor


class StepScope:
    """What `with rec.step() as s` gives: declare each micro-batch before its forward pass."""

    def __init__(
        self,
        number: int,
        reduction: str,
        blocks: Sequence[Block],
        bases: Sequence[Basis] | None,
        groups: int = 1,
        checked: Collection[int] = (),
    ) -> None:
        self.number, self._reduction, self._blocks = number, reduction, blocks
        self.bases = bases  # None: keep the contributions themselves until they can be projected
        self.checked = checked  # the blocks whose rows must add up to the gradient in this step
        self.gradients = Gathered(blocks, bases, groups, checked)
        self.ids: list[str] = []
        self.id_kind: str | None = None  # "int" or "str", once known; the recorder fills in the run's
        self.sizes: list[int] = []
        self._weights: list[Tensor | None] = []
        self._tokens: list[Tensor | None] = []
        self._losses: list[Tensor | None] = []
        self.curvature: CurvatureRows | None = None  # set by the recorder where rows of their own are kept
        self.seen = Seen()  # of the optimizer's state after the step
        self.gdots: Tensor | None = (
            None  # (B, K) w ⟨g, ∇L⟩ of raw gradients, where the step was clipped in Adam's coordinates
        )
        self.hdots: Tensor | None = None  # (B, R) ⟨h, ∇L⟩ likewise
        self.on_batch: Callable[[int], object] = lambda size: None  # set by the recorder: tells the tap

    def batch(
        self,
        ids: Ids,
        weights: Tensor | Sequence[float] | None = None,
        tokens: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Declare the samples of the next micro-batch, in the order of the batch dimension."""
        texts, kind = as_text(ids)
        if not texts:
            raise UsageError(f"step {self.number} declares an empty batch.")
        if self.id_kind not in (None, kind):
            raise UsageError(
                f"step {self.number} has {kind} ids, but those before it are of type {self.id_kind}; use one kind."
            )
        self.id_kind = kind
        self.ids += texts
        check_unique(self.ids, self.number)
        if (weights is not None) != (self._reduction == "weights"):
            raise UsageError(
                f"loss_reduction={self._reduction!r} and weights={'given' if weights is not None else 'not given'} do not "
                "fit: pass weights with every batch and loss_reduction='weights', or neither."
            )
        given = None if weights is None else _weights(weights, len(texts), self.number)
        self.sizes.append(len(texts))
        self._weights.append(given)
        self._tokens.append(None if tokens is None else counts(tokens, len(texts)))
        self._losses.append(None)
        self.on_batch(len(texts))

    def weigh(self, slot: int, weights: Tensor | Sequence[float]) -> None:
        """Replace the weights of micro-batch `slot`, where they are known only after its forward pass."""
        if self._reduction != "weights":
            raise UsageError(f"found loss_reduction={self._reduction!r}; expected 'weights', or no weights at all.")
        self._weights[slot] = _weights(weights, self.sizes[slot], self.number)

    def outputs(self, logits: Tensor, kind: str, mask: Tensor | None = None, reduction: str | None = None) -> None:
        """The model's outputs of the current micro-batch, before `backward()`; classes are the last dimension.

        `mask` (B, S) marks the positions that have a loss; `reduction` says whether a sample's own loss is the
        "sum" or the "mean" over its positions. Curvature other than empirical is computed here.
        """
        self._need_batch("outputs")
        if kind not in OUTPUT_KINDS:
            raise UsageError(f"found kind={kind!r}; expected one of {', '.join(map(repr, OUTPUT_KINDS))}.")
        if len(logits) != self.sizes[-1]:
            raise UsageError(f"found outputs of {len(logits)} samples; the batch declares {self.sizes[-1]}.")
        if mask is not None and self._tokens[-1] is None:
            self._tokens[-1] = counts(mask.reshape(len(mask), -1).sum(1), self.sizes[-1])
        if self.curvature is not None:
            self.curvature.take(self, logits, kind, mask, reduction)

    @contextmanager
    def outputs_of(self, model: nn.Module, kind: str, reduction: str | None = None) -> Iterator[None]:
        """Hand over what the forward passes of `model` inside put out (their `logits`, if they have any), where it is needed."""
        if self.curvature is None:
            yield
            return

        def take(module: nn.Module, args: Any, out: Any) -> None:
            self.outputs(getattr(out, "logits", out), kind, reduction=reduction)

        handle = model.register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def losses(self, per_sample: Tensor) -> None:
        """The loss ℓ of each sample of the current micro-batch, not multiplied by its weight."""
        self._need_batch("losses")
        self._losses[-1] = _vector(per_sample, self.sizes[-1], "losses")

    @property
    def reduction(self) -> str:
        """How the losses of samples make the step's loss."""
        return self._reduction

    def weights(self) -> Tensor:
        """w_z of every sample of the step, float64."""
        n = len(self.ids)
        if self._reduction == "weights":
            return torch.cat([w for w in self._weights if w is not None])
        if self._reduction == "sum":
            return torch.ones(n, dtype=torch.float64)
        if self._reduction == "mean":
            if len(set(self.sizes)) > 1:
                raise UsageError(
                    f"step {self.number} accumulates micro-batches of {self.sizes} samples. A mean over unequal parts "
                    "has no one weight: use loss_reduction='weights' and pass weights= with each batch."
                )
            return torch.full((n,), 1.0 / n, dtype=torch.float64)
        found = [t for t in self._tokens if t is not None]
        if len(found) < len(self.sizes):
            raise UsageError(
                "loss_reduction='token-mean' needs the number of tokens of each sample: pass tokens= to s.batch(), "
                "or mask= to s.outputs()."
            )
        total = float(torch.cat(found).sum())
        if total <= 0:
            raise UsageError(f"step {self.number} has no token with a loss.")
        return torch.full((n,), 1.0 / total, dtype=torch.float64)

    def loss_column(self) -> Tensor:
        """Given losses, NaN where none were given: (B,)."""
        nothing = float("nan")
        given = zip(self.sizes, self._losses, strict=True)
        return torch.cat([torch.full((n,), nothing, dtype=torch.float64) if x is None else x for n, x in given])

    def terms(self) -> Tensor:
        """How many loss terms each sample's own loss is the mean of, (B,): 1 where it is their sum."""
        if self._reduction == "token-mean":
            return torch.ones(len(self.ids), dtype=torch.float64)
        found = [t for t in self._tokens if t is not None]
        if len(found) < len(self.sizes):
            raise UsageError(
                f"curvature by groups of positions with loss_reduction={self._reduction!r} needs the number of loss terms "
                "that each sample's own loss is the mean of: pass tokens= to s.batch() (1 where it is their sum), or "
                "mask= to s.outputs()."
            )
        return torch.cat(found).double().clamp_min(1)

    def check_finite(self, rows: Tensor) -> None:
        """NaN or Inf in a row (B, …, Σ dims): name step, layer and sample."""
        if all_finite(rows):
            return
        rows = rows.flatten(1, -2).sum(1) if rows.dim() > 2 else rows
        bad = (~rows.isfinite()).nonzero()[0].tolist()
        edge, name = 0, ""
        for block in self._blocks:
            edge += block.shape.dims
            if bad[1] < edge:
                name = block.name
                break
        raise NumericalError(
            f"the gradient of sample {self.ids[bad[0]]!r} in step {self.number} has {rows[bad[0], bad[1]].item()} in "
            f"{name!r}. The step was not recorded. Look at that sample's input and loss, or lower the learning rate."
        )

    def _need_batch(self, what: str) -> None:
        if not self.sizes:
            raise UsageError(f"s.{what}() came before s.batch(ids); declare the micro-batch first.")


def safe_inverse(x: Tensor) -> Tensor:
    """1/x, and 0 where x = 0: a sample without weight leaves no row."""
    return torch.where(x == 0, torch.zeros_like(x), 1.0 / torch.where(x == 0, torch.ones_like(x), x))


def _weights(x: Tensor | Sequence[float], n: int, step: int) -> Tensor:
    found = _vector(x, n, "weights")
    if bool((found < 0).any()):
        raise UsageError(f"step {step} has a negative weight; expected weights ≥ 0: curvature needs them.")
    return found


def _vector(x: Tensor | Sequence[float], n: int, what: str) -> Tensor:
    found = x if isinstance(x, Tensor) else torch.tensor(list(x), dtype=torch.float64)
    found = found.detach().double().cpu().reshape(-1)
    if len(found) != n:
        raise UsageError(f"found {len(found)} {what} for {n} samples; expected one for each.")
    if not bool(found.isfinite().all()):
        raise NumericalError(f"found NaN or Inf among the {what} given with the batch.")
    return found
