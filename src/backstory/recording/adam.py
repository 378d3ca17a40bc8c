r"""Adam's second moment, read after each step: it gives the coordinates of the stored gradients, or a diagonal stored with them.

preconditioned  learned and random projections: rows are those of ĝ = P^½ g, with P factored (`maths.adam`); P is read at every
                step at first, and later, when v̂ is a mean over many steps, at some of them
raw             full and mask: rows are those of g, and the exact diagonal P of every step is kept with it
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.modules import Block
from ..capture.updates import OptimizerReader, Reading
from ..errors import UnsupportedError
from ..maths.adam import Scale, drift, dual, factor_scale, size
from ..maths.projection import Basis, project_dense
from ..store.bases import PRECONDITIONED, RAW

RENEWED = 0.05  # P is read again before v̂, a mean over the last steps, can have changed by more than about this part of itself


class AfterUpdate(NamedTuple):
    """What the optimizer's state says after a step."""

    scales: list[Scale] | None = None  # P^½ of each block, where rows are kept in its coordinates
    P: Tensor | None = None  # (Σ dims,) the diagonal, where rows are kept without it
    size: float | None = None  # ‖∇L‖² of the recorded parameters in the run's coordinates
    before: list[Scale] | None = None  # P^½ at the step before
    duals: list[Tensor | None] | None = None  # (product,) of each block, where the step was clipped: ⟨h, ∇L⟩ needs them

    @property
    def drift(self) -> float:
        """Root mean square change of log P since the step before."""
        if self.before is None or self.scales is None:
            return 0.0
        sizes = torch.tensor([len(s.left) * (1 if s.right is None else len(s.right)) for s in self.scales]).float()
        squares = torch.stack([drift(a, b).cpu().float() for a, b in zip(self.before, self.scales, strict=True)])
        return float((squares @ sizes / sizes.sum()).sqrt())


class Adaptive:
    """Follows the second moment of an Adam optimizer; for SGD there is nothing to see."""

    def __init__(self, reader: OptimizerReader, blocks: Sequence[Block], projection: str) -> None:
        self._reader, self._blocks = reader, blocks
        self.preconditioned = reader.adaptive and projection in ("learned", "random")
        self.diagonal = reader.adaptive and not self.preconditioned
        states = [reader.optimizer.state.get(b.parameter, {}) for b in blocks]
        known = self.preconditioned and reader.foreseen and all(x and float(x.get("step", 1)) > 0 for x in states)
        self.scales = [self._scale(b) for b in blocks] if known else None  # of the last step, or of one a little before
        self._age = 0  # steps since they were read

    @property
    def coordinates(self) -> str:
        """The name that the run's config keeps."""
        return PRECONDITIONED if self.preconditioned else RAW

    def told(self) -> list[Scale] | None:
        """P^½ of each block, from the optimizer's state alone."""
        if self.preconditioned and not self._reader.foreseen:
            raise UnsupportedError(
                f"how {type(self._reader.optimizer).__name__} scales its steps depends on the weights before each of them, which its state does "
                "not tell. Record with projection='full' or 'mask', or train with AdamW."
            )
        return self.scales

    def read(self, reading: Reading, bases: Sequence[Basis] | None) -> AfterUpdate:
        """After the optimizer has stepped, while its gradients are still there."""
        if self.diagonal:
            assert bases is not None
            return AfterUpdate(P=torch.cat(list(map(self._diagonal, self._blocks, bases))))
        if not self.preconditioned:
            return AfterUpdate()
        before, self._age = self.scales, self._age + 1
        if self.scales is None or self._age >= self._reader.moments_last(self._blocks[0].parameter, RENEWED):
            self.scales, self._age = [self._scale(b) for b in self._blocks], 0
        scales = self.scales
        grads = [b.parameter.grad for b in self._blocks]
        sizes = [size(g, s, b.shape) for g, s, b in zip(grads, scales, self._blocks, strict=True) if g is not None]
        whole = float(torch.stack([x.cpu().double() for x in sizes]).sum()) / reading.clip**2 if sizes else 0.0
        duals = None if bases is None or reading.clip >= 1 else self._duals(reading, bases, scales)
        return AfterUpdate(scales, None, whole, before, duals)

    def wholes(self, reading: Reading) -> list[Tensor | None] | None:
        """∇L of each block before clipping, where the step was clipped in Adam's coordinates."""
        if not self.preconditioned or reading.clip >= 1:
            return None
        return [None if (g := b.parameter.grad) is None else g / reading.clip for b in self._blocks]

    def _duals(self, reading: Reading, bases: Sequence[Basis], scales: Sequence[Scale]) -> list[Tensor | None]:
        """Of ∇L before clipping, through the sides: far fewer numbers to hold on to than the gradients."""
        out: list[Tensor | None] = []
        for block, basis, scale in zip(self._blocks, bases, scales, strict=True):
            grad = block.parameter.grad
            wide = None if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32))
            out.append(None if wide is None else dual(wide, basis, scale, block.shape) / reading.clip)
        return out

    def _scale(self, block: Block) -> Scale:
        second = self._reader.second_moment(block.parameter)
        return factor_scale(second.v, second.eps, block.shape, second.correction)

    def _diagonal(self, block: Block, basis: Basis) -> Tensor:
        second = self._reader.second_moment(block.parameter)
        P = 1 / ((second.v / second.correction).sqrt() + second.eps)
        return project_dense(P[None], block.shape, basis)[0].cpu()

    def check(self, reading: Reading) -> None:
        """Before the optimizer moves: can its step be followed in these coordinates?"""
        if self.preconditioned and any(reading.groups["l2"]):
            raise UnsupportedError(
                f"{type(self._reader.optimizer).__name__}'s weight_decay is an L2 term inside the gradient, scaled by each "
                "parameter's own learning rate, which a projection cannot represent. Use AdamW, or record with projection='mask' or 'full'."
            )
        if self.diagonal and self._reader.inside and any(reading.groups["momentum"]):
            raise UnsupportedError(
                f"{type(self._reader.optimizer).__name__}'s momentum averages steps that are scaled already, which projection='mask' and "
                "'full' cannot represent. Record with projection='learned' or 'random', or set momentum=0."
            )
