"""Learning a projection from the first steps, without losing those steps.

While the basis is unknown, whole steps wait in the run's spool, each one durable on disk. Once there are enough
(or the byte budget is used up), the basis is computed from them and committed; only then are they projected and
appended like any other step. A crash at any moment leaves either the spool, or the basis and the spool: both go on.
Where training is resumed before the end of a warm-up whose basis is known, those steps are projected in the same way,
so that a resumed run equals an undisturbed one bit for bit.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError
from ..maths.layers import Contribution, Dense, Outer, Plain
from ..maths.projection import Basis, Shape, project
from ..store import RunStore, StepRecord
from .contributions import Parts, Place, divided
from .projecting import Layout, learned
from .settings import auto_rank
from .step import Part, make_record, share


def save_bases(store: RunStore, layout: Layout, bases: Sequence[Basis], warmup: int = 0) -> None:
    """Commit the bases, learned from `warmup` steps: one atomic file; identity sides are left out."""
    tensors = {
        f"{name}/{side}": value.contiguous()
        for (name, _), basis in zip(layout, bases, strict=True)
        for side, value in basis._asdict().items()
        if value is not None
    }
    shapes = json.dumps([list(shape) for _, shape in layout])
    store.save_tensors("basis", tensors, {"warmup": str(warmup), "shapes": shapes})
    settle_layout(store)


def settle_layout(store: RunStore) -> None:
    """Make the run's layout that of its committed basis, if a death came between the two."""
    shapes = store.tensor_metadata("basis").get("shapes") if "basis" in store.tensor_names() else None
    if shapes is None:
        return
    blocks = [{**b, "shape": shape} for b, shape in zip(store.config["blocks"], json.loads(shapes), strict=True)]
    if blocks != store.config["blocks"]:
        store.relayout([Shape(*b["shape"]).dims for b in blocks], blocks=blocks)


def warmup_of(store: RunStore) -> int:
    """From how many steps the committed bases were learned."""
    return int(store.tensor_metadata("basis").get("warmup", "0"))


def spool_step(store: RunStore, step: int, parts: Parts, facts: Mapping[str, Any], before: int) -> int:
    """Keep one step's contributions on disk, after `before` bytes of others; returns the bytes of all."""
    tensors = _tensors(parts)
    store.spool.put(step, tensors, {**facts, "bytes_before": before})
    return before + _nbytes(tensors)


def spooled_bytes(store: RunStore) -> int:
    """The bytes of all contributions that wait."""
    steps = store.spool.steps()
    if not steps:
        return 0
    tensors, facts = store.spool.get(steps[-1])
    return int(facts["bytes_before"]) + _nbytes(tensors)


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


def _tensors(parts: Parts) -> dict[str, Tensor]:
    return {
        f"{row}/{slot}/{b}/{name}": value.contiguous()
        for (row, slot, b), part in parts.items()
        for name, value in part._asdict().items()
    }


def learn(store: RunStore, layout: Layout, seed: int) -> tuple[list[Basis], list[Shape]]:
    """Bases from all spooled rows, and their shapes; where the rank is a share of their energy, the config says what is kept of it."""
    auto = auto_rank(store.config["settings"]["rank"])
    result = learned(partial(_weighted, store), layout, seed, None if auto is None else auto.share)
    if result.energy is not None:
        store.update_config(energy=result.energy)
    return result.bases, result.shapes


def _weighted(store: RunStore) -> Iterator[tuple[int, Contribution]]:
    """All spooled rows √κ h, gradient rows (√w g) among them, as contributions of blocks."""
    for step in store.spool.steps():
        facts = store.spool.meta(step)
        scale = _scales(facts)  # (B, rows)
        ends = list(accumulate(facts["sizes"], initial=0))
        for (row, slot, b), part in _spooled(store, step):
            yield b, divided(part, scale[ends[slot] : ends[slot + 1], row])


def _scales(facts: Mapping[str, Any]) -> Tensor:
    """√κ of each spooled row, (B, rows): of gradient rows first."""
    weight = torch.tensor(facts["weight"], dtype=torch.float64)[:, None]
    kappa = None if facts["kappa"] is None else torch.tensor(facts["kappa"], dtype=torch.float64)
    if kappa is None or not facts["own_rows"]:
        return (weight if kappa is None else kappa).sqrt()
    return torch.cat([weight, kappa], 1).sqrt()


def project_spooled(store: RunStore, layout: Layout, bases: Sequence[Basis]) -> Iterator[StepRecord]:
    """The spooled steps that are not in the tables yet, as records, in order."""
    for step in store.spool.steps():
        if step >= store.n_steps():
            yield project_step(step, _spooled(store, step), store.spool.meta(step), layout, bases)


def project_step(
    step: int,
    parts: Iterable[tuple[Place, Plain]],
    facts: Mapping[str, Any],
    layout: Layout,
    bases: Sequence[Basis],
) -> StepRecord:
    """The record of a step of the warm-up: from the spool, or recorded again with the basis known."""
    sizes, dims = facts["sizes"], [shape.dims for _, shape in layout]
    n_curvature, n_gradient = facts["own_rows"], facts["gradient_rows"]
    rows: Tensor | None = None
    for (row, slot, b), part in parts:
        if rows is None:
            rows = part[-1].new_zeros(sum(sizes), n_gradient + n_curvature, sum(dims))
        lo_row, lo = sum(sizes[:slot]), sum(dims[:b])
        rows[lo_row : lo_row + sizes[slot], row, lo : lo + dims[b]] = project(part, layout[b][1], bases[b])
    if rows is None:
        raise StoreError(f"the stored warm-up step {step} is empty. Record the run again.")
    record = make_record(step, rows[:, :n_gradient], facts, rows[:, n_gradient:] if n_curvature else None)
    shared = facts.get("part")
    return record if shared is None else share(record, Part(*shared))


def _spooled(store: RunStore, step: int) -> Iterator[tuple[Place, Plain]]:
    """The contributions of a spooled step, one in memory at a time."""
    for head, tensors in store.spool.groups(step):
        row, slot, b = map(int, head.split("/"))
        kind: type[Dense | Outer] = Dense if "grads" in tensors else Outer
        yield (row, slot, b), kind(*(tensors[name] for name in kind._fields))
