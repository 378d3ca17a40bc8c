"""stories15M, pretrained on children's stories, on one domain, each sequence once and a few three times.

The paper's fine-tuning figure: there, a pretrained model that sees new text once has no ascent at the end, and one that sees a small set three
times has. Only a timeline is wanted, so that the recording is a cheap one: rank 8, no checkpoints, no embeddings. The same number of steps
either way; all weights are trained, with AdamW, warm-up and cosine. There is no clipping: the pretrained model's first gradients have norms
of 20 and more, and the influences of a step that is clipped add up to 0.
"""

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstory.demo.data import Sequences, corpus, cut
from backstory.demo.gpt_model import BETAS, DECAY, counts, warmup_cosine
from backstory.demo.stages import Progress, Stages, prepare_folder, record_recipe
from backstory.errors import UnsupportedError, UsageError
from backstory.insight import Phases, Timeline, phases, timeline
from backstory.replay.recipe import Recipe
from experiments.data.models import stories15m

RECIPE = "experiments.stories.study:recipe"
PASSES, RANK = (1, 3), 8
WARMUP = 0.05  # part of the steps
BYTES = 200_000  # of the domain


@dataclass(frozen=True, kw_only=True)
class StoriesSetup:
    """One fine-tuning."""

    passes: int = 1  # how often each sequence is used
    domain: str = "scripture"
    steps: int = 240
    batch_size: int = 4
    length: int = 32  # tokens that have a loss
    learning_rate: float = 3e-4
    queries: int = 48  # other sequences of the domain
    seed: int = 0

    @property
    def sequences(self) -> int:
        """How many different ones there are."""
        return self.steps * self.batch_size // self.passes


def recipe(**args: Any) -> Recipe:
    """Model, optimizer, schedule, loss and batches of `StoriesSetup(**args)`."""
    setup = StoriesSetup(**args)
    if setup.steps % setup.passes:
        raise UsageError(
            f"steps must be a multiple of passes, so that every pass is complete, got {setup.steps} and {setup.passes}."
        )
    pool, n = _sequences(setup.domain, setup.length + 1), setup.sequences
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(setup.seed))
    if n + setup.queries > len(order):
        raise UsageError(
            f"{setup.domain!r} has {len(order):,} sequences, and {n:,} for training and {setup.queries} for queries are needed. Use fewer steps."
        )
    model = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, betas=BETAS, weight_decay=DECAY)
    batches = [([pool.ids[i] for i in b.tolist()], pool.tokens[b]) for b in _order(setup, order[:n])]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=batches, loss_reduction="token-mean", tokens=counts,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, setup.steps, WARMUP)),
        queries={"unseen": pool.tokens[order[n : n + setup.queries]]},
    )  # fmt: skip


def _order(setup: StoriesSetup, chosen: Tensor) -> list[Tensor]:
    """Which sequences each step uses; every pass has an order of its own."""
    g = torch.Generator().manual_seed(setup.seed + 1)
    passes = [chosen[torch.randperm(len(chosen), generator=g)] for _ in range(setup.passes)]
    return list(torch.cat(passes).split(setup.batch_size))


def pretrained() -> nn.Module:
    """stories15M with its weights, as a Llama of transformers."""
    try:
        llama = importlib.import_module("transformers.models.llama")
    except ImportError as error:
        raise UnsupportedError(
            "stories15M needs the package 'transformers': pip install '.[hf]' in the checkout."
        ) from error
    pretrained_llama, _ = stories15m()
    with torch.random.fork_rng():
        model: nn.Module = llama.LlamaForCausalLM(llama.LlamaConfig(**asdict(pretrained_llama.shape)))
    model.load_state_dict(pretrained_llama.weights)
    return model


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The sum over each sequence's tokens: (B,)."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each.reshape(len(tokens), -1).sum(1)


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over all tokens of all sequences: one query."""
    return loss(model, tokens).mean() / (tokens.shape[1] - 1)


@lru_cache(maxsize=2)
def _sequences(domain: str, length: int) -> Sequences:
    return cut(corpus([domain], BYTES), stories15m()[1], length)


@dataclass(frozen=True)
class FineTuning:
    """One fine-tuning and its timeline."""

    setup: StoriesSetup
    run: str
    before: float  # nats a token on unseen sequences
    after: float
    timeline: Timeline
    signed: Phases  # of the timeline's means with their sign, as the paper draws them
    undivided: Phases  # of the sizes as they are, not divided by the learning rate
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {k: getattr(self, k) for k in ("run", "before", "after", "seconds")}
        setup = {**asdict(self.setup), "sequences": self.setup.sequences}
        return {
            "setup": setup, **plain, "timeline": self.timeline.as_dict(), "phases_of_signed_means": self.signed.as_dict(),
            "phases_of_undivided_sizes": self.undivided.as_dict(),
        }  # fmt: skip


def fine_tune(
    out: Path, setup: StoriesSetup | None = None, *, passes: Sequence[int] = PASSES, progress: Progress | None = None
) -> list[FineTuning]:
    """One fine-tuning for each number of passes, recorded in `out/run-1`, `out/run-3` and so on."""
    chosen = setup or StoriesSetup()
    return [_one(out, replace(chosen, passes=n), progress) for n in passes]


def _one(out: Path, setup: StoriesSetup, progress: Progress | None) -> FineTuning:
    path, args, stages = prepare_folder(out / f"run-{setup.passes}", RECIPE), asdict(setup), Stages(progress)
    plan = recipe(**args)
    before = _loss(plan)
    with stages.stage(f"fine-tune, {setup.passes} × each sequence") as done:
        run = record_recipe(plan, path, done, rank=RANK, recipe=RECIPE, recipe_args=args)
    with stages.stage(f"timeline, {setup.passes} × each sequence") as done:
        when = timeline(run, plan.model, mean_loss, plan.queries["unseen"], seed=setup.seed, progress=done)
    signed, plain = (phases(curve, seed=setup.seed) for curve in (when.per_rate, when.size * when.rate))
    return FineTuning(setup, str(path), before, _loss(plan), when, signed, plain, sum(stages.seconds.values()))


def _loss(plan: Recipe) -> float:
    plan.model.eval()
    with torch.no_grad():
        return float(mean_loss(plan.model, plan.queries["unseen"]))


def heading(one: FineTuning) -> str:
    """What this fine-tuning is, in one line."""
    often = "once" if one.setup.passes == 1 else f"{one.setup.passes} times"
    return f"{one.setup.sequences:,} sequences of {one.setup.domain!r}, each used {often}."
