r"""Similarity of a sample and a query in the trained model, by gradients or by features.

    gradient dot      ⟨∇ℓ(θ, z), ∇ℓ(θ, q)⟩
    gradient cosine   that over ‖∇ℓ(θ, z)‖ ‖∇ℓ(θ, q)‖
    representation    ⟨φ(z), φ(q)⟩ / (‖φ(z)‖ ‖φ(q)‖)        or ⟨φ(z), φ(q)⟩ with metric="dot"

Positive gradients: a step along the sample lowers the query's loss, so the sample helped; as if training had been plain SGD, and gradients
at the end were what they were in training. φ is the input of the last nn.Linear that the model calls, or the output of a module
given by name; positions between sample and features are averaged. Higher: more alike, read as "helped"; labels play no part, so a sample
with the wrong label looks as helpful as one with the right label. Ranks only: the rate and the number of steps are not in it.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..capture.model_state import in_mode
from ..errors import UsageError, check_one_of
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .gradients import RANK_ONLY, Coordinates, as_influence, gradients, survey


def gradient_dot(
    recipe: Recipe, queries: Any, *, loss: LossFn | None = None, **coordinates: Unpack[Coordinates]
) -> Influence:
    """⟨∇ℓ(θ, z), ∇ℓ(θ, q)⟩ at the weights of `recipe.model`; `loss` of the queries, by default the recipe's."""
    rows = gradients(recipe, **coordinates)
    dots, _ = rows.products(rows.of(queries, loss))
    return as_influence(recipe, rows.training, dots, "gradient dot product", (RANK_ONLY, *rows.caveats))


def gradient_cosine(
    recipe: Recipe, queries: Any, *, loss: LossFn | None = None, **coordinates: Unpack[Coordinates]
) -> Influence:
    """The cosine of the two gradients; 0 if one of them is 0."""
    rows = gradients(recipe, **coordinates)
    V = rows.of(queries, loss).double()  # (Q, p)
    dots, norms = rows.products(V)
    size = V.norm(dim=1)[:, None] * norms  # (Q, N)
    cosines = torch.where(size > 0, dots / size.clamp(min=1e-300), torch.zeros_like(dots))
    return as_influence(recipe, rows.training, cosines, "gradient cosine", (RANK_ONLY, *rows.caveats))


def representation_similarity(
    recipe: Recipe, queries: Any, *, module: str | None = None, metric: str = "cosine"
) -> Influence:
    """Similarity of the features of training samples and queries; each sample of the batch `queries` is one query."""
    check_one_of("metric", metric, ("cosine", "dot"))
    training = survey(recipe)
    Q, place = _features(recipe, queries, module)  # (Q, d)
    parts = []
    for step, keep in training.visits:
        ids, batch = recipe.batches[step]
        rows, _ = _features(recipe, batch, module)
        if len(rows) != len(ids):
            raise UsageError(
                f"the features of step {step} must have one row per sample, got {len(rows)} for {len(ids)} samples."
            )
        parts.append(rows[keep])
    F = torch.cat(parts)  # (N, d)
    if metric == "cosine":
        Q, F = nn.functional.normalize(Q, dim=1), nn.functional.normalize(F, dim=1)
    caveat = f"{metric} of the {place}; ignores labels and loss"
    return as_influence(recipe, training, Q @ F.T, "representation similarity", (RANK_ONLY, caveat))


def _features(recipe: Recipe, batch: Any, module: str | None) -> tuple[Tensor, str]:
    """`(features (B, d) in float64, where they come from)`."""
    modules, features = dict(recipe.model.named_modules()), list[tuple[Tensor, str]]()
    if module is not None and module not in modules:
        raise UsageError(f"the model has no module {module!r}. It has {', '.join(n for n in modules if n)}.")

    def take(name: str, layer: nn.Module, args: Any, out: Any) -> None:
        features.append((args[0], f"input of {name}") if module is None else (out, f"output of {name}"))

    with in_mode(recipe.model), torch.no_grad(), ExitStack() as hooks:
        for name, layer in modules.items():
            if name == module or (module is None and isinstance(layer, nn.Linear)):
                hooks.enter_context(layer.register_forward_hook(partial(take, name)))
        recipe.loss(recipe.model, batch)
    if not features:
        what = f"the module {module!r}" if module else "an nn.Linear"
        raise UsageError(f"the loss never called {what}. Pass module=, the module whose output to use.")
    x, place = features[-1]
    x = x.detach().double().cpu()
    return (x if x.dim() == 2 else x.reshape(len(x), -1, x.shape[-1]).mean(1)), place
