"""A model for a while at other weights or in another mode, and afterwards as it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import MismatchError
from .fingerprint import canonical


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights by name, whatever wrappers the model or the weights come from."""
    names = {canonical(k): k for k in model.state_dict()}
    given = {canonical(k): v for k, v in weights.items()}
    differ = sorted(given.keys() ^ names.keys())
    if differ:
        raise MismatchError(
            f"the model and the weights differ in {', '.join(differ[:5])}; build the model that the weights belong to."
        )
    model.load_state_dict({names[k]: v for k, v in given.items()})


@contextmanager
def restored_weights(model: nn.Module) -> Iterator[None]:
    """Whatever weights are loaded inside, the model has its own again afterwards."""
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(before)


@contextmanager
def in_mode(model: nn.Module, training: bool | None = False) -> Iterator[None]:
    """The model in eval mode, or in training mode, or as it is (None); the flags of all its modules are put back."""
    flags = {module: module.training for module in model.modules()}
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
