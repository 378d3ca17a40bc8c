r"""The linear datamodeling score (LDS) of every method, as the leaderboard of bergson defines it, on the small GPT of the study.

    LDS = mean over the queries of spearman(Σ of the scores of what a drop leaves out, change of the query's loss by retraining without it)

over 100 random drops of 1 % of the training set, for 50 single texts. The interval is the leaderboard's: it draws drops with replacement, the same for
all queries, 10,000 times (and seeds, where there are several). One over queries stands beside it. Retraining is in float64; exact unrolling and recordings
are in float32, as a user would compute them (float64 ranks occurrences alike: `experiments.gpt`).

CPU seconds of a row are those that it would take alone: a recording counts its own training, the methods that need only the trained
model count none. Every row is stored in the cache as soon as it is known, with its seconds; retraining and exact unrolling are also stored on their
way, with the seconds spent so far, and go on from there. Both rows of the influence function have the seconds of its one pass over all dampings.

Shapes:  n drops, Q queries, N occurrences.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backstory.baselines.similarity import gradient_cosine
from backstory.demo.data import Bytes, decode
from backstory.demo.gpt_model import token_losses
from backstory.replay.tape import Removal
from experiments.baselines import PAPERS_DAMPING, post_hoc, setting
from experiments.gpt.methods import FULL, queried, recording, swept, trak_scores
from experiments.gpt.setups import GptSetup, draw, generator, recipe
from experiments.harness import Problem, Say, silent
from experiments.lds.bm25 import bm25
from experiments.statistics import bounds, counts, interval, mean, spearman

WHICH = "drops"
DRAWS = 10_000
EXACT, TRUTH = "exact unrolling", "retraining"
PAPER = {**FULL, "optimizer_model": "sgd"}


@dataclass(frozen=True, kw_only=True)
class LdsSetup:
    """One run of the GPT study, what is dropped from it, and how many texts are queries."""

    gpt: GptSetup
    drops: int = 100
    share: float = 0.01  # of the training set, in each drop
    queries: int = 50


def text_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each text's tokens: (Q, S + 1) -> (Q,)."""
    return token_losses(model, tokens).mean(1)


