"""How far answers can be trusted, in one word with its reason, from the report that a run holds on itself.

    weak        the optimizer is not followed, or more than half of the gradients' energy is not there
    fair        something is assumed or left out that is known to cost accuracy
    good        nothing in the report speaks against the answers
    not known   there is no report

The word judges what was recorded. How right an answer is, only retraining measures.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .schemas import Trust

GOOD, FAIR, WEAK, NOT_KNOWN = "good", "fair", "weak", "not known"
KNOWN = ("clipped", "coverage", "kept", "drift", "largest_growth", "largest_growth_step")
LOST = (
    0.5  # below this share most of the gradient is not there; the bounds of `fair` are those of the report's own words
)
EARLY = (
    "Early steps are understated: recorded curvature only shrinks an influence on its way through later steps, so samples that were "
    "used early come out too small and are ranked less well."
)
NOTHING = "The run holds no report on itself for this model: ask at the final model, or run `backstory embed RUN`."


class Reason(NamedTuple):
    """What speaks against the answers, and how much."""

    verdict: str
    words: str


def trust(quality: Mapping[str, Any]) -> Trust:
    """The report as it is sent: the verdict and its reason first."""
    known = {k: _finite(quality[k]) for k in KNOWN if k in quality}
    expanding = {"expanding_steps": len(quality["expanding_steps"])} if "expanding_steps" in quality else {}
    found = verdict(quality)
    return Trust(
        verdict=found.verdict, reason=found.words, early=EARLY, words=list(quality.get("words", ())), **known, **expanding
    )  # fmt: skip


def verdict(quality: Mapping[str, Any]) -> Reason:
    """The word and its reason: the first of the heaviest ones."""
    if not quality:
        return Reason(NOT_KNOWN, NOTHING)
    found = list(_against(quality))
    heaviest = [r for r in found if r.verdict == WEAK] or found
    return heaviest[0] if heaviest else Reason(GOOD, _for(quality))


def _against(v: Mapping[str, Any]) -> Iterator[Reason]:
    if "proxy" in v.get("modelled", ""):
        yield Reason(WEAK, f"{v.get('optimizer', 'The optimizer')}'s steps were treated {v['modelled']}.")
    if (kept := _kept(v)) is not None and kept <= 0.8:
        yield Reason(
            WEAK if kept < LOST else FAIR, f"The projection retains {kept:.0%} of the gradients' squared norm."
        )
    if (held := v.get("coverage", 1.0)) <= 0.999:
        words = f"The recorded parameters hold {held:.1%} of the squared gradient norm."
        yield Reason(WEAK if held < LOST else FAIR, words)
    if str(v.get("curvature", "")).startswith("empirical"):
        yield Reason(
            FAIR, "Curvature is the empirical Fisher, from the gradients alone: the cheapest kind, not the best."
        )
    if (above := len(v.get("expanding_steps", ()))) > 0:
        yield Reason(FAIR, f"{above} of {v.get('steps', 'the')} steps are above the stable limit of rate × curvature.")
    if (drift := v.get("drift", 0.0)) >= 0.1:
        yield Reason(FAIR, f"Adam's rates change by {drift:.0%} from step to step, and that change is left out.")


def _for(v: Mapping[str, Any]) -> str:
    kept = _kept(v)
    part = "" if kept is None else f", and the projection retains {kept:.0%} of the gradients' squared norm"
    return f"{v.get('optimizer', 'The optimizer')}'s steps are modelled {v.get('modelled', 'as they were')}{part}."


def _kept(v: Mapping[str, Any]) -> float | None:
    """The share of the energy in the projection; a random or a full one is not judged by it."""
    return float(v["kept"]) if v.get("projection") in ("learned", "mask") and "kept" in v else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
