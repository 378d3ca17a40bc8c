"""The shapes of what the service sends, for its OpenAPI document: the `as_dict()` of results, and what pages have beside them.

They describe and convert nothing. All numbers are finite or null. Influence is in the units of the query's loss. `samples` are
the samples that a result names, by id as text.
"""

from pydantic import BaseModel, ConfigDict, Field

MOST_HITS, MOST_A_PAGE, LONGEST_TEXT, LONGEST_NAME = 200, 200, 4_000, 1_000
MOST_PIECES = 64  # contexts of the model that a typed text may fill
Number = float | None
Id = int | str


class Shape(BaseModel):
    """Frozen, with no unknown fields, and without NaN or Inf."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# -- results -----------------------------------------------------------------------------------------------------------


class Quality(Shape):
    """The quality of the recording: a verdict with its reason, everything that was measured in words and in numbers."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    verdict: str = Field(description="good, fair, weak or not known; it judges what was recorded")
    reason: str
    early: str = Field(description="what holds for samples that were used early")
    words: list[str]


class Result(Shape):
    """What every result has."""

    headline: str
    words: list[str] = Field(description="what the numbers show, in sentences")
    at: int = Field(description="the step whose model was queried")
    sign: str
    unit: str
    caveats: list[str]
    quality: Quality | None


class Hit(Shape):
    """A sample, all its occurrences together, and its influence."""

    sample: Id
    step: int = Field(description="where it was used; of several occurrences, where it mattered most")
    influence: float
    occurrences: int
    words: str


class RankedSample(Hit):
    """A sample of a ranking, with its content."""

    last: int = Field(description="the last step that counted in which it was used")
    text: str | None
    label: str | None
    source: str | None


class Side(Shape):
    """One side of the valley: the fall of the warm-up, or the rise of the ascent."""

    present: bool
    p: float
    level: Number
    boundary: int | None


class Window(Shape):
    """Steps first … last−1 in which influence is high."""

    name: str
    first: int
    last: int
    level: Number
    times_basin: Number


class Phases(Shape):
    """Whether the three phases of training are there, and where; else the pattern that there is, if one is clear."""

    present: bool
    shape: str
    words: str
    warm_up: Side
    ascent: Side
    basin: Number
    windows: list[Window]
    steps: int


class Timeline(Result):
    """One number of each kind for each step before `at`."""

    queries: str
    influence: list[Number]
    rate: list[Number]
    per_rate: list[Number]
    size: list[Number]
    loss: list[Number]
    phases: Phases


class EvolutionResult(Result):
    """Mean influence of one sample of each group on the model at each checkpoint."""

    checkpoints: list[int]
    mean: dict[str, list[Number]]
    samples: dict[str, list[float]]
    method: list[str]


class Evolution(EvolutionResult):
    """The same, with what was queried."""

    queries: str
    by: str


class Overwriter(Shape):
    """A later sample that took over some of a sample's influence."""

    sample: Id
    overwritten: float
    step: int
    occurrences: int


class TopStep(Shape):
    """A step that overwrote much."""

    step: int
    overwritten: float


class OverwritingResult(Result):
    """Where a sample's influence went: influence = just_after + momentum − overwritten − decay."""

    queries: str
    sample: Id
    steps: list[int]
    just_after: float
    momentum: float
    overwritten: float
    decay: float
    influence: float
    lost: float
    unexplained: float
    overwritten_by: list[Overwriter]
    by_step: list[Number]
    top_steps: list[TopStep]


class Value(Shape):
    """What one source is worth for one domain, or for all."""

    source: str
    domain: str
    samples: int
    queries: int
    value: float
    low: float
    high: float
    per_sample: float
    words: str = Field(description="helps or hurts; not clear where the interval includes 0")


class Sources(Result):
    """Values of all sources, and of each source for each query set."""

    by: str
    sources: list[str]
    domains: list[str]
    total: list[Value]
    cells: list[list[Value]]
    matrix: list[list[float]] = Field(description="one line for each source, one number for each domain")
    clear: list[list[bool]] = Field(description="of each number of the matrix: whether its interval leaves 0 out")
    interval: str
    paths: dict[str, str] = Field(description="the samples of each source")


class Occurrences(Result):
    """The influence of each single use of a sample."""

    sample: Id
    steps: list[int]
    influence: list[Number]


class Neighbour(Shape):
    """A sample whose embedding points the same way."""

    sample: Id
    similarity: float


class Neighbours(Result):
    """The samples that are most like one sample."""

    sample: Id
    neighbours: list[Neighbour]


class QueryInfluence(Shape):
    """The influence of a sample on one query of a set."""

    query: int
    influence: float


