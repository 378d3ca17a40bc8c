"""A question to a recorded run, answered by exact unrolling of its recipe: the price of a few training runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import MismatchError
from ..replay.recipe import Recipe, stored_args
from ..replay.reproduction import reproduction
from ..replay.tape import Progress, RecipeSource, build_recipe
from ..results.influence import Influence
from ..run.run import Run
from .losses import QuerySet
from .reverse import reverse

ASKED = " asked"  # a name that no recipe gives


def query(
    run: Run,
    recipe: RecipeSource,
    batch: Any,
    at: int | str = "final",
    *,
    args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    check: bool = True,
    checkpoints: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Influence:
    """The influence of every occurrence before `at` on the recipe's losses of `batch`: one query for each loss.

    The recipe is replayed first, and must reproduce the run's stored weights, bit for bit or up to rounding
    (`check=False`: not compared, and the answer says so). Then it is unrolled in `dtype`. Arguments of a recipe named in
    the run are the run's.
    """
    step = run.step_of(at)
    args = stored_args(run.config, recipe) if args is None else args
    notes = [_checked(run, recipe, args, step) if check else "the replay was not compared with the run (check=False)"]
    answer = reverse(
        lambda: _with_query(build_recipe(recipe, args), batch),
        QuerySet(ASKED),
        at=step,
        dtype=dtype,
        checkpoints=checkpoints,
        cache=cache,
        progress=progress,
    )
    if dtype is not None:
        notes.append(f"unrolled in {str(dtype).removeprefix('torch.')}")
    return replace(answer, caveats=(*notes, *answer.caveats, "the model was asked in eval mode"), lookup=run.content)


def _checked(run: Run, recipe: RecipeSource, args: Mapping[str, Any] | None, step: int) -> str:
    found = reproduction(run, recipe, args=args, until=step)
    if not found:
        raise MismatchError(f"{found}. To unroll the recipe all the same, pass check=False.")
    return str(found)


def _with_query(recipe: Recipe, batch: Any) -> Recipe:
    return replace(recipe, queries={**recipe.queries, ASKED: batch})
