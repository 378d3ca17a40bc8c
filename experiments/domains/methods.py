r"""The rows of the study of sources: what each method makes of leaving out a source, or half of it, as a matrix source × domain.

    matrix[s, d] = Σ_{z in the removed part of s} influence of z on the mean loss of domain d

TracIn is linear in the samples' gradients, so that the sum over a group is TracIn of one sample whose loss is the group's sum: one
backward pass for a group instead of one for each sample.

Shapes:  S sources, D domains; S + S groups (whole and half).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from backstory.baselines.tracin import tracin, tracin_run
from backstory.demo.gpt_model import loss
from backstory.insight.sources import sources
from backstory.run.run import Run
from experiments.baselines import PAPERS_DAMPING, TEXT_DAMPINGS, TEXT_RANK, at, influence
from experiments.data.texts import PARTS, DomainSetup, by_passage, recipe, removals, source_of
from experiments.gpt.setups import domain_losses
from experiments.harness import Method, Problem, Recording, Scores, Table

PAPER: dict[str, Any] = {"projection": "full", "curvature": "empirical", "optimizer_model": "sgd"}
SOURCES = "sources"  # in a problem's notes: row -> what insight reported of the run


@dataclass(kw_only=True, eq=False)
class SourceProblem(Problem):
    """One seed's run, and the sources that are left out of it: all of their passages, or a half."""

    names: list[str]  # sources, which are the domains too, in the order of rows and columns


Row = Method[SourceProblem]


def problem_of(setup: DomainSetup, seed: int) -> SourceProblem:
    """The run of this seed; its notes have the domains and their losses at the end of it."""
    gone = removals(setup, seed)
    names = list(gone[PARTS[0]])
    problem = SourceProblem(
        setup=setup, seed=seed, make=lambda: recipe(setup, seed), removals={p: [gone[p][s] for s in names] for p in PARTS},
        loss=domain_losses, queries=recipe(setup, seed).queries["domains"], dtype=torch.float32, names=names,
    )  # fmt: skip
    model = problem.trained.model
    with torch.no_grad():
        losses = domain_losses(model, problem.queries)
    problem.notes.update(names=names, losses=losses, **{SOURCES: {}})
    return problem


def methods() -> list[Row]:
    """All rows; those of one recording and of one sweep can be chosen by one name."""
    return [
        Row("default", lambda p: by_insight(p, "default", recorded(p).run), group="recorded"),
        Row("tracin-run", tracin_in_run, group="recorded"),
        Row("paper", paper),
        Row("tracin", tracin_of_groups),
        Row(f"influence-{PAPERS_DAMPING:g}", lambda p: at(swept(p), PAPERS_DAMPING), group="influence"),
        Row("exact", lambda p: Scores(p.of(p.exact()))),
        Row("influence-best", swept, group="influence"),
    ]


def recorded(problem: SourceProblem) -> Recording:
    """The default recording with the passages' sources."""

    def make() -> Recording:
        made = problem.recording(clip_norm=problem.trained.clip_norm)
        ids = [str(name) for names, _ in problem.trained.batches for name in names]
        made.run.describe(ids, source=[source_of(name) for name in ids])
        return made

    result: Recording = problem.once("recorded", make)
    return result


def by_insight(problem: SourceProblem, row: str, run: Run) -> Scores:
    """`insight.sources` for the whole sources; the sums of `run.query` for their halves."""
    run.embed()
    model = recorded(problem).model
    result = sources(run, model, by_passage, dict(zip(problem.names, problem.queries, strict=True)))
    problem.notes[SOURCES][row] = result
    order = [result.sources.index(name) for name in problem.names]
    halves = problem.of(run.query(model, problem.loss, problem.queries))["half"]
    return Scores({"whole": torch.from_numpy(result.matrix[order]).double(), "half": halves})


def tracin_in_run(problem: SourceProblem) -> Scores:
    """TracIn from the rows of the default recording."""
    made = recorded(problem)
    return Scores(problem.of(tracin_run(made.run, made.model, problem.loss, problem.queries)))


def paper(problem: SourceProblem) -> Scores:
    """The paper's own: all coordinates, plain SGD steps in place of AdamW's, the literal recursion."""
    made = problem.recording(clip_norm=problem.trained.clip_norm, **PAPER)
    return Scores(problem.of(made.run.query(made.model, problem.loss, problem.queries, contraction="never")))


def tracin_of_groups(problem: SourceProblem) -> Scores:
    """TracIn from the weights after each third, in all coordinates."""
    plan = problem.trained
    tokens = {name: x for ids, batch in plan.batches for name, x in zip(ids, batch, strict=True)}
    groups = {f"{p}/{s}": r.samples for p in PARTS for s, r in zip(problem.names, problem.removals[p], strict=True)}
    batches = [([name], torch.stack([tokens[i] for i in ids])[None]) for name, ids in groups.items()]
    grouped = replace(plan, batches=batches, loss=group_loss)
    answer = tracin(grouped, problem.queries, problem.training.thirds, loss=problem.loss)
    values: Table = {p: torch.stack([answer.sum_over([f"{p}/{s}"]) for s in problem.names]) for p in PARTS}
    return Scores(values)


def group_loss(model: nn.Module, groups: Tensor) -> Tensor:
    """The sum over all passages of each group: (groups, n, length + 1) -> (groups,)."""
    return loss(model, groups.flatten(0, 1)).reshape(len(groups), -1).sum(1)


def swept(problem: SourceProblem) -> Scores:
    """The influence function (LoGRA) at every damping."""
    return influence(problem, TEXT_DAMPINGS, rank=TEXT_RANK, seed=problem.seed)
