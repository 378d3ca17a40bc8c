"""The run of the text demo: a small GPT on bytes of eight domains, AdamW as the paper trains its language models.

Passages of one length, each used once, drawn and ordered by a seed; other passages of each domain are the questions.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError
from ..replay.recipe import Presentation, Recipe
from .data import Bytes, Sequences, corpus, cut
from .gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, rate_at

RECIPE = "backstory.demo.texts:recipe"
RATE, WARMUP, END = (
    2e-3,
    0.05,
    0.01,
)  # the highest rate, the part of the steps that leads to it, and its part at the end
QUERIES = 16  # passages of each domain that are kept for questions


class Passages(NamedTuple):
    """What the seed draws."""

    ids: list[str]
    tokens: Tensor  # (N, length + 1)
    domains: list[str]
    queries: Tensor  # (domains, QUERIES, length + 1)


def recipe(
    steps: int = 1280,
    batch_size: int = 16,
    length: int = 96,
    layers: int = 3,
    width: int = 96,
    megabytes: float = 0.5,
    seed: int = 0,
) -> Recipe:
    """Model, optimizer, schedule, loss and batches; ids say source, document and place."""
    drawn = passages(steps * batch_size, length, megabytes, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(vocabulary=256, length=length, layers=layers, width=width, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    parts = drawn.tokens.split(batch_size)
    names = [drawn.ids[t * batch_size : (t + 1) * batch_size] for t in range(steps)]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=list(zip(names, parts, strict=True)),
        loss_reduction="token-mean", tokens=counts, clip_norm=CLIP,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate_at(t, steps, WARMUP, END)),
        queries={"passages": drawn.queries[:, 0], **dict(zip(drawn.domains, drawn.queries, strict=True))},
        page=Presentation(text=partial(typed, length=length), show=show_queries, pieces=pieces),
    )  # fmt: skip


@lru_cache(maxsize=2)
def passages(count: int, length: int, megabytes: float, seed: int) -> Passages:
    """`count` passages for training and QUERIES others of each domain for questions."""
    pool = _pool(length + 1, megabytes)
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(seed)).tolist()
    domains = sorted(set(pool.sources))
    queries = {name: [i for i in order if pool.sources[i] == name][:QUERIES] for name in domains}
    taken = {i for some in queries.values() for i in some}
    used = [i for i in order if i not in taken][:count]
    if len(used) < count or any(len(some) < QUERIES for some in queries.values()):
        raise UsageError(
            f"the corpus has {len(used):,} passages for training beside {QUERIES} of each domain for questions; expected {count:,}. "
            "Take fewer steps, or more megabytes."
        )
    texts = torch.stack([pool.tokens[queries[name]] for name in domains])
    return Passages([pool.ids[i] for i in used], pool.tokens[used], domains, texts)


@lru_cache(maxsize=2)
def _pool(length: int, megabytes: float) -> Sequences:
    return cut(corpus(limit=round(megabytes * 1e6)), Bytes(), length)


def text_of(tokens: Tensor) -> str:
    """A passage as people read it."""
    return Bytes().decode(tokens.tolist())


def typed(text: str, length: int) -> Tensor:
    """What a person types as sequences of at most `length` + 1 bytes; a long text is cut evenly, (n, ≤ length + 1)."""
    tokens = torch.tensor(Bytes().encode(text), dtype=torch.int64)
    if len(tokens) < 2:
        raise UsageError(
            f"found a text of {len(tokens)} bytes; expected 2 or more, for each is asked after those before it."
        )
    n = math.ceil((len(tokens) - 1) / length)  # each byte but the first has a loss
    size = math.ceil((len(tokens) - 1) / n) + 1
    starts = [round(k * (len(tokens) - size) / max(1, n - 1)) for k in range(n)]
    return torch.stack([tokens[lo : lo + size] for lo in starts])


def show_queries(tokens: Tensor) -> list[dict[str, str]]:
    """What a person sees of queries."""
    return [{"text": text_of(x)} for x in tokens]


def pieces(tokens: Tensor, place: int) -> Sequence[str]:
    """The text of each position of one sequence of a batch; a character of several bytes stands at its last one."""
    out, waiting = [], b""
    for value in tokens[place][:-1].tolist():
        waiting += bytes([value])
        whole = waiting.decode(errors="ignore")
        broken = len(waiting) > 3 and not whole
        out.append("\ufffd" if broken else whole)
        waiting = b"" if whole or broken else waiting
    return out
