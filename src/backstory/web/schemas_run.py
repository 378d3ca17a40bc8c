"""What the paths that show a run return: overview, timeline, samples and their lives, sources.

All numbers are finite or null; ids are text, whatever they were. Influence is in the units of the query's loss.
"""

from pydantic import BaseModel, ConfigDict, Field, computed_field

from ..results.sign import HELPED as HELPED
from ..results.sign import HURT as HURT
from ..results.sign import SIGN as SIGN

MOST_HITS, MOST_A_PAGE, LONGEST_TEXT, LONGEST_NAME = 200, 200, 4_000, 1_000
MOST_PIECES = 64  # contexts of the model that a typed text may fill
MOST_EACH = 200  # queries of a set, where each is asked about
Number = float | None


class Shape(BaseModel):
    """Frozen, with no unknown fields, and without NaN or Inf."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sample(Shape):
    """A training sample, as far as the run holds what to show."""

    id: str
    path: str = Field(description="where its life is: /samples/… with the id quoted")
    text: str | None = None
    image: str | None = Field(default=None, description="path of its PNG, or null")
    label: str | None = None
    source: str | None = None
    steps: list[int] = Field(description="the steps in which it was used")
    value: Number = Field(default=None, description="its influence on the mean loss of the query set, or null")


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


class Timeline(Shape):
    """One number of each kind for each step before `at`."""

    queries: str
    at: int
    influence: list[Number]
    rate: list[Number]
    per_rate: list[Number]
    size: list[Number]
    loss: list[Number]
    phases: Phases
    notes: list[str]
    sign: str = SIGN
    unit: str


class Trust(Shape):
    """How far answers can be trusted, in plain words and in numbers."""

    verdict: str = Field(
        default="not known", description="good, fair, weak or not known; judged from what was recorded"
    )
    reason: str = Field(default="", description="why, in one sentence")
    early: str = Field(default="", description="what holds for samples that were used early")
    words: list[str]
    clipped: Number = None
    coverage: Number = None
    retained: Number = None
    drift: Number = None
    largest_growth: Number = None
    largest_growth_step: int | None = None
    expanding_steps: int | None = Field(default=None, description="how many steps expand in the literal form")


class QuerySet(Shape):
    """A set of queries by name."""

    name: str
    count: int


class Has(Shape):
    """What the run holds to show of its samples."""

    text: bool
    image: bool
    source: bool
    label: bool


class Overview(Shape):
    """What was trained, when, on what; and what can be asked."""

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
    checkpoints: list[int] = Field(description="steps at which the model can be asked; the last is the final one")
    query_sets: list[QuerySet]
    default_queries: str | None
    can_type: bool
    can_upload: bool
    can_shade: bool = Field(description="whether single tokens of a sample can be asked about: /ask/tokens")
    has: Has
    loss: list[Number] = Field(description="training loss of each step, null where it was not recorded")
    quality: Trust
    notes: list[str]
    missing: list[str] = Field(description="what cannot be asked, and how to get it")
    sign: str = SIGN
    timeline: Timeline | None


class Samples(Shape):
    """A page of the samples that were asked for."""

    total: int
    page: int
    per: int
    sort: str
    queries: str | None
    items: list[Sample]
    sources: list[str] = Field(description="all sources of the run, to choose from; at most 200")
    labels: list[str] = Field(description="all labels of the run, to choose from; at most 200")
    notes: list[str] = []
    sign: str = SIGN


class Occurrence(Shape):
    """One use of a sample."""

    step: int
    influence: Number
    norm: Number = Field(description="length of its gradient in the run's coordinates")


class AtCheckpoint(Shape):
    """The influence of a sample's occurrences so far on the model at one checkpoint."""

    at: int
    influence: Number


class OnQuery(Shape):
    """The influence of a sample on one query of a set."""

    query: str = Field(description="the query's label")
    index: int
    path: str
    influence: float


class Eraser(Shape):
    """A later sample that took over some of a sample's influence."""

    sample: Sample
    step: int = Field(description="where it took most")
    erased: float


class Neighbour(Shape):
    """A sample whose embedding points the same way."""

    sample: Sample
    similarity: float = Field(description="cosine of the embeddings; of all its occurrences, summed")


class Saturation(Shape):
    """Where the influence of a sample went: left = just_after + momentum − erased − decay."""

    just_after: float
    momentum: float
    erased: float
    decay: float
    left: float


class Life(Shape):
    """One sample over all of training."""

    sample: Sample
    queries: str | None
    at: int
    occurrences: list[Occurrence]
    evolution: list[AtCheckpoint]
    helped: list[OnQuery]
    hurt: list[OnQuery]
    erased_by: list[Eraser] | None = Field(description="null where it was not asked for: ask with erasers=true")
    lost: Number = Field(description="influence just after its own steps minus what is left")
    saturation: Saturation | None
    neighbours: list[Neighbour]
    notes: list[str]
    sign: str = SIGN
    unit: str


class SourceValue(Shape):
    """What one source is worth for all query sets together, with its 95 % interval."""

    name: str
    samples: int
    value: float
    low: float
    high: float
    path: str = Field(description="its samples: /samples?source=… or ?label=…")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """Helps or hurts; not clear where the interval includes 0."""
        return "not clear" if self.low <= 0 <= self.high else "helps" if self.value > 0 else "hurts"


class Sources(Shape):
    """Values of all sources, and of each source for each query set."""

    by: str
    at: int
    sources: list[SourceValue]
    domains: list[str]
    matrix: list[list[float]] = Field(description="one line for each source, one number for each domain")
    clear: list[list[bool]] = Field(
        default=[], description="of each number of the matrix: whether its interval leaves 0 out"
    )
    interval: str
    quality: Trust = Trust(words=[])
    notes: list[str]
    sign: str = SIGN
    unit: str
