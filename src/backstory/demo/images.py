"""The demo: train, record, embed, ask, and prove a few answers by retraining."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError
from ..exact.leave_out import leave_out
from ..recording.recorder import record
from ..replay.recipe import Recipe, take_step
from ..replay.tape import Removal
from ..results.influence import Hit, Influence
from ..results.statistics import spearman
from ..run.run import Run
from . import digits
from .digits import RECIPE, images, loss, png

Say = Callable[[str, int, int], None]  # (stage, done, in all)


@dataclass(frozen=True)
class Proof:
    """One removed sample: predicted and retrained change of the loss of one query."""

    sample: int | str
    query: int
    predicted: float
    retrained: float
    blind: bool  # taken at random, not because the answer names it


@dataclass
class DemoResult:
    """Everything that the table and the report show."""

    run: str
    data: str
    accuracy: float
    steps: int
    occurrences: int
    seconds: dict[str, float] = field(default_factory=dict)
    queries: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[float] = field(default_factory=list)  # mean |influence| of a step's occurrences, over the queries
    losses: list[float] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    spearman: float = 0.0  # predicted against retrained, all pairs
    spearman_blind: float = 0.0  # the same for the samples taken at random
    same_sign: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the images stay in the run."""
        return asdict(self)


def demo(
    out: Path, *, source: str = "auto", n_queries: int = 5, n_blind: int = 12, say: Say | None = None
) -> DemoResult:
    """Run the whole demo into the folder `out`; the recorded run is `out/run`."""
    report = say or (lambda stage, done, total: None)
    path = fresh(out / "run", RECIPE)
    args: dict[str, Any] = {"source": "mnist" if images(source).x.shape[-1] > 8 else "digits"}
    recipe, seconds = digits.recipe(**args), {}
    began = time.perf_counter()
    losses = _train(recipe, path, args, report)
    seconds["train and record"] = time.perf_counter() - began
    x, y = recipe.queries["test"]
    with torch.no_grad():
        outputs = recipe.model(x)
    hard = _hard_questions(outputs, y, n_queries)
    run = Run(path)
    run.add_queries("demo", (x[hard], y[hard]))
    began = time.perf_counter()
    run.embed(progress=lambda done, total: report("embed", done, total))
    seconds["embed"] = time.perf_counter() - began
    began = time.perf_counter()
    answer = run.query(recipe.model, loss, (x[hard], y[hard]))
    seconds["ask"] = time.perf_counter() - began
    result = DemoResult(
        run=str(path),
        data=images(args["source"]).name,
        accuracy=float((outputs.argmax(1) == y).float().mean()),
        steps=run.n_steps,
        occurrences=len(answer),
        seconds=seconds,
        losses=losses,
    )
    result.queries = [
        _question(answer, k, int(y[i]), int(outputs[i].argmax()), x[i, 0]) for k, i in enumerate(hard.tolist())
    ]
    result.timeline = _timeline(answer, run.n_steps)
    began = time.perf_counter()
    _prove(result, answer, args, (x[hard], y[hard]), n_blind, report)
    seconds["retrain"] = time.perf_counter() - began
    return result


def fresh(path: Path, recipe: str) -> Path:
    """An empty place for the run; an earlier run of the same demo is replaced, anything else is left alone."""
    if path.exists():
        if not (path / "config.json").exists() or Run(path).config.get("recipe") != recipe:
            raise StoreError(f"{path} exists and is not a run of the demo; choose another folder with --out.")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _train(recipe: Recipe, path: Path, args: dict[str, Any], say: Say) -> list[float]:
    """Train and record; ten more backward passes, one for each digit, give the curvature."""
    steps, means = len(recipe.batches), []
    settings: dict[str, Any] = {
        "rank": 32,
        "curvature": "exact:10",
        "encoding": "int8",
        "checkpoints": 3,
        "steps": steps,
    }
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction="mean", recipe=RECIPE, recipe_args=args, **settings
    ) as rec:
        for t, (ids, _) in enumerate(recipe.batches):
            with rec.step(ids) as s, s.outputs_of(recipe.model, "cross-entropy"):
                losses = take_step(recipe, t)
                s.losses(losses)
            means.append(float(losses.mean()))
            say("train and record", t + 1, steps)
        _describe(rec.describe, recipe)
    return means


def _describe(describe: Callable[..., None], recipe: Recipe) -> None:
    samples = {
        i: (image, label) for ids, (xs, ys) in recipe.batches for i, image, label in zip(ids, xs, ys, strict=True)
    }
    describe(
        list(samples),
        image=[png(image[0]) for image, _ in samples.values()],
        label=[int(label) for _, label in samples.values()],
    )


def _hard_questions(outputs: Tensor, y: Tensor, n: int) -> Tensor:
    """Test images about which the model is torn: the smallest gaps between the right class and the best other one."""
    right = outputs.gather(1, y[:, None]).squeeze(1)
    others = outputs.scatter(1, y[:, None], float("-inf")).amax(1)
    return (right - others).abs().argsort()[:n]


def _question(answer: Influence, k: int, label: int, said: int, image: Tensor) -> dict[str, Any]:
    def plain(hits: list[Hit]) -> list[dict[str, Any]]:
        return [h.as_dict() for h in hits]

    return {
        "label": label,
        "predicted": said,
        "helpful": plain(answer.top(5, query=k)),
        "harmful": plain(answer.bottom(5, query=k)),
        "image": png(image).hex(),
    }


def _timeline(answer: Influence, steps: int) -> list[float]:
    total, count = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    at = torch.from_numpy(answer.steps).long()
    total.index_add_(0, at, answer.scores.abs().mean(0))
    count.index_add_(0, at, torch.ones(len(answer), dtype=torch.float64))
    return (total / count.clamp_min(1)).tolist()


def _prove(
    result: DemoResult, answer: Influence, args: dict[str, Any], batch: tuple[Tensor, Tensor], n: int, say: Say
) -> None:
    """Retrain without the samples that the answers name first, and a few taken blindly."""
    samples, named = _to_prove(answer, n)
    truth = leave_out(
        lambda: digits.recipe(**args),
        [Removal((s,)) for s in samples],
        lambda model: loss(model, batch),
        lambda done, total: say("retrain", done, total),
    )  # (n, Q)
    predicted = torch.stack([answer.sum_over([s]) for s in samples])
    for i, s in enumerate(samples):
        for q in range(answer.n_queries):
            result.proofs.append(Proof(s, q, float(predicted[i, q]), float(truth[i, q]), i >= named))
    result.spearman = spearman(predicted.reshape(-1), truth.reshape(-1))
    result.spearman_blind = spearman(predicted[named:].reshape(-1), truth[named:].reshape(-1))
    result.same_sign = float((predicted.sign() == truth.sign()).double().mean())


def _to_prove(answer: Influence, n: int) -> tuple[list[int | str], int]:
    """`(samples, how many of them the answers name)`: the first and last of each answer, then n drawn at random."""
    hits = [h for q in range(answer.n_queries) for h in (*answer.top(1, query=q), *answer.bottom(1, query=q))]
    named = list(dict.fromkeys(h.sample for h in hits))
    ids = answer.per_sample()[0]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    blind = [ids[i] for i in order if ids[i] not in named][:n]
    return named + blind, len(named)
