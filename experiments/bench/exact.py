"""The cost of exact results, in multiples of the plain training's CPU time, in one run: reverse sweeps and tangents.

The GPT of the study from scratch, and as `large` the GPT of workload B. Reverse sweeps are of 1, 4 and 16 single sequences; tangents of 8
equal parts of the run. Each has the replay in it, and is timed beside a plain training.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backstory.demo.gpt_model import counts, token_losses
from backstory.exact.reverse import reverse
from backstory.exact.tangent import Group, tangent
from backstory.replay.recipe import Recipe
from experiments.bench.recording import Say, quiet
from experiments.bench.timing import interleave
from experiments.bench.workloads import SCALES
from experiments.gpt.setups import SETUPS, recipe
from experiments.harness import train

QUERIES, PARTS = (1, 4, 16), 8
LARGE_STEPS = 32


def bench_exact(*, scale: str = "full", repeats: int = 2, say: Say = quiet) -> dict[str, Any]:
    """`{"reverse": {"1", "4", "16"}, "tangent": {"8"}, "training_s", "large": the same}`."""
    small = SETUPS["scratch"] if scale == "full" else replace(SETUPS["scratch"], steps=8, length=8, width=8, layers=1)
    say(f"exact: the study's GPT, {small.steps} steps")
    texts = recipe(small, 0).queries["domains"].flatten(0, 1)
    out = _costs(lambda: recipe(small, 0), texts, repeats)
    say("exact: GPT 4 × 128")
    return {"threads": 1, **out, "large": _costs(lambda: _large(scale), _large(scale).queries["q"], repeats)}


def _costs(fresh: Callable[[], Recipe], texts: Tensor, repeats: int) -> dict[str, Any]:
    steps = len(fresh().batches)
    parts = [range(k * steps // PARTS, (k + 1) * steps // PARTS) for k in range(PARTS)]
    sizes = [len(ids) for ids, _ in fresh().batches]
    groups = [Group({t: list(range(sizes[t])) for t in part}) for part in parts if part]
    work: dict[str, Callable[[], object]] = {"training": lambda: train(fresh())}
    work |= {f"reverse {n}": partial(reverse, fresh, _losses(texts[:n]), dtype=None) for n in QUERIES}
    work[f"tangent {PARTS}"] = lambda: tangent(fresh, groups, dtype=None)
    times = interleave(work, repeats)
    plain = times["training"].cpu
    return {
        "training_s": plain,
        "reverse": {str(n): times[f"reverse {n}"].cpu / plain for n in QUERIES},
        "tangent": {str(PARTS): times[f"tangent {PARTS}"].cpu / plain},
    }


def _losses(texts: Tensor) -> Callable[[nn.Module], Tensor]:
    """Each text's mean loss."""
    return lambda model: token_losses(model, texts).mean(1)


def _large(scale: str) -> Recipe:
    work = SCALES[scale]["B"]
    model, optimizer = work.start()
    x, y = work.data()
    tokens = torch.cat([x, y[:, -1:]], 1)
    queries = work.queries()
    steps = list(work.visits(LARGE_STEPS if scale == "full" else 8))
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
