"""Small training runs in float64, and the same runs as ordinary loops that share no code with `backstory.replay` or `backstory.exact`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.oracles import assert_same
from torch import Tensor, nn

from backstory import Recipe

D = torch.float64
N, BATCH, STEPS = 12, 4, 8
CLIP = 0.15  # most steps are longer
NAME = "tests.support.examples:make"
# The sums behind one number of a run: at each step inputs and hidden units of the forward products with their biases, the
# softmax, the mean, outputs and twice the batch of the backward products, the 27 weights in a clipped norm.
TERMS = STEPS * ((3 + 1) + (5 + 1) + 2 + BATCH + (2 + BATCH + BATCH) + 27)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "decay": lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.05),
    "radam": lambda p: torch.optim.RAdam(
        p, lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3, decoupled_weight_decay=True
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.9, eps=1e-3, weight_decay=0.05),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.9, eps=1e-3, momentum=0.7),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, eps=1e-3, weight_decay=0.05),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.3, maximize=True),
}
KINDS = list(OPTIMIZERS)


def net(activation: str, dropout: float, seed: int) -> nn.Module:
    """3-5-2, on its seed's initial weights."""
    g = torch.Generator().manual_seed(seed)
    bend = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()
    model = nn.Sequential(nn.Linear(3, 5), bend, nn.Dropout(dropout), nn.Linear(5, 2)).to(D)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=g, dtype=D))
    return model


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(
    optimizer: str = "sgd",
    clip: float | None = None,
    schedule: bool = False,
    dropout: float = 0.0,
    activation: str = "tanh",
    reduction: str = "mean",
    seed: int = 0,
) -> Recipe:
    """Every sample occurs in two or three of the eight steps."""
    g = torch.Generator().manual_seed(seed + 1)
    x, y = torch.randn(N + 3, 3, generator=g, dtype=D), torch.randint(0, 2, (N + 3,), generator=g)
    model = net(activation, dropout, seed)
    first, *others = model.parameters()
    made = OPTIMIZERS[optimizer]([{"params": others}, {"params": [first], "lr": 0.05}])
    order = torch.cat([torch.randperm(N, generator=g) for _ in range(3)]).split(BATCH)[:STEPS]
    torch.manual_seed(seed + 2)  # dropout draws from here on
    return Recipe(
        model=model,
        optimizer=made,
        loss=loss,
        batches=[(b.tolist(), (x[b], y[b])) for b in order],
        loss_reduction=reduction,
        clip_norm=clip,
        schedule=torch.optim.lr_scheduler.StepLR(made, 3, 0.5) if schedule else None,
        queries={"q": (x[N:], y[N:])},
    )


def sometimes(optimizer: str = "adamw", used: tuple[int, ...] = (0, 1, 2, 5, 7)) -> Recipe:
    """A run with a second layer that takes part in some of its steps only: in the others it gets no gradient."""
    made = make(optimizer)
    model = nn.ModuleList([made.model, nn.Linear(3, 2, dtype=D)])
    with torch.no_grad():
        for p in model[1].parameters():
            p.fill_(0.1)

    def each(m: Any, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        x, y, both = batch
        return F.cross_entropy(m[0](x) + m[1](x) if both else m[0](x), y, reduction="none")

    return Recipe(
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        loss=each,
        batches=[(ids, (*batch, t in used)) for t, (ids, batch) in enumerate(made.batches)],
        clip_norm=CLIP,
        queries={"q": (*made.queries["q"], True)},
    )


def whole() -> Recipe:
    """A run whose numbers all stay whole, so that every processor has the same bits: one weight for each of 4 features.

    A batch has one sample of each feature; a step with rate ½ on (w − y)² goes by w − y, and by all such steps before.
    """
    y = torch.randint(-9, 10, (N,), generator=torch.Generator().manual_seed(0)).to(D)
    model = nn.Linear(4, 1, bias=False, dtype=D)
    nn.init.zeros_(model.weight)
    order = [[4 * ((t + f) % 3) + f for f in range(4)] for t in range(STEPS)]
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=1.0),
        loss=lambda m, b: (m(b[0])[:, 0] - b[1]).square(),
        batches=[(ids, (torch.eye(4, dtype=D), y[ids])) for ids in order],
        loss_reduction="sum",
        queries={"q": (torch.tensor([[1.0, 1, 1, 1], [1, -1, 2, 0]], dtype=D), torch.zeros(2, dtype=D))},
    )


def assert_replayed(actual: Recipe, expected: Recipe) -> None:
    """Weights of two trainings of one recipe, up to rounding."""
    for a, b in zip(actual.model.parameters(), expected.model.parameters(), strict=True):
        assert_same(a, b, TERMS, size=1.0)


def by_hand(recipe: Recipe, factors: Mapping[tuple[int, int], float]) -> Tensor:
    """Query losses after the run, with the weight of occurrence (step, position) times its factor."""
    model = recipe.model
    for t, (ids, batch) in enumerate(recipe.batches):
        model.zero_grad()
        total = torch.zeros((), dtype=D)
        for i, value in enumerate(recipe.loss(model, batch)):
            total = total + value * factors.get((t, i), 1.0)
        (total / len(ids) if recipe.loss_reduction == "mean" else total).backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        recipe.optimizer.step()
        if recipe.schedule is not None:
            recipe.schedule.step()
    model.eval()
    with torch.no_grad():
        return recipe.loss(model, recipe.queries["q"])


def differences(fresh: Callable[[], Recipe], h: float = 1e-5) -> Tensor:
    """(Q, T·B): −w ∂ℓ/∂w of every occurrence, by central differences of whole runs."""
    occurrences = [(t, i) for t, (ids, _) in enumerate(fresh().batches) for i in range(len(ids))]
    rows = [(by_hand(fresh(), {o: 1 - h}) - by_hand(fresh(), {o: 1 + h})) / (2 * h) for o in occurrences]
    return torch.stack(rows, 1)
