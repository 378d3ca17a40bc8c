"""What a recording keeps for replays of the run beside its data: random states, the state of training at checkpoints, the time of a step.

Random states are kept before a step only where something was drawn since the step before (a new epoch's order, an augmentation):
what steps draw themselves (dropout) is drawn again by going on from there.
"""

import time
from array import array
from collections.abc import Sequence
from statistics import median

from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.optimizer_state import optimizer_bytes, optimizer_state
from ..capture.randomness import KINDS, Followed, Generators, generators, pack
from ..replay.anchors import RANDOM
from ..store import RunStore


class Draws:
    """Follows the random generators from step to step."""

    def __init__(self, known: Sequence[int] | None) -> None:
        self._known = None if known is None else tuple(known)  # checksums after the last recorded step
        self._followed = Followed()
        self.states, _ = self._followed.now()  # after it

    def before(self) -> bytes | None:
        """The states of a step that begins, packed: of the generators that were drawn from since the step before."""
        now, found = self._followed.now()
        if found == self._known:
            return None
        sums = dict(zip(KINDS, found, strict=True))
        known = dict(zip(KINDS, self._known or (None,) * len(KINDS), strict=True))
        drawn = {kind: state for kind, state in now.items() if sums[kind] != known[kind]}
        return pack(drawn) if drawn else None

    def after(self) -> tuple[int, ...]:
        """Checksums of the states now, at the end of a step."""
        self._now, sums = self._followed.now()
        return sums

    def keep(self, sums: Sequence[int]) -> None:
        """The step that ended so is recorded."""
        self._known, self.states = tuple(sums), self._now


def known_draws(store: RunStore, at: int) -> Sequence[int] | None:
    """Checksums of the random states after the step before `at`, from the run; None at its start."""
    if at == 0:
        return None
    if at <= store.n_steps():
        sums: list[int] = store.steps(at - 1, at).generators[0].tolist()
        return sums
    spooled: list[int] = store.spool.get(at - 1)[1]["generators"]
    return spooled


def training_state(model: nn.Module, optimizer: Optimizer, random: Generators) -> dict[str, Tensor] | None:
    """All that training goes on from beside the weights; None where the optimizer's state is not made of tensors and numbers."""
    state = optimizer_state(model, optimizer)
    return None if state is None else {**state, **random_state(random)}


def random_state(random: Generators) -> dict[str, Tensor]:
    """Random states under the names that they have in a stored state."""
    return {RANDOM + kind: x for kind, x in random.items()}


def checkpoint_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What one checkpoint takes: weights, the optimizer's state, random states."""
    weights: int = sum(x.nbytes for x in model.state_dict().values())
    return weights + optimizer_bytes(optimizer) + sum(x.nbytes for x in generators().values())


class Stopwatch:
    """Seconds of training in each step, without what recording does at its end; data that is fetched before counts too.

    `on_cpu` counts the training thread's own processor time, so that a busy machine, or a wait for data, does not make training look slow.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        self._seconds, self._on_cpu = array("d"), on_cpu
        self._since: float | None = None

    def begin(self) -> None:
        """The first step begins; later ones have begun when the one before was over."""
        self._since = self._now() if self._since is None else self._since

    def stop(self) -> float:
        """The step's own work is done; its seconds."""
        assert self._since is not None
        return self._now() - self._since

    def keep(self, seconds: float) -> None:
        """The step is recorded."""
        self._seconds.append(seconds)

    def over(self) -> None:
        """Recording has done its work too."""
        self._since = self._now()

    def _now(self) -> float:
        return time.thread_time() if self._on_cpu else time.perf_counter()

    @property
    def median(self) -> float | None:
        """Of the steps; None where there was none."""
        return median(self._seconds) if self._seconds else None
