"""The model at one checkpoint, its coordinates and its embeddings, held in memory so that a question is one pass and one product.

    influence of all occurrences on Q queries = V Eᵀ,      V (Q, p) the queries' gradients, E (N, p) the embeddings

Where the embeddings are not stored, do not fit, or lie in segments, each question reads the run instead.
"""

import copy
import itertools
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..capture.model_state import in_mode
from ..errors import UsageError
from ..replay.queries import parts, size
from ..replay.recipe import Recipe
from ..results.quality import Quality
from ..run.embed import Progress
from ..run.gradients import LossFn, blocks_of, check_model, query_rows
from ..run.run import Run
from ..store.bases import load_scales
from .reader import Reader

Floats = NDArray[np.float64]
AT_ONCE = 8  # queries whose losses are summed in one pass
MODE = "the model was evaluated in eval mode"


def as_report(quality: Quality | None) -> Mapping[str, Any]:
    """A recording's quality in plain values; nothing where it was not measured."""
    return {} if quality is None else quality.as_dict()


class Scored(NamedTuple):
    """Influences, and what must be said with them."""

    scores: Floats  # (Q, N)
    at: int
    method: str
    notes: tuple[str, ...]
    quality: Mapping[str, Any]


class Own(NamedTuple):
    """What the model itself makes of some queries: its losses, and its answers where the recipe can tell."""

    losses: list[float]
    says: list[str]


class Gradients:
    """The recipe's model with the weights of one checkpoint; one question at a time, for hooks belong to the model."""

    def __init__(self, run: Run, recipe: Recipe, bases: Any, step: int) -> None:
        self.model = run.load_weights(copy.deepcopy(recipe.model), step)
        check_model(run.store, self.model, step)
        self._loss, self._says, self._bases = recipe.loss, recipe.page.predict, bases
        self._blocks, self._scales = blocks_of(run.store, self.model), load_scales(run.store, step)
        self._lock = Lock()

    def of(self, batch: Any) -> Tensor:
        """v (Q, p) of the queries in a batch."""
        return self._rows(self._loss, batch)

    def of_mean(self, batch: Any) -> Tensor:
        """v (1, p) of their mean loss, by one backward pass."""
        return self._rows(lambda model, some: self._loss(model, some).mean(), batch)

    def of_sum(self, batch: Any, progress: Progress) -> Tensor:
        """v (1, p) of the sum of their losses, some queries at a time; `progress` may end it between them."""
        n, done, out = size(batch), 0, []
        for some in parts(batch, AT_ONCE):
            progress(done, n)
            out.append(self._rows(lambda model, few: self._loss(model, few).sum(), some))
            done += AT_ONCE
        return torch.cat(out).sum(0, keepdim=True)

    def own(self, batch: Any) -> Own:
        """The model's own losses and answers, in eval mode."""
        with self._lock, torch.no_grad(), in_mode(self.model):
            losses = self._loss(self.model, batch).reshape(-1).double().tolist()
            return Own(losses, [] if self._says is None else [str(x) for x in self._says(self.model, batch)])

    def _rows(self, loss: LossFn, batch: Any) -> Tensor:
        with self._lock:
            return query_rows(self.model, loss, batch, self._blocks, self._bases, self._scales).float()


class Checkpoint:
    """Everything that a question at one step needs."""

    def __init__(self, reader: Reader, step: int, recipe: Recipe | None, bases: Any, room: int) -> None:
        run = reader.run
        self.step, self._reader = step, reader
        self.gradients = None if recipe is None else Gradients(run, recipe, bases, step)
        self._probe = self._stored()
        self.ready = self._probe is not None  # whether an answer needs no sweep
        held = self._probe is not None and self._probe.method == "embeddings" and self._fits(room)
        self.E = run.embeddings(step).float().contiguous() if held else None  # (N, p)
        self._norms: Floats | None = None
        self._norms_lock = Lock()

    @property
    def nbytes(self) -> int:
        """Memory that it holds, about."""
        model = None if self.gradients is None else self.gradients.model
        weights = 0 if model is None else sum(x.nbytes for x in model.state_dict().values())
        return (0 if self.E is None else self.E.nbytes) + weights

    @property
    def quality(self) -> Mapping[str, Any]:
        """How far its answers can be trusted, where embeddings are held."""
        return {} if self._probe is None else as_report(self._probe.quality)

    def _fits(self, room: int) -> bool:
        store = self._reader.run.store
        return 4 * store.width * store.rows_before(self.step) <= room

    def _stored(self) -> Any:
        """An answer to nothing, from what `embed` has stored if there is any: what every answer must say."""
        run = self._reader.run
        try:
            return run.query_gradients(torch.zeros(1, run.store.width), self.step, method="embeddings", caveats=(MODE,))
        except UsageError:
            return None

    def scores(self, v: Tensor, progress: Progress | None = None) -> Scored:
        """Influence of every occurrence before the step on the queries v (Q, p)."""
        if self.E is None:
            found = self._reader.run.query_gradients(v, self.step, caveats=(MODE,), progress=progress)
            return Scored(found.scores.numpy(), self.step, found.method, found.caveats, as_report(found.quality))
        scores = (v @ self.E.T).double().numpy()  # (Q, N)
        said = self._probe
        return Scored(scores, self.step, said.method, said.caveats, as_report(said.quality))

    def similar(self, rows: NDArray[np.int64], inverse: NDArray[np.int64], samples: int) -> Floats | None:
        """Cosines (M,) of the summed embedding of these rows with that of every sample; None without embeddings."""
        if self.E is None:
            return None
        own = self.E[torch.from_numpy(rows)].sum(0)  # (p,)
        inner = np.bincount(inverse[: len(self.E)], weights=(self.E @ own).double().numpy(), minlength=samples)
        size = self._sizes(inverse[: len(self.E)], samples) * float(own.norm())
        out: Floats = np.divide(inner, size, out=np.zeros(samples), where=size > 0)
        return out

    def _sizes(self, inverse: NDArray[np.int64], samples: int, at_once: int = 4096) -> Floats:
        """‖Σ e‖ of every sample, (M,); some samples at a time, and once."""
        with self._norms_lock:
            if self._norms is None:
                assert self.E is not None
                order, found = np.argsort(inverse, kind="stable"), np.zeros(samples)
                cuts = np.searchsorted(inverse[order], range(0, samples + at_once, at_once))
                for k, (lo, hi) in enumerate(itertools.pairwise(cuts.tolist())):
                    rows, first = torch.from_numpy(order[lo:hi]), k * at_once
                    sums = torch.zeros(min(at_once, samples - first), self.E.shape[1])
                    sums.index_add_(0, torch.from_numpy(inverse[order[lo:hi]] - first), self.E[rows])
                    found[first : first + len(sums)] = sums.norm(dim=1).double().numpy()
                self._norms = found
            return self._norms
