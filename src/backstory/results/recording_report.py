"""What one pass over a run measured about its recording, in numbers and plain sentences.

It judges nothing: how well results rank samples is measured on the run itself (`results.quality`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from .row import Row

RETAINED, COVERED, DRIFTED = 0.8, 0.999, 0.1  # beyond these something is left out that costs accuracy
EARLY = (
    "Recorded curvature can only shrink an influence as it passes through later steps, so samples used early get too small "
    "an influence and are ranked less reliably."
)


MIXES = {
    "loss": "the loss compares samples of a batch with each other",
    "layers": "layers of the model mix the samples of a batch",
}


def mixing(found: Mapping[str, str] | None) -> str:
    """What the first step showed of samples that affect each other, in words; empty where nothing."""
    what = [words for name, words in MIXES.items() if (found or {}).get(name) == "found"]
    if not what:
        return ""
    return (
        f"{' and '.join(what)}, so recorded gradients leave out what a sample does to the others in its batch, and may rank "
        "poorly: exact results and training again (leave-out) are right, or groups= where several rows are one sample"
    )


class Finding(NamedTuple):
    """One sentence, and whether it is of something that is known to cost accuracy."""

    words: str
    costs: bool = False


@dataclass(frozen=True)
class RecordingReport(Row):
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
    mixing: str = ""  # how samples of a batch affect each other's gradients, where the first step showed it
    drift: float = 0.0  # mean change of the log of Adam's rates from step to step, root mean square over parameters

    @classmethod
    def from_dict(cls, report: Mapping[str, Any]) -> "RecordingReport":
        """From what `as_dict` returned, or what is stored with embeddings."""
        known = {f.name: report[f.name] for f in fields(cls) if f.name in report}
        return cls(**{**known, "expanding_steps": tuple(known.get("expanding_steps", ()))})

    def measured(self) -> dict[str, Any]:
        """The measured values alone, as a run stores them."""
        return {**asdict(self), "expanding_steps": list(self.expanding_steps)}

    @property
    def words(self) -> tuple[str, ...]:
        """Everything that was measured, in plain sentences, what costs accuracy first."""
        return tuple(f.words for f in sorted(self._findings(), key=lambda f: not f.costs))

    def _findings(self) -> Iterator[Finding]:
        if not self.steps:
            return
        yield Finding(f"{self.optimizer}'s steps are modelled {self.modelled}.", self.proxy)
        yield Finding(
            f"Recorded parameters cover {self.coverage:.1%} of the gradient (squared norm).", self.coverage <= COVERED
        )
        if self.projection in ("learned", "mask"):  # of a random or a full one the share says nothing
            words = f"The projection retains {self.retained:.0%} of the gradients' squared norm."
            yield Finding(words, self.retained <= RETAINED)
        if self.curvature.startswith("empirical"):
            words = (
                "Curvature is the empirical Fisher, computed from the gradients alone; sampled Fisher or exact GGN "
                "curvature is more accurate."
            )
            yield Finding(words, costs=True)
        if self.mixing:
            yield Finding(f"{self.mixing[0].upper()}{self.mixing[1:]}.", costs=True)
        yield self._stability()
        if self.drift:
            words = (
                f"Per-parameter learning rates change by {self.drift:.1%} from step to step; this change is ignored."
            )
            yield Finding(words, self.drift >= DRIFTED)
        if self.clipped:
            yield Finding(f"{self.clipped:.0%} of the steps were clipped; the derivative of clipping is included.")
        yield Finding(EARLY)

    def _stability(self) -> Finding:
        where = "" if self.largest_growth_step is None else f" (at step {self.largest_growth_step})"
        words = f"Peak learning rate × curvature is {self.largest_growth:.0%} of the stability limit{where}"
        if self.largest_growth <= 1:
            return Finding(f"{words}.")
        count = len(self.expanding_steps)
        above = f"{count} of {self.steps} steps {'is' if count == 1 else 'are'} above it"
        meaning = "Samples used up to then get less reliable scores; a lower or slower-rising learning rate avoids it."
        return Finding(f"{words}; {above}. {meaning}", costs=True)
