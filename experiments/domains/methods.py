r"""The rows of the study of sources: what each method says of leaving out a source, or half of it, as a matrix source × domain.

    matrix[s, d] = Σ_{z in the removed part of s} influence of z on the mean loss of domain d

TracIn is linear in the samples' gradients, so that the sum over a group is TracIn of one sample whose loss is the group's sum: one
backward pass for a group instead of one for each sample.

Shapes:  S sources, D domains; S + S groups (whole and half).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from backstory.baselines.influence import influence_sweep
from backstory.baselines.tracin import tracin, tracin_run
from backstory.demo.gpt_model import loss
from backstory.exact.reverse import reverse
from backstory.insight.sources import Sources, sources
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal
from backstory.results.influence import Influence
from backstory.run.run import Run
from experiments.data.texts import PARTS, DomainSetup, by_passage, recipe, removals, source_of
from experiments.gpt.methods import DAMPINGS, INFLUENCE_RANK, PAPERS_DAMPING
from experiments.gpt.setups import domain_losses
from experiments.recorded import recorded

Matrices = dict[str, Tensor]  # whole or half -> (S, D)
PAPER: dict[str, Any] = {"projection": "full", "curvature": "empirical", "optimizer_model": "sgd"}
THIRDS = 3
DEFAULT, COMPRESSED, IN_RUN = "default", "default-compressed", "tracin-run"


@dataclass(frozen=True)
class Problem:
    """One seed's run, trained without recording, and what is left out of it."""

    setup: DomainSetup
    seed: int
    trained: Recipe
    thirds: Sequence[tuple[dict[str, Tensor], float]]  # weights after each third of the steps, and the rate before
    gone: Mapping[str, Mapping[str, Removal]]  # whole or half -> source -> its passages
    said: dict[str, Sources] = field(default_factory=dict)  # row -> what insight said of the run

    @property
    def queries(self) -> Tensor:
        """The passages that are asked about, (D, n, length + 1)."""
        found: Tensor = self.trained.queries["domains"]
        return found

    @property
    def names(self) -> list[str]:
        """Sources, which are the domains too, in the order of rows and columns."""
        return list(self.gone[PARTS[0]])

    def of(self, answer: Influence) -> Matrices:
        """Sums over the passages of each group."""
        return {p: torch.stack([answer.sum_over(self.gone[p][s].samples) for s in self.names]) for p in PARTS}


def trained(setup: DomainSetup, seed: int) -> Problem:
    """Train the run of this seed once, with nothing else going on."""
    plan = recipe(setup, seed)
    return Problem(setup, seed, plan, thirds(plan), removals(setup, seed))


def thirds(plan: Recipe) -> list[tuple[dict[str, Tensor], float]]:
    """Train `plan`; its weights after each third of the steps, with the rate of the step before."""
    total, kept = len(plan.batches), []
    ends = {max(1, round(total * k / THIRDS)) for k in range(1, THIRDS + 1)}
    for t in range(total):
        rate = float(plan.optimizer.param_groups[0]["lr"])
        take_step(plan, t)
        if t + 1 in ends:
            kept.append((copy.deepcopy(plan.model.state_dict()), rate))
    return kept


def recorded_rows(problem: Problem) -> dict[str, Matrices]:
    """The default recording, the same run compressed, and TracIn from its rows."""
    with TemporaryDirectory() as folder:
        plan = recipe(problem.setup, problem.seed)
        run = recorded(plan, Path(folder) / "run", clip_norm=plan.clip_norm)
        ids = [str(name) for names, _ in plan.batches for name in names]
        run.describe(ids, source=[source_of(name) for name in ids])
        run.compress(Path(folder) / "compressed")
        found = {
            DEFAULT: by_insight(problem, run, plan.model, DEFAULT),
            COMPRESSED: by_insight(problem, Run(Path(folder) / "compressed"), plan.model, COMPRESSED),
        }
        return {**found, IN_RUN: problem.of(tracin_run(run, plan.model, domain_losses, problem.queries))}


def by_insight(problem: Problem, run: Run, model: nn.Module, row: str) -> Matrices:
    """`insight.sources` for the whole sources; the sums of `run.query` for their halves."""
    run.embed()
    told = sources(run, model, by_passage, dict(zip(problem.names, problem.queries, strict=True)))
    problem.said[row] = told
    order = [told.sources.index(name) for name in problem.names]
    halves = problem.of(run.query(model, domain_losses, problem.queries))["half"]
    return {"whole": torch.from_numpy(told.matrix[order]).double(), "half": halves}


def paper_row(problem: Problem) -> Matrices:
    """The paper's own: all coordinates, plain SGD steps in place of AdamW's, the literal recursion."""
    with TemporaryDirectory() as folder:
        plan = recipe(problem.setup, problem.seed)
        run = recorded(plan, Path(folder) / "run", clip_norm=plan.clip_norm, **PAPER)
        return problem.of(run.query(plan.model, domain_losses, problem.queries, contraction="never"))


def tracin_row(problem: Problem) -> Matrices:
    """TracIn from the weights after each third, in all coordinates."""
    plan = problem.trained
    tokens = {name: x for ids, batch in plan.batches for name, x in zip(ids, batch, strict=True)}
    groups = [(f"{p}/{s}", problem.gone[p][s].samples) for p in PARTS for s in problem.names]
    batches = [([name], torch.stack([tokens[i] for i in ids])[None]) for name, ids in groups]
    answer = tracin(
        replace(plan, batches=batches, loss=group_loss), problem.queries, problem.thirds, loss=domain_losses
    )
    return {p: torch.stack([answer.sum_over([f"{p}/{s}"]) for s in problem.names]) for p in PARTS}


def group_loss(model: nn.Module, groups: Tensor) -> Tensor:
    """The sum over all passages of each group: (groups, n, length + 1) -> (groups,)."""
    return loss(model, groups.flatten(0, 1)).reshape(len(groups), -1).sum(1)


def influence_rows(problem: Problem) -> dict[str, Matrices]:
    """The influence function (LoGRA) at every damping, from one pass."""
    answers = influence_sweep(
        problem.trained, problem.queries, DAMPINGS, loss=domain_losses, rank=INFLUENCE_RANK, seed=problem.seed
    )
    return {f"influence-{d:g}": problem.of(answer) for d, answer in zip(DAMPINGS, answers, strict=True)}


def exact_row(problem: Problem) -> Matrices:
    """The exact first-order sum, by unrolling: what every method here estimates."""
    queries = problem.queries
    answer = reverse(
        lambda: recipe(problem.setup, problem.seed), lambda model: domain_losses(model, queries), dtype=torch.float32
    )
    return problem.of(answer)


Rows = Callable[[Problem], dict[str, Matrices]]
ROWS: dict[str, Rows] = {
    "recorded": recorded_rows,
    "paper": lambda p: {"paper": paper_row(p)},
    "tracin": lambda p: {"tracin": tracin_row(p)},
    "influence": influence_rows,
    "exact": lambda p: {"exact": exact_row(p)},
}
PAPERS_INFLUENCE = f"influence-{PAPERS_DAMPING:g}"
