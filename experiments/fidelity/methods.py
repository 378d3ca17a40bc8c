"""Every row of the fidelity study: its name, what it models, and how it scores each removal.

A score is one number for removal from the last epoch (single) and one for removal from all epochs; methods that know no
time give the same number twice. Runs are recorded in float64, their rows in float16 as by default.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backstory.baselines.ekfac import ekfac
from backstory.baselines.similarity import gradient_cosine, gradient_dot, representation_similarity
from backstory.baselines.tracin import tracin
from backstory.baselines.trak import margins, trak
from backstory.exact.losses import QuerySet
from backstory.replay.recipe import Recipe
from backstory.replay.tape import in_precision
from backstory.run.run import Run
from backstory.store import RunStore
from experiments.baselines import PAPERS_DAMPING, at, influence, post_hoc
from experiments.data.images import Batch, Setup, mean_loss, recipe, removals
from experiments.fidelity.full import Replay, corrected, influences, replayed
from experiments.harness import STEPS, Method, Problem, Scores

DAMPINGS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
CLASSES = 10
EXACT = f"exact:{CLASSES}"
WARMUP = 20  # steps: the default of `record`
KINDS = ("single", "all")
QUERY = QuerySet("test", mean=True)


@dataclass(kw_only=True, eq=False)
class ImageProblem(Problem):
    """A run on images, replayed in float64 with all its states."""

    setup: Setup
    replay: Replay

    @property
    def trained(self) -> Recipe:
        """The replay's recipe."""
        return self.replay.recipe

    @property
    def samples(self) -> list[int]:
        """What is removed."""
        return [int(removal.samples[0]) for removal in self.removals["all"]]


Row = Method[ImageProblem]


def problem_of(setup: Setup, seed: int, count: int) -> ImageProblem:
    """The run of this seed, and `count` samples removed from its last epoch and from all epochs."""
    gone, replay = removals(setup, seed, count), replayed(recipe(setup, seed))
    return ImageProblem(
        setup=setup, seed=seed, make=lambda: recipe(setup, seed), removals=dict(zip(KINDS, gone, strict=True)),
        loss=mean_loss, queries=replay.recipe.queries["test"], query=QUERY, recorded_in=torch.float64, replay=replay,
    )  # fmt: skip


def methods(optimizer: str) -> list[Row]:
    """All rows for a run of this optimizer, the paper's own method first."""
    return [*_full_rows(optimizer), *_recorded_rows(optimizer), *_post_hoc_rows(optimizer)]


def _about(projection: str, curvature: str, optimizer_model: str) -> dict[str, str]:
    return {"projection": projection, "curvature": curvature, "optimizer_model": optimizer_model}


def _only(optimizer: str, *optimizers: str) -> str:
    """Why a row is not for a run of this optimizer; "" where it is."""
    return "" if optimizer in optimizers else f"it is for {', '.join(optimizers)} only"


def _proxy(optimizer: str) -> str:
    """What a plain SGD step of the same rate is: the step itself, or a proxy."""
    return "sgd" if optimizer == "sgd" else "sgd proxy"


def _full_rows(optimizer: str) -> list[Row]:
    models = {"aware": optimizer, "factored": f"{optimizer}, factored", "proxy": _proxy(optimizer)}

    def row(name: str, curvature: str, form: str, model: str = "aware") -> Row:
        about = _about("full", curvature, f"{models[model]}, {form}")
        obstacle = _only(optimizer, "adamw") if model == "factored" else ""
        return Row(name, lambda p: full(p, curvature, form, model), about, obstacle=obstacle)

    about = _about("full", "exact", "sgd, literal, corrected")
    return [
        row("paper", "empirical", "literal", "proxy"),
        row("full-empirical-implicit", "empirical", "implicit"),
        row("full-empirical-auto", "empirical", "auto"),
        row("full-empirical-factored", "empirical", "auto", "factored"),
        row("full-exact", "exact", "literal"),
        row("full-exact-factored", "exact", "literal", "factored"),
        Row("full-exact-corrected", full_corrected, about, obstacle=_only(optimizer, "sgd")),
    ]