class OnQueries(Result):
    """The single queries that one sample helped most and hurt most."""

    sample: Id
    queries: int
    helped: list[QueryInfluence]
    hurt: list[QueryInfluence]


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


class Overwriting(OverwritingResult):
    """Where a sample's influence went, and what the run holds of the samples that took it."""

    samples: Shown


class Harmful(Result):
    """Both ends of the ranking of samples by their influence on the mean loss of a query set."""

    queries: str
    harmful: list[RankedSample]
    helpful: list[RankedSample]
    without_last: int
    late: int = Field(description="how many of `harmful` were last used in the last tenth of training")
    late_from: int
    samples: Shown


class Input(Shape):
    """What was queried."""

    kind: str = Field(description="stored, text, image or gradient")
    set: str | None
    index: int | None
    text: str | None
    image: str | None = Field(description="a data URL, or null")
    label: str | None
    model_image: str | None = Field(description="an uploaded image as the model gets it: a data URL, or null")
    prediction: str | None = Field(description="the model's prediction, where the recipe can tell")
    loss: Number = Field(description="the model's own loss on it at this checkpoint")
    tokens: int | None = Field(description="over how many tokens that loss is summed, where the recipe can tell")


class ByStep(Shape):
    """The influence of each step's occurrences on the query: their sum, and their mean size."""

    steps: list[int]
    influence: list[Number]
    size: list[Number]


class Ranking(Shape):
    """The ids that a query names at one checkpoint, most first."""

    at: int
    hits: list[str]
    harmful: list[str]


class QueryResult(Result):
    """Which samples helped and which hurt, for one query at one checkpoint."""

    method: str
    queries: int
    occurrences: int
    query: int | str
    per: str
    hits: list[Hit] = Field(description="most helpful first")
    harmful: list[Hit] = Field(description="most harmful first")
    input: Input
    by_step: ByStep
    checkpoints: list[int]
    rankings: list[Ranking] | None = Field(description="at every checkpoint, with replay=true")
    samples: Shown
    seconds: float


class Comparison(Shape):
    """Two results side by side."""

    left: QueryResult
    right: QueryResult
    both: list[str] = Field(description="ids that both name on the same side")


class Token(Shape):
    """A token of a training sequence, and its part of the influence; positive: it helped."""

    text: str
    influence: float


class Tokens(Shape):
    """The tokens of one occurrence of a training sequence, and what each contributed to its influence on a query."""

    sample: str
    step: int
    tokens: list[Token]
    total: float = Field(description="influence of this occurrence: the tokens' parts add up to it")


class TokensResult(Shape):
    """The tokens of some occurrences, in their order; one replay of training for all of them."""

    items: list[Tokens]
    caveats: list[str]
    sign: str


class QuerySet(Shape):
    """A set of queries by name."""

    name: str
    count: int


class About(Shape):
    """What can be queried."""

    checkpoints: list[int] = Field(description="steps at which the model can be queried; the last is the final one")
    has: dict[str, bool] = Field(description="what the run holds of its samples: text, image, source, label")
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
    quality: Quality
    caveats: list[str]
    missing: list[str] = Field(description="what is not available, and how to get it")
    sign: str
    timeline: Timeline | None


class StoredQuery(Shape):
    """A stored query, as far as the recipe can show it."""

    index: int
    label: str
    text: str | None
    image: str | None
    path: str = Field(description="where its result is")
    prediction: str | None
    mistake: bool | None = Field(description="whether the prediction is not its label; null where that is not known")


class StoredSet(QuerySet):
    """A set of queries with what can be shown of each; at most 50."""

    fits: int = Field(description="how many of them fit: all, or the mistakes")
    items: list[StoredQuery]


class QueryForm(About):
    """What can be queried."""

    query_sets: list[StoredSet]
    can_predict: bool = Field(description="whether the recipe can tell the model's mistakes: mistakes=true")
    mistakes: bool
    longest_text: int
    most_pieces: int = Field(description="contexts of the model that a typed text may fill")
    most_hits: int
    dims: int = Field(description="length of a ready gradient")
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


class QueryLabel(Shape):
    """A stored query in a few words, and where its result is."""

    label: str
    path: str


class SamplePage(Shape):
    """One sample over all of training."""

    sample: Sample
    queries: str | None
    at: int
    value: Number = Field(description="its influence on the mean loss of the query set")
    occurrences: Occurrences | None
    evolution: EvolutionResult | None
    on_queries: OnQueries | None
    query_labels: dict[str, QueryLabel]
    overwriting: OverwritingResult | None = Field(description="null unless overwriting=true")
    neighbours: Neighbours | None
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
