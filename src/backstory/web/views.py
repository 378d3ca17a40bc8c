"""The run as a whole: what was trained, when data mattered, what sources are worth, what hurts."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import numpy as np

from .. import insight
from ..insight.harmful import UNIT as HARM_UNIT
from ..insight.timeline import UNIT as TIME_UNIT
from ..insight.timeline import losses
from . import schemas as shapes
from .domains import domains
from .errors import Refused
from .ranking import both, last_use, without_last
from .state import Opened, size
from .trust import trust
from .words import LATE


def overview(opened: Opened) -> shapes.Overview:
    """What was trained, when, on what; with the timeline of the default query set."""
    config, run, name = opened.run.config, opened.run, opened.default
    blocks = config["blocks"]
    return shapes.Overview(
        name=opened.name,
        created=config.get("provenance", {}).get("began"),
        model=_model(opened, blocks),
        optimizer=config["optimizer"]["class"],
        steps=opened.final,
        occurrences=len(opened.catalogue.steps),
        samples=len(opened.catalogue),
        dims=run.store.width,
        curvature=config["settings"]["curvature"],
        projection=config["settings"]["projection"],
        recipe=config.get("recipe"),
        checkpoints=opened.checkpoints,
        query_sets=query_sets(opened),
        default_queries=name,
        can_type=opened.can_type,
        can_upload=opened.can_upload,
        can_shade=opened.can_shade,
        has=opened.catalogue.has,
        loss=opened.results.get("loss", lambda: numbers(losses(run.store, opened.final))),
        quality=trust(opened.quality()),
        notes=list(run.caveats()),
        missing=opened.missing(),
        timeline=None if name is None else timeline(opened, name, opened.final),
    )


def _model(opened: Opened, blocks: Sequence[Mapping[str, Any]]) -> str:
    count = sum(b["shape"][0] * (b["shape"][1] or 1) for b in blocks)
    kind = "" if opened.recipe is None else f"{type(opened.recipe.model).__name__}, "
    return f"{kind}{len(blocks)} recorded parameters of {count:,} numbers"


def query_sets(opened: Opened) -> list[shapes.QuerySet]:
    """Names and sizes."""
    return [shapes.QuerySet(name=name, count=size(batch)) for name, batch in opened.sets.items()]


def timeline(opened: Opened, queries: str | None, at: int | None) -> shapes.Timeline:
    """When data mattered for a query set."""
    name, step = opened.named(queries), opened.step(at)
    found = opened.timeline(name, step)
    return shapes.Timeline(
        queries=name,
        at=step,
        influence=numbers(found.influence),
        rate=numbers(found.rate),
        per_rate=numbers(found.per_rate),
        size=numbers(found.size),
        loss=numbers(found.loss),
        phases=_phases(found.phases),
        notes=[*found.caveats, *(found.quality.words if found.quality else ())],
        unit=TIME_UNIT,
    )


def phases(opened: Opened, queries: str | None, at: int | None) -> shapes.Phases:
    """The phases of training alone."""
    return _phases(opened.timeline(opened.named(queries), opened.step(at)).phases)


def _phases(found: insight.Phases) -> shapes.Phases:
    return shapes.Phases.model_validate(plain(found.as_dict()))


def sources(
    opened: Opened, queries: Sequence[str] | None, by: str | None, at: int | None
) -> tuple[insight.Sources, shapes.Sources]:
    """What each source is worth for these query sets; for all domains where none is named."""
    wanted: Sequence[str | None] = queries or opened.results.get("domains", lambda: domains(opened.sets)) or [None]
    names = list(dict.fromkeys(opened.named(q) for q in wanted))
    step, kind = opened.step(at), _kind(opened, by)

    def ask() -> insight.Sources:
        with opened.spare(step) as (model, loss):
            batches = {name: opened.sets[name] for name in names}
            return insight.sources(opened.run, model, loss, batches, step, by=kind, progress=opened.going_on)

    found: insight.Sources = opened.results.get(("sources", tuple(names), kind, step), ask)
    values = [
        shapes.SourceValue(
            name=v.source, samples=v.samples, value=v.value, low=v.low, high=v.high,
            path=f"/samples?{urlencode({kind: v.source, 'sort': 'value', 'queries': names[0]})}",
        )
        for v in found.total
    ]  # fmt: skip
    shape = shapes.Sources(
        by=kind, at=step, sources=values, domains=list(found.domains), matrix=found.matrix.tolist(), interval="95 %",
        clear=[[not cell.low <= 0 <= cell.high for cell in line] for line in found.cells],
        quality=trust(opened.quality(step)), notes=list(found.caveats), unit=found.as_dict()["unit"],
    )  # fmt: skip
    return found, shape


def _kind(opened: Opened, by: str | None) -> str:
    has = opened.catalogue.has
    found = by or ("source" if has.source else "label")
    if not getattr(has, found):
        raise Refused(
            422,
            f"the run holds no {found} of its samples.",
            f"Give it with run.describe(ids, {found}=…), or ask by=label.",
        )
    return found


def sources_csv(found: insight.Sources) -> str:
    """One line for each source: its value over all domains with its interval, and its value for each domain."""
    file = io.StringIO()
    out = csv.writer(file)
    out.writerow([found.by, "samples", "value", "low", "high", *found.domains])
    for total, line in zip(found.total, found.matrix.tolist(), strict=True):
        out.writerow([_cell(total.source), total.samples, total.value, total.low, total.high, *line])
    return file.getvalue()


def _cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def harmful(opened: Opened, queries: str | None, k: int, at: int | None, without: int = 0) -> shapes.Harmful:
    """The samples with the most negative influence on a query set; uses in the last `without` steps do not count."""
    name, step = opened.named(queries), opened.step(at)
    need_steps(without, step)
    found = opened.mean(name, step)
    _, worst = both(without_last(found.scores[0], opened.catalogue, step, without), opened.catalogue, k, None)
    items, late_from = [h for h in worst if h.influence < 0], step - max(1, step // LATE)
    return shapes.Harmful(
        queries=name, at=step, without_last=without, items=items, late_from=late_from,
        late=sum(last_use(h, step - without) >= late_from for h in items), quality=trust(found.quality),
        notes=[*found.notes, *found.quality.get("words", ())], unit=HARM_UNIT,
    )  # fmt: skip


def need_steps(without: int, step: int) -> None:
    """Some steps must be left."""
    if not 0 <= without < step:
        raise Refused(
            422,
            f"without_last (steps to leave out): found {without}; expected 0 to {step - 1}, for the model has taken {step} steps.",
            "Leave out fewer steps.",
        )


def numbers(values: Iterable[float]) -> list[float | None]:
    """Finite numbers; what is not one is None."""
    return [x if np.isfinite(x) else None for x in map(float, values)]


def plain(value: Any) -> Any:
    """Nested values with None for what is not a finite number."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
