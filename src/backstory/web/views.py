"""What the pages of the run and of its samples show: results as they are, with the content of samples, links and figures beside them."""

import base64
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from ..insight.harmful import harmful_of
from ..insight.neighbours import neighbours
from ..insight.sources import Value
from ..insight.timeline import draw_losses, losses
from ..replay.queries import size
from ..results.figures import Figure
from ..results.influence import Influence
from ..results.row import plain
from .errors import Refusal
from .requests import SampleFilter
from .schemas import LONGEST_TEXT, MOST_HITS, MOST_PIECES
from .state import State

MOST_ON = 10  # queries that a sample helped, and that it hurt
MOST_NEIGHBOURS = 10
MOST_OVERWRITERS = 20  # shown with their content
SHOWN = 50  # queries of a set in the form


class View(NamedTuple):
    """What a path gives: plain values, which JSON sends as they are, and the figures that its page draws."""

    data: dict[str, Any]
    figures: Mapping[str, Figure] = {}


# -- the run -------------------------------------------------------------------------------------------------------


def overview(state: State) -> View:
    """What was trained, when, on what; with the timeline of the default query set."""
    run, config, name = state.run, state.run.config, state.default
    when = None if name is None else state.timeline(name, state.final)
    loss = state.results.get("loss", lambda: losses(run, state.final))
    data = {
        "name": state.name,
        "created": config.get("provenance", {}).get("began"),
        "model": _model(state, config["blocks"]),
        "optimizer": config["optimizer"]["class"],
        "steps": state.final,
        "occurrences": state.catalogue.n_occurrences,
        "samples": len(state.catalogue),
        "dims": run.width,
        "curvature": config["settings"]["curvature"],
        "projection": config["settings"]["projection"],
        "recipe": config.get("recipe"),
        **about(state),
        "default_queries": name,
        "loss": plain(loss),
        "quality": run.quality().as_dict(),
        "recording": state.recording(state.final).as_dict(),
        "caveats": list(run.caveats()),
        "missing": state.missing(),
        "sign": Influence.sign,
        "timeline": None if when is None else when.as_dict(),
    }
    return View(data, draw_losses(loss) if when is None else when.drawings())


def about(state: State) -> dict[str, Any]:
    """What can be queried: what every page knows."""
    return {
        "checkpoints": state.checkpoints,
        "query_sets": [{"name": name, "count": size(batch)} for name, batch in state.sets.items()],
        "has": state.catalogue.has,
        "can_type": state.page.text is not None,
        "can_upload": state.page.image is not None,
        "can_shade": state.page.pieces is not None,
    }


def _model(state: State, blocks: Sequence[Mapping[str, Any]]) -> str:
    count = sum(b["shape"][0] * (b["shape"][1] or 1) for b in blocks)
    kind = "" if state.recipe is None else f"{type(state.recipe.model).__name__}, "
    return f"{kind}{len(blocks)} recorded parameters of {count:,} numbers"


def timeline(state: State, queries: str | None, at: int | None) -> View:
    """When data mattered for a query set."""
    name, step = state.named(queries), state.step(at)
    result = state.timeline(name, step)
    return View({**result.as_dict(), "queries": name}, result.drawings())


def evolution(state: State, queries: str | None, by: str, ids: Sequence[str] | None) -> View:
    """How the influence of groups of samples, or of some against the others, went from checkpoint to checkpoint."""
    name = state.named(queries)
    groups = {"named": [state.catalogue.recorded_id(state.sample_id(x)) for x in ids]} if ids else by
    result = state.evolution(name, groups)
    return View({**result.as_dict(), "queries": name, "by": "ids" if ids else by}, result.drawings())


def overwriting(state: State, queries: str | None, sample: str, at: int | None) -> View:
    """Which later samples overwrote a sample's influence."""
    name, step = state.named(queries), state.step(at)
    result = state.overwriting(name, state.sample_id(sample), step)
    content = show_samples(state, [x.sample for x in result.overwritten_by[:MOST_OVERWRITERS]])
    drawn = result.drawings()
    if "overwriters" in drawn:
        _link(drawn["overwriters"], [sample_path(str(x.sample)) for x in result.overwritten_by])
    return View({**result.as_dict(), "queries": name, "samples": content}, drawn)


def sources(state: State, queries: Sequence[str] | None, by: str | None, at: int | None) -> View:
    """What each source is worth for these query sets; for all domains where none is named."""
    kind, step = _column(state, by), state.step(at)
    result = state.sources([state.named(name) for name in queries or ()], kind, step)
    paths = {
        x: f"/samples?{urlencode({kind: x, 'sort': 'value', 'queries': result.domains[0]})}" for x in result.sources
    }
    drawn = result.drawings()
    if "sources" in drawn:
        _link(drawn["sources"], list(paths.values()))
    return View({**result.as_dict(), "paths": paths}, drawn)


