"""A result checked by retraining: what it predicts for some samples, and how the loss changes when training leaves them out.

The samples at either end of the result were chosen by the scores that are checked; others are drawn at random, as many from each third of
the samples in the order of their last use. Twins, trained again from weights one rounding unit away, show what rounding does.

Shapes:  R samples, Q queries.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..capture.ids import restore
from ..errors import MismatchError, NumericalError, UsageError
from ..replay.recipe import stored_args
from ..replay.tape import Progress, RecipeSource, Removal, build_recipe
from ..results import figures
from ..results.influence import Influence
from ..results.quality import THIRDS
from ..results.result import Result
from ..store.run_store import HasPath, store_of
from .leave_out import retrain
from .losses import QueryLoss
from .reverse import check_replay

UNIT = "predicted: influence; retrained: loss without the sample minus loss with it; both in units of the query's loss"
FEWEST = 8  # samples drawn at random whose ranks say something


@dataclass(frozen=True, repr=False)
class Check(Result):
    """Predicted influences and retrained changes of the loss, of the same samples on the same queries."""

    samples: tuple[int | str, ...]  # (R,) those at either end of the result, then those drawn at random
    ends: int  # how many are of the first kind
    predicted: Tensor  # (R, Q)
    retrained: Tensor  # (R, Q)
    floor: Tensor | None = None  # (Q,) what rounding alone does to each query; None where it was not measured
    method: str = field(default="", kw_only=True)  # of the predictions: exact ones are checked too
    unit = UNIT

    @property
    def spearman(self) -> float:
        """Rank correlation of predicted and retrained, over all samples and queries."""
        return spearman(self.predicted.reshape(-1), self.retrained.reshape(-1))

    @property
    def spearman_random(self) -> float:
        """The same over the samples drawn at random; NaN where they are fewer than 8, too few to rank."""
        drawn = [x[self.ends :].reshape(-1) for x in (self.predicted, self.retrained)]
        return spearman(*drawn) if len(self.samples) - self.ends >= FEWEST else float("nan")

    @property
    def same_sign(self) -> float:
        """Share of samples and queries whose sign was predicted."""
        return float((self.predicted.sign() == self.retrained.sign()).double().mean())

    @property
    def clear(self) -> float:
        """Share of samples and queries whose retrained change is larger than rounding alone makes it."""
        return float((self.retrained.abs() > (0 if self.floor is None else self.floor)).double().mean())

    @property
    def headline(self) -> str:
        """How much was retrained."""
        return f"Predicted influence and retraining without each of {len(self.samples)} samples"

    @property
    def words(self) -> tuple[str, ...]:
        """How well the two agree."""
        drawn = len(self.samples) - self.ends
        alone = f"{self.spearman_random:.2f} for the {drawn} drawn at random"
        among = alone if drawn >= FEWEST else f"the {drawn} drawn at random are too few to rank alone"
        noise = (
            "" if self.floor is None else f" {self.clear:.0%} of the changes are larger than rounding alone makes them."
        )
        return (
            f"Retrained without each of {len(self.samples)} samples: rank correlation with the prediction "
            f"{self.spearman:.2f}{f' ({among})' if drawn else ''}, same sign in {self.same_sign:.0%}.{noise}",
        )

    def numbers(self) -> dict[str, Any]:
        """Both numbers of every sample and query, and how well they agree."""
        agreement = {k: getattr(self, k) for k in ("spearman", "spearman_random", "same_sign", "clear")}
        return {
            **agreement,
            **{k: getattr(self, k) for k in ("samples", "ends", "predicted", "retrained", "floor", "method")},
        }

    def table(self) -> Mapping[str, Any]:
        """One line for each sample and query."""
        r, q = self.predicted.shape
        return {
            "sample": [x for x in self.samples for _ in range(q)],
            "query": [*range(q)] * r,
            "predicted": self.predicted.reshape(-1).tolist(),
            "retrained": self.retrained.reshape(-1).tolist(),
            "random": [i >= self.ends for i in range(r) for _ in range(q)],
        }

    def drawings(self) -> dict[str, figures.Figure]:
        """One point for each sample and query."""
        t = self.table()
        names = [f"sample {s}, query {q}" for s, q in zip(t["sample"], t["query"], strict=True)]
        return figures.drawable(check=figures.checked(names, t["predicted"], t["retrained"], t["random"]))


def check(
    run: HasPath,
    recipe: RecipeSource,
    influence: Influence,
    query_loss: QueryLoss,
    *,
    random: int = 12,
    seed: int = 0,
    args: Mapping[str, Any] | None = None,
    verify: bool = True,
    twins: int = 0,
    workers: int = 1,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Check:
    """Train again without the first and the last sample of each query's result, and without `random` others, one at a time.

    `query_loss(model)` gives the (Q,) losses that the influence is on; `seed` draws the others. The recipe must first reproduce the
    run's stored weights (`verify=False` skips this and adds a caveat). `twins` trainings measure what rounding does; `workers` and `cache`
    are those of `leave_out`.
    """
    store = store_of(run)
    if influence.at != store.step_of("final"):
        raise UsageError(
            f"the result must be at the final step, {store.step_of('final')}, which retraining ends at, got one at step {influence.at}."
        )
    given = stored_args(store, recipe) if args is None else args
    if (steps := len(build_recipe(recipe, given).batches)) != influence.at:
        raise MismatchError(f"the recipe has {steps} steps, but the run has {influence.at}. Pass the run's own recipe.")
    replay = (
        check_replay(run, recipe, given, influence.at, option="verify")
        if verify
        else "the replay was not checked (verify=False)"
    )
    queries = range(influence.n_queries)
    hits = [h for q in queries for h in (*influence.top(1, query=q), *influence.bottom(1, query=q))]
    ends = list(dict.fromkeys(h.sample for h in hits))
    samples = (*ends, *_drawn(influence, set(ends), random, seed))
    retrained, rounding = retrain(
        recipe, [Removal((x,)) for x in samples], query_loss, progress, twins=twins, args=given, workers=workers, cache=cache, run=store
    )  # fmt: skip
    predicted = torch.stack([influence.sum_over([x]) for x in samples])
    if retrained.shape != predicted.shape:
        raise UsageError(
            f"query_loss must give {predicted.shape[1]} losses, as the result has, got {retrained.shape[1]}."
        )
    floor = rounding.abs().amax(0) if len(rounding) else None
    about = {**influence.about, "caveats": tuple(dict.fromkeys((replay, *influence.caveats)))}
    return Check(samples, len(ends), predicted, retrained, floor, method=influence.method, **about)


def _drawn(influence: Influence, known: set[int | str], count: int, seed: int) -> list[int | str]:
    """Other samples, as many from each third of them in the order of their last use."""
    last = dict(zip(influence.sample_ids.tolist(), range(len(influence)), strict=True))
    ordered = [x for x in restore(sorted(last, key=lambda name: last[name]), influence.id_kind) if x not in known]
    g, out = torch.Generator().manual_seed(seed), list[int | str]()
    for k in range(THIRDS):
        part = ordered[len(ordered) * k // THIRDS : len(ordered) * (k + 1) // THIRDS]
        wanted = count * (k + 1) // THIRDS - count * k // THIRDS
        out += [part[i] for i in torch.randperm(len(part), generator=g)[:wanted].tolist()]
    return out


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant.

    Its sums are of whole numbers (ranks times 2 and times n): equal orders have equal correlations.
    """
    if not bool((x.isfinite() & y.isfinite()).all()):
        raise NumericalError("scores and ground truth must be finite to be ranked, got NaN or Inf.")
    a, b = (len(r) * r - r.sum() for r in (_twice_ranks(x), _twice_ranks(y)))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else 0.0


def _twice_ranks(x: Tensor) -> Tensor:
    """Ranks (n,) times 2, equal values at the middle of theirs; by sorting, for any n."""
    _, where, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ranks: Tensor = (2 * counts.cumsum(0) - counts)[where].double()
    return ranks
