r"""What one backward pass contributes to each sample's gradient, projected at once or stored until it can be.

Where the projection is known and rows are kept as they are, a contribution is projected in its hook, and let go. Where
they are kept in Adam's coordinates (`maths.adam`) it waits until the optimizer has stepped: its second moment is
known only then. During a warm-up it waits for the basis.

⟨h, ∇L⟩ of what waits (clipping needs it) is exact during a warm-up, and else taken between the sides of the basis, where
each row is at hand before its core: with L̃ = P_L^{−½} L and R̃ likewise, ⟨h, ∇L⟩ ≈ ⟨Lᵀ ĥ R, L̃ᵀ ∇L R̃⟩.

Shapes:  B samples of a micro-batch (slot), K groups of positions (1: not taken apart), p kept coordinates.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import reduce

import torch
from torch import Tensor

from ..capture.modules import Block
from ..errors import UsageError
from ..maths.adam import Scale, absorb_scale, scale_contribution
from ..maths.layers import Contribution, Outer, Plain, Terms, count_positions, terms
from ..maths.projection import Basis, Shape, apply, compact, merge, products, project, project_groups, split_groups

Key = tuple[int, int]  # slot, block
Waiting = tuple[Contribution, int | None]  # a contribution, and its group where it belongs to one
Versions = tuple[int, ...]  # of a contribution's tensors: how often each has been changed in place


class Gathered:
    """The contributions of one backward pass through all micro-batches of a step."""

    def __init__(
        self, blocks: Sequence[Block], bases: Sequence[Basis] | None, groups: int = 1, checked: Collection[int] = ()
    ) -> None:
        self._blocks, self._bases, self.groups = blocks, bases, groups
        self._checked: dict[int, list[Contribution]] = {block: [] for block in checked}  # until they have been checked
        # of all calls; a contribution that is no outer product counts as many
        self._positions: Counter[Key] = Counter()
        self._rows: dict[Key, Tensor] = {}  # (B, K, dims)
        self._waiting: dict[Key, list[Waiting]] = defaultdict(list)
        self._versions: list[tuple[int, Contribution, Versions]] = []  # of what waits, with its block
        self._dots: dict[int, Tensor] = {}  # slot -> (B, K), of what was settled

    def add(self, slot: int, block: int, part: Contribution, group: int | None = None) -> None:
        """What one layer call contributed; `group` where it is that of one group of positions only."""
        group = None if self.groups == 1 else group  # taken apart for other rows than these: they add up
        self._positions[slot, block] += count_positions(part)
        if block in self._checked:
            self._checked[block].append(part)
        if self._bases is None:
            self._waiting[slot, block].append((part, group))
            self._versions.append((block, part, _versions(part)))
        else:
            self._put((slot, block), self._projected(part, group, block, self._bases[block]))

    def settle(
        self, bases: Sequence[Basis], scales: Sequence[Scale] | None, duals: Sequence[Tensor | None] | None = None
    ) -> None:
        """Project what waits, in the coordinates that `scales` give, and let it go; ⟨h, ∇L⟩ of it with `duals`."""
        self._check_unchanged()
        for (slot, b), parts in self._waiting.items():
            sides = bases[b]._replace(core=None)
            sides = sides if scales is None else absorb_scale(sides, scales[b])
            # (B, K, product)
            wide = reduce(torch.add, (self._projected(part, group, b, sides) for part, group in parts))
            dual = None if duals is None else duals[b]  # (product,)
            if dual is not None:
                self._dots[slot] = self._dots.get(slot, 0.0) + (wide @ dual.to(wide.dtype)).double().cpu()
            self._put((slot, b), apply(wide, bases[b].core))
        self._check_unchanged()  # the training went on meanwhile
        self._waiting.clear()
        self._versions.clear()

    def _check_unchanged(self) -> None:
        for block, part, before in self._versions:
            if _versions(part) != before:
                raise UsageError(
                    f"an input or output gradient of the layer of {self._blocks[block].name!r} was modified in place "
                    "after backward(), before it was recorded. Use new tensors in each step, or modify them later."
                )

    def settled_dots(self, sizes: Sequence[int]) -> Tensor:
        """⟨h_k, ∇L⟩ of all rows as `settle` took them, (Σ B, K), float64 on the CPU."""
        zeros = [torch.zeros(size, self.groups, dtype=torch.float64) for size in sizes]
        return torch.cat([self._dots.get(slot, zero) for slot, zero in enumerate(zeros)])

    def dots(self, wholes: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
        """⟨h_k, ∇L⟩ of what waits, exactly, with each block's gradient, (Σ B, K), float64 on the CPU."""
        out = [torch.zeros(size, self.groups, dtype=torch.float64) for size in sizes]
        for (slot, b), parts in self._waiting.items():
            if (whole := wholes[b]) is None:
                continue
            for part, group in parts:
                groups, where = (self.groups, slice(None)) if group is None else (1, slice(group, group + 1))
                dots = products(part, whole.to(part[-1].dtype), self._blocks[b].shape, groups)
                out[slot][:, where] += dots.double().cpu()
        return torch.cat(out)

    def rows(self, sizes: Sequence[int]) -> Tensor:
        """All rows of the step, (Σ B, K, Σ dims), on the CPU; zeros where nothing came."""
        like = next(iter(self._rows.values()), torch.zeros(()))

        def of(slot: int, b: int) -> Tensor:
            rows = self._rows.get((slot, b))
            return like.new_zeros(sizes[slot], self.groups, self._blocks[b].shape.dims) if rows is None else rows

        slots = [torch.cat([of(slot, b) for b in range(len(self._blocks))], 2) for slot in range(len(sizes))]
        return (slots[0] if len(slots) == 1 else torch.cat(slots)).cpu()

    def parts(self, scales: Sequence[Scale] | None) -> dict[tuple[int, int, int], Plain]:
        """What waits, merged for each (group, slot, block), in the coordinates of `scales`, on the CPU."""
        out: dict[tuple[int, int, int], Plain] = {}
        for (slot, b), waiting in self._waiting.items():
            shape = self._blocks[b].shape
            for k, parts in _by_group(waiting, self.groups).items():
                merged = merge(parts, shape)
                moved = merged if scales is None else scale_contribution(merged, scales[b], shape)
                small = compact(moved, shape)
                out[k, slot, b] = type(small)(*(x.cpu() for x in small))
        return out

    def total(self, block: int, shape: Shape, basis: Basis) -> tuple[Tensor, Tensor]:
        """`(Σ w g, Σ ‖w g‖)` of one block over the step; what waits is projected with `shape` and `basis`."""
        total, size = torch.zeros(shape.dims), torch.zeros(())
        waiting = [x for (_, b), x in self._waiting.items() if b == block]
        projected = [project(merge([part for part, _ in x], shape), shape, basis) for x in waiting]
        for rows in (*projected, *(x.sum(1) for (_, b), x in self._rows.items() if b == block)):
            total, size = total.to(rows) + rows.sum(0), size.to(rows) + rows.norm(dim=1).sum()
        return total, size

    def positions(self) -> dict[int, int]:
        """Of each block: how many outer products a sample's gradient is the sum of, at most; 2 for what is no such sum."""
        most: dict[int, int] = {}
        for (_, b), n in self._positions.items():
            most[b] = max(n, most.get(b, 0))
        return most

    def terms(self, block: int) -> Terms:
        """What was summed into the gradient of a block that is checked in this step."""
        zero = torch.zeros((), dtype=torch.float64)
        return reduce(Terms.__add__, map(terms, self._checked[block]), Terms(zero, 0, zero))

    def end_checks(self) -> None:
        """Let go of what the checks needed."""
        self._checked.clear()

    def _projected(self, part: Contribution, group: int | None, block: int, basis: Basis) -> Tensor:
        shape = self._blocks[block].shape
        if group is None:
            return project_groups(part, shape, basis, self.groups)
        row = project(part, shape, basis)
        out = row.new_zeros(len(row), self.groups, row.shape[1])
        out[:, group] = row
        return out

    def _put(self, key: Key, rows: Tensor) -> None:
        self._rows[key] = self._rows[key] + rows if key in self._rows else rows


def _versions(part: Contribution) -> Versions:
    return tuple(x._version for x in part if isinstance(x, Tensor))


def _by_group(waiting: Sequence[Waiting], groups: int) -> dict[int, list[Contribution]]:
    out: dict[int, list[Contribution]] = defaultdict(list)
    for part, group in waiting:
        for k, piece in enumerate(split_groups(part, groups)) if group is None else [(group, part)]:
            if piece is not None:
                out[k].append(piece)
    return out


def divided(part: Plain, scale: Tensor) -> Plain:
    """Each sample's contribution times its entry of `scale` (B,)."""
    x = part[-1]  # of an `Outer` its right side, of the others all there is
    times = x * scale.to(x.dtype).reshape(-1, *([1] * (x.dim() - 1)))
    return Outer(part.left, times) if isinstance(part, Outer) else type(part)(times)
