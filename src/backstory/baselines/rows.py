r"""Gradients of training samples and of queries, in the same coordinates, at the weights the model holds now.

    G = rows ∇ℓ(θ, z)  (N, p),      V = rows ∇ℓ(θ, q)  (Q, p)

in all coordinates (rank=None), or each parameter's in seeded random ones: vec(Lᵀ ∇W R), inner products right on
average (LoGRA). One backward pass for each batch, through Backstory's own hooks, in eval mode.

Shapes:  N samples, Q queries, p coordinates, blocks (parameters) side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ..capture.modules import Blocks, Rank, Selection, find_blocks, taken_as_frozen
from ..errors import NumericalError, UsageError
from ..maths.projection import Basis, random_basis
from ..replay.recipe import Recipe
from ..run.gradients import LossFn, query_rows
from .training import Training, survey

MOST_BYTES = 12 << 30  # of one table of numbers
Progress = Callable[[int, int], None]


class Coordinates(TypedDict, total=False):
    """What every gradient method takes as keywords."""

    rank: Rank | None  # random coordinates of each side of a parameter; None: all
    seed: int  # of the random coordinates
    layers: Selection | None  # as in `backstory.record`; None: all trained parameters
    progress: Progress | None


@dataclass(frozen=True)
class Gradients:
    """Where gradients are taken, and in which coordinates."""

    recipe: Recipe
    training: Training
    blocks: Blocks
    bases: list[Basis]
    progress: Progress | None = None

    @property
    def dims(self) -> list[int]:
        """Coordinates of each block."""
        return [b.shape.dims for b in self.blocks.blocks]

    @property
    def width(self) -> int:
        """Coordinates of a row."""
        return sum(self.dims)

    @property
    def slices(self) -> list[slice]:
        """Where each block lies in a row."""
        return [slice(lo, hi) for lo, hi in pairwise([0, *accumulate(self.dims)])]

    @property
    def notes(self) -> tuple[str, ...]:
        """What an answer must say about the coordinates."""
        full = sum(b.parameter.numel() for b in self.blocks.blocks)
        out = ["gradients in eval mode, at the weights that the model holds"]
        if self.width < full:
            out.append(f"{self.width:,} random coordinates of {full:,}")
        if self.blocks.left_out:
            out.append(f"left out: {', '.join(self.blocks.left_out)}")
        if self.blocks.elsewhere:
            out.append(taken_as_frozen(self.blocks.elsewhere))
        return tuple(out)

    def ask(self, queries: Any, loss: LossFn | None = None) -> Tensor:
        """Rows of the queries (Q, p); `loss` may give (Q,) or a scalar."""
        return query_rows(self.recipe.model, loss or self.recipe.loss, queries, self.blocks, self.bases)

    def stream(self, loss: LossFn | None = None) -> Iterator[tuple[slice, Tensor]]:
        """`(columns, rows (n, p))` of the training samples, batch by batch."""
        lo = 0
        for done, (step, keep) in enumerate(self.training.visits):
            yield slice(lo, lo + len(keep)), self._rows(step, loss)[keep]
            lo += len(keep)
            if self.progress is not None:
                self.progress(done + 1, len(self.training.visits))

    def stack(self, loss: LossFn | None = None) -> Tensor:
        """All rows of the training samples (N, p)."""
        check_size(len(self.training), self.width, 8)
        out = torch.empty(0)
        for columns, rows in self.stream(loss):
            if not len(out):
                out = rows.new_empty(len(self.training), self.width)
            out[columns] = rows
        return out

    def _rows(self, step: int, loss: LossFn | None) -> Tensor:
        ids, batch = self.recipe.batches[step]
        try:
            rows = self.ask(batch, loss)
        except NumericalError as error:
            raise NumericalError(f"in the training batch of step {step}: {error}") from error
        if len(rows) != len(ids):
            raise UsageError(
                f"the loss of step {step} has {len(rows)} entries for {len(ids)} samples; "
                "expected one loss for each sample: reduction='none' in recipe.loss."
            )
        return rows


def gradients(recipe: Recipe, **coordinates: Unpack[Coordinates]) -> Gradients:
    """Gradients of `recipe` in these coordinates."""
    rank, seed, layers = coordinates.get("rank"), coordinates.get("seed", 0), coordinates.get("layers")
    blocks = find_blocks(recipe.model, recipe.optimizer, rank=rank, layers=layers)
    bases = [random_basis(b.shape, seed=seed, name=b.name) for b in blocks.blocks]
    return Gradients(recipe, survey(recipe), blocks, bases, coordinates.get("progress"))


def check_size(rows: int, columns: int, item: int) -> None:
    """Refuse a table that no memory holds."""
    if rows * columns * item > MOST_BYTES:
        raise UsageError(
            f"{rows:,} × {columns:,} numbers take {rows * columns * item / 2**30:.0f} GB; expected at most "
            f"{MOST_BYTES >> 30}. Pass rank= for fewer coordinates, or layers= for fewer parameters."
        )
