r"""Adam's second moment, read after each step: it gives the coordinates of the stored gradients, or a diagonal stored with them.

preconditioned  learned and random projections: rows are those of ĝ = P^½ g, with P factored (`maths.adam`); P is read at every
                step at first, and later, when v̂ is a mean over many steps, at some of them. The one that is known before a
                step then stands for the one after it, and rows can be projected while the backward pass goes on
raw             full and mask: rows are those of g, and the exact diagonal P of every step is kept with it
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.modules import Block
from ..capture.updates import OptimizerReader, Reading
from ..errors import UnsupportedError
from ..maths.adam import Scale, absorb_scale, drift, dual, factor_scale, size
from ..maths.projection import Basis, project_dense
from ..store.bases import PRECONDITIONED, RAW

KNOWN = 8  # steps after which v̂ changes so little in one that its value before the step stands for the one after it: P^½ by 3 %
RENEWED = 0.05  # P is read again before v̂, a mean over the last steps, can have changed by more than about this part of itself


class AfterUpdate(NamedTuple):
    """What the optimizer's state says after a step."""

    scales: list[Scale] | None = None  # P^½ of each block, where rows are kept in its coordinates
    P: Tensor | None = None  # (Σ dims,) the diagonal, where rows are kept without it
    size: float | None = None  # ‖∇L‖² of the recorded parameters in the run's coordinates
    before: list[Scale] | None = None  # P^½ as it was known before the step
    now: list[Scale] | None = None  # P^½ as it is known after it
    duals: list[Tensor | None] | None = None  # (product,) of each block, where the step was clipped: ⟨h, ∇L⟩ needs them

    @property
    def drift(self) -> float:
        """Root mean square change of log P since the step before."""
        if self.before is None or self.now is None:
            return 0.0
        sizes = torch.tensor([len(s.left) * (1 if s.right is None else len(s.right)) for s in self.now]).float()
        pairs = zip(self.before, self.now, strict=True)
        squares = torch.tensor([0.0 if a is b else float(drift(a, b)) for a, b in pairs])
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
        self.every_step = (
            False  # whether they are read after each step, as those of steps that do not follow each other must be
        )
        self._tables = set[int]()  # blocks whose rows are looked up
        self._empty: dict[int, tuple[Scale, bool]] = {}  # of each block: its scale, and whether a part of it is 0
        self._sides: dict[int, tuple[Basis, Scale, Basis]] = {}  # its basis and scale, and what is made of them

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

    def known(self) -> list[Scale] | None:
        """P^½ before a step, where it may stand for the one after it, but for the blocks that are `late`."""
        first = self._blocks[0].parameter
        if self.every_step or not self.preconditioned or not self._reader.foreseen or self.scales is None:
            return None
        if not self._reader.optimizer.state.get(first) or self._reader.second_moment(first).steps < KNOWN:
            return None
        return self.scales

    def late(self, scales: Sequence[Scale]) -> frozenset[int]:
        """The blocks whose scales must be those after the step.

        In a table a row's gradient may be the first in a long time; and where a scale is 0, no gradient has been there yet.
        """
        for b, scale in enumerate(scales):
            if b not in self._empty or self._empty[b][0] is not scale:
                self._empty[b] = scale, any(bool((x == 0).any()) for x in scale if x is not None)
        return frozenset(self._tables | {b for b, (_, empty) in self._empty.items() if empty})

    def after(self, known: list[Scale] | None, looked_up: Collection[int] = ()) -> list[Scale]:
        """P^½ of the rows of the step that has just been taken, where `known` stood for it, with rows of these blocks looked up."""
        self._tables.update(looked_up)
        self._age += 1
        last = 1 if self.every_step else self._reader.moments_last(self._blocks[0].parameter, RENEWED)
        if self.scales is None or self._age >= last:
            read, self.scales, self._age = self.scales, [self._scale(b) for b in self._blocks], 0
            return self.scales if known is None else self._with(known, self.late(known), read=read is not None)
        return self._with(self.scales if known is None else known, self.late(self.scales if known is None else known))

    def _with(self, scales: list[Scale], late: Collection[int], *, read: bool = False) -> list[Scale]:
        """These, with the late ones as they are after the step: `read` just now, or read here."""
        assert self.scales is not None
        if late and not read:
            fresh = {b: self._scale(self._blocks[b]) for b in late}
            self.scales = [fresh.get(b, scale) for b, scale in enumerate(self.scales)]
        return [self.scales[b] if b in late else scale for b, scale in enumerate(scales)] if late else scales

    def sides(self, bases: Sequence[Basis], scales: Sequence[Scale]) -> list[Basis]:
        """The sides of each block that take raw gradients to the coordinates of P^½; made once for the same scale."""
        for b, (basis, scale) in enumerate(zip(bases, scales, strict=True)):
            if b not in self._sides or self._sides[b][0] is not basis or self._sides[b][1] is not scale:
                self._sides[b] = basis, scale, absorb_scale(basis._replace(core=None), scale)
        return [self._sides[b][2] for b in range(len(bases))]

    def read(
        self,
        reading: Reading,
        bases: Sequence[Basis] | None,
        known: list[Scale] | None = None,
        looked_up: Collection[int] = (),
    ) -> AfterUpdate:
        """After the optimizer has stepped, while its gradients are still there.

        The `known` scales are those that some rows have already, but of `late` blocks; rows of some blocks were `looked_up`.
        """
        if self.diagonal:
            assert bases is not None
            return AfterUpdate(P=torch.cat(list(map(self._diagonal, self._blocks, bases))))
        if not self.preconditioned:
            return AfterUpdate()
        before, scales = self.scales, self.after(known, looked_up)
        grads = [b.parameter.grad for b in self._blocks]
        sizes = [size(g, s, b.shape) for g, s, b in zip(grads, scales, self._blocks, strict=True) if g is not None]
        whole = float(torch.stack([x.cpu().double() for x in sizes]).sum()) / reading.clip**2 if sizes else 0.0
        duals = None if bases is None or reading.clip >= 1 else self._duals(reading, bases, scales)
        return AfterUpdate(scales, None, whole, before, self.scales, duals)

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
