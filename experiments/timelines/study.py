r"""Size timelines of a recording against exact ones, before and after calibration with one other text.

    size of part k of a text     = mean |influence| of the occurrences in the k-th of 20 equal parts of the run
    factor of part k             = Σ|exact| / Σ|recorded| of the calibration text over the part's occurrences
    calibrated size of part k    = factor · recorded size

Each text's recorded timeline is compared with its exact one by rank correlation and by cosine. Two rows beside it say what the recording adds:
`shape` is the calibration text's own exact timeline in place of every text's, and the calibration is repeated with each
text in turn, on the others.

The recording is the default one; exact influences are `run.exact` of a named query set, in the precision of training. Texts are
single sequences that no training step used, as many of each domain.

Shapes:  Q texts, the calibration text last; P parts; N occurrences.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.demo.gpt_model import loss
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe
from backstory.results.influence import Influence
from backstory.run.run import Run
from experiments.gpt.setups import DOMAINS, GptSetup, draw, generator, recipe
from experiments.harness import Say, bounded, recorded, silent
from experiments.lds.study import over_queries
from experiments.statistics import mean, spearman

TEXTS = "texts"
ROWS = ("recorded", "calibrated", "shape")  # ways to a text's timeline
MEASURED = ("rank", "cosine")


@dataclass(frozen=True, kw_only=True)
class TimelineSetup:
    """A run of the GPT study, how many texts are judged, and in how many parts of the run."""

    gpt: GptSetup
    texts: int = 16
    parts: int = 20


@dataclass(frozen=True)
class Case:
    """One recorded run, and the size timelines of its texts (Q, P) by the recording and exactly."""

    run: Run
    make: Callable[[], Recipe]
    calibration: str  # the calibration text, as `run.exact` names it
    recorded: Tensor
    exact: Tensor


Calibrate = Callable[[Case], Tensor]  # the factor of each part, (P,)


def own_factors(case: Case) -> Tensor:
    """Σ|exact| / Σ|recorded| of the calibration text, (P,); means over the same occurrences have the same ratio."""
    return factors(case.recorded[-1], case.exact[-1])


def factors(recorded: Tensor, exact: Tensor) -> Tensor:
    """The ratio of two timelines (P,); 1 where the recorded one is 0."""
    return torch.where(recorded > 0, exact / recorded, torch.ones_like(exact))


def gpt_of(setup: TimelineSetup) -> GptSetup:
    """The run, with enough sequences held out of each domain."""
    return replace(setup.gpt, queries=max(setup.gpt.queries, setup.texts // len(DOMAINS) + 1))


def texts_of(setup: TimelineSetup, seed: int) -> tuple[Tensor, list[str]]:
    """`(Q texts (Q, S + 1), the domain of each)`: a domain after the other, then the calibration text, of a drawn domain."""
    each, rest = divmod(setup.texts, len(DOMAINS))
    if rest or not each:
        raise UsageError(f"texts must be a multiple of {len(DOMAINS)}, got {setup.texts}.")
    held = draw(gpt_of(setup), seed).queries  # (4, n, S + 1)
    which = int(torch.randint(len(DOMAINS), (), generator=generator(seed, "calibration")))
    names = [name for name in DOMAINS for _ in range(each)]
    return torch.cat([*held[:, :each], held[which, each : each + 1]]), [*names, DOMAINS[which]]


def sizes(answer: Influence, steps: int, parts: int) -> Tensor:
    """The size timelines (Q, P) of a run of so many steps."""
    part = torch.from_numpy(answer.steps).long() * parts // steps
    total = torch.zeros(len(answer.scores), parts, dtype=torch.float64)
    total.index_add_(1, part, answer.scores.double().abs())
    return total / part.bincount(minlength=parts)


def measure(setup: TimelineSetup, seed: int, folder: Path, say: Say = silent) -> Case:
    """Train and record, then query every text both ways."""
    texts, _ = texts_of(setup, seed)

    def make() -> Recipe:
        return replace(recipe(gpt_of(setup), seed), queries={TEXTS: texts})

    plan = make()
    say(f"seed {seed}: record", 0, 1)
    run = recorded(plan, folder / "run")
    ours = run.query(plan.model, loss, texts)  # before anything exact is stored, which a query would find
    exact = run.exact(TEXTS, make, each=True, progress=lambda done, total: say(f"seed {seed}: exact", done, total))
    steps = len(plan.batches)
    if not (ours.steps == exact.steps).all() or len(ours.steps) != sum(len(ids) for ids, _ in plan.batches):
        raise UsageError("the recording and the exact results are not of the same occurrences.")
    mine, theirs = (sizes(answer, steps, setup.parts) for answer in (ours, exact))
    return Case(run, make, f"{TEXTS}:{len(texts) - 1}", mine, theirs)


def study(
    setup: TimelineSetup, seeds: Sequence[int], *, calibrate: Calibrate = own_factors, say: Say = silent
) -> dict[str, Any]:
    """Rank correlation and cosine of each row's timelines with exact ones, as plain values."""
    if not 2 <= setup.parts <= setup.gpt.steps:
        raise UsageError(f"parts must be between 2 and the run's {setup.gpt.steps} steps, got {setup.parts}.")
    each = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            case = measure(setup, seed, Path(folder), say)
            each.append({"seed": seed, "domains": texts_of(setup, seed)[1], **judged(case, calibrate(case))})
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "rows": [_row(name, [one["rows"][name] for one in each]) for name in ROWS],
        "recording_adds": {measured: difference(each, measured) for measured in MEASURED},
        "each": each,
    }


