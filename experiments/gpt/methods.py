"""The rows of the GPT table: how each records, how it is asked, and what other methods say of the trained model.

Recorded rows train in float32 as a user would, and read their description from the run's own config, so that the row
`default` shows whatever the library's default is. Rows with the same recording stand side by side: it is made once.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from backstory.baselines.gradients import gradients
from backstory.baselines.influence import influence_sweep
from backstory.baselines.similarity import gradient_cosine, gradient_dot, representation_similarity
from backstory.baselines.tracin import tracin
from backstory.baselines.trak import margins, trak
from backstory.results.influence import Influence
from backstory.run.embed import ContractionChoice, form_of
from backstory.run.run import Run
from experiments.gpt.problem import Method, Problem, Recording, Scores, Settings
from experiments.gpt.setups import domain_losses

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)  # losses are sums over 48 tokens: the curvature is large
INFLUENCE_RANK = 32  # 64 takes minutes more, and the sides of this model are 48
TRAK_RANK = 8  # fewer coordinates than sequences, as TRAK wants them
PAPERS_DAMPING = 1e-3
FULL: Settings = {"projection": "full", "curvature": "empirical"}
GROUPS = (1, 2, 4, 6, 12)
SIX = "empirical/6"


def methods() -> list[Method]:
    """All rows, the paper's own method first."""
    return [*_full_rows(), *_learned_rows(), *_other_rows(), *_post_hoc_rows()]


def _full_rows() -> list[Method]:
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


def _learned_rows() -> list[Method]:
    def learned(curvature: str) -> Settings:
        return {"projection": "learned", "rank": 16, "curvature": curvature}

    found = []
    for k in GROUPS:
        curvature = "empirical" if k == 1 else f"empirical/{k}"
        found.append(row(f"learned-16-{curvature}", learned(curvature)))
        if curvature == SIX:
            found.append(row(f"learned-16-{SIX}-expanding", learned(SIX), contraction="when_expanding"))
            found.append(row(f"learned-16-{SIX}-per-layer", learned(SIX), per_layer=True))
    for curvature in ("sampled:1", "sampled:4", "sampled:1/6"):
        found.append(row(f"learned-16-{curvature.replace(':', '-')}", learned(curvature)))
    return [*found, compressed_row("learned-16-sampled-1/6-compressed", learned("sampled:1/6"))]


def _other_rows() -> list[Method]:
    def six(**settings: Any) -> Settings:
        return {"projection": "learned", "rank": 16, "curvature": SIX, **settings}

    return [
        row("learned-24-empirical/6", six(rank=24)),
        row("learned-auto-0.9-empirical/6", six(rank="auto:0.9")),
        row("learned-auto-0.95-empirical/6", six(rank="auto:0.95")),
        row("random-16-empirical/6", six(projection="random")),
        row("random-32-empirical/6", six(projection="random", rank=32)),
        row("learned-16-empirical/6-int8", six(encoding="int8")),
        row("learned-16-empirical/6-warmup-50", six(warmup_steps=50)),
        Method("default", lambda p, made: asked(p, made), {}, default=True),
        compressed_row("default-compressed", {}),
        compressed_row("int8-compressed", six(encoding="int8")),
    ]


def _post_hoc_rows() -> list[Method]:
    return [
        Method("gradient-dot", lambda p, _: post_hoc(p, gradient_dot)),
        Method("gradient-cosine", lambda p, _: post_hoc(p, gradient_cosine)),
        Method("tracin", lambda p, _: post_hoc(p, tracin, checkpoints=p.thirds)),
        Method("influence-1e-3", lambda p, _: influence_at(p, PAPERS_DAMPING)),
        Method("influence-swept", lambda p, _: influence(p)),
        Method("trak", lambda p, _: trak_scores(p, "margin")),
        Method("trak-loss", lambda p, _: trak_scores(p, "loss")),
        Method("representation", lambda p, _: representation(p)),
    ]


def row(name: str, settings: Settings, *, contraction: ContractionChoice = "auto", per_layer: bool = False) -> Method:
    """A row that records with these settings and asks in this form."""
    return Method(name, lambda p, made: asked(p, made, contraction=contraction, per_layer=per_layer), settings)


def compressed_row(name: str, settings: Settings) -> Method:
    """A row that records with these settings and asks the run after `compress`."""
    return Method(name, compressed, settings)


