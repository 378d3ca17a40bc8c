"""The shapes of what the service sends, for its OpenAPI document: results as they describe themselves, and what pages have beside them.

They describe and convert nothing. All numbers are finite or null. Influence is in the units of the query's loss. `samples` are
the samples that a result names, by id as text.

    Sent[insight.Timeline]                   what a result is sent as, for a field
    page_of(insight.Timeline, queries=str)   the same with what its page has beside it
"""

import types
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

from .. import insight, results
from ..results import Row

MOST_HITS, MOST_A_PAGE, LONGEST_TEXT, LONGEST_NAME = 200, 200, 4_000, 1_000
MOST_PIECES = 64  # how many times a typed text may fill the model's context
COMMON = (
    "headline",
    "words",
    "at",
    "sign",
    "unit",
    "origin",
    "caveats",
    "quality",
    "recording",
    "to_exact",
)  # what every result has
Number = float | None
T = TypeVar("T")


class Shape(BaseModel):
    """Frozen, with no unknown fields, and without NaN or Inf."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# -- results, by the types of what they show ---------------------------------------------------------------------------


def page_of(kind: Any, **beside: Any) -> type[Shape]:
    """A result with what its page has beside it."""
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in beside.items()}
    return create_model(f"{kind.__name__}Page", __base__=shape_of(kind), __doc__=kind.__doc__, **fields)


@cache
def shape_of(kind: Any) -> type[Shape]:
    """The shape of the `as_dict()` of a type of results, or of rows of them."""
    names = kind.columns() if issubclass(kind, Row) else (*kind.shown, *COMMON)
    fields = _fields(kind, names) | {name: (hint, ...) for name, hint in OTHERWISE.get(kind, {}).items()}
    return create_model(kind.__name__, __base__=Shape, __doc__=kind.__doc__, **fields)


def _fields(kind: type[Any], names: Any) -> dict[str, Any]:
    """Of each name: its type as JSON has it, and what the property says of itself."""
    hints, out = get_type_hints(kind), {}
    for name in names:
        made: Any = getattr(kind, name, None)
        told: Callable[..., Any] | None = made.fget if isinstance(made, property) else made if callable(made) else None
        hint = hints[name] if told is None else get_type_hints(told)["return"]
        out[name] = (_sent(hint), Field(description=None if told is None else told.__doc__))
    return out


def _sent(hint: Any) -> Any:
    """A type as JSON has it: lists for tuples and arrays, and null for what is not a finite number."""
    origin, args = get_origin(hint), get_args(hint)
    if np.ndarray in (origin, get_origin(getattr(origin, "__value__", None))):  # NumPy 2.5 has a named alias
        return list[Number]
    if origin is ClassVar:
        return _sent(args[0])
    if origin in (tuple, list):
        return list[_sent(args[0])]  # type: ignore[misc]
    if origin is types.UnionType:
        return reduce(or_, map(_sent, args))
    kind: Any = hint  # types of rows are hashable, whatever a checker makes of their dataclasses
    if isinstance(hint, type) and issubclass(hint, Row):
        return shape_of(kind)
    return Number if hint is float else hint


class _AsSent:
    """Marks a field that holds what a result or a row of one is sent as."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(shape_of(source))


Sent = Annotated[T, _AsSent()]
OTHERWISE: dict[type[Any], dict[str, Any]] = {  # sent as something else than the type says
    insight.Evolution: {"mean": dict[str, list[Number]], "samples": dict[str, list[Number]]},
    insight.Sources: {"matrix": list[list[Number]]},
    results.Influence: {
        "queries": int,
        "occurrences": int,
        "query": int | str,
        "per": str,
        **dict.fromkeys(("hits", "harmful"), list[Sent[results.Hit]]),
    },
    insight.TokenInfluence: {"total": Number},
}


# -- what pages have beside results ------------------------------------------------------------------------------------


class Sample(Shape):
    """A training sample, as far as the run holds what to show."""

    id: str
    path: str = Field(description="where its page is: /samples/… with the id quoted")
    text: str | None
    image: str | None = Field(description="path of its PNG, or null")
    label: str | None
    source: str | None
    steps: list[int] = Field(description="the steps in which it was used")


class ValuedSample(Sample):
    """The same with its influence on the mean loss of a query set."""

    value: Number


Shown = dict[str, Sample]


Timeline = page_of(insight.Timeline, queries=str)
Evolution = page_of(insight.Evolution, queries=str, by=str)
Overwriting = page_of(insight.Overwriting, queries=str, samples=Shown)
Sources = page_of(insight.Sources, paths=dict[str, str])
Harmful = page_of(insight.Harmful, queries=str, samples=Shown)


