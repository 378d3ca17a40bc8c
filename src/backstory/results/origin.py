"""Whether a result's values are exact or from the recording, and what would make recorded ones exact, in plain sentences.

Exact: the derivative through every step of the replayed training. From the recording: projected gradients and recorded curvature.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from .words import METHODS, command_on, describe_duration, name_method

EXACT = "exact unrolling"
BY_REPLAY = "Exact: computed through the replayed training."
IN_SHORT = "Exact, through the replayed training."
IN_PART = "Partly exact, partly from the recording."
NEEDS_RECIPE = (
    "Exact values need a recipe, a function that rebuilds the training run for replay, and the run names none: "
    "`{} --recipe package.module:function`."
)
UNNAMED = ", where NAME is a query set of the recipe or of the run (run.add_queries)"


def is_exact(method: str) -> bool:
    """Whether values by this method are exact."""
    return method == EXACT


def describe_origin(methods: Sequence[str]) -> str:
    """Where values come from that were computed by these methods; empty for baselines, which have names of their own."""
    exact = [is_exact(m) for m in methods]
    if any(exact):
        return BY_REPLAY if all(exact) else IN_PART
    recorded = [name_method(m) for m in dict.fromkeys(methods) if m in METHODS]
    return f"From the recording, by {' and '.join(recorded)}." if recorded else ""


def describe_mixture(methods: Sequence[str], names: Sequence[str], what: str) -> tuple[str, ...]:
    """Which of some values are exact and which are not, where both are there; else nothing."""
    sides = [[n for n, m in zip(names, methods, strict=True) if is_exact(m) == side] for side in (True, False)]
    if not all(sides):
        return ()
    exact, recorded = (", ".join(side) for side in sides)
    return (f"{what}: {exact} exact; {recorded} from the recording, which differs in size, most of all early",)


@dataclass(frozen=True)
class Sweep:
    """One exact computation that is not stored yet."""

    run: str | Path
    queries: str | None  # NAME or NAME:INDEX, where they have one
    each: bool  # every query of the set by itself
    at: int | None  # None: the final model
    seconds: float | None  # that it would take, where that is known

    @property
    def command(self) -> str:
        """The command that computes it."""
        step = [] if self.at is None else ["--at", str(self.at)]
        each = ["--each"] if self.each else []
        return command_on(self.run, "exact", "--queries", self.queries or "NAME", *each, *step)


@dataclass(frozen=True)
class Remedy:
    """What would make a recorded result exact."""

    sweeps: tuple[Sweep, ...]
    recipe: bool = True  # whether the run names one

    def __str__(self) -> str:
        """One sentence: the command, and how long it takes."""
        if not self.recipe:
            return NEEDS_RECIPE.format(self.sweeps[0].command)
        known = [x.seconds for x in self.sweeps if x.seconds is not None]
        time = f" (about {describe_duration(sum(known))})" if len(known) == len(self.sweeps) else ""
        unnamed = UNNAMED if any(x.queries is None for x in self.sweeps) else ""
        return f"To get exact values: `{self.sweeps[0].command}`{self._others()}{time}{unnamed}."

    def _others(self) -> str:
        first, *rest = self.sweeps
        sets = list(dict.fromkeys(str(x.queries) for x in rest if x.queries != first.queries))
        steps = list(dict.fromkeys("final" if x.at is None else str(x.at) for x in rest if x.at != first.at))
        more = [f"--queries {quote(x)}" for x in sets] + [f"--at {x}" for x in steps]
        return f", and the same with {', '.join(more)}" if more else ""


def join_remedies(remedies: Iterable[Remedy | None]) -> Remedy | None:
    """What would make all parts of a result exact."""
    known = [x for x in remedies if x is not None]
    sweeps = dict.fromkeys(sweep for x in known for sweep in x.sweeps)
    return Remedy(tuple(sweeps), all(x.recipe for x in known)) if known else None
