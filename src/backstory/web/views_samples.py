"""The samples of a run: looked for, and one of them over all of training."""

from urllib.parse import quote

import numpy as np

from .. import insight
from ..insight.harmful import UNIT
from . import schemas as shapes
from .catalogue import Floats, Ints
from .errors import Refused
from .state import Opened, size

MOST_ON = 10  # queries shown that a sample helped, and that it hurt
MOST_ERASERS = 20
MOST_NEIGHBOURS = 10


def samples(
    opened: Opened,
    *,
    text: str | None = None,
    source: str | None = None,
    label: str | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
    sort: str = "id",
    queries: str | None = None,
    min_value: float | None = None,
    max_value: float | None = None,
    page: int = 1,
    per: int = 50,
) -> shapes.Samples:
    """A page of the samples that fit; with values where a query set is named, or sorted by."""
    _need_queries(queries, min_value, max_value)
    _need_order(first_step, last_step)
    valued = queries is not None or sort == "value"
    name = opened.named(queries) if valued else None
    values = None if name is None else opened.value(name, opened.final)
    catalogue = opened.catalogue
    fits = _between(catalogue.found(text, source, label, first_step, last_step), values, min_value, max_value)
    found = catalogue.sorted(fits, sort, values)
    _need_page(page, per, len(found))
    shown = found[(page - 1) * per : page * per]
    return shapes.Samples(
        total=len(found),
        page=page,
        per=per,
        sort=sort,
        queries=name,
        items=[catalogue.sample(int(j), None if values is None else float(values[j])) for j in shown],
        sources=catalogue.values("source"),
        labels=catalogue.values("label"),
        notes=[] if name is None else list(opened.mean(name, opened.final).notes),
    )


def _need_queries(queries: str | None, *bounds: float | None) -> None:
    if queries is None and any(x is not None for x in bounds):
        raise Refused(
            422,
            "min_value and max_value are bounds of the influence on a query set; found no queries.",
            "Name a query set with queries=, or leave both out.",
        )


def _need_order(first: int | None, last: int | None) -> None:
    if first is not None and last is not None and first > last:
        raise Refused(
            422,
            f"found first_step (from step) {first} after last_step (to step) {last}; expected the earlier step first.",
            "Exchange them.",
        )


