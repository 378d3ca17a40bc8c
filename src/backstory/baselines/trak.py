r"""TRAK: the influence function of a linearised classifier, with many shortcuts, averaged over models.

    f = log p/(1−p)                                   margin of the label, p its probability
    τ(z, q) = mean_m[ φ(q)ᵀ (ΦᵀΦ + λI)⁻¹ φ(z) ] · mean_m[ 1 − p_z ],      φ = ∇f in random coordinates

Positive: the sample raised the query's margin (or lowered its loss, with target="loss"), it helped. Ranks only, as the
weights p(1−p) of the logistic Hessian are left out.
This is Backstory's own implementation, with one random projection of each side of each parameter; `traker` calls the
authors' package, with one dense projection of the whole gradient.

For ℓ = −log p the margin is −log(eˡ − 1), so nothing but the loss is needed; at p = 1 in the model's precision that
fails, and `margin=` must be given.
Park et al., TRAK: Attributing Model Behavior at Scale, 2023.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..errors import NumericalError, UsageError
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .models import Weights, evaluated, loaded
from .rows import Coordinates, Gradients, gradients
from .solve import by_rows
from .training import RANK_ONLY, answer

TARGETS = ("margin", "loss")


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

    `margin(model, batch)` gives f (B,), for example `margins(model(x), y)`; `loss` is the queries' where
    target="loss". `damping` is added to ΦᵀΦ.
    """
    check_target(target)
    features, doubts = [], []
    for m, weights in enumerate(models if models else [None]):
        own: Coordinates = {**coordinates, "seed": coordinates.get("seed", 0) + m}
        rows = gradients(recipe, **own)
        with nullcontext() if weights is None else loaded(recipe.model, weights):
            V = asked(rows, queries, target, margin, loss)  # (Q, p)
            features.append(by_rows(V, rows.stack(margin or margin_of_loss(recipe.loss)), damping))
            doubts.append(doubt(rows, margin))
    scores = torch.stack(features).mean(0) * torch.stack(doubts).mean(0)
    said = notes(target, margin, len(features))
    return answer(recipe, rows.training, scores, "TRAK", (RANK_ONLY, *said, *rows.notes))


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
            raise UsageError(f"found a loss of {least:.3g}; TRAK expects −log p ≥ 0. Pass margin=.")
        if least < 64 * torch.finfo(losses.dtype).eps:
            raise NumericalError(
                f"a sample has loss {least:.1e}: its probability is 1 in {losses.dtype}, so its margin is lost. "
                "Pass margin=lambda model, batch: margins(model(x), y), or a model in float64."
            )
        return -torch.log(torch.expm1(losses))

    return margin


def doubt(rows: Gradients, margin: LossFn | None) -> Tensor:
    """1 − p of each training sample, (N,)."""
    recipe, out = rows.recipe, []
    f = margin or margin_of_loss(recipe.loss)
    with evaluated(recipe.model), torch.no_grad():
        for step, keep in rows.training.visits:
            out.append(torch.sigmoid(-f(recipe.model, recipe.batches[step][1]))[keep].double().cpu())
    return torch.cat(out)


def asked(rows: Gradients, queries: Any, target: str, margin: LossFn | None, loss: LossFn | None) -> Tensor:
    """Gradients of what should rise: the queries' margin, or minus their loss."""
    if target == "loss":
        return -rows.ask(queries, loss)
    return rows.ask(queries, margin or margin_of_loss(loss or rows.recipe.loss))


def check_target(target: str) -> None:
    """Refuse unknown targets."""
    if target not in TARGETS:
        raise UsageError(f"found target={target!r}; expected one of {', '.join(TARGETS)}.")


def notes(target: str, margin: LossFn | None, count: int) -> tuple[str, ...]:
    """What an answer of TRAK must say."""
    return (
        f"effect on the query's {'margin log p/(1−p)' if target == 'margin' else 'loss, lowered'}, {count} model{'s' * (count > 1)}",
        "assumes a classifier" + ("" if margin else " with loss −log p"),
    )
