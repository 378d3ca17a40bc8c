r"""Replay a run, and check whether it is reproduced: bit for bit, or up to rounding.

The same training rounds differently on another processor, with another number of threads or another alignment of
memory, so weights that are not the run's bit for bit may still be those of a faithful replay. Where the run stored the
weights themselves, rounding is measured: a twin of the replay starts one unit of the last place away in every weight,
and with θ the weights of one tensor before a step

    ‖θ(replay) − θ(run)‖  ≤  10 ‖θ(twin) − θ(replay)‖          counts as rounding

tensor by tensor: Adam makes whole steps out of the rounding of gradients that are 0 (a bias of attention's keys), which
says nothing of the other weights. Tensors in which rounding has taken half of the digits are therefore left out.
Where the run has fingerprints only, a mismatch does not say which of the two it was.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture import fingerprint
from ..capture.fingerprint import weights as weights_of
from ..errors import UsageError
from ..store.run_store import HasPath, RunStore, store_of
from .recipe import Recipe, take_step
from .tape import Progress, RecipeSource, Removal, Tape, generators, index, own_randomness, places, seed, tell

MOST = 0.1  # of what training moved the weights by: rounding that explains more decides nothing
TWINS = 10  # how many times the twin's distance is still rounding: it is one draw, and starts from one rounding only
CHECK = "check the recipe's arguments, its seed (dropout draws from torch's generator) and package versions"


class Gap(NamedTuple):
    """The tensor that is farthest from the run for what rounding explains; distances as parts of its length."""

    tensor: str
    replay: float  # from the run
    allowed: float
    moved: float = math.inf  # by training, as a part of all weights' length

    @property
    def rounding(self) -> bool:
        """Whether rounding explains the distance."""
        return self.replay <= self.allowed

    @property
    def decides(self) -> bool:
        """Whether another recipe would be seen: rounding explains little of what training does."""
        return self.allowed <= MOST * self.moved or not self.rounding


@dataclass(frozen=True)
class Reproduction:
    """At which steps a replay of the recipe reproduced the run's stored weights."""

    same: tuple[int, ...]  # steps: bit for bit
    different: tuple[int, ...] = ()  # by more than rounding explains
    near: tuple[int, ...] = ()  # up to rounding
    undecided: tuple[int, ...] = ()  # not bit for bit, and nothing tells whether it is rounding
    gaps: Mapping[int, Gap] = field(default_factory=dict)  # at the steps whose weights were compared

    def __bool__(self) -> bool:
        return bool(self.same or self.near) and not self.different and not self.undecided

    def __str__(self) -> str:
        agreed = sorted((*self.same, *self.near))
        last = f"they last agree at step {agreed[-1]}" if agreed else "they agree at no earlier step"
        if self.different:
            gap = self.gaps[self.different[0]]
            return (
                f"the replay differs from the run at step {self.different[0]}: {gap.tensor} has a relative error of "
                f"{gap.replay:.1e}, and rounding explains {gap.allowed:.1e} ({last}). To fix it, {CHECK}"
            )
        if self.undecided and self.undecided[0] in self.gaps:
            gap = self.gaps[self.undecided[0]]
            return (
                f"the replay's weights at step {self.undecided[0]} are not bit-identical to the run's ({last}). "
                f"{gap.tensor} has a relative error of {gap.replay:.1e}. Rounding explains {gap.allowed:.1e}, but "
                f"training moved the weights by only {gap.moved:.1e}, so another recipe could look the same: {CHECK}, "
                "or store the weights in float32"
            )
        if self.undecided:
            return (
                f"the replay's weights at step {self.undecided[0]} are not bit-identical to the run's ({last}). A "
                "different processor, thread count or memory alignment can cause this, and so can a different "
                f"recipe. The run stores no weights to tell which (record with steps=…, checkpoints=K): {CHECK}"
            )
        if not agreed:
            return "nothing to compare: the run has no fingerprints of the replayed steps"
        how = "up to rounding" if self.near else "bit for bit"
        return f"the replay reproduces the run {how} (compared at steps {', '.join(map(str, agreed))})"


def replay(
    recipe: RecipeSource,
    removal: Removal | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """Train the recipe's model as in the run, or without the removal's occurrences, and return the recipe."""
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, length=until)
        if removal is None:
            tape.record((), progress)
            return tape.recipe
        gone = places(removal, index(tape.ids))
        tape.record([min(gone)], progress)
        for t in range(tape.rewind(min(gone)), tape.length):
            tape.step(t, tape.without(t, gone, removal.share))
    return tape.recipe