def _recorded_rows(optimizer: str) -> list[Row]:
    model = "adamw, factored" if optimizer == "adamw" else optimizer

    def row(name: str, projection: str, rank: int, curvature: str, kind: str = "joint") -> Row:
        where = f"{projection} {rank}×{rank}" + (f", {kind}" if kind in ("per layer", "epoch") else "")
        form = f"{model}, auto, corrected" if kind == "corrected" else f"{model}, auto"
        about = _about(where, "exact" if curvature == EXACT else curvature, form)
        return Row(name, lambda p: recorded(p, projection, rank, curvature, kind), about)

    def by_name(name: str, **settings: str) -> Row:
        return Row(name, lambda p: chosen(p, **settings), _about("learned 32×32, windows", "auto", f"{model}, auto"))

    return [
        by_name("default"),
        by_name("fast", preset="fast"),
        by_name("best", preset="best"),
        row("learned-16-empirical", "learned", 16, "empirical"),
        row("learned-16-sampled-1", "learned", 16, "sampled:1"),
        row("learned-16-sampled-4", "learned", 16, "sampled:4"),
        row("learned-16-exact", "learned", 16, EXACT),
        row("learned-16-sampled-4-epoch", "learned", 16, "sampled:4", "epoch"),
        row("learned-16-exact-epoch", "learned", 16, EXACT, "epoch"),
        row("learned-16-exact-corrected", "learned", 16, EXACT, "corrected"),
        row("learned-16-empirical-per-layer", "learned", 16, "empirical", "per layer"),
        row("learned-16-exact-per-layer", "learned", 16, EXACT, "per layer"),
        row("random-16-empirical", "random", 16, "empirical"),
        row("random-16-exact", "random", 16, EXACT),
        row("random-32-empirical", "random", 32, "empirical"),
        row("random-32-exact", "random", 32, EXACT),
    ]


def _post_hoc_rows(optimizer: str) -> list[Row]:
    none, steps = _about("full", "none", "none"), _about("full", "none", _proxy(optimizer))
    small, middle = _about("random 32×32", "empirical", "none"), _about("random 64×64", "empirical", "none")
    return [
        Row("no-propagation", no_propagation, steps),
        Row("tracin", tracin_checkpoints, steps),
        Row("gradient-dot", lambda p: post_hoc(p, gradient_dot), none),
        Row("gradient-cosine", lambda p: post_hoc(p, gradient_cosine), none),
        Row("influence-1e-3", lambda p: at(swept(p, rank=64), PAPERS_DAMPING), middle),
        Row("influence-swept", lambda p: swept(p, rank=64), middle),
        Row("influence-full-swept", swept, _about("full", "empirical", "none"), default=False),
        Row("influence-ggn-swept", lambda p: swept(p, hessian="ggn", rank=32), {**small, "curvature": "exact"}),
        Row("trak", lambda p: trak_scores(p, "margin"), small),
        Row("trak-loss", lambda p: trak_scores(p, "loss"), small),
        Row("representation", representation, _about("last layer's input", "none", "none")),
        Row(
            "ekfac", lambda p: post_hoc(p, ekfac, damping=None, hessian="ggn"), {**none, "curvature": "exact"},
            package="kronfluence",
        ),
    ]  # fmt: skip


def full(problem: ImageProblem, curvature: str, form: str, model: str = "aware") -> Scores:
    """The adjoint in full coordinates, from the replay; the bytes are what float16 rows would take on disk."""
    replay = problem.replay
    scores = influences(replay, curvature, form=form, model=model)
    rows = replay.occurrences * (1 + (CLASSES if curvature == "exact" else 0))
    diagonals = sum(k.v is not None for k in replay.updates) if model == "aware" else 0
    return Scores(problem.of_occurrences(scores), cost={"store_bytes": (rows + diagonals) * replay.width * 2})


def full_corrected(problem: ImageProblem) -> Scores:
    """Exact curvature, with the sample's own missing at its later occurrences; removal from one epoch is as it was."""
    plain = full(problem, "exact", "literal")
    every = corrected(problem.replay, problem.samples)[:, None]
    return Scores({**plain.values, "all": every}, cost=plain.cost)


