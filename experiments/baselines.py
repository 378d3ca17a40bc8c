"""Methods that see the trained model only, as the studies ask them: scores of every removal from a problem."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from backstory.baselines.influence import influence_sweep
from backstory.replay.recipe import Recipe
from backstory.results.influence import Influence
from experiments.harness import Problem, Scores

PAPERS_DAMPING = 1e-3
TEXT_DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)  # losses are sums over 48 tokens: the curvature is large
TEXT_RANK = 32  # of the influence function; 64 takes minutes more, and the sides of these models are 48


def post_hoc(problem: Problem, method: Callable[..., Influence], **arguments: Any) -> Scores:
    """A method of `backstory.baselines`; it knows no time."""
    answer = method(problem.trained, problem.queries, loss=problem.loss, **arguments)
    return Scores(problem.of(answer, timeless=True))


def influence(
    problem: Problem,
    dampings: Sequence[float],
    *,
    trained: Callable[[], tuple[Recipe, Any]] | None = None,
    **arguments: Any,
) -> Scores:
    """The influence function at all dampings, from one pass; `trained` gives another recipe and its queries."""

    def sweep() -> dict[str, dict[str, Tensor]]:
        recipe, queries = (problem.trained, problem.queries) if trained is None else trained()
        answers = influence_sweep(recipe, queries, dampings, loss=problem.loss, **arguments)
        return {setting(d): problem.of(a, timeless=True) for d, a in zip(dampings, answers, strict=True)}

    settings = problem.once(f"influence {arguments}", sweep)
    return Scores(settings[setting(PAPERS_DAMPING)], settings)


def setting(damping: float) -> str:
    """What a damping is called."""
    return f"damping {damping:g}"


def at(swept: Scores, damping: float) -> Scores:
    """One setting of a swept method."""
    return replace(swept, values=swept.settings[setting(damping)], settings={})
