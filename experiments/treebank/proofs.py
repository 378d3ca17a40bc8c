r"""Proofs in the treebank study: the first epoch trained again without a copy's original, and without what ours names first.

    truth = ℓ(copy; trained without it) − ℓ(copy; trained with it)          in nats of the copy's whole loss

After one epoch many originals do not rank first. Retraining says whether they were overwritten or understated.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from backstory.demo.gpt_model import loss
from backstory.exact.leave_out import leave_out
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal
from experiments.treebank.copies import Asked, Ranks
from experiments.treebank.run import TreebankSetup, recipe

Say = Callable[[str, int, int], None]  # (stage, done, in all)
PROOFS = 12  # copies


@dataclass(frozen=True)
class Proof:
    """A copy, the sequence that is left out, and what that does to the copy's loss."""

    copy: str
    removed: str
    own: bool  # the copy's original
    said: float
    truth: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def proofs(setup: TreebankSetup, asked: Asked, ranks: Ranks, count: int, say: Say) -> list[Proof]:
    """Of the first `count` copies; `ranks` are ours after the first epoch."""
    if not count:
        return []
    pairs = [(k, name) for k in range(count) for name in dict.fromkeys([asked.ids[k], ranks.first[k].sample])]
    truth = leave_out(
        lambda: first_epoch(setup), [Removal((name,)) for _, name in pairs],
        lambda model: loss(model, asked.tokens[:count]), lambda done, total: say("retrain", done, total),
    )  # fmt: skip
    return [
        Proof(asked.ids[k], str(name), name == asked.ids[k], _said(ranks, k, name == asked.ids[k]), float(row[k]))
        for (k, name), row in zip(pairs, truth, strict=True)
    ]


def first_epoch(setup: TreebankSetup) -> Recipe:
    """The run up to the end of its first epoch, rates as in the whole run."""
    plan = recipe(**asdict(setup))
    return replace(plan, batches=plan.batches[: setup.ends[0]])


def summary(result: Sequence[Proof]) -> dict[str, Any]:
    """Medians of what was said and of the truth, of originals and of other sequences that were named first; how often the original was worth more."""
    own, other = [p for p in result if p.own], [p for p in result if not p.own]
    worth = {p.copy: p.truth for p in own}
    return {
        "originals": len(own),
        "originals_said": median(p.said for p in own),
        "originals_truth": median(p.truth for p in own),
        "others": len(other),
        "others_said": median(p.said for p in other) if other else None,
        "others_truth": median(p.truth for p in other) if other else None,
        "original_was_worth_more": sum(worth[p.copy] > p.truth for p in other),
    }


def _said(ranks: Ranks, k: int, own: bool) -> float:
    return float(ranks.result.influence[k]) if own else ranks.first[k].influence
