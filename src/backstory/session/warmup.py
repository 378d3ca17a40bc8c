"""Learning a subspace from the first steps, without losing those steps.

While the basis is unknown, whole steps wait in the run's spool, each one durable on disk. Once there are enough
(or the byte budget is used up), the basis is computed from them and committed; only then are they projected and
appended like any other step. A crash at any moment leaves either the spool, or the basis and the spool: both go on.
Where training is resumed before the end of a warm-up whose basis is known, those steps are projected in the same way,
so that a resumed run equals an undisturbed one bit for bit.
Knows nothing of hooks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError
from ..maths.layers import Contribution, Dense, Outer
from ..maths.subspace import Basis, Shape, learned_basis, mask_basis, merge, moments, project, random_basis
from ..store import RunStore, StepRecord

Layout = Sequence[tuple[str, Shape]]  # name and shape of each block
Parts = dict[tuple[int, int, int], Contribution]  # (row, slot, block); rows of the gradient first, then of curvature


def fixed_bases(kind: str, layout: Layout, seed: int) -> list[Basis] | None:
    """The bases of a subspace that needs no warm-up, or None for `learned`."""
    if kind == "learned":
        return None
    make = {"full": _identity, "random": random_basis, "mask": mask_basis}[kind]
    return [make(shape, seed=seed, name=name) for name, shape in layout]


def _identity(shape: Shape, *, seed: int, name: str) -> Basis:
    return Basis(None, None)


def save_bases(store: RunStore, layout: Layout, bases: Sequence[Basis], warmup: int = 0) -> None:
    """Commit the bases, learned from `warmup` steps: one atomic file; identity sides are left out."""
    tensors = {
        f"{name}/{side}": value.contiguous()
        for (name, _), basis in zip(layout, bases, strict=True)
        for side, value in zip(("left", "right"), basis, strict=True)
        if value is not None
    }
    store.save_tensors("basis", tensors, {"warmup": str(warmup)})


def load_bases(store: RunStore, layout: Layout) -> list[Basis] | None:
    """The committed bases, or None if there are none yet."""
    if "basis" not in store.tensor_names():
        return None
    tensors = store.load_tensors("basis")
    return [Basis(tensors.get(f"{name}/left"), tensors.get(f"{name}/right")) for name, _ in layout]


def warmup_of(store: RunStore) -> int:
    """From how many steps the committed bases were learned."""
    return int(store.tensor_metadata("basis").get("warmup", "0"))


def spool_step(store: RunStore, step: int, parts: Parts, meta: Mapping[str, Any], before: int) -> int:
    """Keep one step's contributions on disk, after `before` bytes of others; returns the bytes of all."""
    tensors = _tensors(parts)
    store.spool(step, tensors, {**meta, "bytes_before": before})
    return before + _nbytes(tensors)


def spooled_bytes(store: RunStore) -> int:
    """The bytes of all contributions that wait."""
    steps = store.spooled()
    if not steps:
        return 0
    tensors, meta = store.read_spool(steps[-1])
    return int(meta["bytes_before"]) + _nbytes(tensors)


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


def _tensors(parts: Parts) -> dict[str, Tensor]:
    return {
        f"{row}/{slot}/{b}/{name}": value.contiguous()
        for (row, slot, b), part in parts.items()
        for name, value in part._asdict().items()
    }


def learn(store: RunStore, layout: Layout, seed: int) -> list[Basis]:
    """Bases from the second moments of all spooled steps."""
    lefts: dict[int, Tensor] = {}
    rights: dict[int, Tensor] = {}
    for step in store.spooled():
        tensors, meta = store.read_spool(step)
        for b, part in _gradients(tensors, meta["gradient_rows"], layout):
            for table, found in zip((lefts, rights), moments(part, layout[b][1]), strict=True):
                if found is not None:
                    table[b] = table[b] + found if b in table else found
    return [
        learned_basis(lefts.get(b), rights.get(b), shape, seed=seed, name=name)
        for b, (name, shape) in enumerate(layout)
    ]


