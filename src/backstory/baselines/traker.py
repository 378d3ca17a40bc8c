r"""TRAK by its authors' package (`traker`): dense random projection, their scores, Backstory's gradients.

    τ(z, q) = mean_m[ φ(q)ᵀ (ΦᵀΦ + λI)⁻¹ φ(z) ] · mean_m[ 1 − p_z ],      φ = Pᵀ∇f, P dense

Positive: the sample helped; ranks only, as the package divides each model's inverse by its mean. On a CPU the package projects with its BasicProjector, in float32; its files
live in a temporary folder. See `trak` for the letters.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .extras import extra, quiet, release, subclass
from .models import Weights, evaluated, loaded
from .rows import Coordinates, Gradients, gradients
from .training import RANK_ONLY, answer
from .trak import asked, check_target, margin_of_loss, notes


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
    check_target(target)
    rows = gradients(recipe, **coordinates)
    states = [dict(x) for x in models] if models else [copy.deepcopy(recipe.model.state_dict())]

    def ask() -> Tensor:
        return asked(rows, queries, target, margin, loss)

    with TemporaryDirectory() as folder, quiet(), evaluated(recipe.model), loaded(recipe.model, states[0]):
        made = _traker(package, rows, _computer(rows, margin, ask), folder, proj_dim, coordinates.get("seed", 0))
        made.score_computer.lambda_reg = damping * (proj_dim or 1) / float(made.normalize_factor) ** 2
        scores = torch.from_numpy(_run(made, rows, states, len(ask()))).T  # (Q, N)
    size = f"{proj_dim} dense random dimensions" if proj_dim else "no projection"
    said = (*notes(target, margin, len(states)), f"traker {release('traker')}, float32, {size}, any scale")
    return answer(recipe, rows.training, scores, "TRAK (traker)", (RANK_ONLY, *said, *rows.notes))


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
        return rows.ask(recipe.batches[batch[0]][1], f)[batch[1]].float()

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
