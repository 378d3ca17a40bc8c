"""Recording quality: what one pass over the run measured, a verdict with its reason, and plain sentences.

    weak        the optimizer is not followed, or more than half of the gradient is not recorded
    fair        something is assumed or left out that is known to cost accuracy
    good        no weakness was measured
    not known   nothing was measured

The verdict is about the recording. Only retraining measures how accurate a result is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from .row import Row

GOOD, FAIR, WEAK, NOT_KNOWN = "good", "fair", "weak", "not known"
LOST = 0.5  # below this share most of the gradient is not there
RETAINED, COVERED, DRIFTED = 0.8, 0.999, 0.1  # bounds of `fair`
EARLY = (
    "Early steps are understated: recorded curvature can only shrink an influence as it passes through later steps, "
    "so samples used early get too small an influence and are ranked less reliably."
)
NOTHING = "The recording quality was not measured for this model: query the final model, or run `backstory embed RUN`."


class Finding(NamedTuple):
    """One sentence, the verdict if nothing else were known, and the sentence in two or three words."""

    verdict: str
    words: str
    short: str


@dataclass(frozen=True)
class Quality(Row):
    """What was measured about the recorded steps before a model; without arguments, nothing was."""

    steps: int = 0
    clipped: float = 0.0  # share of steps whose gradient was clipped
    # mean share of the squared norm of the gradients that the optimizer used, in recorded parameters
    coverage: float = 1.0
    optimizer: str = "The optimizer"
    modelled: str = "exactly"  # or what was assumed
    proxy: bool = False  # whether the steps were taken as plain SGD steps, which they were not
    curvature: str = ""
    projection: str = ""
    retained: float = 1.0  # mean share of the recorded gradient's squared norm that lies in the projection
    largest_growth: float = 0.0  # rate × curvature over its stable limit; above 1 a literal step expands
    largest_growth_step: int | None = None
    expanding_steps: tuple[int, ...] = ()  # those above 1
    drift: float = 0.0  # mean change of the log of Adam's rates from step to step, root mean square over parameters

    @classmethod
    def from_dict(cls, report: Mapping[str, Any]) -> "Quality":
        """From what `as_dict` returned, or what is stored with embeddings."""
        known = {f.name: report[f.name] for f in fields(cls) if f.name in report}
        return cls(**{**known, "expanding_steps": tuple(known.get("expanding_steps", ()))})

    def measured(self) -> dict[str, Any]:
        """The measured values alone, as a run stores them."""
        return {**asdict(self), "expanding_steps": list(self.expanding_steps)}

    @property
    def verdict(self) -> str:
        """The overall rating in one word."""
        return self._heaviest().verdict

    @property
    def reason(self) -> str:
        """The reason for the verdict, in one sentence."""
        return self._heaviest().words

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def in_short(self) -> str:
        """The verdict, and why in two or three words."""
        return f"{self.verdict} ({self._heaviest().short})"

    @property
    def early(self) -> str:
        """A caveat about samples that were used early, which always applies."""
        return EARLY

    @property
    def words(self) -> tuple[str, ...]:
        """Everything that was measured, in plain sentences, weaknesses first."""
        findings = sorted(self._findings(), key=lambda f: f.verdict == GOOD)
        return tuple(f.words for f in findings)

    def _heaviest(self) -> Finding:
        if not self.steps:
            return Finding(NOT_KNOWN, NOTHING, "not measured")
        return min(self._findings(), key=lambda f: (WEAK, FAIR, GOOD).index(f.verdict))

    def _findings(self) -> Iterator[Finding]:
        if not self.steps:
            return
        words = f"{self.optimizer}'s steps are modelled {self.modelled}."
        yield Finding(WEAK, words, "plain SGD assumed") if self.proxy else Finding(GOOD, words, "steps followed")
        yield Finding(
            _share(self.coverage, COVERED),
            f"Recorded parameters cover {self.coverage:.1%} of the gradient (squared norm).",
            f"coverage {self.coverage:.0%}",
        )
        if self.projection in ("learned", "mask"):  # a random or a full one is not judged by it
            words = f"The projection retains {self.retained:.0%} of the gradients' squared norm."
            yield Finding(_share(self.retained, RETAINED), words, f"retains {self.retained:.0%}")
        if self.curvature.startswith("empirical"):
            words = (
                "Curvature is the empirical Fisher, computed from the gradients alone; sampled Fisher or exact GGN "
                "curvature is more accurate."
            )
            yield Finding(FAIR, words, "empirical Fisher")
        yield self._stability()
        if self.drift:
            words = (
                f"Per-parameter learning rates change by {self.drift:.1%} from step to step; this change is ignored."
            )
            yield Finding(FAIR if self.drift >= DRIFTED else GOOD, words, f"rates drift {self.drift:.0%}")
        if self.clipped:
            words = f"{self.clipped:.0%} of the steps were clipped; the derivative of clipping is included."
            yield Finding(GOOD, words, "clipping followed")

    def _stability(self) -> Finding:
        where = "" if self.largest_growth_step is None else f" (at step {self.largest_growth_step})"
        words = f"Peak learning rate × curvature is {self.largest_growth:.0%} of the stability limit{where}"
        if self.largest_growth <= 1:
            return Finding(GOOD, f"{words}.", "stable")
        count = len(self.expanding_steps)
        above = f"{count} of {self.steps} steps {'is' if count == 1 else 'are'} above it"
        meaning = "Samples used up to then get less reliable scores; a lower or slower-rising learning rate avoids it."
        return Finding(FAIR, f"{words}; {above}. {meaning}", f"{count:,} unstable step{'s' * (count != 1)}")


def _share(share: float, fair: float) -> str:
    return WEAK if share < LOST else GOOD if share > fair else FAIR
