"""The recipe of the demo: a small convolutional net on handwritten digits, plain SGD.

Knows nothing of runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..session.recipe import Recipe
from .data import DataError, Images, digits_8x8, mnist_5k

RECIPE = "backstory.studies.digits:recipe"
Batch = tuple[Tensor, Tensor]


def images(source: str = "auto") -> Images:
    """MNIST's 5,000, or the 8 × 8 digits where no registry can be reached."""
    if source not in ("auto", "mnist", "digits"):
        raise UsageError(f"found source {source!r}; expected auto, mnist or digits.")
    if source == "digits":
        return digits_8x8()
    try:
        return mnist_5k()
    except DataError:
        if source == "mnist":
            raise
        return digits_8x8()


def split(found: Images, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of training and test images: one in five is a test image."""
    order = torch.randperm(len(found.y), generator=torch.Generator().manual_seed(seed))
    cut = len(order) // 5
    return order[cut:], order[:cut]


class Standardise(nn.Module):
    """Pixels to mean 0 and variance 1, so that training starts without a plateau."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 1, H, W); constants of MNIST."""
        return (x - 0.1307) / 0.3081


def net(side: int, seed: int = 0) -> nn.Module:
    """A convolution and a linear layer; GELU, so that retraining is smooth."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = nn.Conv2d(1, 6, 5, stride=3, padding=1) if side > 8 else nn.Conv2d(1, 16, 3, stride=1, padding=1)
        with torch.no_grad():
            width = conv(torch.zeros(1, 1, side, side)).numel()
        return nn.Sequential(Standardise(), conv, nn.GELU(), nn.Flatten(), nn.Linear(width, 10))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each image."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(source: str = "auto", epochs: int = 4, batch_size: int = 64, rate: float = 0.02, seed: int = 0) -> Recipe:
    """Model, optimizer, loss, and the batches in their order; ids are the images' numbers in the data set."""
    found = images(source)
    train, test = split(found, seed)
    model = net(found.x.shape[-1], seed)
    g = torch.Generator().manual_seed(seed + 1)
    order = [b for _ in range(epochs) for b in train[torch.randperm(len(train), generator=g)].split(batch_size)]
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        loss=loss,
        batches=[(b.tolist(), (found.x[b], found.y[b])) for b in order],
        queries={"test": (found.x[test], found.y[test])},
    )
