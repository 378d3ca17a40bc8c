r"""Trajectory-specific leave-one-out: retrain without chosen occurrences, all else equal, and subtract.

    TSLOO = ℓ(θ_T without, q) − ℓ(θ_T with, q)           positive: the removed sample helped

The weights of the other samples stay what they were; order, initialisation and schedule too. A replay starts from
the state just before the first removed occurrence.
Knows nothing of stored rows, embeddings or estimates.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..session.recipe import Recipe, take_step, weights

State = dict[str, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Removal:
    """Which occurrences to leave out: these samples, everywhere or in these steps only."""

    samples: tuple[int | str, ...]
    steps: tuple[int, ...] | None = None

    def hits(self, step: int, ids: Sequence[int | str]) -> list[int]:
        """Positions of the removed samples in the batch of `step`."""
        if self.steps is not None and step not in self.steps:
            return []
        return [i for i, x in enumerate(ids) if x in self.samples]


def tsloo(
    make: Callable[[], Recipe],
    removals: Sequence[Removal],
    query_loss: Callable[[nn.Module], Tensor],
    progress: Progress | None = None,
) -> Tensor:
    """Differences of the query losses, (removals, Q), float64; `make` gives the recipe afresh.

    `query_loss(model)` gives a scalar or (Q,) losses of the trained model.
    """
    recipe = make()
    first = [_first_step(recipe, removal) for removal in removals]
    states, base = _base(recipe, set(first), query_loss)
    out = []
    for done, (removal, step) in enumerate(zip(removals, first, strict=True)):
        out.append(_replay(recipe, states[step], step, removal, query_loss) - base)
        if progress is not None:
            progress(done + 1, len(removals))
    return torch.stack(out)


def _base(
    recipe: Recipe, wanted: set[int], query_loss: Callable[[nn.Module], Tensor]
) -> tuple[dict[int, State], Tensor]:
    """The run as it was: its states before the wanted steps, and its query losses."""
    states: dict[int, State] = {}
    for step in range(len(recipe.batches)):
        if step in wanted:
            states[step] = _save(recipe)
        take_step(recipe, step)
    return states, _ask(recipe, query_loss)


def _replay(
    recipe: Recipe, state: State, start: int, removal: Removal, query_loss: Callable[[nn.Module], Tensor]
) -> Tensor:
    _restore(recipe, state)
    for step in range(start, len(recipe.batches)):
        ids = recipe.batches[step][0]
        hits = removal.hits(step, ids)
        w = weights(recipe, len(ids))
        w[hits] = 0.0
        take_step(recipe, step, w)
    return _ask(recipe, query_loss)


def _first_step(recipe: Recipe, removal: Removal) -> int:
    steps: Iterable[int] = range(len(recipe.batches)) if removal.steps is None else sorted(removal.steps)
    for step in steps:
        if removal.hits(step, recipe.batches[step][0]):
            return step
    raise UsageError(f"none of the samples {removal.samples[:3]} occurs in the steps asked for; nothing to remove.")


def _ask(recipe: Recipe, query_loss: Callable[[nn.Module], Tensor]) -> Tensor:
    was = recipe.model.training
    recipe.model.eval()
    with torch.no_grad():
        found = query_loss(recipe.model).double().reshape(-1)
    recipe.model.train(was)
    return found


def _save(recipe: Recipe) -> State:
    schedule = None if recipe.schedule is None else recipe.schedule.state_dict()
    return copy.deepcopy({"m": recipe.model.state_dict(), "o": recipe.optimizer.state_dict(), "s": schedule})


def _restore(recipe: Recipe, state: State) -> None:
    kept = copy.deepcopy(state)
    recipe.model.load_state_dict(kept["m"])
    recipe.optimizer.load_state_dict(kept["o"])
    if recipe.schedule is not None:
        recipe.schedule.load_state_dict(kept["s"])
