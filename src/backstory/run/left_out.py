"""Groups left out of a recorded run: trained again without each, and the weights stored as differences from the run's.

Twins, which start one rounding unit away and leave nothing out, are trained beside them: what they do to a query is rounding.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.fingerprint import weights
from ..errors import UsageError
from ..exact.reverse import check_replay
from ..exact.states import States
from ..exact.variants import Variant, check_choices, stacks, train_variants
from ..replay.recipe import stored_args
from ..replay.tape import Progress, RecipeSource, Tape, build_recipe, own_randomness, thin_out
from ..results.effects import RETRAINED
from ..store import RunStore
from .changes import (
    TWIN,
    About,
    Job,
    Part,
    Spec,
    WeightChanges,
    check_order,
    file_name,
    group_key,
    missing_recipe,
    parts_of,
    steps_of,
    write_change,
)
from .groups import By, grouped
from .pieces import Piece, compute, settle, within

if TYPE_CHECKING:
    from .run import Run

WEIGHTS = {
    "keep": "the other samples keep their weights",
    "renormalise": "the other samples' weights are scaled so that each step's add up to what they did",
}
EMPTIED = {
    "coast": "still take an optimizer step with gradient 0, on which momentum and weight decay act",
    "skip": "are skipped",
}


def leave_out(
    run: "Run",
    store: RunStore,
    by: By,
    recipe: RecipeSource | None,
    *,
    others: str,
    empty: str,
    twins: int,
    workers: int,
    args: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    check: bool,
    progress: Progress | None,
) -> WeightChanges:
    """The changes without each group; what is not stored is computed, then stored."""
    check_choices(others, empty, "mean")
    if twins < 0:
        raise UsageError(f"twins must be at least 0, got {twins}.")
    groups = grouped(run, by)
    ids, steps = run.occurrences()
    parts = parts_of(groups, ids, steps)
    sizes = store.steps().rows
    jobs = [_job(store, part, others, empty, dtype, check, sizes) for part in parts]
    jobs += [_twin(store, k, dtype, check) for k in range(twins)]
    settle(store)
    known = set(store.tensor_names())
    if missing := [job for job in jobs if job.name not in known]:
        given = missing_recipe([job.about.group for job in missing], recipe)
        _compute(store, given, missing, others, empty, workers, args, dtype, check, progress)
    spec = Spec(RETRAINED, steps_of(store), dtype, (others, empty), check)
    files = tuple(job.name for job in jobs)
    return WeightChanges(store, spec, groups.by, tuple(parts), files[: len(parts)], files[len(parts) :])


def _job(
    store: RunStore, part: Part, others: str, empty: str, dtype: torch.dtype | None, check: bool, sizes: Any
) -> Job:
    """One group; what becomes of empty steps decides only where there are some."""
    emptied = sum(len(gone) == sizes[t] for t, gone in part.group.out.items())
    spec = Spec(RETRAINED, steps_of(store), dtype, (others, empty if emptied else ""), check)
    notes = [WEIGHTS[others], *([f"{emptied} steps that are left empty {EMPTIED[empty]}"] if emptied else [])]
    about = About(part.name, RETRAINED, part.samples, part.occurrences, part.first, spec.precision, "", tuple(notes))
    variant = Variant(part.group.out, others=others, empty=empty)
    return Job(file_name(store, spec, group_key(part.group)), about, variant)


def _twin(store: RunStore, k: int, dtype: torch.dtype | None, check: bool) -> Job:
    spec = Spec(TWIN, steps_of(store), dtype, check=check)
    about = About(f"twin {k}", TWIN, 0, 0, 0, spec.precision, "")
    return Job(file_name(store, spec, k), about, Variant(twin=k))


def _compute(
    store: RunStore,
    recipe: RecipeSource,
    jobs: list[Job],
    others: str,
    empty: str,
    workers: int,
    args: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    check: bool,
    progress: Progress | None,
) -> None:
    args = stored_args(store, recipe) if args is None else args
    made = build_recipe(recipe, args)
    check_choices(others, empty, made.loss_reduction)
    check_order(store, made, store.n_steps())
    replay = check_replay(store, recipe, args, store.n_steps(), check=check)
    done = [job._replace(about=replace(job.about, replay=replay)) for job in jobs]
    ordered = sorted(done, key=lambda job: job.what.first)
    count = max(1, min(workers, len(jobs)))
    blocks = [ordered[k::count] for k in range(count)]
    pieces = [Piece((store.path, recipe, args, block, dtype), tuple(job.name for job in block)) for block in blocks]
    compute(store, train_block, pieces, workers, recipe, progress)


def train_block(
    path: Path,
    recipe: RecipeSource,
    args: Mapping[str, Any] | None,
    jobs: list[Job],
    dtype: torch.dtype | None,
    progress: Progress | None = None,
) -> None:
    """Train some variants after one replay of the run, alone or stacked, and write each as soon as it is there."""
    store, variants = RunStore.open(path), [job.what for job in jobs]
    steps = steps_of(store)
    with own_randomness(), closing(States()) as states, closing(States()) as base, closing(States()) as changes:
        tape = Tape(recipe, args=args, dtype=dtype, length=store.n_steps(), states=states, run=store)
        tape.let_go(min(v.first for v in variants))
        trainings = len(jobs) + 1

        def keep(t: int) -> None:
            if t in steps:
                base[t] = _floats(tape.recipe.model)

        firsts = thin_out([v.first for v in variants], tape.affordable())
        tape.record(firsts, within(progress, 0, trainings), keep)
        done = 1
        for stack in stacks(tape, variants):
            began = time.perf_counter()
            changes.clear()
            _train(tape, [variants[i] for i in stack], steps, base, changes, within(progress, done, trainings))
            seconds = (time.perf_counter() - began) / len(stack)
            for r, i in enumerate(stack):
                own = {t: changes[_place(r, t, steps)] for t in steps if _place(r, t, steps) in changes}
                write_change(store, jobs[i], own, seconds)
            done += len(stack)


def _train(
    tape: Tape,
    variants: list[Variant],
    steps: tuple[int, ...],
    base: States,
    changes: States,
    progress: Progress | None,
) -> None:
    """Differences from the run at the steps, where a variant has begun to differ."""

    def visit(r: int, t: int) -> None:
        if t > variants[r].first:
            before = base[t]
            changes[_place(r, t, steps)] = {k: x - before[k] for k, x in _floats(tape.recipe.model).items()}

    train_variants(tape, variants, steps, visit, progress)


def _place(r: int, t: int, steps: tuple[int, ...]) -> int:
    """The number of variant r at step t."""
    return r * len(steps) + steps.index(t)


def _floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in weights(model).items() if x.is_floating_point()}
