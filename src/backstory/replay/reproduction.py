r"""Replay a run, and check at every step whether it is reproduced: bit for bit, or up to rounding.

A replay that follows the recording (`anchors`) is compared with it: the samples and the data of every step, their losses where they
were recorded, the gradient's norm, and the weights where they are stored. The same training rounds differently on another processor,
with another number of threads or another alignment of memory, so numbers that are not the run's bit for bit may still be those of a
faithful replay. How much, is measured: a twin of the replay starts one unit of the last place away in every weight, and a
difference from the run

    |replay − run|  ≤  10 |twin − replay|          counts as rounding

for every number of a step (the twin's largest so far), and for the weights tensor by tensor: Adam makes whole steps out of the rounding of gradients
that are 0 (a bias of attention's keys), which says nothing of the other weights. Tensors in which rounding has taken half of the
digits are therefore left out. Where it has taken half of the digits of everything, training is chaotic, and nothing can be told up to
the next stored checkpoint, from which replay and twin start anew.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture import fingerprint
from ..capture.fingerprint import weights as weights_of
from ..store.run_store import HasPath, RunStore, store_of
from .numbers import CLIP, LOSS, NORM, Meter, Numbers, Recorded
from .recipe import Recipe
from .tape import Progress, RecipeSource, Removal, State, Tape, index, own_randomness, places, restore, save, tell

MOST = 0.1  # of what training moved the weights by: rounding that explains more decides nothing
TWINS = 10  # how many times the twin's distance is still rounding: it is one draw, and starts from one rounding only
JUMP = 1e4  # times in one step: by more, rounding does not grow
ITSELF = (
    "two replays that differ by rounding only have other losses and gradients there, so the recipe does not repeat itself. "
    "Draw random numbers from the global generators of torch, Python or NumPy only"
)
CHECK = "check the recipe's arguments, its data and their order, its model and package versions"


class Gap(NamedTuple):
    """The tensor that is farthest from the run for what rounding explains; distances as parts of its length."""

    tensor: str
    replay: float  # from the run
    allowed: float
    moved: float = math.inf  # by training, as a part of all weights' length
    lost: bool = False  # rounding has taken half of the digits of most weights

    @property
    def rounding(self) -> bool:
        """Whether rounding explains the distance."""
        return self.replay <= self.allowed

    @property
    def decides(self) -> bool:
        """Whether another recipe would be seen: rounding explains little of what training does."""
        return self.allowed <= MOST * self.moved or not self.rounding


@dataclass(frozen=True)
class Departure:
    """Where a replay left the run."""

    step: int
    what: str  # what differs, and by how much
    until: int | None = None  # the checkpoint from which it starts anew; None: none follows

    def __str__(self) -> str:
        return f"the replay differs from the run at step {self.step}: {self.what}"


@dataclass(frozen=True)
class Reproduction:
    """At which steps a replay of the recipe reproduced the run."""

    same: tuple[int, ...] = ()  # steps whose stored weights are met bit for bit
    near: tuple[int, ...] = ()  # up to rounding
    undecided: tuple[int, ...] = ()  # not bit for bit, and nothing tells whether it is rounding
    gaps: Mapping[int, Gap] = field(default_factory=dict)  # at the steps whose weights were compared
    steps: int = 0  # that were compared one by one, and agree
    exact: bool = True  # bit for bit, all of them
    left: tuple[Departure, ...] = ()  # by more than rounding explains
    lost: tuple[
        tuple[int, int], ...
    ] = ()  # from a step to the next checkpoint: training is chaotic, nothing can be told

    def __bool__(self) -> bool:
        return bool(self.same or self.near or self.steps) and not self.left and not self.undecided

    def __str__(self) -> str:
        if self.left:
            return self._departure()
        if self.undecided:
            return self._open()
        if not (self.same or self.near or self.steps):
            return "nothing to compare: the run has no fingerprints of the replayed steps"
        how = "bit for bit" if self.exact and not self.near else "up to rounding"
        agreed = sorted((*self.same, *self.near))
        steps = f"step{'s' * (len(agreed) > 1)} {', '.join(map(str, agreed))}"
        weights = f"weights at {steps}" if agreed else "no weights are stored"
        return f"the replay reproduces the run {how} (compared at {self.steps} steps; {weights}){self._lost()}"

    def _departure(self) -> str:
        first, more = self.left[0], len(self.left) - 1
        agreed = f"steps 0 to {first.step - 1} agree" if first.step and self.steps else "no earlier step agrees"
        after = "" if first.until is None else f"; from the checkpoint at step {first.until} on it starts anew"
        again = f", and leaves the run {more} more times" if more else ""
        return f"{first} ({agreed}{after}{again}){self._lost()}. To fix it, {CHECK}"

    def _lost(self) -> str:
        if not self.lost:
            return ""
        spans = ", ".join(f"{lo} to {hi}" for lo, hi in self.lost)
        return (
            f". Training is chaotic in steps {spans}: rounding alone changes half of the digits there, so the replay "
            "cannot be compared until it starts anew from the next checkpoint"
        )

    def _open(self) -> str:
        step, agreed = self.undecided[0], [*self.same, *self.near]
        last = f"they last agree at step {max(agreed)}" if agreed else "they agree at no earlier step"
        begin = f"the replay's weights at step {step} are not bit-identical to the run's ({last})."
        if step in self.gaps:
            gap = self.gaps[step]
            return (
                f"{begin} {gap.tensor} has a relative error of {gap.replay:.1e}. Rounding explains {gap.allowed:.1e}, but "
                f"training moved the weights by only {gap.moved:.1e}, so another recipe could look the same: {CHECK}, "
                "or store the weights in float32"
            )
        return (
            f"{begin} A different processor, thread count or memory alignment can cause this, and so can a different "
            f"recipe. The run stores no weights to tell which (record with steps=…, checkpoints=K): {CHECK}"
        )


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
    stop: bool = True,
    progress: Progress | None = None,
) -> Reproduction:
    """Replay the recipe as the recording says, and compare every step and all stored weights with it.

    If everything is met bit for bit, this takes one replay. Else a second one, with a twin beside it, follows from the last stored
    checkpoint before. It ends where the replay leaves the run; with `stop=False` it goes on from the next stored checkpoint.
    """
    store = store_of(run)
    with own_randomness():
        tape = Tape(recipe, args=args, length=until, run=store)
        comparison = _Comparison(store, tape)
        with Meter(tape, store.config["optimizer"]) as meter:
            found = comparison.bit_for_bit(meter, progress)
        if found is None:
            return comparison.result()
        twin = Tape(recipe, args=args, length=until, run=store)
        with Meter(tape, store.config["optimizer"]) as meter, Meter(twin, store.config["optimizer"]) as beside:
            comparison.up_to_rounding(found, (meter, beside), twin, stop, progress)
    return comparison.result()


def reproduces(run: HasPath, recipe: RecipeSource, *, args: Mapping[str, Any] | None = None) -> bool:
    """Whether the recipe's replay reproduces the run, up to rounding, at every step that can be compared (at least one)."""
    return bool(reproduction(run, recipe, args=args))


