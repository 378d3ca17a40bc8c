r"""The training samples of a recipe, each once, where it was used last.

    columns of every answer = the samples, in the order (last step, position)

A batch may be anything that `recipe.loss` takes; only where a package wants single samples is it taken apart, and then
it must be a tensor, or a tuple, list or dict of such.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text, check_unique
from ..errors import UsageError
from ..replay.recipe import Recipe
from ..results.influence import Influence

RANK_ONLY = "rank only: the scores order the samples, their size is no difference of losses"


@dataclass(frozen=True)
class Training:
    """Which samples there are, and where to find each."""

    samples: list[str]  # ids as text
    kind: str  # of the ids: "int" or "str"
    steps: list[int]  # of the last occurrence
    visits: list[tuple[int, list[int]]]  # (step, positions of its batch), in the order of `samples`

    def __len__(self) -> int:
        return len(self.samples)


def survey(recipe: Recipe) -> Training:
    """Every id of `recipe.batches` once, at its last occurrence."""
    seen: set[str] = set()
    kinds: set[str] = set()
    found: list[tuple[int, list[int], list[str]]] = []
    for step in reversed(range(len(recipe.batches))):
        names, kind = as_text(recipe.batches[step][0])
        check_unique(names, step)
        keep = [i for i, name in enumerate(names) if name not in seen]
        if keep:
            kinds.add(kind)
            found.append((step, keep, [names[i] for i in keep]))
            seen.update(names)
    if len(kinds) != 1:
        raise UsageError(
            f"found {len(found)} batches with ids of {len(kinds)} kinds; expected batches with one kind of id."
        )
    found.reverse()
    samples = [name for _, _, names in found for name in names]
    steps = [step for step, keep, _ in found for _ in keep]
    return Training(samples, kinds.pop(), steps, [(step, keep) for step, keep, _ in found])


def answer(recipe: Recipe, training: Training, scores: Tensor, how: str, notes: Sequence[str]) -> Influence:
    """Scores (Q, N) as the answer to a query."""
    return Influence(
        scores=scores.detach().double().cpu(),
        sample_ids=np.array(training.samples),
        steps=np.array(training.steps),
        id_kind=training.kind,
        at=len(recipe.batches),
        method=how,
        caveats=tuple(notes),
    )


def size_of(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    if isinstance(batch, Tensor) and batch.dim():
        return len(batch)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, tuple | list) or not parts:
        raise UsageError(f"found a batch of type {type(batch).__name__}; expected tensors, in a tuple, list or dict.")
    return size_of(parts[0])


def select(batch: Any, keep: Sequence[int], n: int) -> Any:
    """Samples `keep` of a batch of n."""
    if isinstance(batch, Tensor) and batch.dim() and len(batch) == n:
        return batch[torch.as_tensor(keep, device=batch.device)]
    if isinstance(batch, Mapping):
        return {k: select(v, keep, n) for k, v in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(select(v, keep, n) for v in batch)
    found = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
    raise UsageError(
        f"found {found} in a batch of {n} samples; this method takes batches apart, so every part must be a tensor "
        "whose first dimension is the sample."
    )


def join(parts: Sequence[Any]) -> Any:
    """The opposite of `select`: one batch of several."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {k: join([p[k] for p in parts]) for k in first}
    return tuple(join([p[i] for p in parts]) for i in range(len(first)))


def split(recipe: Recipe, training: Training) -> list[Any]:
    """Each sample as a batch of one, in the order of the columns."""
    out: list[Any] = []
    for step, keep in training.visits:
        ids, batch = recipe.batches[step]
        out += [select(batch, [i], len(ids)) for i in keep]
    return out
