"""The training runs of the GPT study: fine-tuning and from scratch, all drawn from one seed.

Bytes of four domains; AdamW with warm-up, cosine, decay 0.1, betas 0.9 and 0.95, clipping 1.0; the loss is a mean over
the step's tokens. Fine-tuning begins from weights that were trained on other sequences of the same domains.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from backstory.demo.data import Bytes, Sequences, corpus, cut
from backstory.demo.gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, token_losses, warmup_cosine
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal

DOMAINS = ("speeches", "code-django", "scripture", "law")
BYTES = 300_000  # of each domain


@dataclass(frozen=True, kw_only=True)
class GptSetup:
    """One training run, but for its seed."""

    mode: str = "finetune"  # or "scratch"
    steps: int = 100
    rate: float = 3e-4
    batch_size: int = 16
    length: int = 48
    layers: int = 2
    width: int = 48
    heads: int = 4
    queries: int = 16  # sequences of each domain
    pretraining: int = 800  # steps, for fine-tuning
    pretraining_rate: float = 3e-3


SETUPS = {"finetune": GptSetup(), "scratch": GptSetup(mode="scratch", steps=300, rate=2e-3, pretraining=0)}


def setup_named(mode: str) -> GptSetup:
    """The set-up of a mode."""
    if mode not in SETUPS:
        raise UsageError(f"mode must be one of {', '.join(SETUPS)}, got {mode!r}.")
    return SETUPS[mode]


def domain_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each domain's tokens, (4,): the queries; `tokens` (4, n, S + 1)."""
    return token_losses(model, tokens.flatten(0, 1)).reshape(len(tokens), -1).mean(1)


@dataclass(frozen=True)
class Drawn:
    """What one seed draws."""

    pretraining: Tensor  # (P, S + 1)
    training: Tensor  # (N, S + 1)
    ids: list[str]
    queries: Tensor  # (4, n, S + 1)


def recipe(setup: GptSetup, seed: int) -> Recipe:
    """The run of this seed; every sequence occurs once."""
    drawn = draw(setup, seed)
    model = net(setup, seed)
    if setup.pretraining:
        model.load_state_dict(_pretrained(setup, seed))
    steps = range(setup.steps)
    parts = drawn.training.split(setup.batch_size)
    names = [drawn.ids[t * setup.batch_size : (t + 1) * setup.batch_size] for t in steps]
    return _recipe(setup, model, [(names[t], parts[t]) for t in steps], setup.rate, drawn.queries)


def _recipe(
    setup: GptSetup, model: nn.Module, batches: list[tuple[list[str], Tensor]], rate: float, queries: Tensor
) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)
    total = len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, total))
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=batches, loss_reduction="token-mean", tokens=counts,
        clip_norm=CLIP, schedule=schedule, queries={"domains": queries},
    )  # fmt: skip


def net(setup: GptSetup, seed: int) -> GPT:
    """The model at its initialisation."""
    with torch.random.fork_rng():
        torch.manual_seed(_number(seed, "initialisation"))
        return GPT(
            vocabulary=256, length=setup.length, layers=setup.layers, width=setup.width, heads=setup.heads
        )  # fmt: skip


@lru_cache(maxsize=4)
def _pretrained(setup: GptSetup, seed: int) -> dict[str, Tensor]:
    drawn, model = draw(setup, seed), net(setup, seed)
    batches: list[tuple[list[str], Tensor]] = [([""] * len(b), b) for b in drawn.pretraining.split(setup.batch_size)]
    before = _recipe(setup, model, batches, setup.pretraining_rate, drawn.queries)
    for t in range(setup.pretraining):
        take_step(before, t)
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


@lru_cache(maxsize=4)
def draw(setup: GptSetup, seed: int) -> Drawn:
    """Sequences for pretraining, training and queries: different ones, a quarter from each domain on average."""
    pool = _sequences(setup.length + 1)
    sizes = (setup.pretraining * setup.batch_size, setup.steps * setup.batch_size)
    order = torch.randperm(len(pool.ids), generator=generator(seed, "sequences"))
    queries: list[Tensor] = []
    for domain in DOMAINS:
        places = torch.tensor([i for i in order.tolist() if pool.sources[i] == domain])
        queries.append(places[: setup.queries])
    taken = set(torch.cat(queries).tolist())
    rest = torch.tensor([i for i in order.tolist() if i not in taken])
    if len(rest) < sum(sizes):
        raise UsageError(f"the study needs {sum(sizes)} sequences and the corpus has {len(rest)}; take fewer steps.")
    before, now = rest[: sizes[0]], rest[sizes[0] : sum(sizes)]
    ids = [pool.ids[i] for i in now.tolist()]
    return Drawn(pool.tokens[before], pool.tokens[now], ids, torch.stack([pool.tokens[a] for a in queries]))


@lru_cache(maxsize=2)
def _sequences(length: int) -> Sequences:
    return cut(corpus(DOMAINS, BYTES), Bytes(), length)


def removals(setup: GptSetup, seed: int, count: int) -> list[Removal]:
    """`count` sequences of the run, drawn from the seed."""
    ids = draw(setup, seed).ids
    if not 1 < count <= len(ids):
        raise UsageError(f"removals must be between 2 and {len(ids)}, got {count}.")
    chosen = torch.randperm(len(ids), generator=generator(seed, "removals"))[:count].tolist()
    return [Removal((ids[i],)) for i in chosen]


def generator(seed: int, what: str) -> torch.Generator:
    """A generator of its own for each use of the seed."""
    return torch.Generator().manual_seed(_number(seed, what))


def _number(seed: int, what: str) -> int:
    digest = hashlib.sha256(f"gpt/{seed}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
