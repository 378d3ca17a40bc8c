r"""Expected leave-one-out: TSLOO averaged over training runs.

    E_ω [ℓ(θ_T without, q) − ℓ(θ_T with, q)]             ω: initialisation and order of the batches

It says what a sample is worth to the learning algorithm; TSLOO says what it did in one run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QueryLoss
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Id, Progress, Removal


@dataclass(frozen=True)
class Expected:
    """A mean over seeds, and how sure it is."""

    mean: Tensor  # (Q,)
    error: Tensor  # (Q,) standard error of the mean
    values: Tensor  # (seeds, Q)
    seeds: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        tensors = {"mean": self.mean, "error": self.error, "values": self.values}
        return {"seeds": list(self.seeds), **{name: x.tolist() for name, x in tensors.items()}}


def expected_loo(
    recipe_for_seed: Callable[[int], Recipe] | str,
    seeds: Sequence[int],
    sample: Id | Removal,
    query_loss: QueryLoss,
    progress: Progress | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Expected:
    """TSLOO of `sample` (removed everywhere, or as the Removal says) in the run of each seed.

    A recipe given by name is called with `seed=` beside `args`.
    """
    if len(seeds) < 2:
        raise UsageError(f"found {len(seeds)} seeds; a mean with an error needs at least 2.")
    removal = sample if isinstance(sample, Removal) else Removal((sample,))
    rows = []
    for done, seed in enumerate(seeds):
        named = isinstance(recipe_for_seed, str)
        recipe = recipe_for_seed if isinstance(recipe_for_seed, str) else partial(recipe_for_seed, seed)
        given = {**(args or {}), "seed": seed} if named else args
        rows.append(leave_out(recipe, [removal], query_loss, args=given, cache=cache, dtype=dtype)[0])
        if progress is not None:
            progress(done + 1, len(seeds))
    values = torch.stack(rows)
    return Expected(values.mean(0), values.std(0) / len(seeds) ** 0.5, values, tuple(seeds))
