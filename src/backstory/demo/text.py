"""The text demo: train a small GPT on eight domains, record it by default, and ask which passages taught it, and when."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..recording.recorder import record
from ..replay.recipe import Recipe, take_step
from ..results.influence import Influence
from ..run.run import Run
from . import texts
from .gpt_model import loss
from .images import fresh
from .texts import RECIPE, text_of

Say = Callable[[str, int, int], None]  # (stage, done, in all)
CHECKPOINTS = 4
BEST = 3  # passages shown on either side of an answer
CAUTION = (
    "This net was trained from scratch, where recorded scores are weakest: in `python -m experiments gpt --mode scratch` they rank the "
    "truth at about 0.3 (fine-tuned: 0.77), sizes come out several times too small, and single signs can be wrong. "
    "Check what matters by retraining (backstory.exact)."
)


@dataclass
class TextResult:
    """Everything that the table and the report show."""

    run: str
    steps: int
    occurrences: int
    loss: float  # nats a byte on the questions' passages
    seconds: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of each step, nats a byte
    questions: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # rows of the matrix
    domains: list[str] = field(default_factory=list)  # columns
    matrix: list[list[float]] = field(default_factory=list)  # influence of all passages of a source on a domain
    trust: list[str] = field(default_factory=list)  # how far the answers can be trusted, in words
    timeline: list[float] = field(default_factory=list)  # mean |influence| of a step's passages over its rate

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def text_demo(out: Path, *, say: Say | None = None, **args: Any) -> TextResult:
    """Run the whole demo into the folder `out`; the recorded run is `out/run`. `args` are those of the recipe."""
    report, seconds = say or (lambda stage, done, total: None), dict[str, float]()
    path, recipe = fresh(out / "run", RECIPE), texts.recipe(**args)
    began = time.perf_counter()
    losses = _train(recipe, path, args, report)
    seconds["train and record"] = time.perf_counter() - began
    run, names = Run(path), [n for n in recipe.queries if n != "passages"]
    for name, batch in recipe.queries.items():
        run.add_queries(name, batch)
    began = time.perf_counter()
    run.embed(progress=lambda done, total: report("embed", done, total))
    seconds["embed"] = time.perf_counter() - began
    began = time.perf_counter()
    answer = run.query(recipe.model, loss, recipe.queries["passages"])
    seconds["ask"] = time.perf_counter() - began
    with torch.no_grad():
        left = torch.stack([loss(recipe.model, recipe.queries[n]).mean() for n in names])
    per_byte = float(left.mean()) / (recipe.queries["passages"].shape[1] - 1)
    result = TextResult(str(path), run.n_steps, len(answer), per_byte, seconds, losses, domains=names)
    result.trust = [CAUTION, *(answer.quality.words if answer.quality else ())]
    result.questions = [_question(answer, k, name, recipe) for k, name in enumerate(names)]
    _by_source(result, run, recipe)
    return result


def _train(recipe: Recipe, path: Path, args: dict[str, Any], say: Say) -> list[float]:
    """Train and record with the defaults for sequences."""
    steps, means = len(recipe.batches), []
    settings: dict[str, Any] = {"checkpoints": CHECKPOINTS, "steps": steps, "recipe": RECIPE, "recipe_args": args}
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction="token-mean", clip_norm=recipe.clip_norm, **settings
    ) as rec:
        for t, (ids, tokens) in enumerate(recipe.batches):
            with rec.step(ids, tokens=recipe.tokens(tokens) if recipe.tokens else None) as s:
                losses = take_step(recipe, t)
                s.losses(losses)
            means.append(float(losses.mean()) / (tokens.shape[1] - 1))
            say("train and record", t + 1, steps)
        used = [(str(i), text_of(x)) for ids, tokens in recipe.batches for i, x in zip(ids, tokens, strict=True)]
        rec.describe([i for i, _ in used], text=[x for _, x in used], source=[i.split("/")[0] for i, _ in used])
    return means


def _question(answer: Influence, k: int, domain: str, recipe: Recipe) -> dict[str, Any]:
    return {
        "domain": domain,
        "text": text_of(recipe.queries["passages"][k]),
        "helpful": [h.as_dict() for h in answer.top(BEST, query=k)],
        "harmful": [h.as_dict() for h in answer.bottom(BEST, query=k)],
    }


def _by_source(result: TextResult, run: Run, recipe: Recipe) -> None:
    """Source × domain, and the mean |influence| of each step's passages on the domains.

    Signed influences of a clipped step add up to 0: scaling all of its gradient changes nothing.
    """

    def domain_means(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return loss(model, tokens.flatten(0, 1)).reshape(len(tokens), -1).mean(1)

    answer = run.query(recipe.model, domain_means, torch.stack([recipe.queries[n] for n in result.domains]))
    sums = answer.group_by("source")
    result.sources = sorted(sums)
    result.matrix = [sums[name].tolist() for name in result.sources]
    at, rates = (torch.from_numpy(answer.steps).long(), torch.from_numpy(run.steps().groups["rate"].max(1)).double())
    total = torch.zeros(run.n_steps, dtype=torch.float64).index_add_(0, at, answer.scores.double().abs().mean(0))
    count = torch.zeros(run.n_steps, dtype=torch.float64).index_add_(0, at, torch.ones(len(at), dtype=torch.float64))
    result.timeline = (total / count / rates).tolist()
