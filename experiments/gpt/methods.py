"""The rows of the GPT table: how each records, how it is queried, and what other methods make of the trained model.

Recorded rows train in float32 as a user would, and read their description from the run's own config, so that the row
`default` shows whatever the library's default is. Rows with the same recording stand side by side: it is made once.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstory.baselines.gradients import gradients
from backstory.baselines.similarity import gradient_cosine, gradient_dot, representation_similarity
from backstory.baselines.tracin import tracin
from backstory.baselines.trak import margins, trak
from backstory.run.embed import ContractionChoice, form_of
from backstory.run.run import Run
from backstory.store import RunStore
from experiments.baselines import PAPERS_DAMPING, TEXT_DAMPINGS, TEXT_RANK, at, influence, post_hoc
from experiments.gpt.replayed import Curvature, sweep
from experiments.gpt.setups import GptSetup, domain_losses, draw, recipe, removals
from experiments.harness import STEPS, Method, Problem, Recording, Scores

Settings = Mapping[str, Any]  # arguments of `record`; "seed" is the study's own unless they are empty
Row = Method[Problem]
WHICH = "sequences"  # the one set of removals
TRAK_RANK = 8  # fewer coordinates than sequences, as TRAK wants them
FULL: Settings = {"projection": "full", "curvature": "empirical"}
GROUPS = (1, 2, 4, 6, 12)
SIX = "empirical/6"


def problem_of(setup: GptSetup, seed: int, count: int) -> Problem:
    """The run of this seed, and `count` sequences that are removed."""
    return Problem(
        setup=setup, seed=seed, make=lambda: recipe(setup, seed), removals={WHICH: removals(setup, seed, count)},
        loss=domain_losses, queries=draw(setup, seed).queries, keep=1,
    )  # fmt: skip


def recording(problem: Problem, settings: Settings) -> Recording:
    """The same training with Backstory recording."""
    return problem.recording(**({"seed": problem.seed, **settings} if settings else {}))


def methods() -> list[Row]:
    """All rows: exact ones first, then the paper's own method."""
    return [*_exact_rows(), *_full_rows(), *_replayed_rows(), *_learned_rows(), *_other_rows(), *_post_hoc_rows()]


def _exact_rows() -> list[Row]:
    """The reverse sweep in float64 (the ceiling, as a row), and in the precision of training."""
    return [
        Row("exact", lambda p: exact(p, torch.float64)),
        Row("exact-float32", lambda p: exact(p, torch.float32)),
    ]


def _full_rows() -> list[Row]:
    six, sampled = {**FULL, "curvature": SIX}, {**FULL, "curvature": "sampled:1/6"}
    return [
        row("paper", {**FULL, "optimizer_model": "sgd"}, contraction="never"),
        row("full-empirical", FULL),
        row("full-empirical-implicit", FULL, contraction="always"),
        row("full-empirical/6", six),
        row("full-empirical/6-expanding", six, contraction="when_expanding"),
        compressed_row("full-empirical/6-compressed", six),
        row("full-empirical/12", {**FULL, "curvature": "empirical/12"}),
        row("full-sampled-1/6", sampled),
        row("full-sampled-1/6-expanding", sampled, contraction="when_expanding"),
        compressed_row("full-sampled-1/6-compressed", sampled),
    ]


def _replayed_rows() -> list[Row]:
    """Full coordinates without a recording: what curvature alone costs. Minutes a seed, so only where they are named."""

    def row(name: str, curvature: Curvature) -> Row:
        return Row(name, lambda p: replayed(p, curvature), default=False)

    return [row("no-curvature", "none"), row("full-exact", "exact"), row("full-hessian", "hessian")]