def _column(state: State, by: str | None) -> str:
    column = by or ("source" if state.catalogue.has["source"] else "label")
    if not state.catalogue.has[column]:
        hint = f"Add it with run.describe(ids, {column}=…), or group by another column."
        raise Refusal(422, f"the run has no {column} for its samples.", hint)
    return column


def sources_csv(data: Mapping[str, Any]) -> str:
    """One line for each source: all that is known of it over all domains, and its value for each domain."""
    file, keys = io.StringIO(), [key for key in Value.columns() if key not in ("source", "domain")]
    out = csv.writer(file)
    out.writerow([data["by"], *keys, *data["domains"]])
    for total, line in zip(data["total"], data["matrix"], strict=True):
        out.writerow([_cell(total["source"]), *(total[k] for k in keys), *line])
    return file.getvalue()


def _cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def harmful(state: State, queries: str | None, top: int, at: int | None, without_last: int = 0) -> View:
    """The samples that hurt a query set most; uses in the last `without_last` steps do not count."""
    name, step = state.named(queries), state.step(at)
    result = harmful_of(state.run, state.mean(name, step), top=top, without_last=without_last)
    drawn = result.drawings()
    for side, figure in drawn.items():
        _link(figure, [sample_path(str(x.sample)) for x in getattr(result, side)])
    content = show_samples(state, [x.sample for x in (*result.harmful, *result.helpful)])
    return View({**result.as_dict(), "queries": name, "samples": content}, drawn)


def _link(figure: Figure, paths: Sequence[str]) -> None:
    """A click on a bar leads to a page."""
    figure["layout"]["meta"]["links"] = list(paths)


# -- samples ---------------------------------------------------------------------------------------------------------


def sample_path(name: str) -> str:
    """Where the page of a sample is."""
    return f"/samples/{quote(name, safe='')}"


def show_sample(state: State, name: str) -> dict[str, Any]:
    """A sample, as far as the run holds what to show."""
    sample, path = state.catalogue.sample(name), sample_path(name)
    image = f"/images/{quote(name, safe='')}" if sample.pop("has_image") else None
    return {**sample, "path": path, "image": image}


def show_samples(state: State, ids: Iterable[int | str]) -> dict[str, dict[str, Any]]:
    """The content of some samples, by id."""
    return {str(name): show_sample(state, str(name)) for name in ids}


def samples(state: State, chosen: SampleFilter) -> View:
    """A page of the samples that fit; with values where a query set is named, or sorted by."""
    _need_bounds(chosen)
    low, high, page, per, sort = chosen.min_value, chosen.max_value, chosen.page, chosen.per, chosen.sort
    name = state.named(chosen.queries) if chosen.queries is not None or sort == "value" else None
    values = {} if name is None else state.values(name)
    fits = state.catalogue.find(chosen.text, chosen.source, chosen.label, chosen.first_step, chosen.last_step)
    fits = [x for x in fits if (low is None or values[x] >= low) and (high is None or values[x] <= high)]
    last = max(1, math.ceil(len(fits) / per))
    if page > last:
        message = f"there is no page {page}: the {len(fits):,} matching samples fill {last}."
        raise Refusal(404, message, "Go to an earlier page.")
    shown = state.catalogue.sort(fits, sort, values)[(page - 1) * per : page * per]
    data = {
        "total": len(fits),
        "page": page,
        "per": per,
        "sort": sort,
        "queries": name,
        "items": [{**show_sample(state, x), "value": values.get(x)} for x in shown],
        "sources": state.catalogue.values("source"),
        "labels": state.catalogue.values("label"),
        "caveats": [] if name is None else _caveats(state.mean(name, state.final)),
        "sign": Influence.sign,
    }
    return View(data)


def _caveats(influence: Influence) -> list[str]:
    return [influence.origin, *influence.caveats]


def _need_bounds(chosen: SampleFilter) -> None:
    first, last = chosen.first_step, chosen.last_step
    if chosen.queries is None and (chosen.min_value is not None or chosen.max_value is not None):
        message = "min_value and max_value limit the influence on a query set, but no query set is named."
        raise Refusal(422, message, "Name a query set with queries=, or leave both out.")
    if first is not None and last is not None and first > last:
        message = f"first_step (from step) is {first}, which is after last_step (to step), {last}."
        raise Refusal(422, message, "Swap the two.")


