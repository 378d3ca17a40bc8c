"""The training runs of the fidelity study: data, model, order and removals, all drawn from one seed.

Knows nothing of methods or scores.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..session.recipe import Recipe
from ..truth import Removal
from .data import Images, digits_8x8, mnist_5k

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run, but for its seed."""

    data: str = "mnist"  # or "digits"
    images: int = 3000
    queries: int = 1000  # other images; the query is their mean loss
    normalised: bool = False
    net: str = "mlp"  # or "cnn"
    hidden: int = 64
    activation: str = "gelu"
    epochs: int = 3
    batch_size: int = 64
    rate: float = 0.05


SETUPS = {
    "gelu": Setup(),
    "paper-mlp": Setup(images=4000, normalised=True, hidden=128, activation="relu", rate=0.01),
    "paper-mlp-10": Setup(images=4000, normalised=True, hidden=128, activation="relu", rate=0.01, epochs=10),
    "paper-cnn": Setup(images=4000, normalised=True, net="cnn", activation="relu", rate=0.01, epochs=10),
    "tiny": Setup(data="digits", images=96, queries=40, hidden=8, epochs=1, batch_size=16),  # seconds: for tests
}
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


def setup_named(name: str, images: int | None = None, epochs: int | None = None) -> Setup:
    """One of `SETUPS`, with other numbers of images and epochs where given."""
    if name not in SETUPS:
        raise UsageError(f"found setup={name!r}; expected one of {', '.join(SETUPS)}.")
    found = SETUPS[name]
    return replace(found, images=images or found.images, epochs=epochs or found.epochs)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each image."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The query: the mean loss of the images."""
    return loss(model, batch).mean()


def recipe(setup: Setup, seed: int) -> Recipe:
    """The run of this seed; ids are the images' numbers in the data set."""
    found = images(setup)
    train, asked = split(setup, len(found.y), seed)
    x = (found.x - MEAN) / DEVIATION if setup.normalised else found.x
    model = net(setup, found.x.shape[-1], seed)
    g = generator(seed, "order")
    epochs = [train[torch.randperm(len(train), generator=g)].split(setup.batch_size) for _ in range(setup.epochs)]
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setup.rate),
        loss=loss,
        batches=[(b.tolist(), (x[b], found.y[b])) for batches in epochs for b in batches],
        queries={"test": (x[asked], found.y[asked])},
    )


def images(setup: Setup) -> Images:
    """The set-up's data set."""
    return digits_8x8() if setup.data == "digits" else mnist_5k()


def split(setup: Setup, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training images and of the queries."""
    if setup.images + setup.queries > n:
        raise UsageError(f"found {setup.images} images and {setup.queries} queries; the data set has {n} in all.")
    order = torch.randperm(n, generator=generator(seed, "data"))
    return order[setup.queries : setup.queries + setup.images], order[: setup.queries]


def net(setup: Setup, side: int, seed: int) -> nn.Module:
    """The model at torch's default initialisation, drawn from the seed."""
    act = ACTIVATIONS[setup.activation]
    with torch.random.fork_rng():
        torch.manual_seed(_number(seed, "initialisation"))
        if setup.net == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(side * side, setup.hidden), act(), nn.Linear(setup.hidden, 10))
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), act(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), act(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 10),
        )  # fmt: skip


def removals(setup: Setup, seed: int, count: int) -> tuple[list[Removal], list[Removal]]:
    """`count` samples, each left out of the last epoch only, and out of all epochs."""
    if not 1 < count <= setup.images:
        raise UsageError(f"found removals={count}; expected 2 to {setup.images}.")
    train, _ = split(setup, len(images(setup).y), seed)
    drawn = train[torch.randperm(len(train), generator=generator(seed, "removals"))[:count]].tolist()
    last = last_epoch(setup)
    return [Removal((i,), last) for i in drawn], [Removal((i,)) for i in drawn]


def last_epoch(setup: Setup) -> tuple[int, ...]:
    """The steps of the last epoch."""
    steps = -(-setup.images // setup.batch_size)
    return tuple(range((setup.epochs - 1) * steps, setup.epochs * steps))


def generator(seed: int, what: str) -> torch.Generator:
    """A generator of its own for each use of the seed."""
    return torch.Generator().manual_seed(_number(seed, what))


def _number(seed: int, what: str) -> int:
    digest = hashlib.sha256(f"fidelity/{seed}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
