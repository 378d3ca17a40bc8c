"""Passages of the eight domains as bytes, each used once, drawn and ordered by a seed; and a small GPT on them, from scratch."""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from backstory.demo.data import Bytes, Sequences, corpus, cut
from backstory.demo.data.typed import encode_text, pieces, show_queries
from backstory.demo.gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, warmup_cosine
from backstory.errors import UsageError
from backstory.replay.recipe import Presentation, Recipe

QUERIES = 16  # passages of each domain for queries
LEARNING_RATE = 2e-3  # the highest
WARMUP, END = 0.05, 0.01  # the part of the steps that leads to it, and its part at the end


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY)
    parts = drawn.tokens.split(batch_size)
    names = [drawn.ids[t * batch_size : (t + 1) * batch_size] for t in range(steps)]
    words = Bytes()
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=list(zip(names, parts, strict=True)),
        loss_reduction="token-mean", tokens=counts, clip_norm=CLIP,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, steps, WARMUP, END)),
        queries={"passages": drawn.queries[:, 0], **dict(zip(drawn.domains, drawn.queries, strict=True))},
        page=Presentation(
            text=partial(encode_text, tokenizer=words, length=length), show=partial(show_queries, tokenizer=words),
            pieces=partial(pieces, tokenizer=words),
        ),
    )  # fmt: skip


@lru_cache(maxsize=2)
def passages(count: int, length: int, megabytes: float, seed: int) -> Passages:
    """`count` passages for training and QUERIES others of each domain for queries."""
    pool = _pool(length + 1, megabytes)
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(seed)).tolist()
    domains = sorted(set(pool.sources))
    queries = {name: [i for i in order if pool.sources[i] == name][:QUERIES] for name in domains}
    taken = {i for some in queries.values() for i in some}
    used = [i for i in order if i not in taken][:count]
    if len(used) < count or any(len(some) < QUERIES for some in queries.values()):
        raise UsageError(
            f"the corpus is too small: after {QUERIES} queries from each source it has {len(used):,} passages for training, "
            f"and this run needs {count:,}. Use fewer steps, or more megabytes."
        )
    texts = torch.stack([pool.tokens[queries[name]] for name in domains])
    return Passages([pool.ids[i] for i in used], pool.tokens[used], domains, texts)


@lru_cache(maxsize=2)
def _pool(length: int, megabytes: float) -> Sequences:
    return cut(corpus(limit=round(megabytes * 1e6)), Bytes(), length)
