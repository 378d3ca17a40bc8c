"""Queries and their results: by a stored query, typed text, an image, or a ready gradient; single tokens; two results compared."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import insight
from ..replay.queries import part, size
from ..results.comparison import Rankings, compare, rankings_of
from ..results.influence import Influence
from ..results.row import plain
from .errors import Refusal
from .requests import Pair, QueryBody, side
from .schemas import MOST_PIECES
from .state import NEEDS_RECIPE, State
from .views import View, data_url, label_query, present_queries, show_samples


@dataclass(frozen=True)
class Query:
    """A query, ready for any checkpoint: a batch for the model, a row of a stored set, or a gradient of the final model."""

    input: dict[str, Any]  # as it is shown
    key: str  # the same for the same query
    batch: Any = None
    row: int | None = None
    gradient: Any = None  # (1, p)


def parse_stored(state: State, name: str, index: int) -> Query:
    """A query of a stored set."""
    queries, index = state.named(name), need_index(state, state.named(name), index)
    content = present_queries(state, queries)[index]
    fields = content if any(content.values()) else {"label": label_query(state, queries, index)}
    return Query(_input("stored", set=queries, index=index, **fields), f"stored/{queries}/{index}", row=index)


def parse_text(state: State, text: str) -> Query:
    """Text that somebody typed."""
    if state.page.text is None:
        raise Refusal(422, "this service does not accept typed text.", how(state, "text="))
    if not text.strip():
        raise Refusal(422, "text (your text) has only white space.", "Type some text.")
    batch = state.page.text(text)
    if (n := size(batch)) > MOST_PIECES:
        raise Refusal(
            422,
            f"text (your text) is too long: it fills the model's context {n} times, and at most {MOST_PIECES} times is allowed.",
            f"Send a part of it: about {len(text) * MOST_PIECES // n:,} characters.",
        )
    return Query(_input("text", text=text), _digest(b"text", text.encode()), batch=batch)


def parse_image(state: State, data: bytes, label: str | None) -> Query:
    """An image that somebody sent, with its label; None: what the model predicts."""
    if state.page.image is None:
        raise Refusal(422, "this service does not accept images.", how(state, "image="))
    batch, show = state.page.image(data, label), state.page.show
    resized = next(iter([] if show is None else show(batch)), {}).get("image")
    fields = {"image": data_url(data), "label": label, "model_image": data_url(resized)}
    return Query(_input("image", **fields), _digest(b"image", (label or "").encode(), data), batch=batch)


def parse_gradient(state: State, gradient: Sequence[float]) -> Query:
    """A gradient in the run's coordinates."""
    width = state.run.width
    hint = (
        f"Send one row of {width} numbers, ∇ℓ(θ, q) in the run's coordinates. In Python: "
        "`v, caveats = run.model_at(model).gradients(loss, batch)`; each row of v is one query."
    )
    if len(gradient) != width:
        raise Refusal(422, f"the gradient has {len(gradient)} numbers, but this run needs {width}.", hint)
    v = torch.tensor(gradient, dtype=torch.float32)[None]
    if not bool(v.isfinite().all()):
        raise Refusal(422, "the gradient has numbers that float32 cannot hold.", "Send finite numbers below 1e38.")
    if not bool(v.any()):
        message = "the gradient is 0 everywhere, so all influence on it is 0. Use a loss that depends on the model."
        raise Refusal(422, message, hint)
    return Query(_input("gradient"), _digest(b"gradient", v.numpy().tobytes()), gradient=v)


def parse_query(state: State, body: QueryBody) -> Query:
    """Whichever query it is; exactly one of them."""
    match (body.text, body.gradient, body.set, body.index):
        case (str(text), None, None, None):
            return parse_text(state, text)
        case (None, list(gradient), None, None):
            return parse_gradient(state, gradient)
        case (None, None, str(name), int(index)):
            return parse_stored(state, name, index)
    raise Refusal(422, "a query needs exactly one of text, gradient, or set with index.", "Send one query at a time.")


def parse_pair(state: State, pair: Pair) -> tuple[Query, Query]:
    """Two queries, whatever each of them is."""
    left, right = (
        parse_query(state, QueryBody(**fields)) if image is None else parse_image(state, image, label)
        for fields, image, label in (side(pair, end) for end in ("", "2"))
    )
    return left, right


def need_index(state: State, name: str, index: int) -> int:
    """The index of a query of a set that exists."""
    count = size(state.sets[name])
    if not 0 <= index < count:
        raise Refusal(404, f"there is no query {index}: the query set has {count} queries.", "Count from 0.")
    return index


def how(state: State, what: str) -> str:
    """What to do where a query of this kind is not available."""
    return NEEDS_RECIPE if state.recipe is None else f"Add {what} to the recipe's page, and restart the service."


def _input(kind: str, **fields: Any) -> dict[str, Any]:
    names = ("set", "index", "text", "image", "label", "model_image", "prediction", "loss", "tokens")
    return {"kind": kind, **dict.fromkeys(names), **fields}


