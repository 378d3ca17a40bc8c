"""Which occurrences a counterfactual run leaves out, and where they stand in the batches."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError

Id = int | str
Places = dict[int, list[int]]  # step -> positions in its batch


@dataclass(frozen=True)
class Removal:
    """Which occurrences to leave out: these samples, everywhere or in these steps only.

    `share` is how much of their weight goes, w → (1 − share) w: 1 leaves them out, −1e-5 adds a little.
    """

    samples: tuple[Id, ...]
    steps: tuple[int, ...] | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.share) or self.share == 0:
            raise UsageError(f"found share={self.share} in a removal; expected a finite number other than 0.")
        object.__setattr__(self, "samples", tuple(_plain(x) for x in self.samples))

    def hits(self, step: int, ids: Sequence[Id]) -> list[int]:
        """Positions of the removed samples in the batch of `step`."""
        if self.steps is not None and step not in self.steps:
            return []
        return [i for i, x in enumerate(ids) if _plain(x) in self.samples]


def _plain(name: Any) -> Id:
    """An id out of a tensor or an array as the number it is."""
    plain: Id = name.item() if hasattr(name, "item") else name
    return plain


def index(ids: Sequence[Sequence[Id]]) -> dict[Id, list[tuple[int, int]]]:
    """Sample -> its occurrences `(step, position)`, for the ids of each step."""
    found: dict[Id, list[tuple[int, int]]] = defaultdict(list)
    for step, names in enumerate(ids):
        for position, name in enumerate(names):
            found[_plain(name)].append((step, position))
    return found


def places(removal: Removal, occurrences: dict[Id, list[tuple[int, int]]]) -> Places:
    """Where the removal bites, earliest step first; an error where it does nothing."""
    steps = None if removal.steps is None else set(removal.steps)
    found: Places = defaultdict(list)
    for name in dict.fromkeys(removal.samples):
        for step, position in occurrences.get(name, ()):
            if steps is None or step in steps:
                found[step].append(position)
    if not found:
        raise UsageError(f"none of the samples {removal.samples[:3]} occurs in the steps asked for; nothing to remove.")
    return {step: sorted(found[step]) for step in sorted(found)}
