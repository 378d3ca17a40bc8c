"""The training runs of the quality study, by name: language models, classifiers and regressions, calm and chaotic ones.

Each is drawn from a seed and has one query set, `QUERIES`. Settings are those that a user would take; only what a run's name says differs
from the defaults of recording.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstory.demo.data import digits_8x8
from backstory.replay.recipe import Recipe
from experiments.data import images
from experiments.gpt import setups as gpt

QUERIES = "unseen"
CLASSIFIER = replace(images.DESIGN, images=1500, queries=300, epochs=2)
CHAOTIC_RATE = 1e-2


@dataclass(frozen=True)
class Kind:
    """One kind of run: how its recipe is made from a seed, and the settings of its recording."""

    make: Callable[[int], Recipe]
    settings: dict[str, Any] = field(default_factory=dict)


def language(mode: str, seed: int, **more: Any) -> Recipe:
    """A run of the GPT study; its queries are unseen sequences of all domains."""
    made = gpt.recipe(replace(gpt.setup_named(mode), **more), seed)
    return replace(made, queries={QUERIES: made.queries["domains"].flatten(0, 1)})


def classifier(seed: int, **more: Any) -> Recipe:
    """A run of the fidelity study."""
    made = images.recipe(replace(CLASSIFIER, **more), seed)
    return replace(made, queries={QUERIES: made.queries["test"]})


class Residual(nn.Module):
    """Two residual blocks of convolutions with GroupNorm."""

    def __init__(self, act: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), act(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten classes."""
        h: Tensor = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        out: Tensor = self.last(h.mean((2, 3)))
        return out


def residual(seed: int, act: type[nn.Module], rate: float, **more: Any) -> Recipe:
    """A residual network with GroupNorm, AdamW."""
    made = classifier(seed, epochs=1, images=1280, batch_size=16, **more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Residual(act)
    return replace(made, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=rate))


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error of each sample."""
    return F.mse_loss(model(batch[0]), batch[1], reduction="none").sum(1)


def regression(seed: int, optimizer: str) -> Recipe:
    """The lower half of a digit's picture from the upper half."""
    x = digits_8x8().x.flatten(1)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    train, unseen = order[:1280], order[1280:]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Recipe(
        model=model, optimizer=made, loss=square, loss_reduction="mean", clip_norm=1.0 if optimizer == "adamw" else None,
        batches=[(b.tolist(), (x[b, :32], x[b, 32:])) for b in train.split(16)],
        queries={QUERIES: (x[unseen, :32], x[unseen, 32:])},
    )  # fmt: skip


EXACT = {"curvature": "exact:10"}
KINDS: dict[str, Kind] = {
    "GPT from scratch": Kind(lambda seed: language("scratch", seed)),
    "GPT from scratch, another": Kind(lambda seed: language("scratch", seed + 1)),
    "GPT fine-tuned": Kind(lambda seed: language("finetune", seed)),
    "GPT fine-tuned, another": Kind(lambda seed: language("finetune", seed + 1)),
    "MLP, SGD": Kind(lambda seed: classifier(seed)),
    "MLP, SGD, exact GGN": Kind(lambda seed: classifier(seed), EXACT),
    "MLP, momentum": Kind(lambda seed: classifier(seed, optimizer="momentum")),
    "MLP, AdamW": Kind(lambda seed: classifier(seed, optimizer="adamw")),
    "MLP, AdamW, exact GGN": Kind(lambda seed: classifier(seed, optimizer="adamw"), EXACT),
    "MLP, ReLU, SGD at a large rate": Kind(lambda seed: classifier(seed, activation="relu", rate=1.0)),
    "CNN, SGD": Kind(lambda seed: classifier(seed, net="cnn", images=960, epochs=1, batch_size=16)),
    "residual CNN, AdamW": Kind(lambda seed: residual(seed, nn.GELU, 1e-3)),
    "residual CNN, ReLU, AdamW at a large rate": Kind(lambda seed: residual(seed, nn.ReLU, CHAOTIC_RATE)),
    "regression, momentum": Kind(lambda seed: regression(seed, "momentum")),
    "regression, AdamW, clipped": Kind(lambda seed: regression(seed, "adamw")),
}
