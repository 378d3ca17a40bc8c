"""An optimizer's state as tensors by name, `<parameter>/<entry>`, and back: what a stored checkpoint holds beside the weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import MismatchError
from .fingerprint import canonical


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor] | None:
    """Copies of all entries on the CPU; None where there is an entry that is neither tensor nor number, or a parameter without a name."""
    names = {id(p): canonical(name) for name, p in model.named_parameters()}
    out: dict[str, Tensor] = {}
    for p, entries in optimizer.state.items():
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if value is None:
                continue
            if id(p) not in names or not isinstance(value, Tensor | int | float):
                return None
            known = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            out[f"{names[id(p)]}/{key}"] = known.detach().cpu().contiguous().clone()
    return out


def optimizer_bytes(optimizer: Optimizer) -> int:
    """What the entries take."""
    values = [x for entries in optimizer.state.values() if isinstance(entries, Mapping) for x in entries.values()]
    return sum(x.nbytes if isinstance(x, Tensor) else 8 for x in values)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put entries back, in the types and on the devices of the parameters, as torch does."""
    names = {id(p): canonical(name) for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        entries.setdefault(parameter, {})[key] = value.clone()
    known = {names.get(id(p), ""): i for i, p in enumerate(parameters)}
    if unknown := sorted(entries.keys() - known.keys()):
        raise MismatchError(
            f"the run has a state of the optimizer for {', '.join(unknown[:3])}, which the recipe's optimizer does not "
            "train. Build model and optimizer as in training."
        )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {known[name]: x for name, x in entries.items()}, "param_groups": groups})