def problem_of(setup: LdsSetup, seed: int, cache: Path | None = None, say: Say = silent) -> Problem:
    """The run of this seed, its drops, and its single texts, a domain after the other."""
    domains = len(draw(setup.gpt, seed).queries)
    gpt = replace(setup.gpt, queries=-(-setup.queries // domains))
    texts = draw(gpt, seed).queries.transpose(0, 1).flatten(0, 1)[: setup.queries]
    return Problem(
        setup=gpt, seed=seed, make=lambda: recipe(gpt, seed), removals={WHICH: drops(setup, seed, draw(gpt, seed).ids)},
        loss=text_losses, queries=texts, keep=1, cache=cache, say=say, clock=time.process_time,
    )  # fmt: skip


def drops(setup: LdsSetup, seed: int, ids: Sequence[str]) -> list[Removal]:
    """Random parts of the training set."""
    g, size = generator(seed, "drops of lds"), max(1, round(setup.share * len(ids)))
    return [Removal(tuple(ids[i] for i in torch.randperm(len(ids), generator=g)[:size])) for _ in range(setup.drops)]


@dataclass
class Meter:
    """CPU seconds by name, written to a file whenever they grow, so that interrupted work is counted."""

    file: Path | None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.is_file():
            self.seconds = json.loads(self.file.read_text())

    @contextmanager
    def measure(self, name: str) -> Iterator[Callable[[], None]]:
        """Count what is spent inside; what it gives writes what was spent until then."""
        before, began = self.seconds.get(name, 0.0), time.process_time()

        def note() -> None:
            self.set(name, before + time.process_time() - began)

        yield note
        note()

    def set(self, name: str, seconds: float) -> None:
        """Write what a name has taken in all."""
        self.seconds[name] = seconds
        if self.file is not None:
            self.file.write_text(json.dumps(self.seconds))


Scored = Callable[[Problem], Tensor]  # (n, Q) for every drop and query


def rows() -> dict[str, Scored]:
    """Every row of the table."""
    return {
        "recording (default)": lambda p: queried(p, recording(p, {})).values[WHICH],
        EXACT: lambda p: p.of(p.exact(torch.float32))[WHICH],
        "paper (SGD proxy)": lambda p: queried(p, recording(p, PAPER), contraction="never").values[WHICH],
        "influence function": lambda p: swept(p).settings[setting(PAPERS_DAMPING)][WHICH],
        "influence function, best damping": _best_damping,
        "gradient cosine": lambda p: post_hoc(p, gradient_cosine).values[WHICH],
        "TRAK, one model": lambda p: trak_scores(p, "margin").values[WHICH],
        "BM25": _bm25,
    }


def _best_damping(problem: Problem) -> Tensor:
    """The damping that agrees best, chosen on the same figures: in the method's favour."""
    truth = problem.truth()[WHICH]
    return max((x[WHICH] for x in swept(problem).settings.values()), key=lambda x: float(each_query(x, truth).mean()))


def _bm25(problem: Problem) -> Tensor:
    batches = problem.make().batches
    ids = [str(name) for names, _ in batches for name in names]
    texts = [decode(x.tolist(), Bytes()) for _, tokens in batches for x in tokens]
    scores = bm25([decode(x.tolist(), Bytes()) for x in problem.queries], texts)  # (Q, N)
    place = {name: k for k, name in enumerate(ids)}
    return torch.stack([scores[:, [place[str(s)] for s in gone.samples]].sum(1) for gone in problem.removals[WHICH]])


def each_query(scores: Tensor, truth: Tensor) -> Tensor:
    """The rank correlation of each query, (Q,)."""
    return torch.tensor([spearman(x, y) for x, y in zip(scores.T, truth.T, strict=True)], dtype=torch.float64)


def over_queries(each: Sequence[Tensor], draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """`(lower, upper)` of the mean, with seeds and the queries in each drawn anew."""
    g = torch.Generator().manual_seed(seed)
    total = draws * len(each)
    return bounds(torch.stack([counts(len(x), total, g) @ x / len(x) for x in each]), g)


class Known(NamedTuple):
    """What one seed gave."""

    truth: Tensor  # (n, Q)
    scores: dict[str, Tensor]  # of each row, (n, Q)
    seconds: dict[str, float]  # of each row, of retraining and of training


def study(
    setup: LdsSetup,
    seeds: Sequence[int],
    *,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """LDS and CPU seconds of every row, as plain values."""
    chosen = {name: scored for name, scored in rows().items() if only is None or name in only}
    results = [run_seed(setup, seed, chosen, cache, say) for seed in seeds]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "draws": DRAWS,
        "rows": [_row(name, results) for name in chosen],
        "retraining_cpu_seconds": mean([known.seconds[TRUTH] for known in results]),
        "training_cpu_seconds": mean([known.seconds["training"] for known in results]),
    }


def _row(name: str, results: Sequence[Known]) -> dict[str, Any]:
    points = [(known.scores[name], known.truth) for known in results]
    each = [each_query(*one) for one in points]
    return {
        "method": name,
        "mean": mean([float(x.mean()) for x in each]),
        "interval": _bounds(interval(points, draws=DRAWS)),
        "over_queries": _bounds(over_queries(each)),
        "median": float(torch.cat(each).median()),
        "seeds": [float(x.mean()) for x in each],
        "queries": [x.tolist() for x in each],
        "cpu_seconds": mean([known.seconds[name] for known in results]),
    }


def _bounds(values: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("lower", "upper"), values, strict=True))


def run_seed(setup: LdsSetup, seed: int, chosen: Mapping[str, Scored], cache: Path | None, say: Say) -> Known:
    """Everything that one seed's rows are computed from."""
    folder = None if cache is None else cache / f"lds-{setup.gpt.mode}-{seed}"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    meter, made = Meter(None if folder is None else folder / "seconds.json"), dict[str, Tensor]()
    with problem_of(setup, seed, folder) as problem:
        truth = _known(problem, TRUTH, lambda p: p.truth()[WHICH], meter, folder, say)
        meter.set("training", problem.training.seconds)  # methods that need the trained model count none
        for name, scored in chosen.items():
            made[name] = _known(problem, name, scored, meter, folder, say)
    return Known(truth, made, meter.seconds)


def _known(problem: Problem, name: str, scored: Scored, meter: Meter, folder: Path | None, say: Say) -> Tensor:
    """A row's scores: read, or made and stored."""
    file = None if folder is None else folder / f"{'-'.join(name.split())}.json"
    if file is not None and file.is_file():
        return torch.tensor(json.loads(file.read_text()), dtype=torch.float64)
    if name not in (EXACT, TRUTH):
        meter.seconds.pop(name, None)  # begun before, but nothing of it is left
    with meter.measure(name) as note:
        problem.say = _noting(say, note)
        problem.saved = 0.0
        scores = scored(problem).double()
    meter.set(name, meter.seconds[name] + problem.saved)  # a recording or a sweep that another row made
    if file is not None:
        file.write_text(json.dumps(scores.tolist()))
    return scores


def _noting(say: Say, note: Callable[[], None]) -> Say:
    def both(stage: str, done: int, total: int) -> None:
        note()
        say(stage, done, total)

    return both
