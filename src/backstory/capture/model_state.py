"""Switch a model to other weights or another mode for a while, and restore it afterwards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import MismatchError
from .fingerprint import canonical


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights by name; prefixes of wrappers (DDP, torch.compile) are ignored."""
    names = {canonical(k): k for k in model.state_dict()}
    given = {canonical(k): v for k, v in weights.items()}
    differ = sorted(given.keys() ^ names.keys())
    if differ:
        first = ", ".join(differ[:5])
        raise MismatchError(f"the weights do not match the model: {first}. Build the model they were saved from.")
    model.load_state_dict({names[k]: v for k, v in given.items()})


@contextmanager
def restored_weights(model: nn.Module) -> Iterator[None]:
    """Restore the model's weights on exit, whatever was loaded inside."""
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
