r"""Self-influence in the treebank study: does a copy of a training sequence name its own original first?

At each epoch's end the same copies are asked of the model of that moment, by three methods:

    ours                  influence of all occurrences so far on the copy's loss, from the recorded run
    influence function    gᵀ (1/N Σ g gᵀ + λ)⁻¹ g_q        random coordinates, the paper's λ
    gradient cosine       ⟨g, g_q⟩ / ‖g‖ ‖g_q‖             the same coordinates

A copy's gradient *is* its original's, at whatever model: its cosine is 1, so that cosine finds every original whether the model has
learned it or not. It is the upper bound of this test and says nothing of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstory.baselines.influence import influence_function
from backstory.baselines.similarity import gradient_cosine
from backstory.errors import UsageError
from backstory.insight import Memorisation, memorisation_of
from backstory.replay.recipe import Recipe
from backstory.results.influence import Influence
from backstory.results.words import common_words
from backstory.run.run import Run

Say = Callable[[str, int, int], None]  # (stage, done, in all)
OURS, FUNCTION, COSINE = "ours", "influence function", "gradient cosine"
METHODS = (OURS, FUNCTION, COSINE)
DAMPING = 1e-3  # the paper's
RANK = 16  # random coordinates of either side of a parameter: as many numbers as the recording keeps
EXAMPLES, BEST = 3, 3


@dataclass(frozen=True)
class Asked:
    """Copies of training sequences, and their texts."""

    ids: list[str]
    tokens: Tensor  # (Q, length + 1)


class Named(NamedTuple):
    """A training sequence and its influence."""

    sample: str
    influence: float


@dataclass(frozen=True)
class Ranks:
    """What one method says of all copies at one epoch's end."""

    epoch: int
    method: str
    result: Memorisation
    best: list[list[dict[str, Any]]]  # of the first EXAMPLES copies: the BEST sequences, highest first
    first: list[Named]  # of each copy: the sequence that ranks first

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        result = self.result.as_dict()
        kept = {k: result[k] for k in ("at", "samples", "share_first", "median_rank", "rank", "caveats")}
        return {"epoch": self.epoch, "method": self.method, **kept, "best": self.best}


def draw_copies(ids: Sequence[str], tokens: Tensor, count: int, seed: int) -> Asked:
    """`count` of the training sequences, drawn by the seed."""
    if not EXAMPLES <= count <= len(ids):
        raise UsageError(f"copies must be between {EXAMPLES} and {len(ids):,}, the sequences of the run, got {count}.")
    chosen = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed + 2))[:count]
    return Asked([ids[i] for i in chosen.tolist()], tokens[chosen])


def copies(run: Run, plan: Recipe, asked: Asked, ends: Sequence[int], *, seed: int, say: Say) -> list[Ranks]:
    """Ranks of the originals at every epoch's end, by every method; the model is left with the last weights."""
    result = []
    for epoch, at in enumerate(ends, 1):
        run.load_weights(plan.model, at)
        last = replace(plan, batches=plan.batches[at - ends[0] : at])  # each sequence once, as it was in this epoch
        for k, method in enumerate(METHODS, 1):
            answer = answered(method, run, last, asked.tokens, at, seed)
            result.append(Ranks(epoch, method, memorisation_of(answer, asked.ids), _best(answer), _first(answer)))
            say("rank copies", len(METHODS) * (epoch - 1) + k, len(METHODS) * len(ends))
    return result


def answered(method: str, run: Run, plan: Recipe, tokens: Tensor, at: int, seed: int) -> Influence:
    """Influence of every training sequence on every copy, by one method."""
    if method == OURS:
        return run.query(plan.model, plan.loss, tokens, at)
    if method == COSINE:
        return gradient_cosine(plan, tokens, rank=RANK, seed=seed)
    return influence_function(plan, tokens, damping=DAMPING, rank=RANK, seed=seed)


def _best(answer: Influence) -> list[list[dict[str, Any]]]:
    """The sequences with the most influence on each example, without their texts."""
    return [[hit.as_dict() for hit in answer.top(BEST, query=k)] for k in range(EXAMPLES)]


def _first(answer: Influence) -> list[Named]:
    names, scores = answer.per_sample()  # (Q, N)
    highest = scores.max(1)
    return [Named(str(names[i]), x) for i, x in zip(highest.indices.tolist(), highest.values.tolist(), strict=True)]


def examples(result: Sequence[Ranks], asked: Asked, texts: dict[str, str]) -> list[dict[str, Any]]:
    """The first copies, with the texts that each method names at each epoch's end."""
    return [
        {
            "id": asked.ids[k],
            "text": texts[asked.ids[k]],
            "named": [
                {"epoch": one.epoch, "method": one.method, "rank": float(one.result.rank[k]),
                 "best": [_shown(hit, asked.ids[k], texts, one.method) for hit in one.best[k]]}
                for one in result
            ],
        }
        for k in range(EXAMPLES)
    ]  # fmt: skip


def _shown(hit: dict[str, Any], own: str, texts: dict[str, str], method: str) -> dict[str, Any]:
    """A named sequence with its text; only ours knows at which step it mattered."""
    text, step = texts[str(hit["sample"])], hit["step"] if method == OURS else None
    named = {"id": hit["sample"], "influence": hit["influence"], "step": step, "own": hit["sample"] == own}
    return {**named, "text": text, "common": sorted(common_words(text, texts[own]))}