class Input(Shape):
    """What was queried."""

    kind: str = Field(description="stored, text, image or gradient")
    set: str | None
    index: int | None
    text: str | None
    image: str | None = Field(description="a data URL, or null")
    label: str | None
    model_image: str | None = Field(description="an uploaded image as the model gets it: a data URL, or null")
    prediction: str | None = Field(description="the model's prediction, if the recipe has predict=")
    loss: Number = Field(description="the model's own loss on it at this checkpoint")
    tokens: int | None = Field(description="over how many tokens that loss is summed, if the recipe counts tokens")


class ByStep(Shape):
    """The influence of each step's occurrences on the query: their sum, and the mean absolute value (`size`).

    Multiplied by `quality.factors`, where it has some: one for each twentieth of the run.
    """

    steps: list[int]
    influence: list[Number]
    size: list[Number]


QueryResult = page_of(
    results.Influence,
    input=Input,
    by_step=ByStep,
    checkpoints=list[int],
    rankings=Annotated[list[Sent[results.Ranking]] | None, Field(description="at every checkpoint, with replay=true")],
    samples=Shown,
    seconds=float,
)


Comparison = page_of(results.Comparison, left=QueryResult, right=QueryResult)


class Tokens(Shape):
    """The tokens of some occurrences, in their order; one replay of training for all of them."""

    items: list[Sent[insight.TokenInfluence]]


class QuerySet(Shape):
    """A set of queries by name."""

    name: str
    count: int


class About(Shape):
    """What can be queried."""

    checkpoints: list[int] = Field(description="steps at which the model can be queried; the last is the final one")
    has: dict[str, bool] = Field(description="what content the run has for its samples: text, image, source, label")
    can_type: bool
    can_upload: bool
    can_shade: bool = Field(description="whether single tokens can be queried: /query/tokens")


class Overview(About):
    """What was trained, when, on what; and what can be queried."""

    name: str
    created: str | None
    model: str
    optimizer: str
    steps: int
    occurrences: int
    samples: int
    dims: int
    curvature: str
    projection: str
    recipe: str | None
    query_sets: list[QuerySet]
    default_queries: str | None
    loss: list[Number] = Field(description="training loss of each step, null where it was not recorded")
    quality: Sent[results.Quality]
    recording: Sent[results.RecordingReport]
    caveats: list[str]
    missing: list[str] = Field(description="what is not available, and how to get it")
    sign: str
    timeline: Sent[insight.Timeline] | None = Field(description="of the default query set")


class QueryLabel(Shape):
    """A stored query in a few words, and where its result is."""

    label: str
    path: str


class StoredQuery(QueryLabel):
    """The same with what the recipe can show of it."""

    index: int
    text: str | None
    image: str | None
    prediction: str | None
    mistake: bool | None = Field(description="whether the prediction differs from the label; null if unknown")


class StoredSet(QuerySet):
    """A set of queries with what can be shown of each; at most 50."""

    fits: int = Field(description="how many of them fit: all, or the mistakes")
    items: list[StoredQuery]


class QueryForm(About):
    """What can be queried."""

    query_sets: list[StoredSet]
    can_predict: bool = Field(description="whether mistakes=true works: the recipe has predict=")
    mistakes: bool
    longest_text: int
    most_pieces: int = Field(description="how many times a typed text may fill the model's context")
    most_hits: int
    dims: int = Field(description="length of a gradient in the run's coordinates")
    missing: list[str]


class Samples(Shape):
    """A page of the samples that fit."""

    total: int
    page: int
    per: int
    sort: str
    queries: str | None
    items: list[ValuedSample]
    sources: list[str] = Field(description="all sources of the run, to choose from; at most 200")
    labels: list[str] = Field(description="all labels of the run, to choose from; at most 200")
    caveats: list[str]
    sign: str


class SamplePage(Shape):
    """One sample over all of training."""

    sample: Sample
    queries: str | None
    at: int
    value: Number = Field(description="its influence on the mean loss of the query set")
    occurrences: Sent[results.Occurrences] | None
    evolution: Sent[insight.Evolution] | None
    on_queries: Sent[insight.OnQueries] | None
    query_labels: dict[str, QueryLabel]
    overwriting: Sent[insight.Overwriting] | None = Field(description="null unless overwriting=true")
    neighbours: Sent[insight.Neighbours] | None
    samples: Shown
    missing: list[str]


class Health(Shape):
    """Whether the service is up, and how many requests it has."""

    ok: bool
    busy: int
    limit: int


class Problem(Shape):
    """What went wrong, and what to do."""

    code: int
    message: str
    hint: str


class Failure(Shape):
    """The one shape of every error."""

    error: Problem