def _learned_rows() -> list[Row]:
    def learned(curvature: str) -> Settings:
        return {"projection": "learned", "rank": 16, "curvature": curvature, "warmup_steps": 20, **STEPS}

    result = []
    for k in GROUPS:
        curvature = "empirical" if k == 1 else f"empirical/{k}"
        result.append(row(f"learned-16-{curvature}", learned(curvature)))
        if curvature == SIX:
            result.append(row(f"learned-16-{SIX}-expanding", learned(SIX), contraction="when_expanding"))
            result.append(row(f"learned-16-{SIX}-per-layer", learned(SIX), per_layer=True))
            result.append(compressed_row(f"learned-16-{SIX}-compressed", learned(SIX)))
    for curvature in ("sampled:1", "sampled:4", "sampled:1/6"):
        result.append(row(f"learned-16-{curvature.replace(':', '-')}", learned(curvature)))
    return [*result, compressed_row("learned-16-sampled-1/6-compressed", learned("sampled:1/6"))]


def _other_rows() -> list[Row]:
    def six(**settings: Any) -> Settings:
        return {"projection": "learned", "rank": 16, "curvature": SIX, "warmup_steps": 20, **STEPS, **settings}

    return [
        row("learned-24-empirical/6", six(rank=24)),
        row("learned-auto-0.9-empirical/6", six(rank="auto:0.9")),
        row("learned-auto-0.95-empirical/6", six(rank="auto:0.95")),
        row("random-16-empirical/6", six(projection="random")),
        row("random-32-empirical/6", six(projection="random", rank=32)),
        row("learned-16-empirical/6-int8", six(encoding="int8")),
        compressed_row("int8-compressed", six(encoding="int8")),
        row("learned-16-empirical/6-warmup-50", six(warmup_steps=50)),
        row("default", {}),
        row("float16", {"encoding": "float16"}),
        row("autocast", {"autocast": True}),
        row("fast", {"preset": "fast"}),
        row("best", {"preset": "best"}),
    ]


def _post_hoc_rows() -> list[Row]:
    return [
        Row("gradient-dot", lambda p: _plain(p, post_hoc(p, gradient_dot))),
        Row("gradient-cosine", lambda p: _plain(p, post_hoc(p, gradient_cosine))),
        Row("tracin", lambda p: _plain(p, post_hoc(p, tracin, checkpoints=p.training.thirds), steps="sgd proxy")),
        Row("influence-1e-3", lambda p: at(swept(p), PAPERS_DAMPING)),
        Row("influence-swept", swept),
        Row("trak", lambda p: trak_scores(p, "margin")),
        Row("trak-loss", lambda p: trak_scores(p, "loss")),
        Row("representation", representation),
    ]


def row(name: str, settings: Settings, *, contraction: ContractionChoice = "auto", per_layer: bool = False) -> Row:
    """A row that records with these settings and is queried in this form."""

    def scores(problem: Problem) -> Scores:
        return queried(problem, recording(problem, settings), contraction=contraction, per_layer=per_layer)

    return Row(name, scores, {"default": not settings, "recorded": True})


def compressed_row(name: str, settings: Settings) -> Row:
    """A row that records with these settings and queries the run after `compress`."""
    return Row(name, lambda p: compressed(p, recording(p, settings)), {"recorded": True})


def compressed(problem: Problem, made: Recording) -> Scores:
    """Query a recorded run after `compress`; the seconds are of both."""
    with tempfile.TemporaryDirectory() as folder:
        began, path = time.perf_counter(), Path(folder) / "run"
        made.run.compress(path)
        seconds = time.perf_counter() - began
        scores = queried(problem, replace(made, run=Run(path)))
        return replace(scores, cost={**scores.cost, "seconds": scores.cost["seconds"] + seconds})


def queried(problem: Problem, made: Recording, **form: Any) -> Scores:
    """A recorded run's scores on the four domains; `form` are arguments of `run.query`."""
    began = time.perf_counter()
    answer = made.run.query(made.model, problem.loss, problem.queries, **form)
    values = problem.of(answer)
    seconds, store = time.perf_counter() - began, RunStore.open(made.run.path)
    cost = {
        "seconds": seconds,
        "recording_ratio": made.seconds / problem.training.seconds,
        "bytes_per_occurrence": store.size_bytes(("checkpoint-",)) / store.n_rows(),
    }
    return Scores(values, about=described(made.run, **form), cost=cost, occurrences=answer.scores.T)


