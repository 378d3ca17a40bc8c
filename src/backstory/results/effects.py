"""What leaving out groups of samples does to queries, at checkpoints: by training again, or to first order by tangents.

Shapes:  G groups, C checkpoints, Q queries, K twins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from . import figures
from .origin import BY_REPLAY
from .result import Result
from .row import Row
from .sign import SIGN
from .words import signed

RETRAINED, FIRST_ORDER, MOVED = "leave_out", "tangent", "move"
HEADLINES = {
    RETRAINED: "Change of the query's loss when training leaves out each group (retrained)",
    FIRST_ORDER: "Exact first-order influence of each group on the query's loss (tangents)",
    MOVED: "First-order change of the query's loss if samples had come at another step (tangents)",
}
BELOW = "below rounding"
BY_TRAINING = "Ground truth: trained again without each group."


@dataclass(frozen=True)
class Effect(Row):
    """What one group does to one query at one checkpoint."""

    group: str
    checkpoint: int
    query: str
    effect: float
    floor: float | None  # what rounding alone does
    samples: int
    occurrences: int
    first_step: int

    @property
    def clear(self) -> bool:
        """Whether it is larger than what rounding alone does."""
        return self.floor is None or abs(self.effect) > self.floor


@dataclass(frozen=True, repr=False)
class GroupEffects(Result):
    """Effects of groups on queries at checkpoints. A group that was not used before a checkpoint has 0 there."""

    kind: str  # "leave_out": retrained; "tangent": first order
    by: tuple[str, ...]  # what the groups are combinations of
    groups: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]  # of each group, its value of each of `by`
    samples: tuple[int, ...]
    occurrences: tuple[int, ...]
    first_steps: tuple[int, ...]
    checkpoints: tuple[int, ...]
    queries: tuple[str, ...]
    losses: Tensor  # (C, Q) of the model as it was trained
    values: Tensor  # (G, C, Q)
    twins: Tensor  # (K, C, Q) the same of trainings that started one rounding unit away; K may be 0
    sign = SIGN.replace("sample", "group")
    shown = (
        "method", "by", "groups", "keys", "samples", "occurrences", "first_steps", "checkpoints", "queries", "losses", "values",
        "floor", "clear",
    )  # fmt: skip

    @property
    def method(self) -> str:
        """How the effects were computed: its kind."""
        return self.kind

    @property
    def origin(self) -> str:
        """Where the values come from: never from the recording."""
        return BY_TRAINING if self.kind == RETRAINED else BY_REPLAY

    @property
    def headline(self) -> str:
        """What was done, and at which step."""
        return f"{HEADLINES[self.kind]}, model at step {self.at}"

    @property
    def floor(self) -> Tensor | None:
        """What rounding alone does to each query at each checkpoint (C, Q); None where it was not measured."""
        return self.twins.abs().amax(0) if len(self.twins) else None

    @property
    def clear(self) -> Tensor:
        """Which effects are larger than rounding alone makes them, (G, C, Q)."""
        return self.values.abs() > (0 if self.floor is None else self.floor)

    @property
    def mean(self) -> Tensor:
        """Effects on the mean loss of the queries, (G, C)."""
        return self.values.mean(2)

    @property
    def mean_clear(self) -> Tensor:
        """Which of these are larger than rounding alone makes them, (G, C)."""
        floor = self.twins.mean(2).abs().amax(0) if len(self.twins) else 0
        return self.mean.abs() > floor

    @property
    def words(self) -> tuple[str, ...]:
        """Which groups mattered most, and how many differences are rounding."""
        last, sure = self.mean[:, -1], self.mean_clear[:, -1]
        used = [i for i, t in enumerate(self.first_steps) if t < self.checkpoints[-1]]
        out = []
        for verb, pick in (("raises", max), ("lowers", min)):
            i = pick(used, key=lambda k: float(last[k]), default=None)
            if i is not None and bool(sure[i]) and (float(last[i]) > 0) == (verb == "raises") and len(self.groups) > 1:
                out.append(f"{self._act(self.groups[i])} {verb} the loss most: {signed(float(last[i]))}.")
        if len(self.twins) and (small := [self.groups[i] for i in used if not bool(sure[i])]):
            out.append(f"{', '.join(small[:3])}{' …' if len(small) > 3 else ''}: {BELOW}, the same as no change.")
        return tuple(out)

    def _act(self, group: str) -> str:
        """What is done to a group; the derivative of leaving it out is not what leaving it out does."""
        acts = {MOVED: "To first order, moving", FIRST_ORDER: "To first order, leaving out"}
        return f"{acts.get(self.kind, 'Leaving out')} {group}"

    def rows(self) -> list[Effect]:
        """Each group, checkpoint and query."""
        floor = self.floor
        return [
            Effect(
                name, c, q, float(self.values[i, j, k]), None if floor is None else float(floor[j, k]),
                self.samples[i], self.occurrences[i], self.first_steps[i],
            )
            for i, name in enumerate(self.groups)
            for j, c in enumerate(self.checkpoints)
            for k, q in enumerate(self.queries)
        ]  # fmt: skip

    def table(self) -> Mapping[str, Any]:
        """One line for each group, checkpoint and query."""
        return Effect.table(self.rows())

    def lines(self) -> tuple[str, ...]:
        """The effect of each group on the mean of the queries, at the last checkpoint."""
        last = zip(self.groups, self.mean[:, -1].tolist(), self.mean_clear[:, -1].tolist(), strict=True)
        return tuple(f"{name}: {signed(x)}{'' if sure or x == 0 else f' ({BELOW})'}" for name, x, sure in last)

    @property
    def grid(self) -> tuple[list[str], list[str], list[list[float]], list[list[bool]]] | None:
        """Where groups are combinations of two things: rows, columns, and their effects at the last checkpoint; 0 where there is none."""
        if len(self.by) != 2:
            return None
        down, across = (list(dict.fromkeys(key[k] for key in self.keys)) for k in (0, 1))
        z, sure = np.zeros((len(down), len(across))), np.zeros((len(down), len(across)), bool)
        for i, (a, b) in enumerate(self.keys):
            place = down.index(a), across.index(b)
            z[place], sure[place] = float(self.mean[i, -1]), bool(self.mean_clear[i, -1])
        return down, across, z.tolist(), sure.tolist()

    def drawings(self) -> dict[str, figures.Figure]:
        """Bars at the last checkpoint; the groups as a matrix, or queries across; lines over the checkpoints."""
        last, sure = self.mean[:, -1].tolist(), self.mean_clear[:, -1].tolist()
        colours = [c if ok else figures.PLAIN for c, ok in zip(figures.signed(last), sure, strict=True)]
        bars = figures.across(self.groups, last, "change of the loss", colours=colours)
        grid = self.grid or (self.groups, self.queries, self.values[:, -1].tolist(), self.clear[:, -1].tolist())
        lines = dict(zip(self.groups, self.mean.tolist(), strict=True)) if len(self.checkpoints) > 1 else {}
        return figures.drawable(
            effects=bars, matrix=figures.matrix(*grid), checkpoints=figures.evolution(self.checkpoints, lines)
        )


@dataclass(frozen=True, repr=False)
class MoveEffects(GroupEffects):
    """The same for samples that come at another step than they did."""

    sign = (
        "positive: with the samples at the other step the query's loss would be higher, they did better where they "
        "were; negative: it would be lower"
    )