def compressed(problem: Problem, made: Recording | None) -> Scores:
    """Ask a recorded run after `compress`; the seconds are of both."""
    assert made is not None
    with tempfile.TemporaryDirectory() as folder:
        began, path = time.perf_counter(), Path(folder) / "run"
        made.run.compress(path)
        seconds = time.perf_counter() - began
        found = asked(problem, replace(made, run=Run(path)))
        return replace(found, seconds=found.seconds + seconds)


def asked(problem: Problem, made: Recording | None, **asking: Any) -> Scores:
    """Ask a recorded run about the four domains; `asking` are arguments of `run.query`."""
    assert made is not None
    began = time.perf_counter()
    answer = made.run.query(made.model, domain_losses, problem.queries, **asking)
    values, seconds = problem.of(answer), time.perf_counter() - began
    store = made.run.store
    return Scores(
        values, described(made.run, **asking), seconds,
        recording_ratio=made.seconds / problem.seconds, bytes_per_occurrence=store.size_bytes() / store.n_rows(),
    )  # fmt: skip


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
        "dims": run.store.width,
    }


def post_hoc(problem: Problem, method: Callable[..., Influence], **arguments: Any) -> Scores:
    """A method that sees the trained model, or a few checkpoints, only."""
    began = time.perf_counter()
    answer = method(problem.trained, problem.queries, loss=domain_losses, **arguments)
    steps = "sgd proxy" if method is tracin else "none"
    return Scores(problem.of(answer), _about(problem, None, "none", steps), time.perf_counter() - began)


def influence(problem: Problem) -> Scores:
    """The influence function (LoGRA) at all dampings, from one pass; asked for twice, it is computed once."""
    if "influence" not in problem.memo:
        began = time.perf_counter()
        answers = influence_sweep(
            problem.trained, problem.queries, DAMPINGS, loss=domain_losses, rank=INFLUENCE_RANK, seed=problem.seed
        )
        found = {f"damping {d:g}": problem.of(a) for d, a in zip(DAMPINGS, answers, strict=True)}
        problem.memo["influence"] = found, time.perf_counter() - began
    settings, seconds = problem.memo["influence"]
    about = _about(problem, INFLUENCE_RANK, "empirical", "none")
    return Scores(settings[f"damping {PAPERS_DAMPING:g}"], about, seconds, settings=settings)


def influence_at(problem: Problem, damping: float) -> Scores:
    """The same at one damping; the seconds are those of all."""
    swept = influence(problem)
    return Scores(swept.settings[f"damping {damping:g}"], swept.about, swept.seconds)


def trak_scores(problem: Problem, target: str) -> Scores:
    """TRAK with one model; a sequence's margin is the mean of its tokens' margins."""
    began = time.perf_counter()
    loss = domain_losses if target == "loss" else None
    answer = trak(
        problem.trained, problem.queries, loss=loss, target=target, margin=mean_margins, damping=1e-6, rank=TRAK_RANK,
        seed=problem.seed,
    )  # fmt: skip
    about = _about(problem, TRAK_RANK, "empirical", "none")
    return Scores(problem.of(answer), about, time.perf_counter() - began)


def mean_margins(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean margin of the tokens of each sequence (B, S + 1), or of each domain's sequences (4, q, S + 1)."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    each = margins(model(flat[:, :-1]).flatten(0, 1), flat[:, 1:].flatten())
    return each.reshape(len(tokens), -1).mean(1)


def representation(problem: Problem) -> Scores:
    """Cosine of the head's inputs, averaged over positions; mean over each domain's sequences."""
    began = time.perf_counter()
    answer = representation_similarity(problem.trained, problem.queries.flatten(0, 1))
    values = problem.of(answer).unflatten(1, (len(problem.queries), -1)).mean(2)
    about = {"projection": "head's input", "curvature": "none", "groups": 1, "optimizer_model": "none"}
    return Scores(values, {**about, "dims": problem.setup.width}, time.perf_counter() - began)


def _about(problem: Problem, rank: int | None, curvature: str, steps: str) -> dict[str, Any]:
    return {
        "projection": "full" if rank is None else f"random {rank}×{rank}",
        "curvature": curvature,
        "groups": 1,
        "optimizer_model": steps,
        "dims": gradients(problem.trained, rank=rank).width,
    }
