r"""Measure a recording's quality on the run itself: recorded influences beside exact ones, and exact ones beside training again.

For the mean of a query set and a few of its single queries, over the occurrences z of a part of the run,

    rank   = Spearman(recorded_z, exact_z)                       of the whole run, its thirds and tenths
    factor = Σ |exact_z| / Σ |recorded_z|                        of its twentieths

and over a few occurrences, drawn alike from each third and left out one at a time, Spearman(exact_z, retrained_z): of all of them, and of
each third's own, for where training is chaotic first order fails early and holds late. A rank's interval is
that of another query of its kind: with z = artanh(rank), n uses and Q queries measured, z̄ ± 1.96 √(s²(1 + 1/Q) + 1.06/(n − 3)); a rank of
±1 counts as half way to the next one that n uses can have, 6/(n³ − n) below it.

What was measured is one small file of the run for each step, named by the run and the step. It holds for the form of the recording
that it was measured on: its curvature, and how it was embedded. A file of another `VERSION` is not read.
"""

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..capture.fingerprint import batch_fingerprint
from ..capture.ids import restore
from ..errors import UsageError
from ..exact import costs
from ..exact.cache import digest
from ..exact.check import spearman
from ..exact.leave_out import retrain
from ..exact.losses import QuerySet
from ..maths.encoding import is_coarse
from ..maths.steps import Contraction
from ..replay.queries import QuerySets, size
from ..replay.recipe import Recipe, stored_args
from ..replay.tape import Progress, RecipeSource, Removal, build_recipe, tell
from ..results.influence import Influence
from ..results.quality import SIZES, TENTHS, THIRDS, Agreement, FirstOrder, Quality, bounds, part_of
from ..results.words import command_on
from ..store import RunStore
from ..store.files import write_tensors
from .methods import choose_method
from .pieces import clear_work, settle, work_folder
from .segments import path_to

if TYPE_CHECKING:
    from .run import Run

