r"""The projection of a run: fixed, or learned from gradients (sides, the coordinates between them, and what is retained of it).

To learn it, the rows are read once for the sides and once for the energy of each coordinate between them.

Shapes:  n coordinates between the sides of a block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..maths.layers import Contribution
from ..maths.projection import (
    WIDER,
    WIDEST,
    Basis,
    Shape,
    allocate,
    count_sufficient,
    energy,
    learned_basis,
    mask_basis,
    moments,
    probes,
    project,
    random_basis,
    widen,
)

Layout = Sequence[tuple[str, Shape]]  # name and shape of each block
Rows = Callable[[], Iterator[tuple[int, Contribution]]]  # all rows √κ h, as contributions of blocks


def fixed_bases(kind: str, layout: Layout, seed: int) -> list[Basis] | None:
    """The bases of a projection that needs no warm-up, or None for `learned`."""
    if kind == "learned":
        return None
    if kind == "full":
        return [Basis(None, None) for _ in layout]
    make = {"random": random_basis, "mask": mask_basis}[kind]
    return [make(shape, seed=seed, name=name) for name, shape in layout]


def basis_like(basis: Basis, parameter: Tensor) -> Basis:
    """The basis on the parameter's device, in its precision or float32; the indices of a mask stay whole numbers.

    Sides lie column by column: products with thousands of rows then take half the time on a CPU.
    """
    wide = torch.promote_types(parameter.dtype, torch.float32)
    sides = (x if x is None or not x.is_floating_point() else x.to(wide).mT.contiguous().mT for x in basis)
    return Basis(*(None if x is None else x.to(parameter.device) for x in sides))


class Learned(NamedTuple):
    """Bases, and the shapes that go with them."""

    bases: list[Basis]
    shapes: list[Shape]
    energy: float | None = None  # share of the rows' energy that they hold, where that chose them


def learned(rows: Rows, layout: Layout, seed: int, share: float | None) -> Learned:
    """As many coordinates as `layout` has, or the fewest that hold `share` of the rows' energy, and no more than these."""
    wide = [(name, widen(shape, WIDER if share is None else WIDEST)) for name, shape in layout]
    budget = sum(shape.dims for _, shape in layout)
    if share is None and sum(shape.dims for _, shape in wide) <= budget:  # everything fits
        return Learned([_laid_out(x) for x in _sides(rows, layout, seed)], [shape for _, shape in layout])
    bases = _sides(rows, wide, seed, turned=True)
    energies = [x.sort(descending=True, stable=True) for x in _energies(rows, wide, bases)]
    values = [x.values for x in energies]
    whole = 0.0 if share is None else sum(energy(part, layout[b][1]) for b, part in rows())
    budget = min(budget, sum(map(len, values)))
    sizes = allocate(values, budget if share is None else count_sufficient(values, share * whole, budget))
    cores = [
        _laid_out(x._replace(core=e.indices[:n].sort().values)) for x, e, n in zip(bases, energies, sizes, strict=True)
    ]
    shapes = [shape._replace(core=n) for (_, shape), n in zip(wide, sizes, strict=True)]
    if share is None:
        return Learned(cores, shapes)
    retained = sum(float(v[:n].sum()) for v, n in zip(values, sizes, strict=True))
    return Learned(cores, shapes, retained / whole if whole else 1.0)


def _laid_out(basis: Basis) -> Basis:
    """As it will be loaded: the strides of a single column would else be others, and so the rounding of products."""
    return Basis(*(None if x is None else x.clone(memory_format=torch.contiguous_format) for x in basis))


def _sides(rows: Rows, layout: Layout, seed: int, *, turned: bool = False) -> list[Basis]:
    """Top eigenvectors of the two second moments of each block's rows; all of them where a side keeps everything and is `turned`."""
    omegas = [probes(shape, seed=seed, name=name) for name, shape in layout]
    sums: list[list[Tensor | None]] = [[None, None] for _ in layout]
    for b, part in rows():
        for side, moment in enumerate(moments(part, layout[b][1], omegas[b], turned=turned)):
            before = sums[b][side]
            sums[b][side] = moment if before is None or moment is None else before.add_(moment)
    return [
        learned_basis(left, right, shape, omega, seed=seed, name=name)
        for (left, right), (name, shape), omega in zip(sums, layout, omegas, strict=True)
    ]


def _energies(rows: Rows, layout: Layout, bases: Sequence[Basis]) -> list[Tensor]:
    """Σ κ x² of each coordinate between the sides of each block, (n,)."""
    sums = [torch.zeros(shape.product, dtype=torch.float64) for _, shape in layout]
    for b, part in rows():
        sums[b] += project(part, layout[b][1], bases[b]).square().sum(0, dtype=torch.float64)
    return sums
