"""What would make a recorded result exact: the queries by name, and the time that it takes by the run's own training time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..exact import costs
from ..replay.queries import size
from ..results.origin import Remedy, Sweep
from ..store import RunStore


def not_stored(how: Remedy | None, step: int, notes: Sequence[str] = ()) -> str:
    """What to say where an exact result is demanded and not stored."""
    found = f": {notes[0]}" if notes else ""
    if how is None:
        return "exact results are stored for batches of queries, and there is no batch. Pass one, or use method='auto'."
    call = f"run.exact({(how.sweeps[0].queries or 'NAME')!r}, recipe)"
    return f"the run has no exact result of these queries for step {step}{found}. Compute it first: {call}. {how}"


def remedy(store: RunStore, sets: Mapping[str, Any], batch: Any, at: int, queries: int) -> Remedy | None:
    """For these queries at one step; None without a batch, for then there is nothing that a recipe's loss takes."""
    if batch is None:
        return None
    config = store.config
    each = config.get("training", {}).get("seconds_per_step")
    seconds = None if each is None else float(each) * at * costs.reverse(queries)
    step = None if at == store.n_steps() else at
    sweep = Sweep(store.path, name_queries(sets, batch), queries > 1, step, seconds)
    return Remedy((sweep,), recipe=config.get("recipe") is not None)


def name_queries(sets: Mapping[str, Any], batch: Any) -> str | None:
    """The `NAME` of the set that a batch is, or the `NAME:INDEX` of the one query that it is; None where it is neither."""
    wanted = list(_tensors(batch))
    for name, queries in sets.items():
        known = list(_tensors(queries))
        if not wanted or len(known) != len(wanted) or any(map(_unlike, known, wanted)):
            continue
        if all(map(torch.equal, known, wanted)):
            return name
        if (count := size(queries)) and size(batch) == 1 and all(len(x) == count for x in known):
            same = [(x == y).reshape(count, -1).all(1) for x, y in zip(known, wanted, strict=True)]
            rows = torch.stack(same).all(0).nonzero()
            if len(rows):
                return f"{name}:{int(rows[0])}"
    return None


def _unlike(x: Tensor, y: Tensor) -> bool:
    return x.dtype != y.dtype or not x.dim() or x.shape[1:] != y.shape[1:]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch.detach().cpu()
    elif isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _tensors(batch[key])
    elif isinstance(batch, tuple | list):
        for x in batch:
            yield from _tensors(x)
