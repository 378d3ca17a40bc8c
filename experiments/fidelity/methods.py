"""Every method of the fidelity study, one function each: from a replayed run to a score for each removal.

A score is one number for removal from the last epoch (single) and one for removal from all epochs; methods that know no
time give the same number twice. Runs are recorded in float64, their rows in float16 as by default.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backstory.baselines.influence import influence_sweep
from backstory.baselines.similarity import representation_similarity
from backstory.baselines.tracin import tracin
from backstory.baselines.trak import margins, trak
from backstory.replay.tape import in_precision
from backstory.results.influence import Influence
from backstory.run.run import Run
from experiments.data.images import Batch, mean_loss, recipe
from experiments.fidelity.full import corrected, influences
from experiments.fidelity.problem import Problem, Scores
from experiments.recorded import recorded as train_recorded

DAMPINGS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
CLASSES = 10
WARMUP = 20  # steps: the default of `record`


def full(problem: Problem, curvature: str, form: str, model: str = "aware") -> Scores:
    """The adjoint in full coordinates, from the replay; the bytes are what float16 rows would take on disk."""
    replay = problem.replay
    scores = influences(replay, curvature, form=form, model=model)
    rows = replay.occurrences * (1 + (CLASSES if curvature == "exact" else 0))
    diagonals = sum(k.v is not None for k in replay.updates) if model == "aware" else 0
    return Scores(*_of_occurrences(problem, scores), store_bytes=(rows + diagonals) * replay.width * 2)


def full_corrected(problem: Problem) -> Scores:
    """Exact curvature, with the sample's own missing at its later occurrences; removal from one epoch is as it was."""
    plain = full(problem, "exact", "literal")
    return Scores(plain.single, corrected(problem.replay, problem.samples), store_bytes=plain.store_bytes)


def recorded(problem: Problem, projection: str, rank: int, curvature: str, kind: str) -> Scores:
    """Train once more with Backstory recording, and ask the run; `kind` is "joint", "per layer", "epoch" or "corrected".

    "epoch": the projection is learned from the whole first epoch, not from 20 steps. "corrected": a sample's own curvature is missing at its later occurrences too (removal from all epochs only).
    """
    steps = len(problem.replay.recipe.batches)
    warmup = steps // problem.setup.epochs if kind == "epoch" else min(WARMUP, steps)
    run, model, earlier = _recorded_run(problem, projection, rank, curvature, warmup)
    answer = run.query(model, mean_loss, problem.queries, per_layer=kind == "per layer")
    single, every = _of_answer(problem, answer)
    if kind == "corrected":
        every = run.predict_removal(problem.samples, model, mean_loss, problem.queries).corrected[0]
    return Scores(single, every, store_bytes=run.store.n_rows() * run.store.bytes_per_row, earlier=earlier)


def no_propagation(problem: Problem) -> Scores:
    """η w ⟨g, v⟩ of each occurrence: `tracin_run`'s formula, without rows; momentum and P are left out."""
    scores = influences(problem.replay, "none", model="proxy")
    bytes_ = problem.replay.occurrences * problem.replay.width * 2
    return Scores(*_of_occurrences(problem, scores), store_bytes=bytes_)


def tracin_checkpoints(problem: Problem) -> Scores:
    """TracIn over the weights at the end of each epoch, with the rate of the step before; momentum and P are left out."""
    replay = problem.replay
    steps = len(replay.recipe.batches) // problem.setup.epochs
    ends = range(steps, len(replay.states), steps)
    found = post_hoc(problem, tracin, checkpoints=[(replay.states[t], replay.updates[t - 1].rate) for t in ends])
    return Scores(found.single, found.all, store_bytes=len(ends) * replay.width * 8)


def post_hoc(problem: Problem, method: Callable[..., Influence], **arguments: Any) -> Scores:
    """A method that sees the trained model only."""
    answer = method(problem.replay.recipe, problem.queries, loss=mean_loss, **arguments)
    return _timeless(problem, answer)


def influence(problem: Problem, **arguments: Any) -> Scores:
    """The influence function at all dampings; rows in float32, sums and solves in float64."""

    def sweep() -> dict[str, tuple[Tensor, Tensor]]:
        narrow = in_precision(recipe(problem.setup, problem.seed), torch.float32)
        narrow.model.load_state_dict(problem.replay.states[-1])
        answers = influence_sweep(narrow, narrow.queries["test"], DAMPINGS, loss=mean_loss, **arguments)
        found = [_timeless(problem, a) for a in answers]
        return {f"damping {d:g}": (s.single, s.all) for d, s in zip(DAMPINGS, found, strict=True)}

    settings, earlier = problem.once(f"influence {arguments}", sweep)
    single, every = settings["damping 1"]
    return Scores(single, every, settings=settings, earlier=earlier)


def influence_at(problem: Problem, damping: float, **arguments: Any) -> Scores:
    """The same at one damping."""
    swept = influence(problem, **arguments)
    single, every = swept.settings[f"damping {damping:g}"]
    return Scores(single, every, earlier=swept.earlier)


def trak_scores(problem: Problem, target: str) -> Scores:
    """TRAK with one model; the mean of the queries' margins, or their mean loss."""

    def margin(model: nn.Module, batch: Batch) -> Tensor:
        return margins(model(batch[0]), batch[1])

    loss = mean_loss if target == "loss" else None
    answer = trak(
        problem.replay.recipe, problem.queries, loss=loss, target=target, margin=margin, rank=32, damping=1e-6
    )
    return _timeless(problem, answer)


def representation(problem: Problem) -> Scores:
    """Cosine of the last layer's inputs, mean over the queries."""
    return _timeless(problem, representation_similarity(problem.replay.recipe, problem.queries))


def _recorded_run(
    problem: Problem, projection: str, rank: int, curvature: str, warmup: int
) -> tuple[Run, nn.Module, float]:
    """`(run, trained model, seconds that an earlier row spent on it)`."""

    def train() -> tuple[Run, nn.Module]:
        path = problem.folder / f"{projection}-{rank}-{curvature.replace(':', '-')}-{warmup}"
        plan = in_precision(recipe(problem.setup, problem.seed), torch.float64)
        settings = {"projection": projection, "rank": rank, "curvature": curvature, "warmup_steps": warmup}
        return train_recorded(plan, path, seed=problem.seed, **settings), plan.model

    (run, model), earlier = problem.once(f"{projection} {rank} {curvature} {warmup}", train)
    return run, model, earlier


def _of_occurrences(problem: Problem, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Occurrences' influences (N,) summed for each removal: `(single, all)`."""
    batches = problem.replay.recipe.batches
    place = {sample: k for k, sample in enumerate(problem.samples)}
    single, every = (torch.zeros(len(problem.samples), dtype=torch.float64) for _ in range(2))
    at, last = 0, set(problem.last)
    for t, (ids, _) in enumerate(batches):
        for i, sample in enumerate(ids):
            if sample in place:
                every[place[sample]] += scores[at + i]
                single[place[sample]] += scores[at + i] * (t in last)
        at += len(ids)
    return single, every


def _of_answer(problem: Problem, answer: Influence) -> tuple[Tensor, Tensor]:
    single = [answer.sum_over([s], steps=problem.last).mean() for s in problem.samples]
    return torch.stack(single), torch.stack([answer.sum_over([s]).mean() for s in problem.samples])


def _timeless(problem: Problem, answer: Influence) -> Scores:
    found = torch.stack([answer.sum_over([s]).mean() for s in problem.samples])
    return Scores(found, found)
