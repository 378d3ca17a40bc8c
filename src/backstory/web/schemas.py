"""What every path takes and returns, once: the same shapes are the JSON, the OpenAPI document, and what pages are made of.

Here are questions, answers and errors; those that show the run are taken from `shapes_run`, so that all have one name.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .schemas_run import (
    HELPED,
    HURT,
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_A_PAGE,
    MOST_HITS,
    MOST_PIECES,
    SIGN,
    AtCheckpoint,
    Eraser,
    Has,
    Life,
    Neighbour,
    Number,
    Occurrence,
    OnQuery,
    Overview,
    Phases,
    QuerySet,
    Sample,
    Samples,
    Saturation,
    Shape,
    Side,
    Sources,
    SourceValue,
    Timeline,
    Trust,
    Window,
)

__all__ = [
    "HELPED",
    "HURT",
    "LONGEST_NAME",
    "LONGEST_TEXT",
    "MOST_A_PAGE",
    "MOST_HITS",
    "SIGN",
    "Answer",
    "AskForm",
    "AtCheckpoint",
    "Comparison",
    "Eraser",
    "Failure",
    "Harmful",
    "Has",
    "Health",
    "Hit",
    "Life",
    "Neighbour",
    "Number",
    "Occurrence",
    "OnQuery",
    "Overview",
    "Pace",
    "Phases",
    "Piece",
    "Problem",
    "Query",
    "QuerySet",
    "Question",
    "Ranking",
    "Sample",
    "Samples",
    "Saturation",
    "Shading",
    "Shape",
    "Side",
    "SourceValue",
    "Sources",
    "Stored",
    "StoredSet",
    "Timeline",
    "Tokens",
    "Trust",
    "Window",
]


class Piece(Shape):
    """A token of a training sequence, and its part of the influence; positive: it helped."""

    text: str
    influence: float


class Hit(Shape):
    """A sample, all its occurrences together, and its influence on the query."""

    sample: Sample
    step: int = Field(description="where it was used; of several occurrences, where it mattered most")
    influence: float
    words: str
    occurrences: int
    common: list[str] = Field(description="words of its text that are in the query's text too")


class Harmful(Shape):
    """The samples with the most negative influence on the mean loss of a query set."""

    queries: str
    at: int
    without_last: int = Field(default=0, description="uses in so many of the last steps before `at` are left out")
    late: int = Field(
        default=0, description="how many of the items were last used in the last tenth of the steps before `at`"
    )
    late_from: int = Field(default=0, description="the first step of that last tenth")
    items: list[Hit]
    quality: Trust = Trust(words=[])
    notes: list[str]
    sign: str = SIGN
    unit: str


class Query(Shape):
    """What was asked."""

    kind: str = Field(description="stored, text, image or gradient")
    set: str | None = None
    index: int | None = None
    text: str | None = None
    image: str | None = Field(default=None, description="a data URL, or null")
    label: str | None = None
    seen: str | None = Field(default=None, description="an uploaded image as the model sees it: a data URL, or null")
    says: str | None = Field(default=None, description="the model's own answer, where the recipe can tell")
    loss: Number = Field(default=None, description="the model's own loss on it at this checkpoint")
    loss_words: str | None = Field(default=None, description="what that loss is")


class Pace(Shape):
    """The query's own timeline: the summed influence of each step's occurrences."""

    steps: list[int]
    influence: list[Number]
    size: list[Number] = Field(description="mean |influence| of the step's occurrences; clipped steps add up to 0")


class Ranking(Shape):
    """The ids that a question names at one checkpoint, most first."""

    at: int
    helpful: list[str]
    harmful: list[str]


class Answer(Shape):
    """Which samples helped and which hurt, for one query at one checkpoint."""

    query: Query
    at: int
    checkpoints: list[int]
    helpful: list[Hit]
    harmful: list[Hit]
    timeline: Pace
    replay: list[Ranking] | None = Field(description="rankings at every checkpoint, where replay=true was asked for")
    method: str = Field(description="embeddings, segments or adjoint")
    quality: Trust
    notes: list[str]
    sign: str = SIGN
    unit: str
    seconds: float


class Tokens(Shape):
    """The tokens of one occurrence of a training sequence, and what each contributed to its influence on a query."""

    sample: str
    step: int
    tokens: list[Piece]
    total: float = Field(description="influence of this occurrence: the tokens' parts add up to it")


class Shading(Shape):
    """The tokens of the occurrences that were asked about, in their order; one replay of training for all of them."""

    items: list[Tokens]
    notes: list[str]
    sign: str = SIGN


class Stored(Shape):
    """A stored query, as far as the recipe can show it."""

    index: int
    label: str
    text: str | None = None
    image: str | None = None
    path: str = Field(description="where its answer is")
    says: str | None = Field(default=None, description="the model's own answer, where the recipe can tell")
    mistake: bool | None = Field(default=None, description="whether that is not its label; null where it is not known")


class StoredSet(Shape):
    """A set of queries with what can be shown of each; at most 50."""

    name: str
    count: int
    fits: int = Field(default=0, description="how many of them fit: all, or the mistakes that were asked for")
    items: list[Stored]


class AskForm(Shape):
    """What can be asked."""

    query_sets: list[StoredSet]
    checkpoints: list[int]
    can_type: bool
    can_upload: bool
    can_tell: bool = Field(default=False, description="whether the recipe can tell the model's mistakes: mistakes=true")
    mistakes: bool = Field(default=False, description="whether only mistakes are listed")
    longest_text: int
    most_pieces: int = Field(default=MOST_PIECES, description="contexts of the model that a typed text may fill")
    most_hits: int = MOST_HITS
    dims: int = Field(description="length of a ready gradient")
    missing: list[str]


class Comparison(Shape):
    """Two answers side by side."""

    left: Answer
    right: Answer
    both: list[str] = Field(description="ids that are in both helpful or in both harmful lists")


class Health(Shape):
    """Whether the service lives, and how many questions it has."""

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


def _numbers(value: Any) -> Any:
    """A list up to its first entry that is no number: one error says as much as a million, which would take seconds."""
    for i, x in enumerate(value if isinstance(value, list) else ()):
        try:
            float(x)
        except (TypeError, ValueError):
            return value[: i + 1]
    return value


Gradient = Annotated[list[float], BeforeValidator(_numbers), Field(min_length=1, max_length=1_000_000)]


class Question(Shape):
    """A question: exactly one of `text`, `gradient`, or `set` with `index`."""

    text: Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)] | None = None
    gradient: Gradient | None = None
    set: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    index: Annotated[int, Field(ge=0, le=10**9)] | None = None
    at: Annotated[int, Field(ge=1, le=10**9)] | None = Field(default=None, description="a checkpoint; null: final")
    k: Annotated[int, Field(ge=1, le=MOST_HITS)] = 10
    replay: bool = False
