"""Runs with bad data planted in them, drawn from one seed: spoiled passages in the text of a small GPT, wrong labels on images.

    shuffled   the bytes of the passage in another order        reversed   from the last byte to the first
    uniform    every byte drawn from all 256                    repeated   its first four bytes over and over
    labels     an image with one of the nine wrong labels, in every epoch

The queries are clean: other passages of all domains, or test images with their own labels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backstory.errors import UsageError
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal
from backstory.run.gradients import LossFn
from experiments.data import images
from experiments.data import texts as text
from experiments.harness import Problem

CLASSES = 10
REPEATED = 4  # bytes
PLANTED = "planted"  # the one removal
SPOILS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "shuffled": lambda x, g: x[torch.randperm(len(x), generator=g)],
    "uniform": lambda x, g: torch.randint(256, x.shape, generator=g),
    "reversed": lambda x, g: x.flip(0),
    "repeated": lambda x, g: x[:REPEATED].repeat(len(x) // REPEATED + 1)[: len(x)],
}
KINDS = (*SPOILS, "labels")


@dataclass(kw_only=True, eq=False)
class PlantedProblem(Problem):
    """One seed's run, what was planted in it, and the clean queries; its one removal is all that was planted."""

    planted: frozenset[str]  # ids, as text

    @property
    def ids(self) -> list[str]:
        """Of all samples, in the order of scores."""
        return sorted({str(i) for names, _ in self.trained.batches for i in names})


def problem_of(setup: text.DomainSetup | images.Setup, kind: str, seed: int, share: float) -> PlantedProblem:
    """The run of this seed with `share` of its samples spoiled."""
    if kind not in KINDS or not 0 < share < 1:
        raise UsageError(
            f"kind must be one of {', '.join(KINDS)}, and share between 0 and 1, got {kind!r} and {share}."
        )
    if isinstance(setup, images.Setup) != (kind == "labels"):
        raise UsageError(
            f"kind={kind!r} does not fit this data: labels are corrupted in images, all other kinds in passages."
        )
    if isinstance(setup, images.Setup):
        make, planted, queries, loss = _images(setup, seed, share)
    else:
        make, planted, queries, loss = _text(setup, kind, seed, share)
    gone = dict.fromkeys(i for names, _ in make().batches for i in names if str(i) in planted)
    problem = PlantedProblem(
        setup=setup, seed=seed, make=make, removals={PLANTED: [Removal(tuple(gone))]}, loss=loss, queries=queries,
        dtype=torch.float32, planted=planted,
    )  # fmt: skip
    problem.notes["bad"] = torch.tensor([i in planted for i in problem.ids])  # (N,)
    return problem


Parts = tuple[Callable[[], Recipe], frozenset[str], Any, LossFn]  # recipe, planted ids, queries and their mean loss


def _text(setup: text.DomainSetup, kind: str, seed: int, share: float) -> Parts:
    drawn = text.drawn(setup, seed)
    ids = drawn.ids[setup.pretraining * setup.batch_size :]
    places = _places(len(ids), share, text.generator(seed, "planted"))
    make = partial(text.recipe, setup, seed, partial(spoiled, kind=kind, places=places, seed=seed))
    return make, frozenset(ids[i] for i in places), drawn.queries.flatten(0, 1), mean_passage


def spoiled(tokens: Tensor, kind: str, places: list[int], seed: int) -> Tensor:
    """Passages (N, S + 1) with those at `places` spoiled."""
    out, g = tokens.clone(), text.generator(seed, f"spoiled, {kind}")
    for i in places:
        out[i] = SPOILS[kind](tokens[i], g)
    return out


def mean_passage(model: nn.Module, tokens: Tensor) -> Tensor:
    """The query of text: the mean loss of all tokens."""
    return text.by_passage(model, tokens).mean()


def _images(setup: images.Setup, seed: int, share: float) -> Parts:
    train, _ = images.split(setup, seed)
    g = images.generator(seed, "planted")
    wrong = {int(train[i]): int(torch.randint(1, CLASSES, (), generator=g)) for i in _places(len(train), share, g)}
    queries = images.recipe(setup, seed).queries["test"]
    return partial(_mislabelled, setup, seed, wrong), frozenset(map(str, wrong)), queries, images.mean_loss


def _mislabelled(setup: images.Setup, seed: int, wrong: dict[int, int]) -> Recipe:
    plan = images.recipe(setup, seed)
    batches = [
        (ids, (x, (y + torch.tensor([wrong.get(int(i), 0) for i in ids])) % CLASSES)) for ids, (x, y) in plan.batches
    ]
    return replace(plan, batches=batches)


def _places(count: int, share: float, g: torch.Generator) -> list[int]:
    """Which of `count` samples are spoiled."""
    n = max(1, round(share * count))
    if n >= count:
        raise UsageError(
            f"share={share} would corrupt all {count} samples. Choose a smaller share, so that some stay clean."
        )
    return sorted(torch.randperm(count, generator=g)[:n].tolist())