def sample(state: State, name: str, queries: str | None, with_overwriting: bool) -> View:
    """One sample over all of training, for a query set; without a model, what needs none."""
    who, step = state.catalogue.recorded_id(state.sample_id(name)), state.final
    chosen = state.named(queries) if state.has_model or queries is not None else None
    near = neighbours(state.run, who, step, top=MOST_NEIGHBOURS) if step in state.in_memory else None
    data: dict[str, Any] = {
        "sample": show_sample(state, name),
        "queries": chosen,
        "at": step,
        "missing": state.missing()[:1],
    }
    data |= dict.fromkeys(("value", "occurrences", "evolution", "on_queries", "overwriting"))
    data |= {"query_labels": {}, "neighbours": None if near is None else near.as_dict()}
    content = show_samples(state, () if near is None else (x.sample for x in near.neighbours))
    drawn: dict[str, Figure] = {}
    if chosen is not None:
        mean = state.mean(chosen, step)
        uses, went = mean.occurrences(who), state.evolution(chosen, {name: [who]})
        each = state.on_queries(chosen, name, MOST_ON)
        indices = [x.query for x in (*each.helped, *each.hurt)]
        data |= {"value": state.values(chosen)[name], "occurrences": uses.as_dict(), "evolution": went.as_dict()}
        data |= {"on_queries": each.as_dict(), "query_labels": {str(q): _query_link(state, chosen, q) for q in indices}}
        drawn = {**uses.drawings(), **went.drawings()}
    if chosen is not None and with_overwriting:
        over = overwriting(state, chosen, name, step)
        content |= over.data.pop("samples")
        data["overwriting"] = {k: v for k, v in over.data.items() if k != "queries"}
        drawn |= {"overwriters": over.figures["overwriters"]} if "overwriters" in over.figures else {}
    return View({**data, "samples": content}, drawn)


def image(state: State, name: str) -> bytes:
    """The PNG of a sample."""
    data = state.catalogue.image(state.run, state.sample_id(name))
    if data is None:
        raise Refusal(404, "the run has no image of this sample.", "Its text and label are at /samples.")
    return data


# -- stored queries ----------------------------------------------------------------------------------------------------


def form(state: State, mistakes: bool = False) -> View:
    """What can be queried; with `mistakes`, of the stored queries those alone that the model gets wrong."""
    predicts = state.page.predict is not None
    if mistakes and not predicts:
        hint = "Add predict= to the recipe's page, and start the service with the recipe."
        raise Refusal(422, "this service does not know the model's mistakes.", hint)
    data = {
        **about(state),
        "query_sets": [_stored_set(state, name, mistakes) for name in state.sets] if state.has_model else [],
        "can_predict": predicts,
        "mistakes": mistakes,
        "longest_text": LONGEST_TEXT,
        "most_pieces": MOST_PIECES,
        "most_hits": MOST_HITS,
        "dims": state.run.width,
        "missing": state.missing(),
    }
    return View(data)


def _stored_set(state: State, name: str, mistakes: bool) -> dict[str, Any]:
    predictions = [] if state.page.predict is None else state.evaluation(name, state.final).predictions
    items = []
    for q, content in enumerate(present_queries(state, name)):
        prediction, label = predictions[q] if q < len(predictions) else None, content["label"]
        mistake = None if prediction is None or label is None else prediction != label
        if mistake or not mistakes:
            more = {"index": q, "prediction": prediction, "mistake": mistake}
            items.append({**content, **_query_link(state, name, q), **more})
    return {"name": name, "count": size(state.sets[name]), "fits": len(items), "items": items[:SHOWN]}


def _query_link(state: State, name: str, index: int) -> dict[str, str]:
    return {"label": label_query(state, name, index), "path": f"/queries/{quote(name, safe='')}/{index}"}


def label_query(state: State, name: str, index: int) -> str:
    """A query in a few words."""
    shown = present_queries(state, name)[index : index + 1]
    label, text = (shown[0].get(key) if shown else None for key in ("label", "text"))
    line = " ".join((text or (f"label {label}" if label else "")).split())
    return f"{name} {index}" + (f": {line[:60]}" if line else "")


def present_queries(state: State, name: str) -> list[dict[str, str | None]]:
    """Text, label and image of each query of a set, as far as the recipe can show them."""

    def compute() -> list[dict[str, str | None]]:
        show, count = state.page.show, size(state.sets[name])
        shown: list[Mapping[str, Any]] = [] if show is None else list(show(state.sets[name]))
        every = shown if len(shown) == count else [{}] * count
        return [
            {
                **{k: None if x.get(k) is None else str(x[k]) for k in ("text", "label")},
                "image": data_url(x.get("image")),
            }
            for x in every
        ]

    made: list[dict[str, str | None]] = state.results.get(("content", name), compute)
    return made


def data_url(data: object) -> str | None:
    """PNG bytes as an address that holds them."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if isinstance(data, bytes) else None
