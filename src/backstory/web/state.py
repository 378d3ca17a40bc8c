"""A run opened for a service: recipe, models, embeddings and samples in memory once, and the results that were computed from them.

Everything here may be called from several threads: each has the run open for itself, and all share its embeddings. What sweeps over
the run uses a model of its own, `spare`, so that quick queries need not wait for it; sweeps take turns.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from .. import insight
from ..insight.evolution import evolution_of
from ..insight.mean import mean_influences
from ..insight.sources import domains
from ..insight.timeline import timeline_of
from ..replay.queries import QuerySets, part, parts, size
from ..replay.recipe import Presentation, Recipe, load_recipe, stored_args
from ..results.influence import Influence
from ..results.recording_report import RecordingReport
from ..results.words import command_on
from ..run.calibrate import calibrations
from ..run.catalogue import Catalogue
from ..run.gradients import ModelAt, evaluate
from ..run.run import Run
from .errors import Refusal
from .jobs import Cancelled, Stopping, check_cancelled

AT_ONCE = 8  # pieces of a text whose losses are summed in one pass
MOST_EACH = 200  # queries of a set, where each is looked at
ROOM = 4 << 30  # bytes of embeddings and weights in memory
RESULTS = 256  # in the cache
SCORES = 256 << 20  # bytes of influences in the cache
NEEDS_RECIPE = (
    "Query sets, and everything made from them, need the model: start the service with --trust-recipe, if you "
    "trust the code that the run names, or with --recipe package.module:function."
)


T = TypeVar("T")
V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key, each computed by one thread however many wait for it; beyond `most` in all, the ones that were not used for longest are dropped."""

    def __init__(self, most: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[Hashable, Future[V]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made now if it is not there; who comes meanwhile waits for it. An error is not cached."""
        with self._lock:
            value = self._values.get(key)
            if mine := value is None:
                value = self._values[key] = Future()
            self._values.move_to_end(key)
        assert value is not None
        if not mine:
            try:
                return value.result()
            except Cancelled:  # by who made it, and had less time
                return self.get(key, make)
        try:
            value.set_result(make())
        except BaseException as error:
            with self._lock:
                self._values.pop(key, None)
            value.set_exception(error)
            raise
        self._trim()
        return value.result()

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is there already."""
        with self._lock:
            return key in self._values and self._values[key].done()

    def clear(self) -> None:
        """Drop all values; who waits for one that is being made still gets it."""
        with self._lock:
            self._values.clear()

    def _trim(self) -> None:
        with self._lock:
            done = {k: f for k, f in self._values.items() if f.done() and f.exception() is None}
            total = sum(self._size(f.result()) for f in done.values())
            for key in list(done)[:-1]:  # the one that was used last stays, however large it is
                if total > self._most:
                    total -= self._size(self._values.pop(key).result())


def _alone(influence: Influence | None) -> dict[str, Influence]:
    """As the cache of influences has them."""
    return {} if influence is None else {"": influence}


class Evaluation(NamedTuple):
    """What the model itself makes of some queries: its losses, and its predictions where the recipe can tell."""

    losses: list[float]
    predictions: list[str]


class Checkpoint:
    """The recipe's model with the weights of one step; one query at a time, for hooks belong to the model."""

    def __init__(self, run: Run, recipe: Recipe, step: int, like: "Checkpoint | None" = None) -> None:
        self.model = run.load_weights(copy.deepcopy(recipe.model), step)
        self.ready: ModelAt = run.model_at(self.model, step, like=None if like is None else like.ready)
        self._recipe, self._lock = recipe, threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return sum(int(x.nbytes) for x in self.model.state_dict().values())

    def gradients(self, batch: Any) -> tuple[Any, list[str]]:
        """`(v (Q, p), caveats)` of the queries in a batch."""
        with self._lock:
            return self.ready.gradients(self._recipe.loss, batch)

    def total_gradient(self, batch: Any, progress: Any) -> tuple[Any, list[str]]:
        """`(v (1, p), caveats)` of the sum of their losses; `progress` may end it between some of them and the next."""

        def pieces() -> Iterator[Any]:
            for done, few in enumerate(parts(batch, AT_ONCE)):
                progress(done * AT_ONCE, size(batch))
                yield few

        with self._lock:
            return self.ready.total_gradient(self._recipe.loss, pieces())

    def find_exact(self, run: Run, batch: Any, step: int, mean: bool) -> Influence | None:
        """The stored exact influence on the queries of a batch, or on their mean."""
        with self._lock:
            return run.find_exact(self.model, self._recipe.loss, batch, step, mean=mean).result

    def evaluate(self, batch: Any) -> Evaluation:
        """The model's own losses and predictions."""
        predict = self._recipe.page.predict
        with self._lock:
            losses = evaluate(self.model, self._recipe.loss, batch).reshape(-1).double().tolist()
            return Evaluation(losses, [] if predict is None else [*map(str, evaluate(self.model, predict, batch))])


class State:
    """One run, ready to be queried."""

    def __init__(
        self, path: str | Path, recipe: str | None = None, *, room: int = ROOM, queries: str | None = None
    ) -> None:
        self._first, self._local = Run(path), threading.local()
        folder = self.run.path.resolve()
        self.name = folder.parent.name if folder.name == "run" and folder.parent.name else folder.name
        self.recipe_name, self.final = recipe, self.run.step_of("final")
        self.recipe: Recipe | None = None if recipe is None else load_recipe(recipe, stored_args(self.run, recipe))
        sets = QuerySets(self.run, self.recipe)
        self.sets, self._chosen = dict(sets.items()), queries
        if queries is not None:  # NAME[:INDEX], checked before anything is loaded
            self.sets[queries] = sets.select(queries)
        for run in (self._first, self.run):
            run.name_queries(self.sets)
        self.catalogue = Catalogue(self.run)
        stored = self.run.checkpoints
        self.checkpoints = sorted({c for c in stored if c > 0} | {self.final})
        self.queryable = [
            c for c in self.checkpoints if c in stored and self.recipe is not None
        ]  # whose model is there
        self.stopping = threading.Event()
        self._sweeping = threading.Lock()
        self._spare = None if self.recipe is None else copy.deepcopy(self.recipe.model)
        self._final = self._load(self.final) if self.final in self.queryable else None
        left = max(0, room - (0 if self._final is None else self._final.nbytes))
        self.in_memory: list[int] = []  # checkpoints whose embeddings are
        for step in reversed(self.checkpoints):
            if self.run.load_embeddings(step, room=left):
                self.in_memory.append(step)
                left -= self.run.embedding_bytes(step)
        self.embedded = [c for c in self.checkpoints if self.run.has_embeddings(c)]  # no sweep is needed
        self._models: Cache[Checkpoint] = Cache(left, lambda c: c.nbytes)
        self.results: Cache[Any] = Cache(RESULTS)
        self._vectors: Cache[tuple[Any, list[str]]] = Cache(SCORES, lambda v: int(v[0].nbytes))
        self._influences: Cache[dict[str, Influence]] = Cache(
            SCORES, lambda x: sum(int(i.scores.nbytes) for i in x.values())
        )
        self._folder, self._calibrations = self.run.path, calibrations(self.run.path)

    @property
    def run(self) -> Run:
        """The run, as this thread may read it: two threads cannot read one table at once."""
        if not hasattr(self._local, "run"):
            self._local.run = self._first.reopen()
        run: Run = self._local.run
        return run

    # -- what can be queried ---------------------------------------------------------------------------------------

    @property
    def page(self) -> Presentation:
        """How the recipe shows queries and takes people's own; nothing without a model."""
        return Presentation() if self.recipe is None or self._final is None else self.recipe.page

    @property
    def has_model(self) -> bool:
        """Whether the final model is there."""
        return self._final is not None

    @property
    def default(self) -> str | None:
        """The query set that is meant where none is named."""
        return self._chosen or next(iter(self.sets), None) if self.has_model else None

    @property
    def embed_command(self) -> str:
        """What makes embeddings of this run."""
        return command_on(self._folder, "embed")

    def missing(self) -> list[str]:
        """What is not available, and how to get it."""
        out = []
        if self.recipe is None:
            out.append(NEEDS_RECIPE)
        elif not self.has_model:
            out.append(
                "The run has no final weights, so its model cannot be queried: record with steps=…, checkpoints=K."
            )
        has = self.catalogue.has
        if self.recipe is not None and self.recipe.page.text is None and has["text"]:
            out.append("Typed text: the recipe's page has no text=, a function from text to a batch.")
        if self.recipe is not None and self.recipe.page.image is None and has["image"]:
            out.append("Uploaded images: the recipe's page has no image=, a function from a PNG file to a batch.")
        if self.final not in self.in_memory:
            stored = self.run.has_embeddings(self.final)
            why = "they do not fit into --memory" if stored else f"run `{self.embed_command}`"
            out.append(f"Embeddings of the final model in memory ({why}). Queries read the run; no neighbours.")
        return out

    def step(self, at: int | None) -> int:
        """A checkpoint that can be queried; None is the final one."""
        step = self.final if at is None else at
        if step not in self.checkpoints:
            known = ", ".join(map(str, self.checkpoints))
            raise Refusal(422, f"the run cannot be queried at step {step}, only at {known}.", "Choose one of these.")
        return step

    def named(self, name: str | None) -> str:
        """A query set that exists; None is the default one."""
        if not self.has_model:
            raise Refusal(422, "the service runs without a model that can be queried.", " ".join(self.missing()[:1]))
        queries = self.default if name is None else name
        if queries is None or queries not in self.sets:
            known = ", ".join(self.sets) or "none"
            raise Refusal(
                404, f"there is no such query set; the run and its recipe have: {known}.", "Name one of them."
            )
        return queries

    def sample_id(self, name: str) -> str:
        """The id of a sample that exists."""
        if name not in self.catalogue:
            raise Refusal(404, "the run has no sample of this id.", "Look for samples at /samples.")
        return name

    # -- the model at a checkpoint ------------------------------------------------------------------------------------

    def _load(self, step: int) -> Checkpoint:
        assert self.recipe is not None
        return Checkpoint(self.run, self.recipe, step, getattr(self, "_final", None))

    def checkpoint(self, step: int) -> Checkpoint:
        """The model of a checkpoint."""
        self._need_model(step)
        if step == self.final and self._final is not None:
            return self._final
        return self._models.get(step, lambda: self._load(step))

    def _need_model(self, step: int) -> None:
        if step not in self.queryable:
            raise Refusal(422, f"the model at step {step} cannot be queried.", " ".join(self.missing()[:1]))

    @contextmanager
    def spare(self, step: int) -> Iterator[tuple[Any, Any]]:
        """`(model, loss)` at a checkpoint for work that takes long; one at a time."""
        self._need_model(step)
        assert self._spare is not None
        assert self.recipe is not None
        with self._sweeping:
            yield self.run.load_weights(self._spare, step), self.recipe.loss

    def gradients(self, name: str, step: int) -> tuple[Any, list[str]]:
        """`(v (Q, p), caveats)` of a query set."""
        return self._vectors.get((name, step), lambda: self.checkpoint(step).gradients(self.sets[name]))

    def evaluation(self, name: str, step: int) -> Evaluation:
        """The model's own losses and predictions on a query set."""
        return self._cached(("evaluation", name, step), lambda: self.checkpoint(step).evaluate(self.sets[name]))

    # -- results ---------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Drop what is in memory where the run was calibrated since: every result carries its quality."""
        if (now := calibrations(self._folder)) != self._calibrations:
            self._calibrations = now
            for cache in (self.results, self._influences):
                cache.clear()

    def influence(self, key: Any, v: Any, caveats: Sequence[str], step: int) -> Influence:
        """Influence on one query v (1, p); cached under `key` where it took a sweep."""
        query = partial(self.run.query_gradients, v, step, caveats=caveats)
        if step in self.embedded:
            return query()
        return self._influences.get(("one", key, step), lambda: {"": query(progress=self.proceed)})[""]

    def find_exact(self, batch: Any, step: int, *, mean: bool = False) -> Influence | None:
        """The stored exact influence on the queries of a batch, or on their mean, at a checkpoint."""
        return self.checkpoint(step).find_exact(self.run, batch, step, mean)

    def _exact(self, key: tuple[Hashable, ...], find: Callable[[], Influence | None]) -> Influence | None:
        """What `find` gives, in the cache; what is not stored is looked for again."""
        found = None if key in self._influences else find()
        if found is None and key not in self._influences:
            return None
        return self._influences.get(key, lambda: _alone(found or find())).get("")

    def mean(self, name: str, step: int) -> Influence:
        """Influence of every occurrence on the mean loss of a query set: exact where stored; else a sweep is made for all sets at once."""
        exact = self._exact(("exact", name, step), lambda: self.find_exact(self.sets[name], step, mean=True))
        if exact is not None:
            return exact
        names = [name] if step in self.embedded else list(self.sets)

        def compute() -> dict[str, Influence]:
            gradients = {n: self.checkpoint(step).gradients(self.sets[n]) for n in names}
            return mean_influences(self.run, gradients, self.sets, step, progress=self.proceed)

        return self._influences.get(("mean", *names, step), compute)[name]

    def values(self, name: str) -> dict[str, float]:
        """Influence of each sample, its occurrences summed, on the mean loss of a query set at the end."""

        def compute() -> dict[str, float]:
            ids, values = self.mean(name, self.final).per_sample()
            return dict(zip(map(str, ids), values[0].tolist(), strict=True))

        return self._cached(("values", name), compute)

    def timeline(self, name: str, step: int) -> insight.Timeline:
        """When data mattered for a query set."""
        return self._cached(("timeline", name, step), lambda: timeline_of(self.run, self.mean(name, step)))

    def evolution(self, name: str, by: str | Mapping[str, Sequence[int | str]]) -> insight.Evolution:
        """How the influence of groups or samples went from checkpoint to checkpoint."""
        return evolution_of(self.run, [self.mean(name, step) for step in self.queryable], by=by)

    def overwriting(self, name: str, sample: str, step: int) -> insight.Overwriting:
        """Which later samples overwrote a sample's influence on a query set."""

        def compute() -> insight.Overwriting:
            with self.spare(step) as (model, loss):
                who = self.catalogue.recorded_id(sample)
                return insight.overwriting(self.run, model, loss, self.sets[name], who, step, progress=self.proceed)

        return self._cached(("overwriting", name, sample, step), compute)

    def sources(self, names: Sequence[str] | None, by: str, step: int) -> insight.Sources:
        """What each source is worth for query sets; for all domains where none is named."""
        chosen: Sequence[str | None] = names or self._cached("domains", lambda: domains(self.sets)) or [None]
        sets = {self.named(name): self.sets[self.named(name)] for name in chosen}

        def compute() -> insight.Sources:
            with self.spare(step) as (model, loss):
                return insight.sources(self.run, model, loss, sets, step, by=by, progress=self.proceed)

        return self._cached(("sources", tuple(sets), by, step), compute)

    def on_queries(self, name: str, sample: str, top: int) -> insight.OnQueries:
        """The first queries of a set that a sample helped and hurt most."""
        who, queries = self.catalogue.recorded_id(sample), part(self.sets[name], 0, MOST_EACH)
        exact = self._exact(("exact each", name), lambda: self.find_exact(queries, self.final))
        if exact is not None:
            return insight.on_queries_of(exact, who, top=top)
        v, caveats = self.gradients(name, self.final)
        first = v[:MOST_EACH]
        if self.final in self.in_memory:
            return insight.on_queries(self.run, first, who, self.final, top=top, caveats=caveats)

        def compute() -> dict[str, Influence]:
            return {"": self.run.query_gradients(first, self.final, caveats=caveats, progress=self.proceed)}

        return insight.on_queries_of(self._influences.get(("each", name), compute)[""], who, top=top)

    def recording(self, step: int) -> RecordingReport:
        """What the recorded steps before a checkpoint are like."""
        return self._cached(("recording", step), lambda: self.run.recording_report(step))

    def _cached(self, key: Any, compute: Callable[[], T]) -> T:
        made: T = self.results.get(key, compute)
        return made

    # -- what is known already, so that it takes no sweep ------------------------------------------------------------

    def timeline_known(self, name: str | None, at: int | None) -> bool:
        """Whether the timeline of a query set has been computed, or can never be."""
        return self.default is None or ("timeline", name or self.default, at or self.final) in self.results

    def mean_known(self, name: str | None, at: int | None) -> bool:
        """Whether the mean of a query set is known at a checkpoint."""
        step, one = at or self.final, name or self.default
        keys = (("exact", one, step), ("mean", one, step), ("mean", *self.sets, step))
        return any(key in self._influences for key in keys)

    def means_known(self, name: str | None) -> bool:
        """Whether the means of a query set are known at every checkpoint, or can never be."""
        return not self.has_model or all(self.mean_known(name, step) for step in self.queryable)

    def each_known(self, name: str | None) -> bool:
        """Whether influence on the single queries of a set takes no sweep and no pass through the model."""
        queries = name or self.default
        ready = self.final in self.in_memory and (queries, self.final) in self._vectors
        swept = any((kind, queries) in self._influences for kind in ("each", "exact each"))
        return not self.has_model or ready or swept

    def evaluations_known(self) -> bool:
        """Whether what the model predicts for every query set is known, or can never be."""
        return self.page.predict is None or all(("evaluation", n, self.final) in self.results for n in self.sets)

    def recording_known(self) -> bool:
        """Whether what the recorded steps are like takes no pass over the run."""
        return self.final in self.embedded or ("recording", self.final) in self.results

    # -- work in the background --------------------------------------------------------------------------------------

    def proceed(self, done: int, total: int) -> None:
        """Called by work in progress: ends it where the service stops, or where nobody waits for it."""
        if self.stopping.is_set():
            raise Stopping
        check_cancelled()

    def warm(self) -> None:
        """What most pages need, before somebody wants it; the latest checkpoints first."""
        if self.default is not None:
            self.timeline(self.default, self.final)
            for step in reversed(self.queryable):
                self.mean(self.default, step)
