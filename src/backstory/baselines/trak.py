r"""TRAK: the influence function of a linearised classifier, with many shortcuts, averaged over models.

    f = log p/(1−p)                                   margin of the label, p its probability
    τ(z, q) = mean_m[ φ(q)ᵀ (ΦᵀΦ + λI)⁻¹ φ(z) ] · mean_m[ 1 − p_z ],      φ = ∇f in random coordinates

Positive: the sample raised the query's margin (or lowered its loss, with target="loss"), it helped. Ranks only, as the
weights p(1−p) of the logistic Hessian are left out.
`trak` is Backstory's own implementation, with one random projection of each side of each parameter. `traker` calls the authors'
package on Backstory's gradients, with one dense projection of the whole gradient, φ = Pᵀ∇f; the package divides each model's inverse by
its mean. On a CPU it projects with its BasicProjector, in float32; its files live in a temporary folder.

For ℓ = −log p the margin is −log(eˡ − 1), so nothing but the loss is needed; at p = 1 in the model's precision that
fails, and `margin=` must be given.
Park et al., TRAK: Attributing Model Behavior at Scale, 2023.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.model_state import in_mode, load_weights, restored_weights
from ..errors import NumericalError, UsageError
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .curvature import by_rows
from .extras import extra, quiet, release, subclass
from .gradients import RANK_ONLY, Coordinates, Gradients, as_influence, gradients

TARGETS = ("margin", "loss")
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

    `margin(model, batch)` gives f (B,), for example `margins(model(x), y)`; `loss` is the queries' where
    target="loss". `damping` is added to ΦᵀΦ.
    """
    _check_target(target)
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
            raise UsageError(f"found a loss of {least:.3g}; TRAK expects −log p ≥ 0. Pass margin=.")
        if least < 64 * torch.finfo(losses.dtype).eps:
            raise NumericalError(
                f"a sample has loss {least:.1e}: its probability is 1 in {losses.dtype}, so its margin is lost. "
                "Pass margin=lambda model, batch: margins(model(x), y), or a model in float64."
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


def _check_target(target: str) -> None:
    """Refuse unknown targets."""
    if target not in TARGETS:
        raise UsageError(f"found target={target!r}; expected one of {', '.join(TARGETS)}.")


def _caveats(target: str, margin: LossFn | None, count: int) -> tuple[str, ...]:
    """What every result of TRAK must say."""
    return (
        f"effect on the query's {'margin log p/(1−p)' if target == 'margin' else 'loss, lowered'}, {count} model{'s' * (count > 1)}",
        "assumes a classifier" + ("" if margin else " with loss −log p"),
    )


def traker(
    recipe: Recipe,
    queries: Any,
    *,
    loss: LossFn | None = None,
    target: str = "margin",
    margin: LossFn | None = None,
    models: Sequence[Weights] | None = None,
    damping: float = 0.0,
    proj_dim: int | None = 512,
    **coordinates: Unpack[Coordinates],
) -> Influence:
    """TRAK through the package; `proj_dim=None` does not project. `rank=` may shrink the gradients beforehand."""
    package = extra("trak", "traker")
    _check_target(target)
    rows = gradients(recipe, **coordinates)
    states = [dict(x) for x in models] if models else [copy.deepcopy(recipe.model.state_dict())]

    def ask() -> Tensor:
        return _query_rows(rows, queries, target, margin, loss)

    with TemporaryDirectory() as folder, quiet(), in_mode(recipe.model), restored_weights(recipe.model):
        load_weights(recipe.model, states[0])
        made = _traker(package, rows, _computer(rows, margin, ask), folder, proj_dim, coordinates.get("seed", 0))
        made.score_computer.lambda_reg = damping * (proj_dim or 1) / float(made.normalize_factor) ** 2
        scores = torch.from_numpy(_run(made, rows, states, len(ask()))).T  # (Q, N)
    size = f"{proj_dim} dense random dimensions" if proj_dim else "no projection"
    package_caveat = f"traker {release('traker')}, float32, {size}, any scale"
    caveats = (RANK_ONLY, *_caveats(target, margin, len(states)), package_caveat, *rows.caveats)
    return as_influence(recipe, rows.training, scores, "TRAK (traker)", caveats)


def _traker(package: Any, rows: Gradients, computer: Any, folder: str, dim: int | None, seed: int) -> Any:
    projectors = extra("trak.projectors", "traker")
    if dim is None:
        projector = projectors.NoOpProjector(proj_dim=rows.width, device="cpu")
    else:
        projector = projectors.BasicProjector(
            rows.width, dim, seed, projectors.ProjectionType.normal, "cpu", dtype=torch.float32,
            block_size=max(1, min(100, dim // 2)),  # a single block would not survive the package's free_memory()
        )  # fmt: skip
    return package.TRAKer(
        model=rows.recipe.model, task=object(), train_set_size=len(rows.training), save_dir=folder, device="cpu",
        gradient_computer=computer, projector=projector, logging_level=logging.ERROR,
        use_half_precision=False,
    )  # fmt: skip


def _run(made: Any, rows: Gradients, states: Sequence[Weights], n_queries: int) -> Any:
    """The package's four verbs; scores (N, Q)."""
    for m, weights in enumerate(states):
        made.load_checkpoint(weights, model_id=m)
        lo = 0
        for visit in rows.training.visits:
            made.featurize(batch=visit, inds=np.arange(lo, lo + len(visit[1])))
            lo += len(visit[1])
    made.finalize_features()
    for m, weights in enumerate(states):
        made.start_scoring_checkpoint("queries", weights, model_id=m, num_targets=n_queries)
        made.score(batch=None, num_samples=n_queries)
    return np.array(made.finalize_scores("queries"))


def _computer(rows: Gradients, margin: LossFn | None, ask: Callable[[], Tensor]) -> Any:
    """The package's gradient computer, with rows from Backstory's hooks; a batch is (step, positions), or None."""
    f, recipe = margin or margin_of_loss(rows.recipe.loss), rows.recipe

    def grads(self: Any, batch: tuple[int, list[int]] | None) -> Tensor:
        if batch is None:
            return ask().float()
        return rows.of(recipe.batches[batch[0]][1], f)[batch[1]].float()

    def doubts(self: Any, batch: tuple[int, list[int]]) -> Tensor:
        with torch.no_grad():
            return torch.sigmoid(-f(recipe.model, recipe.batches[batch[0]][1]))[batch[1]].float()[:, None]

    base = extra("trak.gradient_computers", "traker").AbstractGradientComputer
    return subclass(
        base,
        __init__=lambda self, **settings: None,
        load_model_params=lambda self, model: None,
        compute_per_sample_grad=grads,
        compute_loss_grad=doubts,
    )