def _need_page(page: int, per: int, total: int) -> None:
    last = max(1, -(-total // per))
    if page > last:
        raise Refused(
            404,
            f"page (the page): found {page}; expected at most {last}, for {total:,} samples fit.",
            "Go to an earlier page.",
        )


def _between(found: Ints, values: Floats | None, low: float | None, high: float | None) -> Ints:
    """Those of the samples found whose values are from low to high, both included."""
    if values is None or (low is None and high is None):
        return found
    own = values[found]
    return found[(own >= (-np.inf if low is None else low)) & (own <= (np.inf if high is None else high))]


def life(opened: Opened, name: str, queries: str | None, erasers: bool) -> shapes.Life:
    """One sample over all of training, for a query set; without a model, what needs none."""
    j, step = opened.catalogue.number(name), opened.final
    asked = opened.named(queries) if opened.can_ask or queries is not None else None
    rows = opened.catalogue.rows(j)
    found = None if asked is None else opened.mean(asked, step)
    scores = None if found is None else found.scores[0]
    gone = _saturation(opened, j, asked) if erasers and asked is not None else None
    helped, hurt = ([], []) if asked is None else _on_queries(opened, rows, asked)
    notes = [] if found is None else [*found.notes, *found.quality.get("words", ())]
    return shapes.Life(
        sample=opened.catalogue.sample(j, None if scores is None else float(scores[rows].sum())),
        queries=asked,
        at=step,
        occurrences=[_occurrence(opened, int(row), scores) for row in rows],
        evolution=[] if asked is None else evolution(opened, j, asked),
        helped=helped,
        hurt=hurt,
        erased_by=None if gone is None else _erasers(opened, gone),
        lost=None if gone is None else gone.lost,
        saturation=None if gone is None else _terms(gone),
        neighbours=_neighbours(opened, j, rows),
        notes=[*notes, *([] if opened.can_ask else opened.missing()[:1])],
        unit=UNIT,
    )


def _occurrence(opened: Opened, row: int, scores: Floats | None) -> shapes.Occurrence:
    found = opened.run.store.read(row, row + 1).rows
    norm = None if found is None else float(found.double().norm())
    return shapes.Occurrence(
        step=int(opened.catalogue.steps[row]), influence=None if scores is None else float(scores[row]), norm=norm
    )


def evolution(opened: Opened, j: int, name: str) -> list[shapes.AtCheckpoint]:
    """Influence of a sample's occurrences so far on the model at every checkpoint; null before its first use."""
    out, rows = [], opened.catalogue.rows(j)
    for step in opened.asked_at:
        scores = opened.mean(name, step).scores[0]
        so_far = rows[rows < len(scores)]
        value = float(scores[so_far].sum()) if len(so_far) else None
        out.append(shapes.AtCheckpoint(at=step, influence=value))
    return out


def _on_queries(opened: Opened, rows: Ints, name: str) -> tuple[list[shapes.OnQuery], list[shapes.OnQuery]]:
    """The single queries of the set that the sample helped most and hurt most."""
    values = opened.each(name, rows)
    order = np.argsort(-values, kind="stable")

    def shown(q: int) -> shapes.OnQuery:
        path = f"/queries/{quote(name, safe='')}/{q}"
        return shapes.OnQuery(query=label(opened, name, q), index=q, path=path, influence=float(values[q]))

    helped = [shown(int(q)) for q in order[:MOST_ON] if values[q] > 0]
    return helped, [shown(int(q)) for q in order[::-1][:MOST_ON] if values[q] < 0]


def label(opened: Opened, name: str, index: int) -> str:
    """A query in a few words."""
    found = shown_queries(opened, name)
    if index >= len(found):
        return f"{name} {index}"
    own = found[index].get("label")
    text = found[index].get("text") or (None if own is None else f"label {own}")
    line = " ".join(str(text or "").split())
    return f"{name} {index}" + (f": {line[:60]}" if line else "")


def shown_queries(opened: Opened, name: str) -> list[dict[str, object]]:
    """What the recipe can show of each query of a set; nothing where it cannot."""

    def ask() -> list[dict[str, object]]:
        show = None if opened.recipe is None else opened.recipe.page.show
        found = [] if show is None else [dict(x) for x in show(opened.sets[name])]
        return found if len(found) == size(opened.sets[name]) else []

    kept: list[dict[str, object]] = opened.results.get(("shown", name), ask)
    return kept


def _saturation(opened: Opened, j: int, name: str) -> insight.Overwriting:
    def ask() -> insight.Overwriting:
        with opened.spare(opened.final) as (model, loss):
            batch, who = opened.sets[name], opened.catalogue.own_id(j)
            return insight.overwriting(opened.run, model, loss, batch, who, opened.final, progress=opened.going_on)

    found: insight.Overwriting = opened.results.get(("saturation", name, j), ask)
    return found


def _erasers(opened: Opened, gone: insight.Overwriting) -> list[shapes.Eraser]:
    return [
        shapes.Eraser(
            sample=opened.catalogue.sample(opened.catalogue.number(str(e.sample))), step=e.step, erased=e.overwritten
        )
        for e in gone.overwritten_by[:MOST_ERASERS]
    ]


def _terms(gone: insight.Overwriting) -> shapes.Saturation:
    return shapes.Saturation(
        just_after=gone.just_after,
        momentum=gone.momentum,
        erased=gone.overwritten,
        decay=gone.decay,
        left=gone.influence,
    )


def _neighbours(opened: Opened, j: int, rows: Ints) -> list[shapes.Neighbour]:
    """The samples whose embeddings point most the same way."""
    catalogue = opened.catalogue
    found = opened.checkpoint(opened.final).similar(rows, catalogue.inverse, len(catalogue))
    if found is None:
        return []
    found[j] = -np.inf
    kept = np.argpartition(-found, min(MOST_NEIGHBOURS, len(found) - 1))[:MOST_NEIGHBOURS]
    order = [int(i) for i in kept[np.argsort(-found[kept], kind="stable")] if np.isfinite(found[i])]
    return [shapes.Neighbour(sample=catalogue.sample(i), similarity=float(np.clip(found[i], -1.0, 1.0))) for i in order]


def image(opened: Opened, name: str) -> bytes:
    """The PNG of a sample."""
    return opened.catalogue.image(opened.catalogue.number(name))


def need_index(opened: Opened, name: str, index: int) -> int:
    """A query of a set that exists."""
    if not 0 <= index < size(opened.sets[name]):
        raise Refused(
            404, f"the query set has {size(opened.sets[name])} queries; found index {index}.", "Count from 0."
        )
    return index