VERSION = 2  # of what is stored; 1 had no thirds of what was retrained
PREFIX, RETRAINED = "quality-", "calibrate"  # of its file; the folder of what was retrained so far
SINGLES, REMOVALS, TWINS = 4, 24, 3  # queries, uses left out, trainings that measure rounding
FEWEST = 8  # uses whose ranks say something
SURE = 1.96
PARTS = 1000  # in which progress is counted
Form = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One query: ranks by part, and sizes in the twentieths."""

    query: str
    mean: bool  # of several losses
    whole: float | None
    thirds: list[float | None]
    tenths: list[float | None]
    exact: list[float]  # Σ |influence|
    recorded: list[float]
    retrained: float | None  # rank of exact influences beside retraining, over all uses that were left out
    retrained_thirds: list[float | None]  # the same over those of each third


@dataclass(frozen=True)
class Calibration:
    """What was measured of the recording before one step."""

    at: int
    queries: str  # the set
    batch: str  # its fingerprint
    form: dict[str, Any]
    uses: dict[str, list[int]]  # how many, of the thirds and tenths
    measured: list[Measured]
    left_out: list[int]  # how many uses of each third
    clear: int
    seconds: float

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Calibration":
        """From what is stored."""
        return cls(**{**stored, "measured": [Measured(**x) for x in stored["measured"]]})


def selections(name: str, count: int, singles: int) -> list[str]:
    """The mean of a set of so many queries, and some single ones, evenly spread over it."""
    chosen = dict.fromkeys(count * (2 * k + 1) // (2 * singles) for k in range(singles)) if singles else {}
    return [*([name] if count > 1 or not chosen else []), *(f"{name}:{i}" for i in chosen)]


def form_of(
    store: RunStore, step: int, per_layer: bool, contraction: Contraction, method: str = "auto"
) -> dict[str, Any]:
    """What of a recording decides its values: what was kept of curvature, and how it is carried through later steps."""
    grid, compressed = store.grid, store.config.get("compressed") or {}
    return {
        "curvature": store.config["settings"]["curvature"],
        "windows": len(store.windows.spans(step)) if store.has_windows else 0,
        "rank": compressed.get("rank") or (None if grid is None else grid.rank),
        "numbers": store.config["encoding"],
        "per_layer": per_layer,
        "contraction": contraction,
        "encoding": _encoding(store, step, per_layer, contraction, method),
    }


def _encoding(store: RunStore, step: int, per_layer: bool, contraction: Contraction, method: str) -> str:
    """Of the embeddings or segments that a query uses, where it is coarse; finer ones change nothing."""
    how, used = choose_method(store, method, step, per_layer, contraction), list[Any]()
    if how == "embeddings":
        used = [store.embeddings()[step].get("encoding", "")]
    elif how == "segments":
        segments = store.segments()
        used = [segments[x]["settings"].get("encoding", "") for x in path_to(store, step, per_layer, contraction)]
    return next((str(x) for x in used if x and is_coarse(x)), "")


def name_calibration(store: RunStore, at: int) -> str:
    """The name of what was measured before a step; of a run that was resumed since, another one."""
    return f"{PREFIX}{digest([store.config.get('fingerprints', {}), at])}"


def read_calibration(store: RunStore, at: int) -> Calibration | None:
    """What was measured before a step, if anything was, and by this version."""
    stored = _stored(store, at)
    if stored is None or stored.pop("version", 1) != VERSION:
        return None
    return Calibration.from_dict(stored)


def describe_unread(store: RunStore, at: int) -> str:
    """Why what is stored for a step is not read; empty where nothing is stored, or it is read."""
    stored = _stored(store, at)
    read = stored is None or stored.get("version", 1) == VERSION
    return "" if read else "they were calibrated by another version of Backstory, which measured something else"


def _stored(store: RunStore, at: int) -> dict[str, Any] | None:
    name = name_calibration(store, at)
    if name not in store.tensor_names():
        return None
    store.load_tensors(name)  # compares its checksum
    about: dict[str, Any] = json.loads(store.tensor_metadata(name)["about"])
    return about


def calibrations(path: Path) -> dict[str, int]:
    """The files of what was measured, and when each was written: another value means that a run was calibrated since."""
    return {file.name: file.stat().st_mtime_ns for file in path.glob(f"{PREFIX}*.safetensors")}


def write_calibration(store: RunStore, made: Calibration) -> None:
    """Store what was measured, in the place of an older one."""
    about = json.dumps({"version": VERSION, **asdict(made)})
    file = work_folder(store.path) / f"{name_calibration(store, made.at)}.safetensors"
    write_tensors(
        file, {"about": torch.tensor(list(about.encode()), dtype=torch.uint8)}, {"about": about}, checked=True
    )
    settle(store)


def calibrate(
    run: "Run",
    store: RunStore,
    queries: str,
    recipe: RecipeSource,
    at: int,
    *,
    singles: int,
    removals: int,
    seed: int,
    args: Mapping[str, Any] | None,
    workers: int,
    progress: Progress | None,
) -> Calibration:
    """Measure the recording on a query set, and store what was measured; an interrupted call goes on."""
    began = time.perf_counter()
    _check(singles, removals)
    args = stored_args(store, recipe) if args is None else args
    made = build_recipe(recipe, args)
    batches = _select(store, made, queries, singles)
    names, means = list(batches), [size(x) > 1 for x in batches.values()]
    swept = costs.reverse(len(names)) / costs.calibrate(len(names), removals)
    recorded = _recorded(run, made, batches, at)  # first: it takes seconds, and needs the weights of the step
    exact = run.exact(names, recipe, at, args=args, workers=workers, progress=_between(progress, 0, swept))
    drawn = draw_removals(exact, removals, seed) if removals else []
    effects, removed, clear = _retrain(store, recipe, args, names, exact, drawn, workers, _between(progress, swept, 1))
    tell(progress, PARTS, PARTS)
    seconds = round(time.perf_counter() - began, 3)
    third = part_of([r.steps[0] for r in drawn if r.steps], at, THIRDS)
    out = Calibration(
        at, queries, batch_fingerprint(batches[names[0]]), form_of(store, at, False, run.form()), count_uses(exact.steps, at),
        measure(names, means, exact, recorded, Removed(effects, removed, third)), np.bincount(third, minlength=THIRDS).tolist(), clear, seconds,
    )  # fmt: skip
    write_calibration(store, out)
    clear_work(store.path, RETRAINED)
    return out


def _between(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Progress from one share of the whole to another."""
    return None if progress is None else lambda a, b: progress(round(PARTS * (begin + (end - begin) * a / b)), PARTS)


def _check(singles: int, removals: int) -> None:
    if singles < 0 or removals < 0:
        raise UsageError(f"singles and removals must be at least 0, got {singles} and {removals}.")
    if 0 < removals < FEWEST:
        raise UsageError(f"removals must be 0 or at least {FEWEST}, too few to rank otherwise, got {removals}.")


def _select(store: RunStore, recipe: Recipe, queries: str, singles: int) -> dict[str, Any]:
    """The mean of the set, and single queries of it, by name."""
    sets = QuerySets(store, recipe)
    name, index = sets.parse(queries)
    if index is not None:
        raise UsageError(
            f"calibrate takes a query set and chooses queries of it itself, got {queries!r}. Pass {name!r}."
        )
    return {x: sets.select(x) for x in selections(name, size(sets[name]), singles)}


