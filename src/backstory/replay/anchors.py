"""What a recording knows of its training, put into a replay: learning rates, random states, and the whole state at stored checkpoints.

A replay that starts anew at every such checkpoint does not add up rounding over a long run.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adafactor, Optimizer

from ..capture.model_state import load_weights
from ..capture.optimizer_state import load_optimizer_state
from ..capture.randomness import Generators, generators, seed, unpack
from ..errors import MismatchError, UsageError
from ..store import RunStore
from .recipe import Recipe
from .update import READERS

RANDOM = "random/"  # names of random states in a stored state begin so


class Anchors:
    """A recorded run, as its replay needs it."""

    def __init__(self, store: RunStore, optimizer: Optimizer, length: int) -> None:
        self._store, known = store, store.n_steps()
        if length > known:
            raise UsageError(f"the replay has {length} steps, but the run has {known}. Replay up to one of its steps.")
        groups = store.steps(0, length).groups
        self._rates, self._momenta = groups["rate"], groups["momentum"]
        if (there := len(optimizer.param_groups)) != store.config["groups"]:
            raise MismatchError(
                f"the recipe's optimizer has {there} parameter groups, but the run was trained with "
                f"{store.config['groups']}. Build the optimizer as in training."
            )
        self._drawn = store.random_states(0, length)
        self.steps = {t for t in store.restarts() if t <= length}  # where the replay starts anew

    def set_rates(self, t: int, optimizer: Optimizer) -> None:
        """The learning rates of step t as they were recorded, and the momenta where they are followed.

        Of torch's own optimizers only: what another one's reader calls its rate need not be its `lr`.
        """
        if type(optimizer) not in (*READERS, Adafactor):
            return
        for group, rate, momentum in zip(optimizer.param_groups, self._rates[t], self._momenta[t], strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)
            if momentum and "momentum" in group:  # 0 is recorded where a buffer begins
                group["momentum"] = float(momentum)
            elif momentum and "betas" in group:
                group["betas"] = (float(momentum), group["betas"][1])

    def before(self, t: int, end: Generators) -> Generators:
        """The random states before the forward pass of step t, where those after the step before are `end`."""
        return {**end, **unpack(self._drawn[t])} if t in self._drawn else end

    def drew(self, t: int) -> bool:
        """Whether something was drawn between step t and the one before."""
        return t in self._drawn

    def first(self) -> Generators:
        """The random states before the first batch was fetched, where they are stored."""
        return _random(self._store.load_state(0)) if "state-00000000" in self._store.tensor_names() else {}

    def restore(self, t: int, recipe: Recipe) -> Generators:
        """The state of training before step t, in the precision of the recipe's model; returns the random states."""
        load_weights(recipe.model, self._store.load_checkpoint(t))
        state = self._store.load_state(t)
        entries = {name: x for name, x in state.items() if not name.startswith(RANDOM)}
        load_optimizer_state(recipe.model, recipe.optimizer, entries)
        recipe.optimizer.zero_grad()
        return _random(state)


def _random(state: dict[str, Tensor]) -> Generators:
    return {name.removeprefix(RANDOM): x for name, x in state.items() if name.startswith(RANDOM)}


class Fetched(Sequence[Any]):
    """The batches of a recipe, each fetched with the random states that training had then; the last one stays.

    `before(t)` gives these states, or None where they are not known. Whoever fetches finds the generators as they were.
    """

    def __init__(
        self, batches: Sequence[tuple[Sequence[int | str], Any]], before: Callable[[int], Generators | None]
    ) -> None:
        self._batches, self._before = batches, before
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, step: Any) -> Any:
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        now, states = generators(), self._before(step)
        try:
            seed(states or {})
            batch = self._batches[step]
        finally:
            seed(now)
        self._last = None if states is None else (step, batch)
        return batch
