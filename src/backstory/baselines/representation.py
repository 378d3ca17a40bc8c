r"""Representation similarity: how alike the model sees a sample and a query.

    score(z, q) = ⟨φ(z), φ(q)⟩ / (‖φ(z)‖ ‖φ(q)‖)        or ⟨φ(z), φ(q)⟩ with metric="dot"

φ is the input of the last nn.Linear that the model calls, or the output of a module given by name; positions between
sample and features are averaged. Higher: more alike, read as "helped"; labels play no part, so a sample with the wrong
label looks as helpful as one with the right label. Ranks only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..replay.recipe import Recipe
from ..results.influence import Influence
from .models import evaluated
from .training import RANK_ONLY, answer, survey

METRICS = ("cosine", "dot")


def representation_similarity(
    recipe: Recipe, queries: Any, *, module: str | None = None, metric: str = "cosine"
) -> Influence:
    """Likeness of the features of samples and of queries, one query for each sample of the batch `queries`."""
    if metric not in METRICS:
        raise UsageError(f"found metric={metric!r}; expected one of {', '.join(METRICS)}.")
    training = survey(recipe)
    asked, place = _features(recipe, queries, module)  # (Q, d)
    found = []
    for step, keep in training.visits:
        ids, batch = recipe.batches[step]
        rows, _ = _features(recipe, batch, module)
        if len(rows) != len(ids):
            raise UsageError(f"the features of step {step} have {len(rows)} rows for {len(ids)} samples.")
        found.append(rows[keep])
    F = torch.cat(found)  # (N, d)
    if metric == "cosine":
        asked, F = nn.functional.normalize(asked, dim=1), nn.functional.normalize(F, dim=1)
    said = f"{metric} of the {place}; the labels and the loss play no part"
    return answer(recipe, training, asked @ F.T, "representation similarity", (RANK_ONLY, said))


def _features(recipe: Recipe, batch: Any, module: str | None) -> tuple[Tensor, str]:
    """`(features (B, d) in float64, where they come from)`."""
    held: list[tuple[Tensor, str]] = []
    with evaluated(recipe.model), torch.no_grad(), _watch(recipe.model, module, held):
        recipe.loss(recipe.model, batch)
    if not held:
        what = f"the module {module!r}" if module else "an nn.Linear"
        raise UsageError(f"the loss never called {what}; name the module whose output to take with module=.")
    x, place = held[-1]
    x = x.detach().double().cpu()
    return (x if x.dim() == 2 else x.reshape(len(x), -1, x.shape[-1]).mean(1)), place


@contextmanager
def _watch(model: nn.Module, module: str | None, held: list[tuple[Tensor, str]]) -> Iterator[None]:
    modules = dict(model.named_modules())
    if module is not None and module not in modules:
        raise UsageError(f"the model has no module {module!r}; it has {', '.join(n for n in modules if n)}.")
    handles = []
    for name, layer in modules.items():
        if name == module:
            handles.append(layer.register_forward_hook(lambda m, a, out, n=name: held.append((out, f"output of {n}"))))
        elif module is None and isinstance(layer, nn.Linear):
            handles.append(layer.register_forward_pre_hook(lambda m, a, n=name: held.append((a[0], f"input of {n}"))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
