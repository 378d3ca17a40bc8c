"""Measure a recording during a sweep over its steps; `results.recording_report` words it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capture.optimizers import listed
from ..maths.steps import growth
from ..results.recording_report import RecordingReport, mixing
from ..store import RunStore
from ..store.bases import PRECONDITIONED
from .sweep import Chunk, backward

MEANS = ("clipped", "coverage", "retained", "drift")  # over the steps


def without(optimizer: Mapping[str, Any]) -> str:
    """What a run leaves out of its optimizer's steps, where they were taken as plain SGD steps; empty where nothing."""
    return listed(optimizer["dropped"]) if optimizer["modelled_as"] == "sgd" else ""


def _modelled(config: Mapping[str, Any]) -> str:
    if dropped := without(config["optimizer"]):
        return f"as plain SGD (the paper's proxy), without {dropped}"
    how = "with the second moment of the run"
    if config["optimizer"].get("coordinates") == PRECONDITIONED:
        return f"{how}, factored over rows and columns"
    return how if config["diagonal"] else "exactly"


class Watch:
    """Takes in a run's steps as a sweep passes them, in any order, and becomes its report."""

    def __init__(self, store: RunStore, at: int, start: int = 0) -> None:
        table = store.steps(start, at)
        settings, optimizer = store.config["settings"], store.config["optimizer"]
        self._known = RecordingReport(
            steps=at - start,
            clipped=float((table.clip < 1).mean()) if at > start else 0.0,
            coverage=float(table.trained.mean()) if at > start else 1.0,
            optimizer=optimizer["class"],
            modelled=_modelled(store.config),
            proxy=bool(without(optimizer)),
            curvature=settings["curvature"],
            projection=settings["projection"],
            mixing=mixing(store.config.get("mixing")),
            drift=float(table.drift.mean()) if at > start else 0.0,
        )
        self._start, self._squares = start, table.size.tolist()  # ‖∇L‖² of the recorded parameters
        self._growth: dict[int, float] = {}  # step -> rate × curvature over its stable limit
        self._retained = 0.0

    def see(self, chunk: Chunk) -> None:
        """The steps of one chunk."""
        for number, step in enumerate(chunk.steps, chunk.first_step):
            whole = self._squares[number - self._start]
            self._growth[number] = growth(step)
            self._retained += float((step.w @ step.G).square().sum()) / whole if whole else 1.0

    def done(self) -> RecordingReport:
        """The report on everything seen."""
        step, largest = max(self._growth.items(), key=lambda x: (x[1], -x[0]), default=(0, 0.0))
        return replace(
            self._known,
            retained=self._retained / max(1, len(self._growth)),
            largest_growth=largest,
            largest_growth_step=step if largest else None,
            expanding_steps=tuple(sorted(t for t, x in self._growth.items() if x > 1)),
        )


def read_report(settings: Mapping[str, Any]) -> RecordingReport | None:
    """The report that is stored beside embeddings, in their settings."""
    stored = settings.get("recording")
    return None if stored is None else RecordingReport.from_dict(stored)


def merged(parts: Sequence[RecordingReport]) -> RecordingReport:
    """The reports on consecutive parts of a run as one report on the whole."""
    steps, worst = sum(p.steps for p in parts), max(parts, key=lambda p: p.largest_growth)
    means = {k: sum(p.steps * getattr(p, k) for p in parts) / max(1, steps) for k in MEANS}
    expanding = tuple(sorted(t for p in parts for t in p.expanding_steps))
    return replace(worst, steps=steps, expanding_steps=expanding, **means)


def report_on(store: RunStore, at: int) -> RecordingReport:
    """One pass over the rows before step `at`."""
    watch = Watch(store, at)
    for chunk in backward(store, at, dtype=torch.float32):
        watch.see(chunk)
    return watch.done()
