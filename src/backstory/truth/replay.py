"""A run played again, and whether it came out the same, bit for bit.

Knows nothing of removals' effects, queries or caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..capture import fingerprint
from ..errors import UsageError
from ..session.recipe import Recipe
from ..session.run import Run
from .removal import Removal, index, places
from .tape import Make, Progress, Tape, own_randomness


@dataclass(frozen=True)
class Reproduction:
    """Which stored weights of a run a replay of its recipe met, bit for bit."""

    same: tuple[int, ...]  # steps
    different: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.same) and not self.different

    def __str__(self) -> str:
        if not self.same and not self.different:
            return "nothing to compare: the run has no fingerprints of the replayed steps"
        if self:
            return f"the replay reproduces the run bit for bit (compared at steps {', '.join(map(str, self.same))})"
        return (
            f"the replay differs from the run at step {self.different[0]} and was last the same at "
            f"{self.same[-1] if self.same else 'none'}: check the recipe's arguments, its seed (dropout draws from "
            "torch's generator), the number of threads and the versions"
        )


def replay(
    make: Make,
    removal: Removal | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """The recipe with its model trained, as the run trained it, or without the removal's occurrences."""
    with own_randomness():
        tape = Tape(make, args=args, dtype=dtype, length=until)
        if removal is None:
            tape.record((), progress)
            return tape.recipe
        gone = places(removal, index(tape.ids))
        tape.record([min(gone)], progress)
        for t in range(tape.rewind(min(gone)), tape.length):
            tape.step(t, tape.without(t, gone, removal.share))
    return tape.recipe


def reproduction(
    run: Run,
    make: Make,
    *,
    args: Mapping[str, Any] | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Replay the recipe and compare the weights with the fingerprints that the run stored."""
    known = {int(step): word for step, word in run.config.get("fingerprints", {}).items()}
    same: list[int] = []
    different: list[int] = []
    with own_randomness():
        tape = Tape(make, args=args, length=until)
        if tape.length < run.n_steps and until is None:
            raise UsageError(f"the recipe has {tape.length} steps, the run {run.n_steps}; give the run's own recipe.")

        def watch(t: int) -> None:
            if t in known:
                (same if fingerprint(tape.recipe.model) == known[t] else different).append(t)

        tape.record((), progress, watch)
    return Reproduction(tuple(same), tuple(different))


def reproduces(run: Run, make: Make, *, args: Mapping[str, Any] | None = None) -> bool:
    """Whether the recipe's replay meets every fingerprint of the run, and there is at least one."""
    return bool(reproduction(run, make, args=args))
