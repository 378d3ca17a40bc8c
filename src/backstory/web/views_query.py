"""Questions and their answers: by a stored query, typed text, an image, or a ready gradient; tokens; two answers compared."""

import base64
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import exact
from ..errors import UsageError
from ..replay.queries import part
from . import schemas as shapes
from .comparing import Pair, side
from .errors import Refused
from .ranking import both, pace, ranking
from .schemas_run import MOST_PIECES
from .state import NEEDS_RECIPE, Opened, size
from .trust import trust
from .views_samples import label, need_index, shown_queries

UNIT = "influence of a sample, its occurrences summed, in units of the query's loss"
REPLAYED = 10  # ids at each checkpoint
TOKENS = (
    "a token's part is that of the layers' computations at its position, with the whole sequence as it was; it is not the effect "
    "of deleting the token"
)


@dataclass(frozen=True)
class Asked:
    """A question, ready for any checkpoint: a batch for the model, or a gradient of the final one."""

    query: shapes.Query
    key: str  # the same for the same question
    batch: Any = None
    row: int | None = None  # of a stored set
    gradient: Tensor | None = None


def stored(opened: Opened, name: str, index: int) -> Asked:
    """A query of a stored set."""
    found = opened.named(name)
    need_index(opened, found, index)
    known = shown_queries(opened, found)
    shown = known[index] if index < len(known) else {}
    text, image = shown.get("text"), shown.get("image")
    query = shapes.Query(
        kind="stored", set=found, index=index, label=label(opened, found, index) if not known else _label(shown),
        text=None if text is None else str(text), image=data_url(image),
    )  # fmt: skip
    return Asked(query, f"stored/{found}/{index}", row=index)


def _label(shown: dict[str, object]) -> str | None:
    return None if shown.get("label") is None else str(shown["label"])


def typed(opened: Opened, text: str) -> Asked:
    """Text that somebody typed."""
    encode = None if opened.recipe is None else opened.recipe.page.text
    if encode is None:
        raise Refused(422, "this service cannot ask about typed text.", how(opened, "page.text"))
    if not text.strip():
        raise Refused(422, "your text (text): found only white space; expected words.", "Type what to ask about.")
    batch = encode(text)
    if (n := size(batch)) > MOST_PIECES:
        raise Refused(
            422,
            f"your text (text): found a text that fills the model's context {n} times; expected at most {MOST_PIECES} times.",
            f"Ask about a part of it: about {len(text) * MOST_PIECES // n:,} characters.",
        )
    return Asked(shapes.Query(kind="text", text=text), _digest(b"text", text.encode()), batch=batch)


def uploaded(opened: Opened, data: bytes, named: str | None) -> Asked:
    """An image that somebody sent, with its label; None: what the model says."""
    encode = None if opened.recipe is None else opened.recipe.page.image
    if encode is None:
        raise Refused(422, "this service cannot ask about images.", how(opened, "page.image"))
    batch, show = encode(data, named), opened.recipe.page.show if opened.recipe is not None else None
    seen = next(iter([] if show is None else show(batch)), {}).get("image")
    query = shapes.Query(kind="image", image=data_url(data), label=named, seen=data_url(seen))
    return Asked(query, _digest(b"image", (named or "").encode(), data), batch=batch)


def ready(opened: Opened, gradient: Sequence[float]) -> Asked:
    """A gradient in the run's coordinates."""
    width = opened.run.store.width
    if len(gradient) != width:
        raise Refused(422, f"found a gradient of {len(gradient)} numbers; expected {width}.", _made(width))
    v = torch.tensor(gradient, dtype=torch.float32)[None]
    if not bool(v.isfinite().all()):
        raise Refused(422, "the gradient has numbers that float32 cannot hold.", "Send finite numbers below 1e38.")
    if not bool(v.any()):
        raise Refused(
            422,
            "the gradient is 0 everywhere, so all influence on it is 0; expected a loss that the model can change.",
            _made(width),
        )
    return Asked(shapes.Query(kind="gradient"), _digest(b"gradient", v.numpy().tobytes()), gradient=v)


def _made(width: int) -> str:
    return (
        f"Send one row of {width} numbers, ∇ℓ(θ, q) in the run's coordinates. In Python: "
        "`from backstory.run.gradients import compute_query_gradients; v, notes = compute_query_gradients(run.store, model, loss, batch, run.n_steps)`; each row of v is one query."
    )


def asked(opened: Opened, q: shapes.Question) -> Asked:
    """Whichever question it is; exactly one of them."""
    given = [q.text is not None, q.gradient is not None, q.set is not None or q.index is not None]
    if sum(given) != 1 or (given[2] and (q.set is None or q.index is None)):
        raise Refused(422, "expected exactly one of text, gradient, or set with index.", "Send one question at a time.")
    if q.text is not None:
        return typed(opened, q.text)
    if q.gradient is not None:
        return ready(opened, q.gradient)
    assert q.set is not None
    assert q.index is not None
    return stored(opened, q.set, q.index)


def how(opened: Opened, what: str) -> str:
    """What to do where a question of this kind cannot be asked."""
    return NEEDS_RECIPE if opened.recipe is None else f"Give the run's recipe {what}, and start the service again."


def vector(opened: Opened, question: Asked, step: int) -> Tensor:
    """v (1, p) of a question at a checkpoint; the losses of a batch's rows add up."""
    if question.gradient is not None:
        return question.gradient
    if question.row is not None:
        assert question.query.set is not None
        rows = opened.vectors(question.query.set, step)
        if question.row >= len(rows):
            raise Refused(404, f"the query set gives {len(rows)} losses; found index {question.row}.", "Count from 0.")
        return rows[question.row : question.row + 1]
    return opened.gradients(step).of_sum(question.batch, opened.going_on)


