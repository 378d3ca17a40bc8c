"""The treebank study: when training data mattered, how groups of it faded, and whether copies find their originals.

A small GPT is trained for some epochs under the default recording. Every checkpoint is asked by an adjoint sweep: for a few hundred
questions that is far less work than embedding in segments, and the answers are the same.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backstory.demo.gpt_model import counts
from backstory.demo.stages import prepare_folder
from backstory.insight import Evolution, Phases, Timeline, evolution, phases, timeline
from backstory.insight.mean import mean_influence
from backstory.insight.phases import Curve
from backstory.recording.recorder import record
from backstory.replay.recipe import Recipe, take_step
from backstory.run.groups import grouped
from backstory.run.run import Run
from experiments.treebank.copies import Asked, Ranks, copies, draw_copies, examples
from experiments.treebank.proofs import PROOFS, Proof, proofs, summary
from experiments.treebank.run import RECIPE, TreebankSetup, drawn, per_word, recipe

Say = Callable[[str, int, int], None]  # (stage, done, in all)
PARTS = 4  # of each epoch, with a checkpoint at the end of each
COPIES = 240
CAUTION = (
    "The net was trained from scratch, where recorded scores are weakest: in `python -m experiments gpt --mode scratch` they rank the "
    "truth at about 0.3 (fine-tuned: 0.77), and sizes come out several times too small."
)


@dataclass(frozen=True)
class TreebankResult:
    """Everything that the tables and the pages show."""

    setup: TreebankSetup
    run: str
    losses: list[dict[str, float]]  # nats a word at each epoch's end: of the copies, and of unseen text
    timeline: Timeline
    signed: Phases  # of the timeline's means with their sign, as the paper draws them
    undivided: Phases  # of the sizes as they are, not divided by the rate
    evolution: Evolution  # of occurrences by thirds of the steps
    faded: Curve  # (3, C) the same groups and checkpoints: mean |influence| of one occurrence
    ranks: list[Ranks]
    examples: list[dict[str, Any]]
    proofs: list[Proof]  # of the first epoch, by retraining
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {k: getattr(self, k) for k in ("run", "losses", "examples", "seconds")}
        return {
            "setup": {**asdict(self.setup), "ends": self.setup.ends},
            **plain,
            "timeline": self.timeline.as_dict(),
            "phases_of_signed_means": self.signed.as_dict(),
            "phases_of_undivided_sizes": self.undivided.as_dict(),
            "evolution": self.evolution.as_dict(),
            "evolution_of_sizes": dict(zip(self.evolution.groups, self.faded.tolist(), strict=True)),
            "copies": [one.as_dict() for one in self.ranks],
            "proofs": [one.as_dict() for one in self.proofs],
            "proven": summary(self.proofs) if self.proofs else None,
            "caution": CAUTION,
        }


def study(
    setup: TreebankSetup, out: Path, *, count: int = COPIES, checked: int = PROOFS, say: Say | None = None
) -> TreebankResult:
    """Run the whole study into the folder `out`; the recorded run is `out/run`. `count` copies are asked, `checked` of them by retraining too."""
    report, seconds = say or (lambda stage, done, total: None), dict[str, float]()
    result, plan = drawn(setup), recipe(**asdict(setup))
    asked = draw_copies(result.ids, result.tokens, count, setup.seed)
    path, batch = prepare_folder(out / "run", RECIPE), plan.queries["valid"]
    with _timed(seconds, "train and record"):
        run = _recorded(setup, plan, path, report)
    with _timed(seconds, "timeline"):
        when = timeline(run, plan.model, per_word, batch, seed=setup.seed)
    with _timed(seconds, "evolution"):
        groups = evolution(
            run, plan.model, per_word, batch, by="steps", progress=lambda done, total: report("evolution", done, total)
        )
        faded = sizes_by_third(run, plan)
    with _timed(seconds, "rank copies"):
        ranks = copies(run, plan, asked, setup.ends, seed=setup.seed, say=report)
    with _timed(seconds, "retrain"):
        proven = proofs(setup, asked, ranks[0], min(checked, count), report)
    texts = dict(zip(result.ids, result.texts, strict=True))
    return TreebankResult(
        setup, str(run.path), [_losses(run, plan, asked, at) for at in setup.ends], when,
        phases(when.per_rate, seed=setup.seed), phases(when.size * when.rate, seed=setup.seed), groups, faded, ranks, examples(ranks, asked, texts), proven, seconds,
    )  # fmt: skip


def _recorded(setup: TreebankSetup, plan: Recipe, path: Path, say: Say) -> Run:
    """Train and record by default; every epoch's end is a checkpoint, and so are PARTS − 1 places inside each."""
    steps, result = len(plan.batches), drawn(setup)
    with record(
        plan.model, plan.optimizer, path, loss_reduction="token-mean", clip_norm=plan.clip_norm, steps=steps,
        checkpoints=PARTS * setup.epochs - 1, recipe=RECIPE, recipe_args=asdict(setup),
    ) as rec:  # fmt: skip
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)) as s:
                s.losses(take_step(plan, t))
            say("train and record", t + 1, steps)
        rec.describe(result.ids, text=result.texts)
    return Run(path)


def sizes_by_third(run: Run, plan: Recipe) -> Curve:
    """Mean |influence| on the unseen sequences' mean loss of one occurrence of each third of the steps, at every checkpoint, (3, C)."""
    columns = []
    _, third, *_ = grouped(run, "steps")
    for c in run.checkpoints[1:]:
        answer = mean_influence(run, run.load_weights(plan.model, c), per_word, plan.queries["valid"], c)
        sizes, own = answer.scores[0].abs().numpy(), third[: len(answer)]
        columns.append([sizes[own == k].mean() if (own == k).any() else np.nan for k in range(3)])
    return np.array(columns).T


def _losses(run: Run, plan: Recipe, asked: Asked, at: int) -> dict[str, float]:
    """Nats a word of the model at one step, on the copies and on unseen sequences."""
    run.load_weights(plan.model, at)
    with torch.no_grad():
        known, unseen = (float(per_word(plan.model, x).mean()) for x in (asked.tokens, plan.queries["valid"]))
    return {"at": at, "copies": known, "unseen": unseen}


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