def _gradients(tensors: Mapping[str, Tensor], n_rows: int, layout: Layout) -> Iterator[tuple[int, Contribution]]:
    """The gradient of each micro-batch and block; where it was taken apart, its groups together again."""
    found: dict[tuple[int, int], list[Contribution]] = {}
    for row, slot, b, part in _parts(tensors):
        if row < n_rows:  # the subspace is that of the gradients
            found.setdefault((slot, b), []).append(part)
    for (_, b), parts in found.items():
        yield b, merge(parts, layout[b][1])


def project_spooled(store: RunStore, layout: Layout, bases: Sequence[Basis]) -> Iterator[StepRecord]:
    """The spooled steps that are not in the tables yet, as records, in order."""
    for step in store.spooled():
        if step < store.n_steps():
            continue
        tensors, meta = store.read_spool(step)
        yield _record(step, tensors, meta, layout, bases)


def project_step(
    step: int,
    parts: Parts,
    meta: Mapping[str, Any],
    layout: Layout,
    bases: Sequence[Basis],
) -> StepRecord:
    """A step of the warm-up that is recorded again, with the basis known: the same sums in the same order."""
    return _record(step, _tensors(parts), meta, layout, bases)


def _record(
    step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], layout: Layout, bases: Sequence[Basis]
) -> StepRecord:
    sizes: list[int] = meta["sizes"]
    dims = [shape.dims for _, shape in layout]
    parts = list(_parts(tensors))
    if not parts:
        raise StoreError(f"the spooled step {step} is empty; record the run again.")
    first = parts[0][3]
    dtype = (first.right if isinstance(first, Outer) else first[0]).dtype
    n_own, n_gradient = meta["own_rows"], meta["gradient_rows"]
    rows = torch.zeros(sum(sizes), n_gradient + n_own, sum(dims), dtype=dtype)
    for row, slot, b, part in parts:
        lo_row, lo = sum(sizes[:slot]), sum(dims[:b])
        rows[lo_row : lo_row + sizes[slot], row, lo : lo + dims[b]] = project(part, layout[b][1], bases[b])
    return finished_record(step, rows[:, :n_gradient], meta, rows[:, n_gradient:] if n_own else None)


def finished_record(
    step: int, gradients: Tensor, meta: Mapping[str, Any], curvature: Tensor | None = None
) -> StepRecord:
    """Gradients (B, K, p) and what was read of the step, as the store keeps them.

    Where they are taken apart (K > 1) and there are no curvature rows of their own, they are the curvature rows.
    ⟨g, ∇L⟩ is what `meta` says, or else taken in the kept coordinates.
    """
    rows = gradients.sum(1) if gradients.shape[1] > 1 else gradients[:, 0]
    curvature = gradients if curvature is None and gradients.shape[1] > 1 else curvature
    weight = torch.tensor(meta["weight"], dtype=torch.float64)
    wide = rows.double()
    whole = weight @ wide  # (p,) the step's gradient in the kept coordinates
    gdot, hdot = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (meta["gdot"], meta["hdot"]))
    if hdot is None and curvature is not None:
        hdot = curvature.double() @ whole
    return StepRecord(
        step=step,
        samples=meta["samples"],
        weight=weight,
        loss=torch.tensor([float("nan") if x is None else x for x in meta["loss"]], dtype=torch.float64),
        gdot=wide @ whole if gdot is None else gdot,
        rows=rows,
        groups=meta["groups"],
        clip=meta["clip"],
        norm=meta["norm"],
        coverage=meta["coverage"],
        size=meta["size"],
        drift=meta["drift"],
        P=meta.get("P"),
        curvature=curvature,
        kappa=None if curvature is None else torch.tensor(meta["kappa"], dtype=torch.float64),
        hdot=hdot,
    )


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int, Contribution]]:
    keys = sorted({tuple(map(int, k.split("/")[:3])) for k in tensors})
    for row, slot, b in keys:
        head = f"{row}/{slot}/{b}/"
        if head + "grads" in tensors:
            yield row, slot, b, Dense(tensors[head + "grads"])
        else:
            yield row, slot, b, Outer(tensors[head + "left"], tensors[head + "right"])