def fingerprints(run: HasPath) -> dict[int, str]:
    """Steps in order, and the fingerprints of the run's weights there."""
    known = store_of(run).config.get("fingerprints", {})
    return {int(t): word for t, word in sorted(known.items(), key=lambda x: int(x[0]))}


class _Comparison:
    """A replay beside the recording, first bit for bit, then up to rounding."""

    def __init__(self, store: RunStore, tape: Tape) -> None:
        self.store, self.tape = store, tape
        stands = bool(store.config.get("from_checkpoints"))  # its steps were taken at other weights than training's
        self._recorded = None if stands else Recorded(store, tape.length)
        self._marks = {t: x for t, x in fingerprints(store).items() if t <= tape.length}
        self._unit = max(torch.finfo(p.dtype).eps for p in tape.parameters)
        self._matched = False  # a checksum of a batch has been met: the recipe calls its model as training did
        self._so_far = Reproduction()
        self._aside = False  # whether the twin has left the replay
        self._start: Mapping[str, Tensor] = {}  # weights where replay and twin last started
        self._spread: dict[str, float] = {}  # the twin's largest distances since then

    def result(self) -> Reproduction:
        """What was found."""
        return self._so_far

    def bit_for_bit(self, meter: Meter, progress: Progress | None) -> tuple[int, State] | None:
        """Play the run until something is not the run's bit for bit; where it last started anew then, None where all is."""
        tape, last = self.tape, (0, save(self.tape.recipe))
        if not self._met(0):
            return last
        for t in range(tape.length):
            now = meter.take(t)
            if self._recorded is not None and not self._identical(self._recorded[t], now):
                return last
            self._note(steps=self._so_far.steps + (self._recorded is not None))
            if not self._met(t + 1):
                return last
            tape.arrive(t + 1)
            if t + 1 in tape.anchored:
                last = t + 1, save(tape.recipe)
            tell(progress, t + 1, tape.length)
        return None

    def _met(self, t: int) -> bool:
        """Whether the weights before step t are the run's bit for bit, where it knows them."""
        same = t not in self._marks or fingerprint(self.tape.recipe.model) == self._marks[t]
        if t in self._marks and same:
            self._note(same=(*self._so_far.same, t))
        return same

    def _identical(self, run: Numbers, replay: Numbers) -> bool:
        self._matched |= run.batch is not None and run.batch == replay.batch
        plain = self._plain(run, replay) is None and not any(replay.apart(run).values())
        return plain and (run.batch in (None, replay.batch) or LOSS in replay.apart(run))

    def _note(self, **changes: Any) -> None:
        self._so_far = replace(self._so_far, **changes)

    def up_to_rounding(
        self, begin: tuple[int, State], meters: Sequence[Meter], twin: Tape, stop: bool, progress: Progress | None
    ) -> None:
        """Play replay and twin from there; the first departure ends it, or they go on from the next checkpoint."""
        first, state = begin
        tape, astray = self.tape, False
        self._note(
            same=tuple(t for t in self._so_far.same if t <= first), steps=first if self._recorded else 0, exact=False
        )
        for each in (tape, twin):
            restore(each.recipe, state)
            each.arrive(first)
        self._part(twin)
        for t in range(first, tape.length):
            now, beside = (meter.take(t) for meter in meters)
            self._aside = self._aside or shift(twin.parameters)
            if not astray and self._recorded is not None:
                self._judge_step(t, self._recorded[t], now, beside)
            astray = self._weigh(t + 1, twin, bool(self._left_at(t)) or astray)
            if astray and stop:
                return
            for each in (tape, twin):
                each.arrive(t + 1)
            if t + 1 in tape.anchored:
                astray = False
                self._part(twin)
            tell(progress, t + 1, tape.length)

    def _part(self, twin: Tape) -> None:
        """Replay and twin stand at one state of training: the twin takes a step aside."""
        self._aside = shift(twin.parameters)
        self._start, self._spread = weights_of(self.tape.recipe.model), {}

    def _left_at(self, t: int) -> bool:
        return bool(self._so_far.left) and self._so_far.left[-1].step == t

    def _judge_step(self, t: int, run: Numbers, replay: Numbers, twin: Numbers) -> None:
        """Whether rounding explains what a step of the replay has other than the run."""
        beside, before = twin.apart(replay), self._spread
        usual = max(beside[LOSS], beside[NORM])  # what one of them has of rounding, the others may have
        self._spread = {name: max(before.get(name, self._unit), usual, x) for name, x in beside.items()}
        jumps = all(beside[name] > JUMP * before.get(name, self._unit) for name in (LOSS, NORM))
        self._matched |= run.batch is not None and run.batch == replay.batch
        apart = replay.apart(run)
        lost = all(self._spread[name] > self._unit**0.5 for name in apart if name != CLIP)
        wrong = [] if lost else [k for k, x in apart.items() if x > TWINS * self._spread[k]]
        data = run.batch not in (None, replay.batch)
        if wrong == [LOSS] and run.batch is not None and not data:
            wrong = []  # the same data and the same gradient: what was recorded is another number
        unseen = data and (self._matched if lost else bool(wrong) or LOSS not in apart)
        if (plain := self._plain(run, replay)) or jumps or unseen or wrong:
            self._leave(t, plain or (ITSELF if jumps else self._what(run, replay, unseen, wrong)))
        elif lost:
            self._lose(t)
        else:
            self._note(steps=self._so_far.steps + 1)

    def _plain(self, run: Numbers, replay: Numbers) -> str | None:
        """What needs no measure of rounding."""
        if run.ids != replay.ids:
            i = next((i for i, pair in enumerate(zip(run.ids, replay.ids, strict=False)) if pair[0] != pair[1]), -1)
            there, here = (
                f"{len(x)} samples" if i < 0 else f"sample {x[i]} at position {i}" for x in (run.ids, replay.ids)
            )
            return f"the recipe has {here}, the run used {there}. The data or their order differ"
        if run.decays != replay.decays and self.store.config["optimizer"].get("modelled_as") != "sgd":
            now, then = next((a, b) for a, b in zip(replay.decays, run.decays, strict=True) if a != b)
            return f"weight decay is {now:g} in the recipe, and was {then:g} in the run"
        return None

    def _what(self, run: Numbers, replay: Numbers, data: bool, wrong: Sequence[str]) -> str:
        if data:
            return (
                "the model gets other data than in training (the checksums of the batch differ): the data or their order "
                "differ, or the recipe's loss calls the model with other tensors"
            )
        apart, name = replay.apart(run), NORM if NORM in wrong and LOSS not in wrong else wrong[0]
        return _sized(name, apart[name], TWINS * self._spread[name])

    def _leave(self, t: int, what: str) -> None:
        self._note(left=(*self._so_far.left, Departure(t, what, self._restart(t))))

    def _lose(self, t: int) -> None:
        spans, to = self._so_far.lost, self._restart(t) or self.tape.length
        if not spans or spans[-1][1] <= t:
            self._note(lost=(*spans, (t, to)))

    def _restart(self, t: int) -> int | None:
        return min((x for x in self.tape.anchored if t < x < self.tape.length), default=None)

    def _weigh(self, t: int, twin: Tape, astray: bool) -> bool:
        """Compare the weights before step t with those that are stored; whether the replay has left the run."""
        if t not in self._marks or astray:
            return astray
        if t not in self.store.checkpoints():
            if self._recorded is None and fingerprint(self.tape.recipe.model) != self._marks[t]:
                self._note(undecided=(*self._so_far.undecided, t))
            return False
        gap = _gap(self.store, t, self.tape, twin, self._start)
        self._note(gaps={**self._so_far.gaps, t: gap})
        if gap.replay == 0:
            self._note(same=(*self._so_far.same, t))
        elif not gap.rounding and not gap.lost:
            self._leave(t, _sized(gap.tensor, gap.replay, gap.allowed))
            return True
        elif not gap.rounding:
            self._lose(t - 1)
        elif not gap.decides:
            self._note(undecided=(*self._so_far.undecided, t))
        else:
            self._note(near=(*self._so_far.near, t))
        return False


def _sized(what: str, size: float, allowed: float) -> str:
    return f"{what} has a relative error of {size:.1e}, and rounding explains {allowed:.1e}"


def shift(parameters: Sequence[Tensor], twin: int = 0) -> bool:
    """Move every weight by one unit of the last place, up or down as a coin says that is seeded by the twin's number.

    False where all are 0 and stay so: then the twin must take its step aside after the first update.
    """
    coin = torch.Generator().manual_seed(twin)
    with torch.no_grad():
        for p in parameters:
            up = torch.randint(0, 2, p.shape, generator=coin).to(p)
            p.mul_(1 + torch.finfo(p.dtype).eps * (2 * up - 1))
        return any(bool(p.any()) for p in parameters)


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
    lost = 2 * sum(sizes[k] for k in sure) < sum(sizes.values())
    if lost:
        sure, allowed = list(allowed), {k: min(x, most) for k, x in allowed.items()}
    sure += [k for k in apart if k not in spread]
    worst = max(sure, key=lambda k: apart[k] / max(allowed.get(k, 0.0), 1e-300))
    return Gap(worst, apart[worst], allowed.get(worst, 0.0), lost=lost)


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