def described(run: Run, *, contraction: ContractionChoice = "auto", per_layer: bool = False) -> dict[str, Any]:
    """What the run's config says of its rows, and how it is asked."""
    settings, optimizer = run.config["settings"], run.config["optimizer"]
    curvature, _, groups = settings["curvature"].partition("/")
    rank = settings["rank"]
    where = "full" if settings["projection"] == "full" else f"{settings['projection']} {rank}×{rank}"
    extras = [
        *(["per layer"] if per_layer else []),
        *(["compressed"] if "compressed" in run.config else []),
        *([] if settings["encoding"] == "float16" else [settings["encoding"]]),
        *([f"{settings['warmup_steps']} steps"] if settings["projection"] == "learned" else []),
    ]
    steps = "sgd proxy" if optimizer["modelled_as"] == "sgd" else optimizer["class"].lower()
    factored = [] if optimizer["coordinates"] == "raw" else ["factored"]
    return {
        "projection": ", ".join([where, *extras]),
        "curvature": curvature,
        "groups": int(groups or 1),
        "optimizer_model": ", ".join([steps, *factored, form_of(run.form(contraction))]),
        "dims": run.width,
    }


def replayed(problem: Problem, curvature: Curvature) -> Scores:
    """Scores of every occurrence from a replay in full coordinates."""
    scores = sweep(problem.make, lambda model: problem.loss(model, problem.queries), curvature, dtype=problem.dtype)
    values = {name: torch.cat([problem.of_occurrences(q)[name] for q in scores.T], 1) for name in problem.removals}
    return replace(_plain(problem, Scores(values), None, curvature, "adamw, literal"), occurrences=scores)


def exact(problem: Problem, dtype: torch.dtype) -> Scores:
    """Scores of every occurrence by exact unrolling in this precision."""
    answer = problem.exact(dtype)
    form = f"adamw, unrolled in {str(dtype).removeprefix('torch.')}"
    return replace(
        _plain(problem, Scores(problem.of(answer)), None, "hessian", form), occurrences=answer.scores.T
    )  # fmt: skip


def swept(problem: Problem) -> Scores:
    """The influence function (LoGRA) at all dampings."""
    scores = influence(problem, TEXT_DAMPINGS, rank=TEXT_RANK, seed=problem.seed)
    return _plain(problem, scores, TEXT_RANK, "empirical")


def trak_scores(problem: Problem, target: str) -> Scores:
    """TRAK with one model; a sequence's margin is the mean of its tokens' margins."""
    loss = problem.loss if target == "loss" else None
    answer = trak(
        problem.trained, problem.queries, loss=loss, target=target, margin=mean_margins, damping=1e-6, rank=TRAK_RANK,
        seed=problem.seed,
    )  # fmt: skip
    return _plain(problem, Scores(problem.of(answer)), TRAK_RANK, "empirical")


def mean_margins(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean margin of the tokens of each sequence (B, S + 1), or of each domain's sequences (4, q, S + 1)."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    each = margins(model(flat[:, :-1]).flatten(0, 1), flat[:, 1:].flatten())
    return each.reshape(len(tokens), -1).mean(1)


def representation(problem: Problem) -> Scores:
    """Cosine of the head's inputs, averaged over positions; mean over each domain's sequences."""
    answer = representation_similarity(problem.trained, problem.queries.flatten(0, 1))
    values = {which: x.unflatten(1, (len(problem.queries), -1)).mean(2) for which, x in problem.of(answer).items()}
    about = {"projection": "head's input", "curvature": "none", "groups": 1, "optimizer_model": "none"}
    return Scores(values, about={**about, "dims": problem.setup.width})


def _plain(
    problem: Problem, scores: Scores, rank: int | None = None, curvature: str = "none", steps: str = "none"
) -> Scores:
    """Scores with what the table says of a method that sees the trained model, or a few checkpoints, only."""
    about = {
        "projection": "full" if rank is None else f"random {rank}×{rank}",
        "curvature": curvature,
        "groups": 1,
        "optimizer_model": steps,
        "dims": gradients(problem.trained, rank=rank).width,
    }
    return replace(scores, about=about)
