r"""What one backward pass contributes to each sample's gradient, projected at once or stored until it can be.

Where the projection is known and rows are kept as they are, a contribution is projected in its hook, and let go. Where
they are kept in Adam's coordinates (`maths.adam`) it waits until the optimizer has stepped, as its second moment is
known only then, or, once that hardly changes in a step, until there is enough to be projected behind the backward pass that
goes on (`Ahead`). During a warm-up it waits for the basis.

⟨h, ∇L⟩ of what waits (clipping needs it) is exact during a warm-up, and else taken between the sides of the basis, where
each row is at hand before its core: with L̃ = P_L^{−½} L and R̃ likewise, ⟨h, ∇L⟩ ≈ ⟨Lᵀ ĥ R, L̃ᵀ ∇L R̃⟩.

Shapes:  B samples of a micro-batch (slot), K groups of positions (1: not taken apart), p kept coordinates.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.modules import Block
from ..errors import UsageError
from ..maths.adam import Scale, scale_contribution
from ..maths.layers import Contribution, Dense, Outer, Plain, Sum, Terms, count_positions, terms, written_out
from ..maths.projection import Basis, Shape, apply, compact, merge, products, project, project_groups, split_groups

Key = tuple[int, int]  # slot, block
Place = tuple[int, int, int]  # row, slot, block; rows of the gradient first, then of curvature
Parts = dict[Place, Plain]
PIECE = 16 << 20  # bytes that are projected together behind the backward pass
Versions = tuple[int, ...]  # of a contribution's tensors: how often each has been changed in place
Later = Callable[[Callable[[], None], int], None]  # has something done in order that holds so many bytes until it is


class Waiting(NamedTuple):
    """A contribution that is not projected yet."""

    part: Contribution
    group: int | None  # where it belongs to one group of positions only
    versions: Versions


class Ahead(NamedTuple):
    """How contributions are projected before the step is complete."""

    sides: Sequence[Basis]  # in the coordinates of the rows
    later: Later
    late: Collection[int]  # blocks that wait for the end of the step all the same


class Gathered:
    """The contributions of one backward pass through all micro-batches of a step."""

    def __init__(
        self,
        blocks: Sequence[Block],
        bases: Sequence[Basis] | None,
        groups: int = 1,
        checked: Mapping[int, tuple[Shape, Basis]] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._blocks, self._bases, self.groups, self._ahead = blocks, bases, groups, ahead
        self._checked = checked or {}  # blocks whose sum is compared, in these coordinates
        self._held: dict[Key, list[Contribution]] = defaultdict(list)  # of these blocks, until they have been checked
        # of all calls; a contribution that is no outer product counts as many
        self._positions: Counter[Key] = Counter()
        self._rows: dict[Key, Tensor] = {}  # (B, K, dims)
        self._waiting: dict[Key, list[Waiting]] = defaultdict(list)
        self._nbytes = 0  # of what waits, but for what waits for the end of the step
        self._dropped = False
        self._wide: dict[Key, Tensor] = {}  # (B, K, product) what was projected with sides alone
        self._dots: dict[int, Tensor] = {}  # slot -> (B, K), of what was settled

    def add(self, slot: int, block: int, part: Contribution, group: int | None = None) -> None:
        """What one layer call contributed; `group` where it is that of one group of positions only."""
        group = None if self.groups == 1 else group  # taken apart for other rows than these: they add up
        self._positions[slot, block] += count_positions(part)
        if block in self._checked:
            self._held[slot, block].append(part)
        if self._bases is not None:
            _add(self._rows, (slot, block), self._projected(part, group, block, self._bases[block]))
            return
        self._waiting[slot, block].append(Waiting(part, group, _versions(part)))
        if self._ahead is not None and block not in self._ahead.late and not _is_look_up(part):
            self._nbytes += sum(x.nbytes for x in part if isinstance(x, Tensor))
            if self._nbytes > PIECE:
                self._hand_over(self._ahead)

    def _hand_over(self, ahead: Ahead) -> None:
        """What waits is projected while the backward pass goes on; but for look-ups and blocks that are late."""
        late = {b for (_, b), x in self._waiting.items() if any(_is_look_up(w.part) for w in x)}.union(ahead.late)
        kept = {key: x for key, x in self._waiting.items() if key[1] in late}
        waiting = {key: x for key, x in self._waiting.items() if key[1] not in late}
        nbytes, self._nbytes, self._waiting = self._nbytes, 0, defaultdict(list, kept)
        ahead.later(partial(self._project, waiting, ahead.sides), nbytes)

    def looked_up(self) -> set[int]:
        """The blocks whose rows were looked up by what waits."""
        return {b for (_, b), x in self._waiting.items() if any(_is_look_up(w.part) for w in x)}

    def drop(self) -> None:
        """The step is none: what was handed over is not projected any more."""
        self._dropped = True

    def _project(self, waiting: dict[Key, list[Waiting]], sides: Sequence[Basis]) -> None:
        for (slot, b), parts in () if self._dropped else waiting.items():
            for one in parts:
                self._check_unchanged(b, one)
                _add(self._wide, (slot, b), self._projected(one.part, one.group, b, sides[b]))
            for one in parts:
                self._check_unchanged(b, one)  # the training went on meanwhile
            parts.clear()

    def settle(
        self, bases: Sequence[Basis], sides: Sequence[Basis], duals: Sequence[Tensor | None] | None = None
    ) -> None:
        """Project what waits, with sides in the coordinates of the rows, and let it go; ⟨h, ∇L⟩ of it with `duals`."""
        self._project(self._waiting, sides)
        self._waiting.clear()
        for (slot, b), wide in sorted(self._wide.items(), key=itemgetter(0)):  # (B, K, product)
            if duals is not None and (dual := duals[b]) is not None:
                self._dots[slot] = self._dots.get(slot, 0.0) + (wide @ dual.to(wide.dtype)).double().cpu()
            self._rows[slot, b] = apply(wide, bases[b].core)
        self._wide.clear()

    def _check_unchanged(self, block: int, waiting: Waiting) -> None:
        if _versions(waiting.part) != waiting.versions:
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
            for part, group, _ in parts:
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

    def take_parts(self, scales: Sequence[Scale] | None, times: Sequence[Tensor] | None = None) -> Parts:
        """What waits, merged for each (group, slot, block), in the coordinates of `scales`, on the CPU; `times` (B,) of each slot.

        One block after the other, which lets go of what came: with copies of all of it a step would take twice its memory.
        """
        out: Parts = {}
        for key in list(self._waiting):
            slot, b = key
            shape = self._blocks[b].shape
            for k, parts in _by_group(self._waiting.pop(key), self.groups).items():
                merged = merge(parts, shape)
                moved = merged if scales is None else scale_contribution(merged, scales[b], shape)
                small = compact(moved, shape)
                small = small if times is None else divided(small, times[slot])
                out[k, slot, b] = type(small)(*(x.cpu().contiguous() for x in small))
        return out

    def total(self, block: int) -> tuple[Tensor, Tensor]:
        """`(Σ w g, Σ ‖w g‖)` over the step of one block that is checked, in the coordinates of the check."""
        where = self._checked[block]
        if self._bases is None:
            held = [x for (_, b), x in self._held.items() if b == block]
            found = [reduce(torch.add, (project(part, *where) for part in parts)) for parts in held]
        else:
            found = [x.sum(1) for (_, b), x in self._rows.items() if b == block]
        total, size = torch.zeros(where[0].dims), torch.zeros(())
        for rows in found:
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
        return reduce(
            Terms.__add__,
            (terms(x) for (_, b), parts in self._held.items() if b == block for x in parts),
            Terms(zero, 0, zero),
        )

    def end_checks(self) -> None:
        """Let go of what the checks needed."""
        self._held.clear()

    def _projected(self, part: Contribution, group: int | None, block: int, basis: Basis) -> Tensor:
        shape = self._blocks[block].shape
        if group is None:
            return project_groups(part, shape, basis, self.groups)
        row = project(part, shape, basis)
        out = row.new_zeros(len(row), self.groups, row.shape[1])
        out[:, group] = row
        return out


def _add(into: dict[Key, Tensor], key: Key, rows: Tensor) -> None:
    into[key] = into[key] + rows if key in into else rows


def _is_look_up(part: Contribution) -> bool:
    return isinstance(part, Outer) and not part.left.is_floating_point()


def _versions(part: Contribution) -> Versions:
    return tuple(x._version for x in part if isinstance(x, Tensor))


def _by_group(waiting: Sequence[Waiting], groups: int) -> dict[int, list[Contribution]]:
    out: dict[int, list[Contribution]] = defaultdict(list)
    for part, group, _ in waiting:
        for k, piece in enumerate(split_groups(part, groups)) if group is None else [(group, part)]:
            if piece is not None:
                out[k].append(piece)
    return out


def divided(part: Plain, scale: Tensor) -> Plain:
    """Each sample's contribution times its entry of `scale` (B,)."""
    x = part[-1]  # of an `Outer` its right side, of the others all there is
    times = x * scale.to(x.dtype).reshape(-1, *([1] * (x.dim() - 1)))
    return Outer(part.left, times) if isinstance(part, Outer) else type(part)(times)


def places_of(rows: Sequence[int], samples: int) -> Tensor:
    """Which rows of a batch are those of each sample, (samples, K), −1 where it has fewer than K."""
    own = [[i for i, sample in enumerate(rows) if sample == z] for z in range(samples)]
    most = max(map(len, own))
    return torch.tensor([[*places, *[-1] * (most - len(places))] for places in own])


def joined(part: Contribution, places: Tensor) -> Contribution:
    """The contributions of samples that have several rows: one row's positions after the other's."""
    places = places.to(part[-1].device)
    there, where = places >= 0, places.clamp_min(0)

    def of(x: Tensor) -> Tensor:
        each = x[where]  # (B, K, …)
        return each * there.reshape(*there.shape, *[1] * (each.dim() - 2)).to(each.dtype)

    plain = written_out(part)
    if isinstance(plain, Dense):
        return Dense(of(plain.grads).sum(1))
    if isinstance(plain, Sum):
        return Sum(of(plain.values).flatten(1, 2))
    return Outer(plain.left[where].flatten(1, 2), of(plain.right).flatten(1, 2))