def judged(case: Case, by: Tensor) -> dict[str, Any]:
    """Every text's agreement in each row, and what other choices of the calibration text give."""
    mine, exact = case.recorded[:-1], case.exact[:-1]
    ways = dict(zip(ROWS, (mine, mine * by, case.exact[-1].expand_as(exact)), strict=True))
    return {
        "rows": {name: agreements(way, exact) for name, way in ways.items()},
        "other_choices": choices(case.recorded, case.exact),
        "factors": by.tolist(),
        "recorded": case.recorded.tolist(),
        "exact": case.exact.tolist(),
    }


def agreements(ours: Tensor, exact: Tensor) -> dict[str, list[float]]:
    """`rank` and `cosine` of each text's timeline (Q, P) with its exact one."""
    return {
        "rank": [spearman(x, y) for x, y in zip(ours, exact, strict=True)],
        "cosine": torch.nn.functional.cosine_similarity(ours, exact).tolist(),
    }


def choices(recorded: Tensor, exact: Tensor) -> list[float]:
    """With each text in turn as the calibration text: the mean rank correlation of the others."""

    def without(k: int) -> float:
        others = [q for q in range(len(exact)) if q != k]
        return mean(agreements(recorded[others] * factors(recorded[k], exact[k]), exact[others])["rank"])

    return [without(k) for k in range(len(exact))]


def difference(each: Sequence[dict[str, Any]], measured: str) -> dict[str, float]:
    """`calibrated` − `shape`, paired by text: what the recording adds to another text's exact timeline."""
    pairs = [[torch.tensor(one["rows"][name][measured], dtype=torch.float64) for name in ROWS[1:]] for one in each]
    values = [ours - theirs for ours, theirs in pairs]
    return bounded((mean([float(x.mean()) for x in values]), *over_queries(values)))


def _row(name: str, each: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Means over texts and seeds, with the 95 % interval of both drawn anew."""
    out: dict[str, Any] = {"method": name}
    for measured in MEASURED:
        values = [torch.tensor(one[measured], dtype=torch.float64) for one in each]
        lower, upper = over_queries(values)
        out[measured] = {
            "mean": mean([float(x.mean()) for x in values]),
            "interval": {"lower": lower, "upper": upper},
            "seeds": [float(x.mean()) for x in values],
            "least": min(float(x.min()) for x in values),
        }
    return out
