"""The runs of the study of sources: a small GPT on eight domains of text, AdamW, from scratch or fine-tuned, all drawn from one seed.

Fine-tuning begins from weights that were trained on other passages of the same domains. Every passage is used once; ids begin with the source.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from backstory.demo.gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, token_losses, warmup_cosine
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal
from experiments.data.passages import Passages, passages


@dataclass(frozen=True, kw_only=True)
class DomainSetup:
    """One training run, but for its seed."""

    mode: str = "scratch"  # or "finetune"
    steps: int = 200
    rate: float = 2e-3
    batch_size: int = 16
    length: int = 48
    layers: int = 2
    width: int = 48
    pretraining: int = 0  # steps, for fine-tuning
    pretraining_rate: float = 3e-3
    megabytes: float = 0.3  # of each source


SETUPS = {
    "finetune": DomainSetup(mode="finetune", steps=100, rate=3e-4, pretraining=800),
    "scratch": DomainSetup(),
}
PARTS = ("whole", "half")  # of a source that is removed


def setup_named(mode: str) -> DomainSetup:
    """The set-up of a mode."""
    if mode not in SETUPS:
        raise UsageError(f"mode must be one of {', '.join(SETUPS)}, got {mode!r}.")
    return SETUPS[mode]


def recipe(setup: DomainSetup, seed: int, change: Callable[[Tensor], Tensor] | None = None) -> Recipe:
    """The run of this seed; `change` may replace the tokens of the training passages (N, S + 1) by others."""
    result, before = drawn(setup, seed), setup.pretraining * setup.batch_size
    model = _net(setup, seed)
    if setup.pretraining:
        model.load_state_dict(_pretrained(setup, seed))
    tokens = result.tokens[before:] if change is None else change(result.tokens[before:])
    return _recipe(setup, model, result.ids[before:], tokens, setup.rate, result)


def source_of(name: int | str) -> str:
    """The source that an id begins with."""
    return str(name).split("/")[0]


def by_passage(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each passage's tokens: (B, S + 1) -> (B,)."""
    return token_losses(model, tokens).mean(1)


def removals(setup: DomainSetup, seed: int) -> dict[str, Mapping[str, Removal]]:
    """Whole or half -> source -> what is left out: all of its passages, or a half of them that the seed draws."""
    result = drawn(setup, seed)
    of: dict[str, list[str]] = {name: [] for name in result.domains}
    for name in result.ids[setup.pretraining * setup.batch_size :]:
        of[source_of(name)].append(name)
    if few := [name for name, ids in of.items() if len(ids) < 2]:
        raise UsageError(f"the run has fewer than 2 passages of {few[0]}; take more steps.")
    halves = {name: _half(ids, seed, name) for name, ids in of.items()}
    return {
        "whole": {name: Removal(tuple(ids)) for name, ids in of.items()},
        "half": {name: Removal(tuple(ids)) for name, ids in halves.items()},
    }


def _half(ids: Sequence[str], seed: int, name: str) -> list[str]:
    order = torch.randperm(len(ids), generator=generator(seed, f"half of {name}")).tolist()
    return [ids[i] for i in sorted(order[: len(ids) // 2])]


def drawn(setup: DomainSetup, seed: int) -> Passages:
    """Passages for pretraining, then for training, and those of each domain that are asked about."""
    count = (setup.pretraining + setup.steps) * setup.batch_size
    return passages(count, setup.length, setup.megabytes, seed)


def _recipe(
    setup: DomainSetup, model: GPT, ids: Sequence[str], tokens: Tensor, rate: float, result: Passages
) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)
    size = setup.batch_size
    parts = tokens.split(size)
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, loss_reduction="token-mean", tokens=counts, clip_norm=CLIP,
        batches=[(list(ids[t * size : (t + 1) * size]), part) for t, part in enumerate(parts)],
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, len(parts))),
        queries={"domains": result.queries, **dict(zip(result.domains, result.queries, strict=True))},
    )  # fmt: skip


def _net(setup: DomainSetup, seed: int) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(_number(seed, "initialisation"))
        return GPT(vocabulary=256, length=setup.length, layers=setup.layers, width=setup.width, heads=4)


@lru_cache(maxsize=4)
def _pretrained(setup: DomainSetup, seed: int) -> dict[str, Tensor]:
    result, n, model = drawn(setup, seed), setup.pretraining * setup.batch_size, _net(setup, seed)
    before = _recipe(setup, model, result.ids[:n], result.tokens[:n], setup.pretraining_rate, result)
    for t in range(setup.pretraining):
        take_step(before, t)
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def generator(seed: int, what: str) -> torch.Generator:
    """A generator of its own for each use of the seed."""
    return torch.Generator().manual_seed(_number(seed, what))


def _number(seed: int, what: str) -> int:
    digest = hashlib.sha256(f"domains/{seed}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
