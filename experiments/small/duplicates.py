"""The study of copies: one sample, used early and used late, is worth two different amounts.

M samples of the run get one more occurrence in an early batch and one in a late batch, each copy under an id of its own.
Retraining without either copy is the truth. Methods that see only the trained model give both copies one number.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.baselines.influence import influence_function
from backstory.baselines.similarity import gradient_dot
from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal, in_precision
from backstory.results.influence import Influence
from backstory.results.statistics import spearman
from experiments.data.images import Setup, generator, mean_loss, recipe, split
from experiments.fidelity.full import influences, replayed
from experiments.recorded import recorded

Say = Callable[[str, int, int], None]
QUERY = QuerySet("test", mean=True)
PART = 4  # early: the first quarter of the steps; late: the last
EARLY, LATE = 1_000_000, 2_000_000  # added to a sample's number: the copies' ids
DAMPING, RANK = 1e-3, 32  # of the influence function
CLASSES = 10

Pair = tuple[Tensor, Tensor]  # values of the early and the late copies, (M,) each


def study(
    setup: Setup,
    seeds: Sequence[int],
    *,
    count: int = 20,
    rank: int = 16,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth and each method's values of all copies, one entry for each seed, and what they have in common."""
    found = [one_seed(setup, seed, count, rank, cache, say or (lambda stage, done, total: None)) for seed in seeds]
    names = [name for name in found[0] if name != "truth"]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "copies": count,
        "truth": _sizes([seed["truth"] for seed in found]),
        "rows": [_row(name, found) for name in names],
        "values": [{name: {"early": e.tolist(), "late": k.tolist()} for name, (e, k) in s.items()} for s in found],
    }


def with_copies(setup: Setup, seed: int, count: int) -> tuple[Recipe, list[int]]:
    """`(the run of the seed with two more occurrences of each chosen sample, the samples)`."""
    plan = recipe(setup, seed)
    train, steps = split(setup, seed)[0], len(plan.batches)
    part = steps // PART
    if not 1 < count <= len(train) or part < 1:
        raise UsageError(
            f"found {count} copies in {steps} steps; expected 2 to {len(train)}, and {PART} steps at least."
        )
    chosen = train[torch.randperm(len(train), generator=generator(seed, "duplicates"))[:count]].tolist()
    images = {i: (x, y) for ids, (xs, ys) in plan.batches for i, x, y in zip(ids, xs, ys, strict=True)}
    more: dict[int, list[tuple[int, int]]] = {}  # step -> (sample, what to add to its number)
    for k, sample in enumerate(chosen):
        early = k * part // count
        more.setdefault(early, []).append((sample, EARLY))
        more.setdefault(steps - part + early, []).append((sample, LATE))
    batches = [_longer(batch, more.get(t, []), images) for t, batch in enumerate(plan.batches)]
    return replace(plan, batches=batches), chosen


def _longer(batch: Any, more: Sequence[tuple[int, int]], images: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    ids, (x, y) = batch
    if not more:
        return batch
    xs, ys = (torch.stack([images[sample][k] for sample, _ in more]) for k in range(2))
    return [*ids, *(sample + added for sample, added in more)], (torch.cat([x, xs]), torch.cat([y, ys]))


def one_seed(setup: Setup, seed: int, count: int, rank: int, cache: Path | None, say: Say) -> dict[str, Pair]:
    """The truth and every method's values."""

    def make() -> Recipe:
        return with_copies(setup, seed, count)[0]

    ids = _ids(with_copies(setup, seed, count)[1])
    truth = leave_out(
        make, [Removal((i,)) for i in ids], QUERY, lambda done, total: say(f"seed {seed}: retrain", done, total),
        cache=cache, dtype=torch.float64,
    )[:, 0]  # fmt: skip
    out = {"truth": _pair(truth)}
    methods = _methods(make, seed, rank)
    for done, (name, run) in enumerate(methods.items()):
        out[name] = _pair(run(ids))
        say(f"seed {seed}: methods", done + 1, len(methods))
    return out


def _methods(make: Callable[[], Recipe], seed: int, rank: int) -> dict[str, Callable[[list[int]], Tensor]]:
    """Name -> values of the copies with these ids."""
    replay = replayed(make())
    end, queries = replay.recipe, replay.recipe.queries["test"]

    def full(ids: list[int]) -> Tensor:
        at = {name: k for k, name in enumerate(i for names, _ in end.batches for i in names)}
        return influences(replay, "exact")[[at[i] for i in ids]]

    def ours(ids: list[int]) -> Tensor:
        plan = in_precision(make(), torch.float64)
        with tempfile.TemporaryDirectory() as folder:
            run = recorded(plan, Path(folder) / "run", curvature=f"exact:{CLASSES}", rank=rank, seed=seed)
            return _of(run.query(plan.model, mean_loss, queries), ids)

    return {
        "exact unrolling": lambda ids: _of(reverse(make, QUERY), ids),
        "full coordinates": full,
        f"recorded, learned {rank}": ours,
        "influence function": lambda ids: _of(
            influence_function(end, queries, loss=mean_loss, damping=DAMPING, rank=RANK), ids
        ),
        "gradient dot": lambda ids: _of(gradient_dot(end, queries, loss=mean_loss), ids),
    }


def _ids(chosen: Sequence[int]) -> list[int]:
    return [i + added for added in (EARLY, LATE) for i in chosen]


def _of(answer: Influence, ids: Sequence[int]) -> Tensor:
    return torch.stack([answer.sum_over([i]).mean() for i in ids])


def _pair(values: Tensor) -> Pair:
    early, late = values.chunk(2)
    return early, late


def _row(name: str, found: Sequence[dict[str, Pair]]) -> dict[str, Any]:
    """Correlations with the truth (0 where a method says nothing), means and each seed's."""
    each: dict[str, list[float]] = {"early": [], "late": [], "difference": []}
    for seed in found:
        (e, k), (true_e, true_k) = seed[name], seed["truth"]
        each["early"].append(spearman(e, true_e))
        each["late"].append(spearman(k, true_k))
        each["difference"].append(0.0 if _same(e, k) else spearman(k - e, true_k - true_e))
    pairs = [seed[name] for seed in found]
    return {
        "method": name,
        **{kind: _mean(values) for kind, values in each.items()},
        **{f"{kind}_seeds": values for kind, values in each.items()},
        "one_number": all(_same(e, k) for e, k in pairs),
        **_sizes(pairs),
    }


def _sizes(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median |value| of the early and of the late copies, over all seeds."""
    sizes = [float(torch.cat([pair[k] for pair in pairs]).abs().median()) for k in range(2)]
    return {"early_size": sizes[0], "late_size": sizes[1]}


def _same(early: Tensor, late: Tensor) -> bool:
    """One number for both copies, but for rounding."""
    return bool(torch.allclose(early, late, rtol=1e-6, atol=1e-9 * float(late.abs().max())))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