def recorded(problem: ImageProblem, projection: str, rank: int, curvature: str, kind: str = "joint") -> Scores:
    """Train once more with Backstory recording, and query the run; `kind` is "joint", "per layer", "epoch" or "corrected".

    "epoch": the projection is learned from the whole first epoch, not from 20 steps. "corrected": a sample's own curvature is
    missing at its later occurrences too (removal from all epochs only).
    """
    steps = len(problem.trained.batches)
    warmup = steps // problem.setup.epochs if kind == "epoch" else min(WARMUP, steps)
    run, model = recording(problem, projection, rank, curvature, warmup)
    values = problem.of(run.query(model, problem.loss, problem.queries, per_layer=kind == "per layer"))
    if kind == "corrected":
        removal = run.predict_removal(problem.samples, model, problem.loss, problem.queries)
        values["all"] = removal.corrected[0][:, None]
    return Scores(values, cost={"store_bytes": run.n_occurrences * RunStore.open(run.path).bytes_per_row})


def recording(problem: ImageProblem, projection: str, rank: int, curvature: str, warmup: int) -> tuple[Run, nn.Module]:
    """`(run, trained model)`; every occurrence keeps its own curvature samples."""
    made = problem.recording(
        seed=problem.seed, projection=projection, rank=rank, curvature=curvature, warmup_steps=warmup, **STEPS
    )
    return made.run, made.model


def chosen(problem: ImageProblem, **settings: str) -> Scores:
    """Train once more with a recording as a user makes it, the number of steps known, and query the run."""
    made = problem.recording(seed=problem.seed, steps=len(problem.trained.batches), **settings)
    values = problem.of(made.run.query(made.model, problem.loss, problem.queries))
    store = RunStore.open(made.run.path)
    return Scores(
        values,
        about={"curvature": store.config["settings"]["curvature"]},
        cost={
            "store_bytes": store.size_bytes(("checkpoint-",)),
            "recording_ratio": made.seconds / problem.training.seconds,
        },
    )


def no_propagation(problem: ImageProblem) -> Scores:
    """η w ⟨g, v⟩ of each occurrence: `tracin_run`'s formula, without rows; momentum and P are left out."""
    scores = influences(problem.replay, "none", model="proxy")
    bytes_ = problem.replay.occurrences * problem.replay.width * 2
    return Scores(problem.of_occurrences(scores), cost={"store_bytes": bytes_})


def tracin_checkpoints(problem: ImageProblem) -> Scores:
    """TracIn over the weights at the end of each epoch, with the rate of the step before; momentum and P are left out."""
    replay = problem.replay
    steps = len(replay.recipe.batches) // problem.setup.epochs
    ends = range(steps, len(replay.states), steps)
    scores = post_hoc(problem, tracin, checkpoints=[(replay.states[t], replay.updates[t - 1].rate) for t in ends])
    return Scores(scores.values, cost={"store_bytes": len(ends) * replay.width * 8})


def swept(problem: ImageProblem, **arguments: object) -> Scores:
    """The influence function at all dampings; rows in float32, sums and solves in float64."""

    def narrow() -> tuple[Recipe, Batch]:
        plan = in_precision(problem.make(), torch.float32)
        plan.model.load_state_dict(problem.replay.states[-1])
        return plan, plan.queries["test"]

    return influence(problem, DAMPINGS, trained=narrow, **arguments)


def trak_scores(problem: ImageProblem, target: str) -> Scores:
    """TRAK with one model; the mean of the queries' margins, or their mean loss."""

    def margin(model: nn.Module, batch: Batch) -> Tensor:
        return margins(model(batch[0]), batch[1])

    loss = problem.loss if target == "loss" else None
    answer = trak(problem.trained, problem.queries, loss=loss, target=target, margin=margin, rank=32, damping=1e-6)
    return _mean_over_queries(problem.of(answer, timeless=True))


def representation(problem: ImageProblem) -> Scores:
    """Cosine of the last layer's inputs, mean over the queries."""
    answer = representation_similarity(problem.trained, problem.queries)
    return _mean_over_queries(problem.of(answer, timeless=True))


def _mean_over_queries(values: dict[str, Tensor]) -> Scores:
    return Scores({name: x.mean(1, keepdim=True) for name, x in values.items()})