# -- results -----------------------------------------------------------------------------------------------------------


def gradient(state: State, query: Query, step: int) -> tuple[Any, list[str]]:
    """`(v (1, p), caveats)` of a query at a checkpoint; the losses of a batch's rows add up."""
    if query.gradient is not None:
        return query.gradient, []
    if query.row is None:
        return state.checkpoint(step).total_gradient(query.batch, state.proceed)
    rows, caveats = state.gradients(query.input["set"], step)
    if query.row >= len(rows):
        raise Refusal(404, f"there is no loss {query.row}: the query set has {len(rows)} losses.", "Count from 0.")
    return rows[query.row : query.row + 1], caveats


def influence_of(state: State, query: Query, step: int) -> Influence:
    """The influence on a query at a checkpoint: exact where stored."""
    batch = query.batch if query.row is None else part(state.sets[query.input["set"]], query.row, query.row + 1)
    single = batch is not None and size(batch) == 1  # the losses of several rows add up
    if single and (exact := state.find_exact(batch, step)) is not None:
        return exact
    result = state.influence(query.key, *gradient(state, query, step), step)
    return replace(result, remedy=state.run.remedy(batch, step)) if single else result


def show_influence(state: State, query: Query, at: int | None, top: int, replay: bool = False) -> View:
    """Which samples helped and which hurt; with `replay`, the rankings at every checkpoint."""
    began, step = time.perf_counter(), state.step(at)
    if replay and query.gradient is not None:
        raise Refusal(422, "a gradient cannot be evaluated at other checkpoints.", "Send it without replay.")
    influence = influence_of(state, query, step)
    rankings = rankings_of([influence_of(state, query, c) for c in state.queryable], step) if replay else None
    return _view(state, query, influence, top, began, rankings)


def _view(
    state: State, query: Query, influence: Influence, top: int, began: float, rankings: Rankings | None = None
) -> View:
    result = influence.as_dict(top=top)
    page = {
        "input": _evaluated(state, query, influence.at),
        "by_step": plain(influence.by_step()._asdict()),
        "checkpoints": state.checkpoints,
        "rankings": None if rankings is None else plain(rankings.rankings),
        "samples": show_samples(state, (hit["sample"] for name in ("hits", "harmful") for hit in result[name])),
        "seconds": time.perf_counter() - began,
    }
    return View({**result, **page}, {**influence.drawings(), **({} if rankings is None else rankings.drawings())})


def _evaluated(state: State, query: Query, step: int) -> dict[str, Any]:
    """The query's input, with the model's own loss on it, over how many tokens, and its prediction."""
    if query.gradient is not None:
        return query.input
    if query.row is not None:
        rows, name = slice(query.row, query.row + 1), query.input["set"]
        evaluation, batch = state.evaluation(name, step), part(state.sets[name], rows.start, rows.stop)
    else:
        rows, evaluation, batch = slice(None), state.checkpoint(step).evaluate(query.batch), query.batch
    predictions, count = evaluation.predictions[rows], None if state.recipe is None else state.recipe.tokens
    more = {
        "prediction": predictions[0] if len(predictions) == 1 else None,
        "loss": plain(sum(evaluation.losses[rows])),
        "tokens": None if count is None else int(count(batch).sum()),
    }
    return {**query.input, **more}


def show_comparison(state: State, left: Query, right: Query, at: int | None, top: int) -> View:
    """Two results side by side, and the samples that both name on the same side."""
    began, step, both = time.perf_counter(), state.step(at), {"left": left, "right": right}
    influences = {name: influence_of(state, query, step) for name, query in both.items()}
    result = compare(**influences, top=top)
    sides = {name: _view(state, query, influences[name], top, began).data for name, query in both.items()}
    return View({**result.as_dict(), **sides}, result.drawings())


def show_tokens(state: State, query: Query, hits: Sequence[tuple[str, int]], at: int | None) -> View:
    """Each token's part of the influence of these occurrences, (sample, step) each; one replay of training."""
    recipe, step = state.recipe, state.step(at)
    if recipe is None or state.recipe_name is None or state.page.pieces is None:
        raise Refusal(422, "this service cannot show single tokens.", how(state, "pieces="))
    occurrences = [(state.catalogue.recorded_id(state.sample_id(x)), t) for x, t in hits]
    v, _ = gradient(state, query, step)
    name, pieces = state.recipe_name, state.page.pieces

    def compute() -> list[insight.TokenInfluence]:
        return insight.tokens(state.run, name, None, occurrences, step, vectors=v, progress=state.proceed)

    results = state.results.get(("tokens", query.key, tuple(hits), step), compute)
    return View({"items": [_with_texts(recipe.batches[x.step], x, pieces).as_dict() for x in results]})


def _with_texts(
    batch: tuple[Sequence[int | str], Any], result: insight.TokenInfluence, pieces: Any
) -> insight.TokenInfluence:
    place = [str(x) for x in batch[0]].index(str(result.sample))
    return result.with_texts(pieces(batch[1], place))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
