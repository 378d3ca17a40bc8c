r"""The projection of a run: fixed, or learned from gradients (sides, the spectrum between them, and what is retained of it).

To learn it, the rows are read once for the sides and once or more for the spectra, block by block where memory does not hold all. With
a share of their energy to be kept, a pass before that counts rows and energy; rows that are fewer than their coordinates
are then kept themselves, which is exact and much less work.

Shapes:  n coordinates between the sides of a block.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..maths.layers import Contribution
from ..maths.projection import (
    LEADING,
    Basis,
    Shape,
    Spectrum,
    allocate,
    count_sufficient,
    energy,
    learned_basis,
    mask_basis,
    moments,
    probes,
    project,
    random_basis,
    spectrum,
    spectrum_of_rows,
    widen,
)

LEARNING_BYTES = 512 << 20  # what the second moments of rows may take at once

Layout = Sequence[tuple[str, Shape]]  # name and shape of each block
# all rows √κ h of these blocks (None: all)
Rows = Callable[[Collection[int] | None], Iterator[tuple[int, Contribution]]]


def fixed_bases(kind: str, layout: Layout, seed: int) -> list[Basis] | None:
    """The bases of a projection that needs no warm-up, or None for `learned`."""
    if kind == "learned":
        return None
    if kind == "full":
        return [Basis(None, None) for _ in layout]
    make = {"random": random_basis, "mask": mask_basis}[kind]
    return [make(shape, seed=seed, name=name) for name, shape in layout]


def basis_like(basis: Basis, parameter: Tensor) -> Basis:
    """The basis on the parameter's device, in its precision or float32; the indices of a mask stay whole numbers."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    sides = (x if x is None or not x.is_floating_point() else x.to(wide) for x in basis)
    return Basis(*(None if x is None else x.to(parameter.device) for x in sides))


class Learned(NamedTuple):
    """Bases, and the shapes that go with them."""

    bases: list[Basis]
    shapes: list[Shape]
    energy: float | None = None  # share of the rows' energy that they hold, where that chose them


def learned(rows: Rows, layout: Layout, seed: int, share: float | None) -> Learned:
    """As many coordinates as `layout` has, or the fewest that hold `share` of the rows' energy, and no more than these."""
    wide = [(name, widen(shape)) for name, shape in layout]
    budget = sum(shape.dims for _, shape in layout)
    if share is None and sum(shape.dims for _, shape in wide) <= budget:  # everything fits
        return Learned([_laid_out(x) for x in _sides(rows, layout, seed)], [shape for _, shape in layout])
    whole, counts = (0.0, None) if share is None else _measured(rows, layout)
    bases = _sides(rows, wide, seed)
    spectra = list(_spectra(rows, wide, bases, [LEADING * shape.dims for _, shape in layout], counts))
    values = [x.values for x in spectra]
    sizes = allocate(values, budget if share is None else count_sufficient(values, share * whole, budget))
    cores = [
        _laid_out(x._replace(core=s.vectors[:, :n].float())) for x, s, n in zip(bases, spectra, sizes, strict=True)
    ]
    shapes = [shape._replace(core=n) for (_, shape), n in zip(wide, sizes, strict=True)]
    if share is None:
        return Learned(cores, shapes)
    retained = sum(float(v[:n].sum()) for v, n in zip(values, sizes, strict=True))
    return Learned(cores, shapes, retained / whole if whole else 1.0)


def _laid_out(basis: Basis) -> Basis:
    """As it will be loaded: the strides of a single column would else be others, and so the rounding of products."""
    return Basis(*(None if x is None else x.clone(memory_format=torch.contiguous_format) for x in basis))


def _measured(rows: Rows, layout: Layout) -> tuple[float, list[int]]:
    """`(energy of all rows, how many each block has)`."""
    whole, counts = 0.0, [0] * len(layout)
    for b, part in rows(None):
        whole += energy(part, layout[b][1])
        counts[b] += len(part[0])
    return whole, counts


def _sides(rows: Rows, layout: Layout, seed: int) -> list[Basis]:
    """Top eigenvectors of the two second moments of each block's rows."""
    omegas = [probes(shape, seed=seed, name=name) for name, shape in layout]
    sums: list[list[Tensor | None]] = [[None, None] for _ in layout]
    for b, part in rows(None):
        for side, moment in enumerate(moments(part, layout[b][1], omegas[b])):
            before = sums[b][side]
            sums[b][side] = moment if before is None or moment is None else before.add_(moment)
    return [
        learned_basis(left, right, shape, omega, seed=seed, name=name)
        for (left, right), (name, shape), omega in zip(sums, layout, omegas, strict=True)
    ]


def _spectra(
    rows: Rows, layout: Layout, bases: Sequence[Basis], most: Sequence[int], counts: Sequence[int] | None
) -> Iterator[Spectrum]:
    """Of Σ κ x xᵀ over each block's rows x between its sides; as many blocks at once as memory allows.

    With `counts`, rows that are fewer than their coordinates are kept and not summed.
    """
    n = [shape.product for _, shape in layout]
    few = [counts is not None and counts[b] < n[b] for b in range(len(n))]
    for blocks in _at_once([4 * n[b] * (counts[b] if counts and few[b] else n[b]) for b in range(len(n))]):
        sums = {b: torch.zeros(n[b], n[b]) for b in blocks if not few[b]}
        listed: dict[int, list[Tensor]] = {b: [torch.zeros(0, n[b])] for b in blocks if few[b]}
        for b, part in rows(blocks):
            x = project(part, layout[b][1], bases[b])
            if few[b]:
                listed[b].append(x)
            else:
                sums[b] = sums[b].to(x.dtype).addmm_(x.T, x)
        for b in blocks:
            yield spectrum_of_rows(torch.cat(listed.pop(b)), most[b]) if few[b] else spectrum(sums[b], most[b])


def _at_once(sizes: Sequence[int]) -> Iterator[range]:
    """Runs of blocks that take no more than `LEARNING_BYTES` together, or one block."""
    at = 0
    while at < len(sizes):
        end, room = at, LEARNING_BYTES
        while end < len(sizes) and (end == at or sizes[end] <= room):
            room -= sizes[end]
            end += 1
        yield range(at, end)
        at = end
