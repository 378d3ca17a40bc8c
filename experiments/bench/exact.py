"""The cost of exact results, in multiples of the plain training's CPU time, in one run: reverse sweeps, groups left out, tangents.

The GPT of the study from scratch, and as `large` the GPT of workload B. Reverse sweeps are of 1, 4 and 16 single sequences; eight sources
(two sequences of every batch each) are left out, beside three twins that start one rounding unit apart, and 16 sequences evaluated; tangents are of 8 equal parts
of the run. Each has the replay in it. As in the commands, freed memory stays with the process. Every way is timed between two plain trainings, and divided by their mean.

Memory is of a reverse sweep of one query with its states on disk: the highest number of bytes in tensors, less what the two
derivatives of one step take by themselves, in multiples of parameters and optimizer state.
"""

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backstory.demo.gpt_model import counts, token_losses
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import step_gradient
from backstory.exact.reverse import reverse
from backstory.exact.tangent import Group, tangent
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal
from backstory.workers import keep_freed_memory
from experiments.bench.live import peak_of
from experiments.bench.recording import Say, quiet
from experiments.bench.timing import timed
from experiments.bench.workloads import SCALES
from experiments.gpt.setups import SETUPS, recipe
from experiments.harness import train

QUERIES, SOURCES, TWINS, PARTS = (1, 4, 16), 8, 3, 8
STEPS, LARGE_STEPS, MEMORY_STEPS = 48, 8, 3
SMALL, LARGE = "the study's GPT", "GPT 4 × 128"
Fresh = Callable[[], Recipe]
Work = Mapping[str, Callable[[], object]]


def bench_exact(*, scale: str = "full", repeats: int = 2, say: Say = quiet) -> dict[str, Any]:
    """`{"reverse": {"1", "4", "16"}, "leave_out": {"8"}, "tangent": {"8"}, "memory", "training_s", "large": the same, "rows": of both}`."""
    keep_freed_memory()
    small = replace(SETUPS["scratch"], steps=STEPS)
    if scale != "full":
        small = replace(small, steps=8, length=8, width=8, layers=1)
    texts = recipe(small, 0).queries["domains"].flatten(0, 1)
    fresh: dict[str, Fresh] = {SMALL: lambda: recipe(small, 0), LARGE: lambda: _large(scale)}
    queries = {SMALL: texts, LARGE: _large(scale).queries["q"]}
    costs = {name: _costs(name, fresh[name], queries[name], repeats, say) for name in fresh}
    about = {"threads": 1, "repeats": repeats, "cores": os.cpu_count(), "load": os.getloadavg()[1]}
    rows = [_line(name, part, about) for name, part in costs.items()]
    return {**about, **costs[SMALL], "large": costs[LARGE], "rows": rows}


def _costs(name: str, fresh: Fresh, texts: Tensor, repeats: int, say: Say) -> dict[str, Any]:
    work = _ways(fresh, texts)
    seconds, ratios = _ratios(partial(train_again, fresh), work, repeats, lambda way: say(f"exact: {name}, {way}"))
    out: dict[str, Any] = {"steps": len(fresh().batches), "training_s": seconds, "memory": _memory(fresh, texts[:1])}
    for way, ratio in ratios.items():
        kind, _, n = way.partition(" ")
        out.setdefault(kind, {})[n] = ratio
    return out


