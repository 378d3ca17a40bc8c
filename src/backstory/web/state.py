"""A run opened for a service: recipe, models, embeddings and samples in memory once, and what was computed from them.

Everything here may be called from several threads. What sweeps over the run uses a model of its own, `spare`, so that quick
questions need not wait for it; sweeps take turns.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import insight
from ..replay.queries import QuerySets, part, size
from ..replay.recipe import Recipe, load_recipe, stored_args
from ..run.gradients import bases_of
from ..run.run import Run
from . import cancellation as wanted
from .cache import Kept
from .cancellation import Stopped
from .catalogue import Catalogue
from .checkpoint import Checkpoint, Floats, Gradients, Own, Scored
from .errors import Refused
from .reader import Reader
from .schemas_run import MOST_EACH

__all__ = ["MOST_EACH", "MOST_QUERIES", "NEEDS_RECIPE", "ROOM", "Opened", "Stopped", "size"]
MOST_QUERIES = 1000  # of a set
ROOM = 4 << 30  # bytes of embeddings and weights in memory
NEEDS_RECIPE = (
    "Questions about query sets, and everything made from them, need the model: start the service with --trust-recipe, if you "
    "trust the code that the run names, or with --recipe package.module:function."
)


class Opened:
    """One run, ready to be asked."""

    def __init__(self, path: str | Path, recipe: str | None = None, *, room: int = ROOM) -> None:
        self._reader = Reader(path)
        folder = self.run.path.resolve()
        self.name = folder.parent.name if folder.name == "run" and folder.parent.name else folder.name
        self.recipe_name = recipe
        self.final = self.run.step_of("final")
        args = stored_args(self.run.config, recipe)
        self.recipe: Recipe | None = None if recipe is None else load_recipe(recipe, args)
        self.bases = None if self.recipe is None else bases_of(self.run.store)
        self.catalogue = Catalogue(self._reader)
        self.checkpoints = sorted({c for c in self.run.checkpoints if c > 0} | {self.final})
        self.asked_at = [c for c in self.checkpoints if c in self.run.checkpoints]  # those whose model can be asked
        self._reports = {at: found.get("quality") for at, found in self.run.store.embeddings().items()}
        self.stopping = Event()
        self._sweeping, self._spare = Lock(), None if self.recipe is None else copy.deepcopy(self.recipe.model)
        self._final = Checkpoint(self._reader, self.final, self._asked(self.final), self.bases, room)
        self._room = max(0, room - self._final.nbytes)
        self._checkpoints: Kept[Checkpoint] = Kept(self._room, lambda c: c.nbytes)
        self.results: Kept[Any] = Kept(256)
        self._vectors: Kept[Tensor] = Kept(256 << 20, lambda v: v.nbytes)
        self._scores: Kept[Scored] = Kept(256 << 20, lambda s: s.scores.nbytes)
        self.sets = self._sets()

    @property
    def run(self) -> Run:
        """The run, as this thread may read it."""
        return self._reader.run

    def _sets(self) -> dict[str, Any]:
        """Query sets by name: those of the recipe first, in its order, then those that only the run has."""
        return {name: part(batch, 0, MOST_QUERIES) for name, batch in QuerySets(self.run, self.recipe).items()}

    def _asked(self, step: int) -> Recipe | None:
        """The recipe, where the run has the weights of this step to ask it with."""
        return self.recipe if step in self.run.checkpoints else None

    @property
    def can_ask(self) -> bool:
        """Whether the final model is there."""
        return self._final.gradients is not None

    @property
    def can_type(self) -> bool:
        """Whether text can be typed."""
        return self.can_ask and self.recipe is not None and self.recipe.page.text is not None

    @property
    def can_upload(self) -> bool:
        """Whether images can be brought."""
        return self.can_ask and self.recipe is not None and self.recipe.page.image is not None

    @property
    def can_shade(self) -> bool:
        """Whether single tokens can be asked about."""
        return self.can_ask and self.recipe is not None and self.recipe.page.pieces is not None

    @property
    def can_tell(self) -> bool:
        """Whether the model's own answers are known, and with them its mistakes."""
        return self.can_ask and self.recipe is not None and self.recipe.page.predict is not None

    @property
    def default(self) -> str | None:
        """The query set that is meant where none is named."""
        return next(iter(self.sets), None) if self.can_ask else None

    def missing(self) -> list[str]:
        """What cannot be asked, and how to get it."""
        out = []
        if self.recipe is None:
            out.append(NEEDS_RECIPE)
        elif not self.can_ask:
            out.append(
                "The run stores no weights of its end, so its model cannot be asked: record with steps=…, checkpoints=K."
            )
        if self.recipe is not None and self.recipe.page.text is None:
            out.append(
                "Typed text cannot be asked about: the recipe has no page.text, a function from text to a batch."
            )
        if self.recipe is not None and self.recipe.page.image is None:
            out.append(
                "Images cannot be uploaded: the recipe has no page.image, a function from a PNG file to a batch."
            )
        if self._final.E is None:
            why = (
                "they do not fit into --memory"
                if self.final in self.run.store.embeddings()
                else "run `backstory embed RUN`"
            )
            out.append(
                f"The final model's embeddings are not in memory ({why}): questions read the run; no neighbours."
            )
        return out

    def step(self, at: int | None) -> int:
        """A checkpoint that can be asked; None is the final one."""
        step = self.final if at is None else at
        if step not in self.checkpoints:
            known = ", ".join(map(str, self.checkpoints))
            raise Refused(422, f"found at={step}; the run can be asked at the steps {known}.", "Choose one of them.")
        return step

    def checkpoint(self, step: int) -> Checkpoint:
        """The model and embeddings of a checkpoint."""
        if step == self.final:
            return self._final
        return self._checkpoints.get(
            step, lambda: Checkpoint(self._reader, step, self._asked(step), self.bases, self._room)
        )

    def quick(self, step: int) -> bool:
        """Whether a question at a checkpoint needs no sweep, as far as is known."""
        found = self._final if step == self.final else self._checkpoints.peek(step)
        return found is not None and found.ready

    def named(self, name: str | None) -> str:
        """A query set that exists; None is the default one."""
        if not self.can_ask:
            raise Refused(422, "the service runs without a model that can be asked.", " ".join(self.missing()[:1]))
        found = self.default if name is None else name
        if found is None or found not in self.sets:
            known = ", ".join(self.sets) or "none"
            raise Refused(
                404, f"there is no such query set; the run and its recipe have: {known}.", "Name one of them."
            )
        return found

    def gradients(self, step: int) -> Gradients:
        """The model of a checkpoint, to be asked."""
        found = self.checkpoint(step).gradients
        if found is None:
            raise Refused(422, f"the model at step {step} cannot be asked.", " ".join(self.missing()[:1]))
        return found

    def vectors(self, name: str, step: int) -> Tensor:
        """v (Q, p) of a query set."""
        return self._vectors.get((name, step), lambda: self.gradients(step).of(self.sets[name]))

    def own(self, name: str, step: int) -> Own:
        """The model's own losses on a query set, and its answers where the recipe can tell."""
        found: Own = self.results.get(("own", name, step), lambda: self.gradients(step).own(self.sets[name]))
        return found

    def own_known(self) -> bool:
        """Whether what the model says of every query set is known, or can never be."""
        able = self.can_ask and self.recipe is not None and self.recipe.page.predict is not None
        return not able or all(("own", name, self.final) in self.results for name in self.sets)

    def mean(self, name: str, step: int) -> Scored:
        """Influence of every occurrence on the mean loss of a query set, (1, N); a sweep answers for all sets at once."""
        if self.checkpoint(step).ready:
            return self._scores.get(("mean", name, step), lambda: self._means([name], step))
        found = self._scores.get(("means", step), lambda: self._means(list(self.sets), step))
        which = list(self.sets).index(name)
        return found._replace(scores=found.scores[which : which + 1])

    def _means(self, names: list[str], step: int) -> Scored:
        v = torch.cat([self.gradients(step).of_mean(self.sets[name]) for name in names])  # (sets, p)
        return self.checkpoint(step).scores(v, self.going_on)

    def each(self, name: str, rows: Any) -> Floats:
        """Influence of some occurrences together on each of the first queries of a set at the end, (Q,)."""
        v, E = self.vectors(name, self.final)[:MOST_EACH], self._final.E
        if E is not None:
            out: Floats = (v @ E[torch.from_numpy(rows)].sum(0)).double().numpy()
            return out
        found = self._scores.get(("each", name), lambda: self._final.scores(v, self.going_on))
        summed: Floats = found.scores[:, rows].sum(1)
        return summed

    def value(self, name: str, step: int) -> Floats:
        """Influence of each sample, its occurrences summed, on the mean loss of a query set, (M,)."""
        return self.summed(self.mean(name, step).scores[0])

    def summed(self, scores: Floats) -> Floats:
        """Scores of the first occurrences (n,) summed over each sample's, (M,)."""
        inverse = self.catalogue.inverse[: len(scores)]
        return np.bincount(inverse, weights=scores, minlength=len(self.catalogue)).astype(np.float64)

    def scored(self, key: Any, v: Tensor, step: int) -> Scored:
        """Influence on one query v (1, p); kept under `key` where it took a sweep."""
        if self.checkpoint(step).E is not None:
            return self.checkpoint(step).scores(v)
        return self._scores.get(("one", key, step), lambda: self.checkpoint(step).scores(v, self.going_on))

    @contextmanager
    def spare(self, step: int) -> Iterator[tuple[nn.Module, Any]]:
        """`(model, loss)` at a checkpoint for work that takes long; one at a time."""
        with self._sweeping:
            if self._spare is None or self.recipe is None or step not in self.run.checkpoints:
                raise Refused(422, f"the model at step {step} cannot be asked.", " ".join(self.missing()[:1]))
            yield self.run.load_weights(self._spare, step), self.recipe.loss

    def timeline(self, name: str, step: int) -> insight.Timeline:
        """When data mattered for a query set."""

        def ask() -> insight.Timeline:
            with self.spare(step) as (model, loss):
                return insight.timeline(self.run, model, loss, self.sets[name], step, progress=self.going_on)

        found: insight.Timeline = self.results.get(("timeline", name, step), ask)
        return found

    def timeline_known(self, name: str | None, at: int | None) -> bool:
        """Whether the timeline of a query set has been computed."""
        return ("timeline", name or self.default, at or self.final) in self.results

    def means_known(self, name: str | None) -> bool:
        """Whether the means of a query set are known at every checkpoint, or can never be."""
        return all(self.mean_known(name, c) for c in self.asked_at) if self.can_ask else True

    def mean_known(self, name: str | None, at: int | None) -> bool:
        """Whether the mean of a query set is known at a checkpoint."""
        step = at or self.final
        return ("mean", name or self.default, step) in self._scores or ("means", step) in self._scores

    def each_known(self, name: str | None) -> bool:
        """Whether influence on the single queries of a set takes no sweep and no pass through the model."""
        found = name or self.default
        held = self._final.E is not None and (found, self.final) in self._vectors
        return not self.can_ask or held or ("each", found) in self._scores

    def quality(self, step: int | None = None) -> Mapping[str, Any]:
        """How far answers about the model at a checkpoint can be trusted; None is the final one."""
        at = self.final if step is None else step
        return self._report(at) or self.results.get(("quality", at), lambda: self.run.quality(at).as_dict())

    def _report(self, at: int) -> Mapping[str, Any]:
        return self._reports.get(at) or (self._final.quality if at == self.final else {})

    def validity_known(self) -> bool:
        """Whether the report on the final model takes no pass over the run."""
        return bool(self._report(self.final)) or ("quality", self.final) in self.results

    def going_on(self, done: int, total: int) -> None:
        """Called by work in progress: gives it up where the service ends, or where nobody waits for it."""
        if self.stopping.is_set():
            raise Stopped
        wanted.look()

    def warm(self) -> None:
        """What most pages need, before somebody asks; the latest checkpoints first."""
        if self.default is None:
            return
        self.timeline(self.default, self.final)
        for step in reversed(self.asked_at):
            self.mean(self.default, step)
