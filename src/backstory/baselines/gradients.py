r"""The training samples of a recipe, and the gradients of samples and queries in the same coordinates.

    columns of every result = the samples, each once, in the order (last step, position)
    G = rows ∇ℓ(θ, z)  (N, p),      V = rows ∇ℓ(θ, q)  (Q, p)

at the weights the model holds now, in all coordinates (rank=None), or each parameter's in seeded random ones: vec(Lᵀ ∇W R), inner
products right on average (LoGRA). One backward pass for each batch, through Backstory's own hooks, in eval mode. A batch may be
anything that `recipe.loss` takes.

Shapes:  N samples, Q queries, p coordinates, blocks (parameters) side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text
from ..capture.modules import Blocks, Rank, Selection, find_blocks, taken_as_frozen
from ..errors import NumericalError, UsageError
from ..maths.projection import Basis, random_basis
from ..replay.recipe import Recipe
from ..results.influence import UNIT, Influence
from ..run.gradients import LossFn, query_rows

RANK_ONLY = "rank only: the scores order the samples, but they are not differences of losses"
MOST_BYTES = 12 << 30  # of one table of numbers
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Training:
    """Which samples there are, and where each was used last."""

    samples: list[str]  # ids as text
    kind: str  # of the ids: "int" or "str"
    steps: list[int]  # of the last occurrence
    visits: list[tuple[int, list[int]]]  # (step, positions of its batch), in the order of `samples`

    def __len__(self) -> int:
        return len(self.samples)


def survey(recipe: Recipe) -> Training:
    """Every id of `recipe.batches` once, at its last occurrence."""
    known: set[str] = set()
    kinds: set[str] = set()
    visits: list[tuple[int, list[int], list[str]]] = []
    for step in reversed(range(len(recipe.batches))):
        names, kind = as_text(recipe.batches[step][0])
        keep = [i for i, name in enumerate(names) if name not in known and name not in names[:i]]
        if keep:
            kinds.add(kind)
            visits.append((step, keep, [names[i] for i in keep]))
            known.update(names)
    if len(kinds) != 1:
        raise UsageError(f"all batches must have ids of one type, got {len(visits)} batches with {len(kinds)} types.")
    visits.reverse()
    samples = [name for _, _, names in visits for name in names]
    steps = [step for step, keep, _ in visits for _ in keep]
    return Training(samples, kinds.pop(), steps, [(step, keep) for step, keep, _ in visits])


def as_influence(recipe: Recipe, training: Training, scores: Tensor, method: str, caveats: Sequence[str]) -> Influence:
    """Scores (Q, N) as the result of a query."""
    return Influence(
        scores=scores.detach().double().cpu(),
        sample_ids=np.array(training.samples),
        steps=np.array(training.steps),
        id_kind=training.kind,
        at=len(recipe.batches),
        method=method,
        caveats=tuple(caveats),
        unit=RANK_ONLY if RANK_ONLY in caveats else UNIT,
    )


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
    def full_width(self) -> int:
        """Coordinates of a gradient that is not projected."""
        return sum(b.parameter.numel() for b in self.blocks.blocks)

    @property
    def slices(self) -> list[slice]:
        """Where each block lies in a row."""
        return [slice(lo, hi) for lo, hi in pairwise([0, *accumulate(self.dims)])]

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a result must say about the coordinates."""
        out = ["gradients in eval mode, at the model's current weights"]
        if self.width < self.full_width:
            out.append(f"random projection to {self.width:,} of {self.full_width:,} coordinates")
        if self.blocks.left_out:
            out.append(f"left out: {', '.join(self.blocks.left_out)}")
        if self.blocks.elsewhere:
            out.append(taken_as_frozen(self.blocks.elsewhere))
        return tuple(out)

    def of(self, batch: Any, loss: LossFn | None = None) -> Tensor:
        """Rows of a batch's losses, (Q, p); `loss` may give (Q,) or a scalar."""
        return query_rows(self.recipe.model, loss or self.recipe.loss, batch, self.blocks, self.bases)

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

    def products(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """`(V Gᵀ (Q, N), norms of G (N,))` in float64, one batch in memory at a time."""
        V = V.double()
        dots = torch.zeros(len(V), len(self.training), dtype=torch.float64)
        norms = torch.zeros(len(self.training), dtype=torch.float64)
        for columns, G in self.stream():
            dots[:, columns] = V @ G.double().T
            norms[columns] = G.double().norm(dim=1)
        return dots, norms

    def _rows(self, step: int, loss: LossFn | None) -> Tensor:
        ids, batch = self.recipe.batches[step]
        try:
            rows = self.of(batch, loss)
        except NumericalError as error:
            raise NumericalError(f"in the training batch of step {step}: {error}") from error
        if len(rows) != len(ids):
            raise UsageError(
                f"recipe.loss must return one loss per sample (reduction='none'), got {len(rows)} losses for "
                f"{len(ids)} samples in step {step}."
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
            f"{rows:,} × {columns:,} numbers would take {rows * columns * item / 2**30:.0f} GB, more than the limit "
            f"of {MOST_BYTES >> 30} GB. Pass a smaller rank=, or fewer layers=."
        )
