r"""A model for a while at other weights, or in eval mode, and afterwards as it was.

checkpoint = (weights by name, learning rate: one number, or one for each parameter group)
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ..capture import canonical
from ..errors import MismatchError
from ..run.run import Run

Weights = Mapping[str, Tensor]
Checkpoint = tuple[Weights, float | Sequence[float]]


@contextmanager
def loaded(model: nn.Module, weights: Weights) -> Iterator[None]:
    """`model` with these weights."""
    names = {canonical(k): k for k in model.state_dict()}
    given = {canonical(k): v for k, v in weights.items()}
    differ = sorted(given.keys() ^ names.keys())
    if differ:
        raise MismatchError(
            f"the weights and the model differ in {', '.join(differ[:5])}; give the state_dict() of that model."
        )
    before = copy.deepcopy(model.state_dict())
    try:
        model.load_state_dict({names[k]: v for k, v in given.items()})
        yield
    finally:
        model.load_state_dict(before)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode."""
    flags = {m: m.training for m in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def run_checkpoints(run: Run, model: nn.Module, steps: Sequence[int] | None = None) -> Iterator[Checkpoint]:
    """The checkpoints that a run stored (or those of `steps`), each with the rates of the update taken from it.

    The final weights, from which no update was taken, come with the rates of the last one.
    """
    rates = run.store.steps().groups["rate"]  # (T, groups)
    twin = copy.deepcopy(model)
    for step in run.checkpoints if steps is None else steps:
        weights = copy.deepcopy(run.load_weights(twin, step).state_dict())
        yield weights, rates[min(step, len(rates) - 1)].tolist()