def reproduction(
    run: HasPath,
    recipe: RecipeSource,
    *,
    args: Mapping[str, Any] | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Replay the recipe and compare the weights with what the run stored: fingerprints, then the weights themselves.

    If all fingerprints match, this takes one replay; otherwise it stops at the first that does not, and two more follow.
    """
    known = fingerprints(run)
    with own_randomness():
        tape = Tape(recipe, args=args, length=until)
        if tape.length < (steps := store_of(run).n_steps()) and until is None:
            raise UsageError(f"the recipe has {tape.length} steps, but the run has {steps}. Pass the run's own recipe.")
        for t in _side_by_side((tape,), progress):
            if t in known and fingerprint(tape.recipe.model) != known[t]:
                return judge(run, recipe, t, args=args, until=until, progress=progress)
    return Reproduction(tuple(t for t in known if t <= tape.length))


def reproduces(run: HasPath, recipe: RecipeSource, *, args: Mapping[str, Any] | None = None) -> bool:
    """Whether the recipe's replay reproduces the run, up to rounding, at every step that can be compared (at least one)."""
    return bool(reproduction(run, recipe, args=args))


def fingerprints(run: HasPath) -> dict[int, str]:
    """Steps in order, and the fingerprints of the run's weights there."""
    known = store_of(run).config.get("fingerprints", {})
    return {int(t): word for t, word in sorted(known.items(), key=lambda x: int(x[0]))}


def judge(
    run: HasPath,
    recipe: RecipeSource,
    step: int,
    *,
    args: Mapping[str, Any] | None = None,
    until: int | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Whether it is rounding that the weights before `step` are the first which are not the run's bit for bit.

    Where the run stores weights there or later, two replays side by side tell, up to the first weights that differ.
    """
    store = store_of(run)
    checkpoints, end = set(store.checkpoints()), store.n_steps() if until is None else until
    if not any(step <= t <= end for t in checkpoints):
        return Reproduction(tuple(t for t in fingerprints(run) if t < step), undecided=(step,))
    with own_randomness():
        tape, twin = (Tape(recipe, args=args, length=end) for _ in range(2))
        shift(twin.parameters)
        start = weights_of(tape.recipe.model)
        gaps = dict[int, Gap]()
        for t in _side_by_side((tape, twin), progress):
            if t in checkpoints:
                gaps[t] = _gap(store, t, tape, twin, start)
            if t in checkpoints and not gaps[t].rounding:
                break
    same = tuple(t for t, gap in gaps.items() if gap.replay == 0)
    different = tuple(t for t, gap in gaps.items() if not gap.rounding)
    undecided = tuple(t for t, gap in gaps.items() if t > 0 and t not in same and not gap.decides)
    near = tuple(t for t in gaps if t not in same + different + undecided)
    return Reproduction(same, different, near, undecided, gaps)


def _side_by_side(tapes: Sequence[Tape], progress: Progress | None) -> Iterator[int]:
    """Play the tapes together, with the same random draws; gives each step before it is taken, and the end."""
    seed(tapes[0].generators[0])
    for t in range(tapes[0].length):
        yield t
        before = generators()
        for tape in tapes:
            seed(before)
            take_step(tape.recipe, t)
        tell(progress, t + 1, tapes[0].length)
    yield tapes[0].length


def shift(parameters: Sequence[Tensor], twin: int = 0) -> None:
    """Move every weight by one unit of the last place, up or down as a coin says that is seeded by the twin's number."""
    coin = torch.Generator().manual_seed(twin)
    with torch.no_grad():
        for p in parameters:
            up = torch.randint(0, 2, p.shape, generator=coin).to(p)
            p.mul_(1 + torch.finfo(p.dtype).eps * (2 * up - 1))


def _gap(store: RunStore, step: int, tape: Tape, twin: Tape, start: Mapping[str, Tensor]) -> Gap:
    stored, replayed = store.load_checkpoint(step), weights_of(tape.recipe.model)
    unit = max(torch.finfo(p.dtype).eps for p in tape.parameters)
    apart, spread = _distances(replayed, stored), _distances(weights_of(twin.recipe.model), replayed)
    gap = farthest(apart, spread, {k: v.numel() for k, v in replayed.items()}, unit**0.5)
    return gap._replace(moved=_distance(_joined(stored), _joined(start)))


def _joined(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([x.double().flatten() for _, x in sorted(weights.items()) if x.is_floating_point()])


def farthest(apart: Mapping[str, float], spread: Mapping[str, float], sizes: Mapping[str, int], most: float) -> Gap:
    """The worst of the tensors, for distances from the run and of the twins; `most` is half of the digits.

    A tensor of a few numbers may be near its twin by chance, so each is allowed what the tensor in the middle is.
    """
    usual = median([x for x in spread.values() if x > 0] or [0.0])
    allowed = {k: TWINS * max(x, usual) for k, x in spread.items()}
    sure = [k for k, x in allowed.items() if x <= most]
    if 2 * sum(sizes[k] for k in sure) < sum(sizes.values()):
        sure, allowed = list(allowed), {k: min(x, most) for k, x in allowed.items()}
    sure += [k for k in apart if k not in spread]
    worst = max(sure, key=lambda k: apart[k] / max(allowed.get(k, 0.0), 1e-300))
    return Gap(worst, apart[worst], allowed.get(worst, 0.0))


def _distances(replayed: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, float]:
    """‖replayed − stored‖ / ‖stored‖ of each tensor; infinite where they cannot be compared, or whole numbers differ."""
    return {k: _distance(replayed.get(k), stored.get(k)) for k in sorted({*replayed, *stored})}


def _distance(x: Tensor | None, y: Tensor | None) -> float:
    if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
        return math.inf
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else math.inf
    apart, length = float((x.double() - y.double()).norm()), float(y.double().norm())
    return apart / length if length else apart