def _recorded(run: "Run", recipe: Recipe, batches: Mapping[str, Any], at: int) -> Tensor:
    """Recorded influences (Q, N) on the mean loss of each selection."""
    model = run.model_at(run.load_weights(recipe.model, at), at)
    rows = [model.gradients(lambda m, x: recipe.loss(m, x).mean(), batch)[0] for batch in batches.values()]
    return run.query_gradients(torch.cat(rows), at).scores


# -- measuring -----------------------------------------------------------------------------------------------------


class Removed(NamedTuple):
    """R uses that were left out, one at a time."""

    effects: Tensor  # (R, Q) what that did
    exact: Tensor  # (R, Q) their exact influences
    third: Any  # (R,) of the run


def measure(
    names: Sequence[str], means: Sequence[bool], exact: Influence, recorded: Tensor, removed: Removed
) -> list[Measured]:
    """One row for each query."""
    steps, at = exact.steps, exact.at
    thirds, tenths, sizes = (part_of(steps, at, n) for n in (THIRDS, TENTHS, SIZES))
    out = []
    for q, (name, mean) in enumerate(zip(names, means, strict=True)):
        x, y = recorded[q].double(), exact.scores[q].double()
        ranks = _ranks(x, y, thirds, THIRDS), _ranks(x, y, tenths, TENTHS)
        predicted, left = removed.exact[:, q], removed.effects[:, q]
        again = _rank(predicted, left), _ranks(predicted, left, removed.third, THIRDS)
        out.append(Measured(name, mean, _rank(x, y), *ranks, _sums(y, sizes), _sums(x, sizes), *again))
    return out


def _rank(x: Tensor, y: Tensor) -> float | None:
    """Of what is judged (x) beside the truth (y); None where these are too few, or all the same, as at a learning rate of 0."""
    return spearman(x, y) if len(x) >= FEWEST and bool((y != y[0]).any()) else None


def _ranks(x: Tensor, y: Tensor, part: Any, parts: int) -> list[float | None]:
    inside = [torch.from_numpy(np.flatnonzero(part == k)) for k in range(parts)]
    return [_rank(x[rows], y[rows]) for rows in inside]


def _sums(x: Tensor, part: Any) -> list[float]:
    return [float(v) for v in np.bincount(part, weights=x.abs().numpy(), minlength=SIZES)]


def count_uses(steps: Any, at: int) -> dict[str, list[int]]:
    """How many uses lie in each third and each tenth."""
    parts = {"thirds": THIRDS, "tenths": TENTHS}
    return {name: np.bincount(part_of(steps, at, n), minlength=n).tolist() for name, n in parts.items()}