def _line(model: str, part: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A model's costs as a line of a table."""
    ways = {f"{way} {n}": x for way in ("reverse", "leave_out", "tangent") for n, x in part[way].items()}
    plain = {key: part[key] for key in ("steps", "training_s", "memory")}
    return {"model": model, **plain, **ways, "load": f"{about['load']:.1f} of {about['cores']}"}


def _ways(fresh: Fresh, texts: Tensor) -> Work:
    ids = [list(names) for names, _ in fresh().batches]
    steps = len(ids)
    parts = [range(k * steps // PARTS, (k + 1) * steps // PARTS) for k in range(PARTS)]
    groups = [Group({t: list(range(len(ids[t]))) for t in part}) for part in parts if part]
    samples = list(dict.fromkeys(name for names in ids for name in names))
    sources = [Removal(tuple(samples[k::SOURCES])) for k in range(SOURCES)]
    return {
        **{f"reverse {n}": partial(reverse, fresh, _one_by_one(texts[:n]), dtype=None) for n in QUERIES},
        f"leave_out {SOURCES}": lambda: left_out(fresh, sources, _losses(texts[: QUERIES[-1]])),
        f"tangent {PARTS}": partial(tangent, fresh, groups, dtype=None),
    }


def left_out(fresh: Fresh, sources: list[Removal], query: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
    """`(changes of the losses without each source, losses of the twins)`: what `run.leave_out` does, without the run."""
    changes = leave_out(fresh, sources, query)
    twins = []
    for k in range(TWINS):
        twin = fresh()
        nudge(twin.model, k)
        train(twin)
        with torch.no_grad():
            twins.append(query(twin.model))
    return changes, torch.stack(twins)


def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight to the next number above or below it."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.nextafter(p, torch.where(torch.rand(p.shape, generator=g) < 0.5, torch.inf, -torch.inf)))


def train_again(fresh: Fresh) -> None:
    """A plain training, which everything is measured by."""
    plan = fresh()
    for t in range(len(plan.batches)):
        take_step(plan, t)


def _ratios(
    training: Callable[[], object], work: Work, repeats: int, say: Callable[[str], None]
) -> tuple[float, dict[str, float]]:
    """`(median CPU seconds of a training, median of each way's CPU time over that of the trainings before and after it)`."""
    training()  # warms up
    plain, ratios = [timed(training).cpu], {way: list[float]() for way in work}
    for _ in range(repeats):
        for way, run in work.items():
            used = timed(run).cpu
            plain.append(timed(training).cpu)
            ratios[way].append(used / statistics.mean(plain[-2:]))
            say(f"{way}: {ratios[way][-1]:.2f} trainings")
    return statistics.median(plain), {way: statistics.median(each) for way, each in ratios.items()}


def _memory(fresh: Fresh, text: Tensor) -> float:
    """Bytes of a reverse sweep beyond the activations of one step, over those of parameters and optimizer state."""
    plan = fresh()
    parameters = [p for group in plan.optimizer.param_groups for p in group["params"]]
    along = [torch.ones_like(p) for p in parameters]
    size = sum(p.numel() * p.element_size() for p in parameters)
    w = torch.ones(len(plan.batches[0][0]))

    def differentiate() -> None:
        gradient = step_gradient(lambda: plan.loss(plan.model, plan.batches[0][1]), w, parameters)
        gradient.pull(along)  # while both derivatives are held, as a sweep holds them

    activations = peak_of(differentiate) - size  # the gradient is none of them
    train_again(lambda: replace(plan, batches=plan.batches[:1]))
    state: int = sum(x.numel() * x.element_size() for s in plan.optimizer.state.values() for x in s.values())
    sweep = peak_of(lambda: reverse(fresh, _losses(text), dtype=None, at=min(MEMORY_STEPS, len(plan.batches))))
    return float((sweep - activations) / (size + state))


def _losses(texts: Tensor) -> Callable[[nn.Module], Tensor]:
    """Each text's mean loss."""
    return lambda model: token_losses(model, texts).mean(1)


def _one_by_one(texts: Tensor) -> Callable[[nn.Module], Tensor]:
    """The same, each from a forward pass of its own, as `run.exact` evaluates queries."""
    return lambda model: torch.stack([token_losses(model, text[None]).mean() for text in texts])


def _large(scale: str) -> Recipe:
    work = SCALES[scale]["B"]
    model, optimizer = work.start()
    x, y = work.data()
    tokens = torch.cat([x, y[:, -1:]], 1)
    queries = work.queries()
    steps = list(work.visits(LARGE_STEPS))
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=lambda m, z: token_losses(m, z).sum(1),
        batches=[(list(range(s.start, s.stop)), tokens[s]) for s in steps],
        loss_reduction="token-mean",
        tokens=counts,
        clip_norm=1.0,
        queries={"q": torch.cat([queries[0], queries[1][:, -1:]], 1)},
    )
