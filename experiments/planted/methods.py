r"""What each method says of every training sample: the higher, the more suspect.

    influence             −influence of the sample on the clean queries' mean loss (it hurt them)
    influence function    −v (GᵀG + NλI)⁻¹ gᵀ towards the clean queries;   itself:  g (GᵀG + NλI)⁻¹ gᵀ
    gradient norm, loss   ‖g‖ and ℓ of the sample on the trained model

With GGᵀ = U μ Uᵀ both forms of the influence function come from one decomposition, at every damping λ:

    v Gᵀ U (μ + Nλ)⁻¹ Uᵀ          Σ_j U_ij² μ_j / (μ_j + Nλ)

Shapes:  N samples, p coordinates; all scores in the order of the ids as text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from backstory.baselines.curvature import products
from backstory.baselines.gradients import Gradients, gradients
from backstory.baselines.tracin import tracin
from backstory.capture.model_state import in_mode
from backstory.exact.reverse import reverse
from backstory.replay.recipe import Recipe
from backstory.results.influence import Influence
from backstory.run.run import Run
from experiments.domains.methods import thirds
from experiments.gpt.methods import DAMPINGS, PAPERS_DAMPING
from experiments.planted.setups import Planted
from experiments.recorded import recorded

TOWARDS, ITSELF = "influence-function", "influence-function-self"  # the best of all dampings


@dataclass(frozen=True)
class Suspects:
    """One method's suspicions, and its influences in units of the queries' loss where it has any."""

    scores: Tensor  # (N,)
    influences: Tensor | None = None


Found = dict[str, dict[str, Suspects]]  # method -> setting ("" where it has none) -> its suspicions


def all_scores(problem: Planted, tell: Callable[[int, int], None]) -> tuple[list[str], Found]:
    """`(ids, every method's suspicions)`."""
    found: Found = {}
    for done, part in enumerate((by_recording, by_model, by_unrolling)):
        found.update(part(problem))
        tell(done + 1, 3)
    ids = sorted({str(i) for names, _ in problem.make().batches for i in names})
    return ids, found


def by_recording(problem: Planted) -> Found:
    """The default recording, the same run compressed where that can be done, and a finer curvature where one is asked for."""
    with TemporaryDirectory() as folder:
        plan, out = problem.make(), Found()
        run = recorded(plan, Path(folder) / "run", clip_norm=plan.clip_norm)
        out["default"] = _asked(problem, run, plan.model)
        if run.store.curvature_rows:
            run.compress(Path(folder) / "compressed")
            out["default-compressed"] = _asked(problem, Run(Path(folder) / "compressed"), plan.model)
        if problem.finer is not None:
            again = problem.make()
            run = recorded(again, Path(folder) / "finer", clip_norm=plan.clip_norm, curvature=problem.finer)
            out[f"curvature-{problem.finer}"] = _asked(problem, run, again.model)
        return out


def _asked(problem: Planted, run: Run, model: nn.Module) -> dict[str, Suspects]:
    return {"": _suspects(run.query(model, problem.asked, problem.queries))}


def by_unrolling(problem: Planted) -> Found:
    """The exact derivative: what every influence estimates."""
    answer = reverse(problem.make, lambda model: problem.asked(model, problem.queries), dtype=torch.float32)
    return {"exact": {"": _suspects(answer)}}


def by_model(problem: Planted) -> Found:
    """Methods that see the trained model, or a few checkpoints, only."""
    plan = problem.make()
    kept = thirds(plan)
    rows = gradients(plan)
    order = np.argsort(np.array(rows.training.samples), kind="stable")
    G, v = rows.stack()[order], rows.of(problem.queries, problem.asked)  # (N, p), (1, p)
    traced = tracin(plan, problem.queries, kept, loss=problem.asked)
    return {
        "tracin": {"": Suspects(_suspects(traced).scores)},
        **influence_functions(v, G),
        "gradient-norm": {"": Suspects(G.norm(dim=1).double())},
        "loss": {"": Suspects(final_losses(plan, rows)[order])},
    }


def influence_functions(v: Tensor, G: Tensor) -> Found:
    """Towards the queries (one row v) and of each sample on itself, at every damping."""
    mu, U = torch.linalg.eigh(products(G, G))  # (N,), (N, N)
    mu, b = mu.clamp(min=0), products(v, G)[0] @ U  # (N,)
    towards, itself = dict[str, Suspects](), dict[str, Suspects]()
    for damping in DAMPINGS:
        below, name = mu + len(G) * damping, f"damping {damping:g}"
        found = U @ (b / below)
        towards[name], itself[name] = Suspects(-found, found), Suspects(U.square() @ (mu / below))
    fixed = f"damping {PAPERS_DAMPING:g}"
    return {f"{TOWARDS}-{PAPERS_DAMPING:g}": {"": towards[fixed]}, TOWARDS: towards, ITSELF: itself}


def final_losses(plan: Recipe, rows: Gradients) -> Tensor:
    """The loss of each sample on the trained model, in the order of `rows`, (N,)."""
    out = []
    with in_mode(plan.model), torch.no_grad():
        for step, keep in rows.training.visits:
            out.append(plan.loss(plan.model, plan.batches[step][1])[keep].double())
    return torch.cat(out)


def _suspects(answer: Influence) -> Suspects:
    found = answer.per_sample()[1][0].double()
    return Suspects(-found, found)
