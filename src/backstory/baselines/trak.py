r"""TRAK: the influence function of a linearised classifier, with many shortcuts, averaged over models.

    f = log p/(1−p)                                   margin of the label, p its probability
    τ(z, q) = mean_m[ φ(q)ᵀ (ΦᵀΦ + λI)⁻¹ φ(z) ] · mean_m[ 1 − p_z ],      φ = ∇f in random coordinates

Positive: the sample raised the query's margin (or lowered its loss, with target="loss"), it helped. Ranks only, as the
weights p(1−p) of the logistic Hessian are left out.
Gradients are projected at random on each side of each parameter, where the authors' package has one dense projection of all of them.

For ℓ = −log p the margin is −log(eˡ − 1), so nothing but the loss is needed; at p = 1 in the model's precision that
fails, and `margin=` must be given.
Park et al., TRAK: Attributing Model Behavior at Scale, 2023.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..capture.model_state import in_mode, load_weights, restored_weights
from ..errors import NumericalError, UsageError, check_one_of
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .curvature import by_rows
from .gradients import RANK_ONLY, Coordinates, Gradients, as_influence, gradients

Weights = Mapping[str, Tensor]


def trak(
    recipe: Recipe,
    queries: Any,
    *,
    loss: LossFn | None = None,
    target: str = "margin",
    margin: LossFn | None = None,
    models: Sequence[Weights] | None = None,
    damping: float = 0.0,
    **coordinates: Unpack[Coordinates],
) -> Influence:
    """TRAK at the weights of `recipe.model`, or averaged over `models`, each with its own random coordinates.

    `margin(model, batch)` returns f (B,), for example `margins(model(x), y)`; `loss` is the queries' loss, for
    target="loss". `damping` is added to ΦᵀΦ.
    """
    check_one_of("target", target, ("margin", "loss"))
    features, doubts = [], []
    with restored_weights(recipe.model):
        for m, weights in enumerate(models or [recipe.model.state_dict()]):
            of_model: Coordinates = {**coordinates, "seed": coordinates.get("seed", 0) + m}
            rows = gradients(recipe, **of_model)
            load_weights(recipe.model, weights)
            V = _query_rows(rows, queries, target, margin, loss)  # (Q, p)
            features.append(by_rows(V, rows.stack(margin or margin_of_loss(recipe.loss)), damping))
            doubts.append(_doubt(rows, margin))
    scores = torch.stack(features).mean(0) * torch.stack(doubts).mean(0)
    caveats = (RANK_ONLY, *_caveats(target, margin, len(features)), *rows.caveats)
    return as_influence(recipe, rows.training, scores, "TRAK", caveats)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """f = log p/(1−p) = logit of the label − log Σ exp of the others: (B, C), (B,) -> (B,)."""
    label = nn.functional.one_hot(labels, logits.shape[1]).bool()
    return logits[label] - logits.masked_fill(label, -torch.inf).logsumexp(1)


def margin_of_loss(loss: LossFn) -> LossFn:
    """f = −log(eˡ − 1), for a loss ℓ = −log p."""

    def margin(model: nn.Module, batch: Any) -> Tensor:
        losses = loss(model, batch)
        least = float(losses.detach().min())
        if least < 0:
            raise UsageError(f"TRAK needs a loss −log p ≥ 0, got {least:.3g}. Pass margin=.")
        if least < 64 * torch.finfo(losses.dtype).eps:
            raise NumericalError(
                f"a sample has loss {least:.1e}: its probability rounds to 1 in {losses.dtype}, so its margin is "
                "lost. Pass margin=lambda model, batch: margins(model(x), y), or use a float64 model."
            )
        return -torch.log(torch.expm1(losses))

    return margin


def _doubt(rows: Gradients, margin: LossFn | None) -> Tensor:
    """1 − p of each training sample, (N,)."""
    recipe, out = rows.recipe, []
    f = margin or margin_of_loss(recipe.loss)
    with in_mode(recipe.model), torch.no_grad():
        for step, keep in rows.training.visits:
            out.append(torch.sigmoid(-f(recipe.model, recipe.batches[step][1]))[keep].double().cpu())
    return torch.cat(out)


def _query_rows(rows: Gradients, queries: Any, target: str, margin: LossFn | None, loss: LossFn | None) -> Tensor:
    """Gradients of what should rise: the queries' margin, or minus their loss."""
    if target == "loss":
        return -rows.of(queries, loss)
    return rows.of(queries, margin or margin_of_loss(loss or rows.recipe.loss))


def _caveats(target: str, margin: LossFn | None, count: int) -> tuple[str, ...]:
    """What every result of TRAK must say."""
    what = "margin log p/(1−p)" if target == "margin" else "loss (positive: lowers it)"
    models = f"{count} model{'s' * (count > 1)}"
    return f"effect on the query's {what}, {models}", "assumes a classifier" + ("" if margin else " with loss −log p")
