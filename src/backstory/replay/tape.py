r"""One pass over a recipe that records what a later replay needs to be identical except for the removal.

Of each step the states of the random generators before it (dropout draws the same masks again) and the coefficients of
the update; of chosen steps the whole state of training. The recipe is made, and the run begins, with torch's generator
at a fixed seed; a recipe that draws (dropout) seeds the generator itself, as its training did. A replay may leave occurrences
out, and may run in another floating-point precision.

With the run that the recipe rebuilds, the replay follows its recording (`anchors`): learning rates and random states are the recorded
ones, and at every stored checkpoint it starts anew from there.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..capture import fingerprint
from ..capture.randomness import Generators, after
from ..capture.randomness import generators as generators
from ..capture.randomness import own_randomness as own_randomness
from ..capture.randomness import seed as seed
from ..errors import UsageError
from ..store import RunStore
from . import update
from .anchors import Anchors, Fetched
from .recipe import Recipe, load_recipe, take_step, weights

Id = int | str
Places = dict[int, list[int]]  # step -> positions in its batch
RecipeSource = Callable[[], Recipe] | str  # a function, or "package.module:function"
Progress = Callable[[int, int], None]
State = dict[str, Any]
STATE_BYTES = 1 << 30  # what the states in memory may take together


@dataclass(frozen=True)
class Removal:
    """Which occurrences to leave out: these samples, everywhere or in these steps only.

    `share` is the share of their weight that is removed, w → (1 − share) w: 1 leaves them out, −1e-5 adds a little.
    """

    samples: tuple[Id, ...]
    steps: tuple[int, ...] | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.share) or self.share == 0:
            raise UsageError(f"share of a removal must be finite and not 0, got {self.share}.")
        object.__setattr__(self, "samples", tuple(_plain(x) for x in self.samples))


def _plain(name: Any) -> Id:
    """An id out of a tensor or an array as the number it is."""
    plain: Id = name.item() if hasattr(name, "item") else name
    return plain


def index(ids: Sequence[Sequence[Id]]) -> dict[Id, list[tuple[int, int]]]:
    """Sample -> its occurrences `(step, position)`, for the ids of each step."""
    occurrences: dict[Id, list[tuple[int, int]]] = defaultdict(list)
    for step, names in enumerate(ids):
        for position, name in enumerate(names):
            occurrences[_plain(name)].append((step, position))
    return occurrences


def places(removal: Removal, occurrences: dict[Id, list[tuple[int, int]]]) -> Places:
    """Where the removal bites, earliest step first; an error where it does nothing."""
    steps = None if removal.steps is None else set(removal.steps)
    positions: Places = defaultdict(list)
    for name in dict.fromkeys(removal.samples):
        for step, position in occurrences.get(name, ()):
            if steps is None or step in steps:
                positions[step].append(position)
    if not positions:
        raise UsageError(
            f"none of the samples {removal.samples[:3]} is used in the given steps, so there is nothing to remove."
        )
    return {step: sorted(positions[step]) for step in sorted(positions)}


def in_precision(recipe: Recipe, dtype: torch.dtype | None) -> Recipe:
    """`recipe` with every floating-point number in `dtype`; None leaves it as it is."""
    if dtype is None:
        return recipe
    recipe.model.to(dtype)  # keeps the parameters' identity, so the optimizer still holds them
    if recipe.optimizer.state:
        recipe.optimizer.load_state_dict(recipe.optimizer.state_dict())  # casts to the parameters' type
    return replace(
        recipe,
        batches=_Converted(recipe.batches, dtype),
        queries={name: convert(batch, dtype) for name, batch in recipe.queries.items()},
    )


def convert(batch: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a batch (a tensor, or tuples, lists and mappings of them) in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: convert(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(convert(value, dtype) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(convert(value, dtype) for value in batch)
    return batch


class _Converted(Sequence[Any]):
    """The batches of a recipe, converted when they are asked for."""

    def __init__(self, batches: Sequence[tuple[Sequence[int | str], Any]], dtype: torch.dtype) -> None:
        self.batches, self.dtype = batches, dtype

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: Any) -> Any:
        ids, batch = self.batches[step]
        return ids, convert(batch, self.dtype)


class Tape:
    """A recipe and its run. `recipe.model` is where the last call left it."""

    def __init__(
        self,
        recipe: RecipeSource,
        *,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        length: int | None = None,
        states: MutableMapping[int, State] | None = None,
        run: RunStore | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.recipe = in_precision(build_recipe(recipe, args), dtype)
        self.parameters = update.trained_parameters(self.recipe.optimizer)
        self.obstacle = update.obstacle(self.recipe.optimizer)
        steps = len(self.recipe.batches)
        self.length = _length(steps, length, run)
        self.ends: dict[int, Generators] = {}  # random states after the step before, where the batch is fetched
        self.generators: dict[int, Generators] = {}  # random states before each step's forward pass
        self._anchors = None if run is None else Anchors(run, self.optimizer, self.length)
        self.anchored: set[int] = set() if self._anchors is None else set(self._anchors.steps)
        if self._anchors is not None:
            self.recipe = replace(self.recipe, batches=Fetched(self.recipe.batches, self.ends.get))
        self._note(0, self._anchor(0))
        self.start, self.end = fingerprint(self.recipe.model), ""
        self.ids: list[list[Id]] = [list(self.recipe.batches[t][0]) for t in range(self.length)]
        self.coefficients: list[tuple[update.Coefficients, ...]] = []  # of each step; none where not modelled
        self.states: MutableMapping[int, State] = {} if states is None else states
        _check_clipping(self.recipe, self.parameters)

    def record(
        self, keep: Collection[int], progress: Progress | None = None, watch: Callable[[int], None] | None = None
    ) -> None:
        """Play the run once; `keep` names the steps before which the state is kept, `watch(t)` runs before step t."""
        known: dict[Any, Any] = {}
        for t in range(self.length):
            if t in keep:
                self.states[t] = save(self.recipe)
            self._set_rates(t)
            if watch is not None:
                watch(t)
            if self.obstacle is None:
                self.coefficients.append(tuple(known.setdefault(c, c) for c in update.coefficients(self.optimizer)))
            self.take(t)
            self.arrive(t + 1)
            tell(progress, t + 1, self.length)
        if watch is not None:
            watch(self.length)
        self.end = fingerprint(self.recipe.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The recipe's."""
        return self.recipe.optimizer

    def weights(self, t: int) -> Tensor:
        """w_z of step t, (B,) float64."""
        return weights(self.recipe, t)

    def without(self, t: int, gone: Places, share: float) -> Tensor:
        """w_z of step t with the removal."""
        w = self.weights(t)
        w[gone.get(t, [])] *= 1 - share
        return w

    def rewind(self, step: int) -> int:
        """Go back to the nearest kept state at or before `step`; returns its step."""
        at = max(t for t in self.states if t <= step)
        restore(self.recipe, self.states[at])
        return at

    def step(self, t: int, w: Tensor | None = None) -> None:
        """Step t as the run took it, with the same random draws, and on to where the run was; `w` replaces the weights."""
        self.take(t, w)
        self._anchor(t + 1)

    def take(self, t: int, w: Tensor | None = None) -> Tensor:
        """Step t by itself; returns the losses (B,)."""
        self._set_rates(t)
        seed(self.generators[t])
        return take_step(self.recipe, t, w)

    def arrive(self, t: int) -> None:
        """After step t − 1, for the first time: where the run kept its state, the replay starts anew from it."""
        self._note(t, self._anchor(t))

    def let_go(self, step: int) -> None:
        """From `step` on the replay is not the run's any more: it starts anew at no later checkpoint."""
        self.anchored = {t for t in self.anchored if t <= step}

    def _set_rates(self, t: int) -> None:
        if self._anchors is not None:
            self._anchors.set_rates(t, self.optimizer)

    def _anchor(self, t: int) -> Generators:
        """Start anew where the run kept its state before step t; the random states then, as far as they are known."""
        if self._anchors is not None and t in self.anchored:
            return self._anchors.restore(t, self.recipe)
        return self._anchors.first() if self._anchors is not None and t == 0 else {}

    def _note(self, t: int, known: Generators) -> None:
        """The random states before step t: those of the run, or those that the replay has."""
        now = {**generators(), **known}
        self.ends[t] = end = after(self.ends.get(t - 1, {}), now)
        self.generators[t] = end if self._anchors is None or t == self.length else self._anchors.before(t, end)

    def awaits(self, t: int) -> bool:
        """Whether the batch of step t depends on random states that are known only when the replay comes there."""
        return self._anchors is not None and t not in self.ends and self._anchors.drew(t)

    def skip(self) -> None:
        """A step that is not taken: the schedule goes on, and nothing else changes."""
        if self.recipe.schedule is not None:
            self.recipe.schedule.step()

    def losses(self, t: int) -> Tensor:
        """The losses (B,) of step t at the model's present weights, with the draws of the run."""
        seed(self.generators[t])
        return self.recipe.loss(self.recipe.model, self.recipe.batches[t][1])

    def load(self, theta: tuple[Tensor, ...]) -> None:
        """Put these values into the trained parameters."""
        with torch.no_grad():
            for p, value in zip(self.parameters, theta, strict=True):
                p.copy_(value)

    def affordable(self) -> int:
        """How many states may be kept in memory."""
        size: int = sum(x.numel() * x.element_size() for x in self.recipe.model.state_dict().values())
        return max(2, STATE_BYTES // max(1, 3 * size))


def tell(progress: Progress | None, done: int, total: int) -> None:
    """Report how far a job has come, where somebody wants to know."""
    if progress is not None:
        progress(done, total)


def build_recipe(recipe: RecipeSource, args: Mapping[str, Any] | None) -> Recipe:
    """The recipe, fresh."""
    if isinstance(recipe, str):
        return load_recipe(recipe, args)
    return recipe(**(args or {}))


def save(recipe: Recipe) -> State:
    """A copy of everything that training changes."""
    schedule = None if recipe.schedule is None else recipe.schedule.state_dict()
    return copy.deepcopy({"m": recipe.model.state_dict(), "o": recipe.optimizer.state_dict(), "s": schedule})


def restore(recipe: Recipe, state: State) -> None:
    """Put a saved state back."""
    copied = copy.deepcopy(state)
    recipe.model.load_state_dict(copied["m"])
    recipe.optimizer.load_state_dict(copied["o"])
    recipe.optimizer.zero_grad()
    if recipe.schedule is not None:
        recipe.schedule.load_state_dict(copied["s"])


def thin_out(steps: Collection[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, the first among them."""
    ordered = sorted(set(steps))
    count = min(count, len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]


def _length(steps: int, wanted: int | None, run: RunStore | None) -> int:
    """How many of a recipe's steps are replayed: as many as the run has, if there is one, or all."""
    if wanted is None and run is not None:
        wanted = run.n_steps()
        if steps < wanted:
            raise UsageError(f"the recipe has {steps} steps, but the run has {wanted}. Pass the run's own recipe.")
    length = steps if wanted is None else wanted
    if not 0 < length <= steps:
        raise UsageError(f"at must be between 1 and {steps}, the number of steps of the recipe, got {wanted}.")
    return length


def _check_clipping(recipe: Recipe, parameters: list[Tensor]) -> None:
    trained = {id(p) for p in parameters}
    others = [n for n, p in recipe.model.named_parameters() if p.requires_grad and id(p) not in trained]
    if recipe.clip_norm is not None and others:
        raise UsageError(
            f"the gradient of {others[0]!r} counts towards the clipped norm, but it is not in the optimizer, so it is "
            "never zeroed. Freeze it with requires_grad_(False), or add it to the optimizer."
        )