def answer(opened: Opened, question: Asked, at: int | None, k: int, replay: bool) -> shapes.Answer:
    """Which samples helped and which hurt."""
    began, step = time.perf_counter(), opened.step(at)
    if replay and question.gradient is not None:
        raise Refused(422, "a ready gradient belongs to one model; it cannot be replayed.", "Ask without replay.")
    found = opened.scored(question.key, vector(opened, question, step), step)
    scores = found.scores[0]
    helpful, harmful = both(scores, opened.catalogue, k, question.query.text)
    notes = [*found.notes, *_cut(question)]
    return shapes.Answer(
        query=_with_own(opened, question, step),
        at=step,
        checkpoints=opened.checkpoints,
        helpful=helpful,
        harmful=harmful,
        timeline=pace(scores, opened.catalogue, step),
        replay=_replay(opened, question) if replay else None,
        method=found.method,
        quality=trust(found.quality),
        notes=notes,
        unit=UNIT,
        seconds=time.perf_counter() - began,
    )


def _with_own(opened: Opened, question: Asked, step: int) -> shapes.Query:
    """The query, with the model's own loss on it and its own answer."""
    query = question.query
    if question.gradient is not None:
        return query
    if question.row is not None:
        assert query.set is not None
        found, rows = opened.own(query.set, step), slice(question.row, question.row + 1)
        batch = part(opened.sets[query.set], question.row, question.row + 1)
    else:
        found, rows, batch = opened.gradients(step).own(question.batch), slice(None), question.batch
    says = found.says[rows]
    loss = sum(found.losses[rows])
    told = {"says": says[0] if len(says) == 1 else None, "loss": loss, "loss_words": _loss_words(opened, batch, loss)}
    return query.model_copy(update=told if math.isfinite(loss) else {})


def _loss_words(opened: Opened, batch: Any, loss: float) -> str:
    """What a loss is: the recipe's own, over how many tokens."""
    count = None if opened.recipe is None else opened.recipe.tokens
    n = 0 if count is None else int(count(batch).sum())
    over = f"the sum over {n:,} tokens, {loss / n:.3g} each; " if n else ""
    return f"{over}the recipe's own loss, in nats where that is a cross-entropy"


def _cut(question: Asked) -> list[str]:
    n = size(question.batch) if question.batch is not None else 1
    return [f"the text was cut into {n} pieces; influence is on the sum of their losses"] if n > 1 else []


def _replay(opened: Opened, question: Asked) -> list[shapes.Ranking]:
    """The ranking at every checkpoint whose model can be asked."""
    out = []
    for step in opened.asked_at:
        found = opened.scored(question.key, vector(opened, question, step), step)
        out.append(ranking(found.scores[0], opened.catalogue, REPLAYED, step))
    return out


def pair(opened: Opened, both: Pair) -> tuple[Asked, Asked]:
    """Two questions, whatever each of them is."""
    left, right = (side(both, end) for end in ("", "2"))
    return _either(opened, *left), _either(opened, *right)


def _either(opened: Opened, fields: dict[str, Any], image: bytes | None, named: str | None) -> Asked:
    return asked(opened, shapes.Question(**fields)) if image is None else uploaded(opened, image, named)


def compare(opened: Opened, left: Asked, right: Asked, at: int | None, k: int) -> shapes.Comparison:
    """Two answers side by side, and the samples that both name at the same end."""
    one, two = (answer(opened, x, at, k, False) for x in (left, right))
    ends = [({h.sample.id for h in a}, {h.sample.id for h in b}) for a, b in _pairs(one, two)]
    return shapes.Comparison(left=one, right=two, both=sorted({name for a, b in ends for name in a & b}))


def _pairs(one: shapes.Answer, two: shapes.Answer) -> list[tuple[list[shapes.Hit], list[shapes.Hit]]]:
    return [(one.helpful, two.helpful), (one.harmful, two.harmful)]


def tokens(opened: Opened, question: Asked, hits: Sequence[tuple[str, int]], at: int | None) -> shapes.Shading:
    """Each token's part of the influence of these occurrences, (sample, step) each; one replay of training."""
    recipe, step = opened.recipe, opened.step(at)
    if recipe is None or recipe.page.pieces is None:
        raise Refused(422, "this service cannot ask about single tokens.", how(opened, "page.pieces"))
    own = [(opened.catalogue.own_id(opened.catalogue.number(name)), t) for name, t in hits]
    v = vector(opened, question, step)

    def ask() -> list[exact.TokenInfluence]:
        make = opened.recipe_name
        assert make is not None
        return exact.tokens(opened.run, make, None, own, step, vectors=v, progress=opened.going_on)

    found = opened.results.get(("tokens", question.key, tuple(hits), step), ask)
    return shapes.Shading(items=[_tokens(recipe.batches[x.step], x, recipe.page.pieces) for x in found], notes=[TOKENS])


def _tokens(batch: tuple[Sequence[int | str], Any], found: exact.TokenInfluence, pieces: Any) -> shapes.Tokens:
    texts = pieces(batch[1], [str(x) for x in batch[0]].index(str(found.sample)))
    parts = found.scores[0].tolist()
    if len(texts) != len(parts):
        raise UsageError(
            f"the recipe's pieces= gives {len(texts)} texts; expected {len(parts)}, one for each position."
        )
    shown = [shapes.Piece(text=text, influence=x) for text, x in zip(texts, parts, strict=True)]
    return shapes.Tokens(sample=str(found.sample), step=found.step, tokens=shown, total=float(found.total[0]))


def data_url(data: object) -> str | None:
    """PNG bytes as an address that holds them."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if isinstance(data, bytes) else None


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
