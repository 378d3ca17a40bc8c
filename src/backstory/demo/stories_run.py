"""The runs of the fine-tuning demo: stories15M, pretrained on children's stories, trained on one domain of the corpus.

The same number of steps either way: each sequence once, or few sequences several times. All weights are trained, with AdamW, warm-up and
cosine. There is no clipping: the pretrained model's first gradients have norms of 20 and more, and the influences of a step that is
clipped add up to 0.
"""

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError, UsageError
from ..replay.recipe import Recipe
from .data import Sequences, corpus, cut, stories15m
from .gpt_model import BETAS, DECAY, counts, rate_at

RECIPE = "backstory.demo.stories_run:recipe"
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
    rate: float = 3e-4
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
            f"found {setup.steps} steps for {setup.passes} passes; expected a multiple, so that all passes are whole."
        )
    pool, n = _sequences(setup.domain, setup.length + 1), setup.sequences
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(setup.seed))
    if n + setup.queries > len(order):
        raise UsageError(
            f"found {n:,} sequences and {setup.queries} queries; {setup.domain!r} has {len(order):,}. Take fewer steps."
        )
    model = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.rate, betas=BETAS, weight_decay=DECAY)
    batches = [([pool.ids[i] for i in b.tolist()], pool.tokens[b]) for b in _order(setup, order[:n])]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=batches, loss_reduction="token-mean", tokens=counts,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate_at(t, setup.steps, WARMUP)),
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
        raise UnsupportedError("stories15M needs the package 'transformers': pip install 'backstory[hf]'.") from error
    pretrained_llama, _ = stories15m()
    with torch.random.fork_rng():
        model: nn.Module = llama.LlamaForCausalLM(llama.LlamaConfig(**pretrained_llama.shape.as_dict()))
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
