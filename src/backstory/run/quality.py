"""How far a run's answers can be trusted, from what was recorded, in numbers and in plain words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from ..capture.optimizers import listed
from ..maths.steps import growth
from ..store import RunStore
from .sweep import Chunk, backward

MEANS = ("clipped", "coverage", "kept", "drift")  # over the steps


@dataclass
class Quality:
    """What one pass over the rows before a step has shown."""

    steps: int
    clipped: float  # share of steps whose gradient was clipped
    coverage: float  # mean share of the squared norm of the gradients that the optimizer used, in recorded parameters
    optimizer: str
    modelled: str  # "exactly", or what was assumed
    curvature: str
    projection: str
    kept: float = 0.0  # mean share of the recorded gradient's squared norm that lies in the projection
    largest_growth: float = 0.0  # rate × curvature over its stable limit; above 1 a literal step expands
    largest_growth_step: int | None = None
    expanding_steps: list[int] = field(default_factory=list)  # those above 1
    drift: float = 0.0  # mean change of the log of Adam's rates from step to step, root mean square over parameters

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "words": self.words()}

    def words(self) -> list[str]:
        """The report in plain sentences, weaknesses first."""
        bad: list[str] = []
        good: list[str] = []
        (bad if "proxy" in self.modelled else good).append(f"{self.optimizer}'s steps are modelled {self.modelled}.")
        (good if self.coverage > 0.999 else bad).append(
            f"The recorded parameters hold {self.coverage:.1%} of the squared gradient norm."
        )
        if self.projection in ("learned", "mask"):
            (good if self.kept > 0.8 else bad).append(
                f"The projection retains {self.kept:.0%} of the gradients' squared norm."
            )
        where = "" if self.largest_growth_step is None else f", at step {self.largest_growth_step}"
        (good if self.largest_growth <= 1 else bad).append(
            f"The largest rate × curvature is {self.largest_growth:.2g} times its stable limit{where}"
            + (
                "."
                if self.largest_growth <= 1
                else f"; {len(self.expanding_steps)} of {self.steps} steps are above it."
            )
        )
        if self.drift:
            (good if self.drift < 0.1 else bad).append(
                f"Adam's rates of single parameters change by {self.drift:.1%} from step to step; that change is left out."
            )
        if self.curvature == "empirical":
            bad.append(
                "Curvature is the empirical Fisher, from the gradients alone; sampled or exact rows follow the loss better."
            )
        if self.clipped:
            good.append(f"{self.clipped:.0%} of the steps were clipped; clipping's derivative is followed.")
        return bad + good


def without(optimizer: Mapping[str, Any]) -> str:
    """What a run leaves out of its optimizer's steps, where they were taken as plain SGD steps; empty where nothing."""
    if optimizer["modelled_as"] != "sgd":
        return ""
    if "dropped" in optimizer:
        return listed(optimizer["dropped"])
    return "momentum and weight decay, if it had any" if optimizer["class"] == "SGD" else "its own way of stepping"


def _modelled(optimizer: Mapping[str, Any]) -> str:
    if dropped := without(optimizer):
        return f"as plain SGD steps, the paper's proxy, without {dropped}"
    if optimizer["class"] == "SGD":
        return "exactly"
    how = "with its second moment as it was in the run"
    return f"{how}, factored over rows and columns" if optimizer.get("coordinates") == "preconditioned" else how


class Watch:
    """Takes in a run's steps as a sweep passes them, in any order, and becomes its report."""

    def __init__(self, store: RunStore, at: int, start: int = 0) -> None:
        table = store.steps(start, at)
        settings, optimizer = store.config["settings"], store.config["optimizer"]
        self.report = Quality(
            steps=at - start,
            clipped=float((table.clip < 1).mean()) if at > start else 0.0,
            coverage=float(table.trained.mean()) if at > start else 1.0,
            optimizer=optimizer["class"],
            modelled=_modelled(optimizer),
            curvature=settings["curvature"],
            projection=settings["projection"],
        )
        self.report.drift = float(table.drift.mean()) if at > start else 0.0
        self._start, self._squares = (
            start,
            table.size.tolist(),
        )  # ‖∇L‖² of the recorded parameters in the run's coordinates
        self._kept = self._seen = 0.0

    def see(self, chunk: Chunk) -> None:
        """The steps of one chunk."""
        for number, step in enumerate(chunk.steps, chunk.first_step):
            found, whole = growth(step), self._squares[number - self._start]
            if found > 1:
                self.report.expanding_steps.append(number)
            if found > self.report.largest_growth:
                self.report.largest_growth, self.report.largest_growth_step = found, number
            self._kept += float((step.w @ step.G).square().sum()) / whole if whole else 1.0
            self._seen += 1

    def done(self) -> Quality:
        """The report on everything seen."""
        self.report.kept = self._kept / max(1.0, self._seen)
        self.report.expanding_steps.sort()
        return self.report


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reports of consecutive parts of a run as one report on the whole."""
    known = {f.name for f in fields(Quality)}
    parts = [Quality(**{k: v for k, v in r.items() if k in known}) for r in reports]
    steps, worst = sum(p.steps for p in parts), max(parts, key=lambda p: p.largest_growth)
    means = {k: sum(p.steps * getattr(p, k) for p in parts) / max(1, steps) for k in MEANS}
    expanding = sorted(t for p in parts for t in p.expanding_steps)
    return replace(worst, steps=steps, expanding_steps=expanding, **means).as_dict()


def quality(store: RunStore, at: int) -> Quality:
    """One pass over the rows before step `at`."""
    watch = Watch(store, at)
    for chunk in backward(store, at, dtype=torch.float32):
        watch.see(chunk)
    return watch.done()
