"""The training runs of the fidelity study: data, model, order and removals, all drawn from one seed."""

import hashlib
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstory.demo.data import Images, digits_8x8
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal
from experiments.data.mnist import mnist

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
    optimizer: str = "sgd"
    rate: float = 0.05  # of plain SGD


DESIGN = Setup()
PAPER = Setup(images=6000, normalised=True, hidden=128, activation="relu", rate=0.01)
TINY = Setup(data="digits", images=96, queries=40, hidden=8, epochs=1, batch_size=16)  # seconds: for tests
MOMENTUM, ADAMW_RATE, BETAS = 0.9, 1e-3, (0.9, 0.95)
OPTIMIZERS = ("sgd", "momentum", "adamw")
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


def setup_of(
    model: str, activation: str, optimizer: str, epochs: int | None = None, images: int | None = None
) -> Setup:
    """The paper's run for ReLU and for the CNN, a smooth one for GELU; "tiny" takes seconds."""
    _expect("model", model, ("mlp", "cnn", "tiny"))
    _expect("activation", activation, tuple(ACTIVATIONS))
    _expect("optimizer", optimizer, OPTIMIZERS)
    result = (
        TINY if model == "tiny" else replace(PAPER if activation == "relu" or model == "cnn" else DESIGN, net=model)
    )
    usual = 10 if model == "cnn" else result.epochs
    return replace(
        result, activation=activation, optimizer=optimizer, epochs=epochs or usual, images=images or result.images
    )


def optimizer_of(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    """Momentum at the rate that moves as far as plain SGD in the long run."""
    if setup.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=ADAMW_RATE, betas=BETAS, weight_decay=0.0)
    if setup.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=setup.rate * (1 - MOMENTUM), momentum=MOMENTUM)
    return torch.optim.SGD(model.parameters(), lr=setup.rate)


def _expect(what: str, result: str, known: tuple[str, ...]) -> None:
    if result not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}, got {result!r}.")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each image."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The query: the mean loss of the images."""
    return loss(model, batch).mean()


def recipe(setup: Setup, seed: int) -> Recipe:
    """The run of this seed; ids are the images' numbers in the training set."""
    result, others = images(setup)
    train, asked = split(setup, seed)
    model = net(setup, result.x.shape[-1], seed)
    g = generator(seed, "order")
    epochs = [train[torch.randperm(len(train), generator=g)].split(setup.batch_size) for _ in range(setup.epochs)]
    return Recipe(
        model=model,
        optimizer=optimizer_of(setup, model),
        loss=loss,
        batches=[(b.tolist(), (_scaled(setup, result.x[b]), result.y[b])) for batches in epochs for b in batches],
        queries={"test": (_scaled(setup, others.x[asked]), others.y[asked])},
    )


@cache
def _images(data: str) -> tuple[Images, Images]:
    if data == "mnist":
        return mnist()
    result = digits_8x8()
    half = len(result.y) // 2
    return Images(result.name, result.x[:half], result.y[:half]), Images(result.name, result.x[half:], result.y[half:])


def images(setup: Setup) -> tuple[Images, Images]:
    """`(training images, test images)` of the set-up's data set."""
    return _images(setup.data)


def split(setup: Setup, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training images, and of the queries among the test images."""
    drawn = []
    for result, count, what in zip(images(setup), (setup.images, setup.queries), ("data", "queries"), strict=True):
        if count > len(result.y):
            raise UsageError(f"the data set {result.name} has only {len(result.y)} images, got {count}.")
        drawn.append(torch.randperm(len(result.y), generator=generator(seed, what))[:count])
    return drawn[0], drawn[1]


def _scaled(setup: Setup, x: Tensor) -> Tensor:
    return (x - MEAN) / DEVIATION if setup.normalised else x


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
        raise UsageError(f"removals must be between 2 and {setup.images}, got {count}.")
    train, _ = split(setup, seed)
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
