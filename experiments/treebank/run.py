"""The run of the treebank study: a small GPT on words of the Penn Treebank, several epochs, AdamW as the paper trains its language models.

A sequence is some words in a row of the training text. Which sequences are used, and their order in each epoch, is drawn by a seed;
sequences of the validation text are the questions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from backstory.demo.data import Document, cut
from backstory.demo.gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, token_losses, warmup_cosine
from backstory.errors import UsageError
from backstory.replay.recipe import Presentation, Recipe
from experiments.data.treebank import penn_treebank

RECIPE = "experiments.treebank.run:recipe"
RATE, WARMUP = 3e-3, 0.05  # the highest rate, and the part of the steps that leads to it
ASKED = 128  # sequences of the validation text that are asked about
RARE, END = "<unk>", "<eos>"


@dataclass(frozen=True)
class Words:
    """One token for each word that is known; all others are <unk>, and the end of a line is <eos>."""

    known: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many different tokens there are."""
        return len(self.known)

    def encode(self, text: str) -> list[int]:
        """The tokens of the text's words."""
        number = {word: k for k, word in enumerate(self.known)}
        return [number.get(word, number[RARE]) for word in words_of(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The words of tokens, with spaces between them."""
        return " ".join(self.known[k] for k in tokens)


class Net(GPT):
    """The GPT with positions looked up for each sequence: the gradients of many queries then come from one backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S) -> (B, S, vocabulary)."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


class Drawn(NamedTuple):
    """What the seed draws."""

    tokenizer: Words
    ids: list[str]
    tokens: Tensor  # (N, length + 1)
    texts: list[str]  # as they stand in the treebank
    asked: Tensor  # (ASKED or fewer, length + 1)


@dataclass(frozen=True, kw_only=True)
class TreebankSetup:
    """One training run."""

    sequences: int = 4800
    epochs: int = 3
    batch_size: int = 16
    length: int = 32  # words that have a loss
    layers: int = 2
    width: int = 64
    words: int = 2000  # that are known
    seed: int = 0

    @property
    def ends(self) -> list[int]:
        """The step at which each epoch ends."""
        steps = math.ceil(self.sequences / self.batch_size)
        return [steps * k for k in range(1, self.epochs + 1)]


def recipe(**args: int) -> Recipe:
    """Model, optimizer, schedule, loss and batches of `TreebankSetup(**args)`; an id says where the sequence begins in the training text."""
    setup = TreebankSetup(**args)
    result = drawn(setup)
    with torch.random.fork_rng():
        torch.manual_seed(setup.seed)
        model = Net(
            vocabulary=result.tokenizer.size, length=setup.length, layers=setup.layers, width=setup.width, heads=4
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    batches = [([result.ids[i] for i in b.tolist()], result.tokens[b]) for b in _order(setup)]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=batches, loss_reduction="token-mean", tokens=counts,
        clip_norm=CLIP,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, len(batches), WARMUP)),
        queries={"valid": result.asked}, page=Presentation(show=partial(shown, tokenizer=result.tokenizer)),
    )  # fmt: skip


def _order(setup: TreebankSetup) -> list[Tensor]:
    """Which sequences each step uses; every epoch has an order of its own."""
    g = torch.Generator().manual_seed(setup.seed + 1)
    every = [torch.randperm(setup.sequences, generator=g).split(setup.batch_size) for _ in range(setup.epochs)]
    return [batch for epoch in every for batch in epoch]


def per_word(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each sequence's words: (B,)."""
    return token_losses(model, tokens).mean(1)


@lru_cache(maxsize=2)
def drawn(setup: TreebankSetup) -> Drawn:
    """Sequences of the training text, and the first ones of the validation text."""
    text, size = penn_treebank(), setup.length + 1
    tokenizer = known_words(text.train, setup.words)
    pool = cut([Document("train", "treebank", text.train)], tokenizer, size)
    if setup.sequences > len(pool.ids):
        raise UsageError(
            f"sequences must be at most {len(pool.ids):,}, because the treebank has no more of {size} words, "
            f"got {setup.sequences:,}."
        )
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(setup.seed))[: setup.sequences]
    ids, every = [pool.ids[i] for i in order.tolist()], words_of(text.train)
    starts = [int(name.split("/")[-1]) for name in ids]
    asked = cut([Document("valid", "treebank", text.valid)], tokenizer, size).tokens[:ASKED]
    return Drawn(tokenizer, ids, pool.tokens[order], [" ".join(every[k : k + size]) for k in starts], asked)


def known_words(text: str, most: int) -> Words:
    """The `most` words that occur most often, <unk> and <eos> among them."""
    often = Counter(words_of(text))
    names = sorted(often.keys() - {RARE, END}, key=lambda word: (-often[word], word))
    return Words((RARE, END, *names[: most - 2]))


def words_of(text: str) -> list[str]:
    """Words, and <eos> where a line ends."""
    return text.replace("\n", f" {END} ").split()


def shown(tokens: Tensor, tokenizer: Words) -> list[dict[str, str]]:
    """What a person sees of queries."""
    return [{"text": tokenizer.decode(row)} for row in tokens.tolist()]
