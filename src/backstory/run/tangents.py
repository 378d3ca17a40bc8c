"""Tangents of groups of a recorded run: θ̇ at every checkpoint, stored in the run for any later query; and samples at other steps."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..capture.fingerprint import canonical
from ..capture.ids import as_text
from ..errors import UsageError
from ..exact.cache import digest
from ..exact.derivative import split
from ..exact.reverse import STATISTICS, check_replay
from ..exact.tangent import Group, tangent
from ..replay import update
from ..replay.recipe import Recipe, stored_args
from ..replay.tape import Progress, RecipeSource, build_recipe
from ..results.effects import FIRST_ORDER
from ..store import RunStore
from .changes import (
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
from .groups import By, grouped, places_of
from .pieces import Piece, compute, settle, split_evenly, work_folder

if TYPE_CHECKING:
    from .run import Run

BLOCK = 64  # groups that share one replay, at most
BLOCK_BYTES = 1 << 30  # of their (θ̇, ṁ, v̇) in memory


def tangents_of(run: "Run", by: By) -> tuple[tuple[str, ...], list[Part]]:
    """`(what the groups are of, the groups)`."""
    groups = grouped(run, by)
    return groups.by, parts_of(groups, *run.occurrences())


def moved(
    run: "Run", samples: Iterable[int | str], to: int, steps: Sequence[int] | None
) -> tuple[tuple[str, ...], list[Part]]:
    """The same for samples that are taken out of their steps (or of these only) and put in at step `to`, with the weight they had."""
    if not 0 <= to < run.n_steps:
        raise UsageError(f"to must be a step of the run, 0 to {run.n_steps - 1}, got {to}.")
    names = as_text(samples)[0]
    ids, at = run.occurrences()
    chosen = np.isin(ids, names) & (at != to)
    chosen &= np.isin(at, list(steps)) if steps is not None else True
    if not chosen.any():
        raise UsageError(
            f"none of the samples, such as {names[0]!r}, is used at another step than {to}, so there is nothing to move."
        )
    out = places_of(at, chosen)
    group = Group(out, {to: [(t, i) for t, places in out.items() for i in places]})
    name = f"{'sample ' + names[0] if len(names) == 1 else f'{len(names)} samples'}, moved to step {to}"
    return ("samples",), [Part(name, (name,), group, len(np.unique(ids[chosen])))]


def carry(
    store: RunStore,
    kind: str,
    by: tuple[str, ...],
    parts: Sequence[Part],
    recipe: RecipeSource | None,
    *,
    workers: int,
    args: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    check: bool,
    progress: Progress | None,
) -> WeightChanges:
    """The tangents of the groups; what is not stored is computed, then stored."""
    spec = Spec(FIRST_ORDER, steps_of(store), dtype, check=check)  # whether occurrences are moved is in the group's key
    jobs = [_job(store, spec, part, kind) for part in parts]
    settle(store)
    known = set(store.tensor_names())
    if missing := [job.about.group for job in jobs if job.name not in known]:
        _compute(store, missing_recipe(missing, recipe), jobs, workers, args, dtype, check, progress)
    return WeightChanges(store, replace(spec, kind=kind), by, tuple(parts), tuple(job.name for job in jobs))


def _job(store: RunStore, spec: Spec, part: Part, kind: str) -> Job:
    about = About(part.name, kind, part.samples, part.occurrences, part.first, spec.precision, "")
    return Job(file_name(store, spec, group_key(part.group)), about, part.group)


def _compute(
    store: RunStore,
    recipe: RecipeSource,
    jobs: Sequence[Job],
    workers: int,
    args: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    check: bool,
    progress: Progress | None,
) -> None:
    """Blocks are cut from all groups, so that a second call has the same ones; a block leaves out what is stored."""
    args = stored_args(store, recipe) if args is None else args
    made = build_recipe(recipe, args)
    check_order(store, made, store.n_steps())
    replay = check_replay(store, recipe, args, store.n_steps(), check=check)
    notes = (STATISTICS,) if _has_statistics(store, made.model) else ()
    full = [job._replace(about=replace(job.about, replay=replay, caveats=notes)) for job in jobs]
    known = set(store.tensor_names())
    blocks = [
        [job for job in block if job.name not in known] for block in split_evenly(full, _most(made, dtype), workers)
    ]
    pieces = [
        Piece((store.path, recipe, args, block, dtype), tuple(job.name for job in block), f"tangent-{block_key(block)}")
        for block in blocks
        if block
    ]
    compute(store, carry_block, pieces, workers, recipe, progress)


def _has_statistics(store: RunStore, model: nn.Module) -> bool:
    """Whether training changed more of the model (at its start) than its parameters."""
    if store.n_steps() not in store.checkpoints():
        return False
    last = store.load_checkpoint(store.n_steps())
    buffers = {canonical(name): x for name, x in model.named_buffers() if x.is_floating_point()}
    return any(name in last and not torch.equal(x.cpu(), last[name]) for name, x in buffers.items())


def _most(recipe: Recipe, dtype: torch.dtype | None) -> int:
    """How many tangents may be in memory together."""
    size = sum(
        p.numel() * (p if dtype is None else torch.empty(0, dtype=dtype)).element_size()
        for p in update.trained_parameters(recipe.optimizer)
    )
    return max(1, min(BLOCK, BLOCK_BYTES // max(1, 3 * size)))


def block_key(jobs: Sequence[Job]) -> str:
    """What decides the tangents of a block."""
    return digest([job.name for job in jobs])


def carry_block(
    path: Path,
    recipe: RecipeSource,
    args: Mapping[str, Any] | None,
    jobs: list[Job],
    dtype: torch.dtype | None,
    progress: Progress | None = None,
) -> None:
    """Carry the tangents of some groups along one replay, and write each group's."""
    began, store, work = time.perf_counter(), RunStore.open(path), work_folder(path)
    steps = steps_of(store)
    key = block_key(jobs)
    result = tangent(
        recipe,
        [job.what for job in jobs],
        steps,
        args=args,
        dtype=dtype,
        run=store,
        cache=work,
        key=key,
        progress=progress,
    )
    made = build_recipe(recipe, args)
    names, shapes = _names(made), [p.shape for p in update.trained_parameters(made.optimizer)]
    seconds = (time.perf_counter() - began) / len(jobs)
    for i, job in enumerate(jobs):
        own = {t: dict(zip(names, split(result[t][i], shapes), strict=True)) for t in steps if t > job.about.first}
        write_change(store, job, own, seconds)


def _names(recipe: Recipe) -> list[str]:
    """The names of the trained parameters, in the optimizer's order."""
    model: nn.Module = recipe.model
    names = {id(p): canonical(name) for name, p in model.named_parameters()}
    return [names[id(p)] for p in update.trained_parameters(recipe.optimizer)]