def draw_removals(influence: Influence, count: int, seed: int) -> list[Removal]:
    """Single uses, drawn by a seed, as many from each third of the run."""
    third, g = part_of(influence.steps, influence.at, THIRDS), torch.Generator().manual_seed(seed)
    rows: list[int] = []
    for k in range(THIRDS):
        inside = np.flatnonzero(third == k)
        order = torch.randperm(len(inside), generator=g)[: -(-count // THIRDS)]
        rows += inside[order.numpy()].tolist()
    ids = restore([str(influence.sample_ids[i]) for i in rows], influence.id_kind)
    steps = [int(influence.steps[i]) for i in rows]
    return [Removal((name,), steps=(t,)) for name, t in dict.fromkeys(zip(ids, steps, strict=True))]


def _retrain(
    store: RunStore,
    recipe: RecipeSource,
    args: Mapping[str, Any] | None,
    names: Sequence[str],
    exact: Influence,
    removals: Sequence[Removal],
    workers: int,
    progress: Progress | None,
) -> tuple[Tensor, Tensor, int]:
    """`(retrained (R, Q), exact influences of what was left out (R, Q), how many changed the first loss clearly)`."""
    if not removals:
        return torch.zeros(0, len(names)), torch.zeros(0, len(names)), 0
    query = tuple(QuerySet(name, mean=True, run=store.path) for name in names)
    effects, twins = retrain(
        recipe, removals, query, progress, twins=TWINS, args=args, at=exact.at, workers=workers, run=store,
        cache=work_folder(store.path) / RETRAINED,
    )  # fmt: skip
    removed = torch.stack([exact.sum_over(r.samples, steps=r.steps) for r in removals])
    return effects, removed, int((effects[:, 0].abs() > twins[:, 0].abs().max()).sum())


# -- what results are told -----------------------------------------------------------------------------------------


def quality_of(made: Calibration, *, exact: bool, mean: bool) -> Quality:
    """What was measured on queries of a kind; on those of the other kind where there are none."""
    rows = [x for x in made.measured if x.mean == mean] or made.measured
    order = _first_order(made, rows)
    on = _describe(made, rows)
    again = () if order is None else _parts(made.at, [x.retrained_thirds for x in rows], made.left_out)
    if exact:
        return Quality(exact=True, on=on if order else "", first_order=order, retrained=again)
    thirds = _parts(made.at, [x.thirds for x in rows], made.uses["thirds"])
    tenths = _parts(made.at, [x.tenths for x in rows], made.uses["tenths"])
    whole = _agreement([x.whole for x in rows], (0, made.at), sum(made.uses["thirds"]))
    return Quality(
        on=on, whole=whole, thirds=thirds, tenths=tenths, factors=_factors(rows), first_order=order, retrained=again
    )


def _parts(at: int, ranks: Sequence[Sequence[float | None]], uses: Sequence[int]) -> tuple[Agreement, ...]:
    """The thirds or tenths, of each query's ranks in them; a part without a step, of a short run, is none."""
    spans = enumerate(bounds(at, len(uses)))
    return tuple(_agreement([x[k] for x in ranks], span, uses[k]) for k, span in spans if span[0] < span[1])


def _describe(made: Calibration, rows: Sequence[Measured]) -> str:
    if rows[0].mean:
        return f"the mean of `{made.queries}`"
    return f"{len(rows)} single queries of `{made.queries}`" if len(rows) > 1 else f"one query, `{rows[0].query}`"


def _agreement(ranks: Sequence[float | None], span: tuple[int, int], uses: int) -> Agreement:
    known = [x for x in ranks if x is not None]
    if not known:
        return Agreement(*span, None, None, None, uses)
    return Agreement(*span, statistics.fmean(known), *interval(known, uses), uses)


def interval(ranks: Sequence[float], n: int) -> tuple[float, float]:
    """95 % interval of the rank correlation of another query of the kind, over n uses."""
    most = min(0.999999, 1 - 6 / (n**3 - n))
    z = [math.atanh(max(-most, min(most, x))) for x in ranks]
    spread = statistics.variance(z) * (1 + 1 / len(z)) if len(z) > 1 else 0.0
    reach = SURE * math.sqrt(spread + 1.06 / max(1, n - 3))
    middle = statistics.fmean(z)
    return math.tanh(middle - reach), math.tanh(middle + reach)


def _first_order(made: Calibration, rows: Sequence[Measured]) -> FirstOrder | None:
    known = [x.retrained for x in rows if x.retrained is not None]
    if not known:
        return None
    rank = statistics.fmean(known)
    trainings = sum(made.left_out)
    return FirstOrder(rank, *interval(known, trainings), trainings, made.clear)


def _factors(rows: Sequence[Measured]) -> tuple[float, ...]:
    """Of each twentieth, the middle of the queries' own factors; 1 where nothing was recorded."""
    each = [[x.exact[k] / x.recorded[k] for x in rows if x.recorded[k] > 0] for k in range(SIZES)]
    known = [[factor for factor in part if math.isfinite(factor)] for part in each]
    return tuple(statistics.median(part) if part else 1.0 for part in known)


def describe_stale(made: Calibration, form: Form) -> str:
    """Why what was measured does not hold for this form; empty where it does."""
    other = [name for name, value in form.items() if made.form.get(name) != value]
    if not other:
        return ""
    was = ", ".join(f"{name.replace('_', ' ')} {made.form.get(name) or 'none'}" for name in other)
    return f"it was measured on another form of the recording ({was})"


def unmeasured(
    store: RunStore, at: int, sets: Sequence[str], *, exact: bool, stale: str = "", remedy: bool = True
) -> Quality:
    """That nothing is known, and what would measure it; with another form than `calibrate` measures there is no such command."""
    if not remedy:
        return Quality(exact=exact, stale=stale or "only results of the default form are")
    recipe = [] if store.config.get("recipe") else ["--recipe", "package.module:function"]
    step = [] if at == store.n_steps() else ["--at", str(at)]
    command = command_on(store.path, "calibrate", "--queries", sets[0] if sets else "NAME", *recipe, *step)
    each = store.config.get("training", {}).get("seconds_per_step")
    seconds = None if each is None else float(each) * at * costs.calibrate(SINGLES + 1, REMOVALS)
    return Quality(exact=exact, stale=stale, command=command, seconds=seconds)
