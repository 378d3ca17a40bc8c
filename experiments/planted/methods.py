r"""The rows of the study of planted data: how suspect each method finds every training sample.

    influence             −influence of the sample on the clean queries' mean loss (it hurt them)
    influence function    −v (GᵀG + NλI)⁻¹ gᵀ towards the clean queries;   itself:  g (GᵀG + NλI)⁻¹ gᵀ
    gradient norm, loss   ‖g‖ and ℓ of the sample on the trained model

With GGᵀ = U μ Uᵀ both forms of the influence function come from one decomposition, at every damping λ:

    v Gᵀ U (μ + Nλ)⁻¹ Uᵀ          Σ_j U_ij² μ_j / (μ_j + Nλ)

Shapes:  N samples, p coordinates; all scores in the order of the ids as text.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backstory.baselines.curvature import products
from backstory.baselines.gradients import Gradients, gradients
from backstory.baselines.tracin import tracin
from backstory.capture.model_state import in_mode
from backstory.replay.recipe import Recipe
from backstory.results.influence import Influence
from backstory.run.run import Run
from experiments.baselines import PAPERS_DAMPING, TEXT_DAMPINGS, at, setting
from experiments.harness import STEPS, Method, Recording, Scores, Table
from experiments.planted.setups import PlantedProblem

SUSPICION, INFLUENCE = (
    "suspicion",
    "influence",
)  # of each sample, (N,); influences only where they are changes of the loss
FINER = "sampled:4"  # for classifiers: four more backward passes a step
Row = Method[PlantedProblem]


def methods(labels: bool) -> list[Row]:
    """All rows: a compressed run for text, a finer curvature for images."""
    return [
        Row("default", lambda p: queried(p, recorded(p))),
        Row(f"curvature-{FINER}", lambda p: queried(p, recorded(p, curvature=FINER)))
        if labels
        else Row("steps-compressed", compressed),
        Row("tracin", lambda p: Scores({SUSPICION: hurt(traced(p)).values[SUSPICION]})),
        Row(f"influence-function-{PAPERS_DAMPING:g}", lambda p: at(influence_functions(*of(p)[:2])[0], PAPERS_DAMPING)),
        Row("influence-function", lambda p: influence_functions(*of(p)[:2])[0]),
        Row("influence-function-self", lambda p: influence_functions(*of(p)[:2])[1]),
        Row("gradient-norm", lambda p: Scores({SUSPICION: of(p).G.norm(dim=1).double()})),
        Row("loss", lambda p: Scores({SUSPICION: of(p).losses})),
        Row("exact", lambda p: hurt(p.exact())),
    ]


def hurt(answer: Influence) -> Scores:
    """Suspect is what raised the queries' loss."""
    scores = answer.per_sample()[1][0].double()
    return Scores({SUSPICION: -scores, INFLUENCE: scores})


def recorded(problem: PlantedProblem, **settings: Any) -> Recording:
    """The run recorded by default, but for these settings."""
    return problem.recording(clip_norm=problem.trained.clip_norm, **settings)


def queried(problem: PlantedProblem, made: Recording) -> Scores:
    """A recorded run's influences on the clean queries."""
    return hurt(made.run.query(made.model, problem.loss, problem.queries))


def compressed(problem: PlantedProblem) -> Scores:
    """Every occurrence's own curvature, after `compress`."""
    made = recorded(problem, rank=16, **STEPS)
    folder = made.run.path.parent / "compressed"
    made.run.compress(folder)
    return queried(problem, replace(made, run=Run(folder)))


def traced(problem: PlantedProblem) -> Influence:
    """TracIn from the weights after each third of the steps."""
    return tracin(problem.trained, problem.queries, problem.training.thirds, loss=problem.loss)


class Trained(NamedTuple):
    """The samples on the trained model, in the order of their ids."""

    v: Tensor  # (1, p) the queries' gradient
    G: Tensor  # (N, p) each sample's gradient
    losses: Tensor  # (N,)


def of(problem: PlantedProblem) -> Trained:
    """Gradients and losses, computed once."""

    def make() -> Trained:
        rows = gradients(problem.trained)
        order = np.argsort(np.array(rows.training.samples), kind="stable")
        v = rows.of(problem.queries, problem.loss)
        return Trained(v, rows.stack()[order], final_losses(problem.trained, rows)[order])

    trained: Trained = problem.once("trained", make)
    return trained


def influence_functions(v: Tensor, G: Tensor) -> tuple[Scores, Scores]:
    """Towards the queries (one row v) and of each sample on itself, at every damping."""
    mu, U = torch.linalg.eigh(products(G, G))  # (N,), (N, N)
    mu, b = mu.clamp(min=0), products(v, G)[0] @ U  # (N,)
    towards, itself = dict[str, Table](), dict[str, Table]()
    for damping in TEXT_DAMPINGS:
        below, name = mu + len(G) * damping, setting(damping)
        scores = U @ (b / below)
        towards[name] = {SUSPICION: -scores, INFLUENCE: scores}
        itself[name] = {SUSPICION: U.square() @ (mu / below)}
    first = setting(PAPERS_DAMPING)
    return Scores(towards[first], towards), Scores(itself[first], itself)


def final_losses(plan: Recipe, rows: Gradients) -> Tensor:
    """The loss of each sample on the trained model, in the order of `rows`, (N,)."""
    out = []
    with in_mode(plan.model), torch.no_grad():
        for step, keep in rows.training.visits:
            out.append(plan.loss(plan.model, plan.batches[step][1])[keep].double())
    return torch.cat(out)
