"""What a run takes on disk: bytes per occurrence against float16 × 1,024 random dimensions a layer, curvature alike."""

import tempfile
from pathlib import Path
from typing import Any

from experiments.bench.recording import OWN, Say, quiet
from experiments.bench.training import Settings, recorded_run, sizes
from experiments.bench.workloads import SCALES
from experiments.harness import STEPS as EVERY_STEP

REFERENCE: Settings = {"projection": "random", "rank": 32, "encoding": "float16"}
OWN_SETTINGS: Settings = {"rank": 16, **EVERY_STEP}
STORES: dict[str, Settings] = {
    "default": {},
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
    "float16": {"encoding": "float16"},
    "empirical": {"curvature": "empirical"},
    OWN: OWN_SETTINGS,
    f"{OWN}, int8": {**OWN_SETTINGS, "encoding": "int8"},
    f"{OWN}, sampled:1/6": {**OWN_SETTINGS, "curvature": "sampled:1/6"},
}
COMPRESSED: dict[str, Settings] = {
    f"{OWN}, compressed": OWN_SETTINGS,
    f"{OWN}, int8, compressed": {**OWN_SETTINGS, "encoding": "int8"},
}
WINDOW = 2048  # occurrences of a run that is compressed: one window, as `compress` chooses them
LEARNED_FROM = 8  # steps: the size of a row does not depend on how well its projection was learned
STEPS = LEARNED_FROM + 4


def bench_store(*, scale: str = "full", say: Say = quiet) -> list[dict[str, Any]]:
    """One line for each configuration of B, and for the reference of each curvature setting."""
    work, lines = SCALES[scale]["B"], []
    references: dict[str, float] = {}
    for name, settings in {**STORES, **COMPRESSED}.items():
        say(f"store: B, {name}")
        line = {"configuration": name, **_recorded(work.name, scale, settings, compress=name in COMPRESSED)}
        curvature = line["curvature"]
        if curvature not in references:
            result = _recorded(work.name, scale, {**REFERENCE, "curvature": curvature})
            references[curvature] = result["bytes_per_occurrence"]
            lines.append({"configuration": f"reference: random 32×32, {curvature}", **result, "times_smaller": 1.0})
        lines.append({**line, "times_smaller": references[curvature] / line["bytes_per_occurrence"]})
    return lines


def _recorded(workload: str, scale: str, settings: Settings, *, compress: bool = False) -> dict[str, Any]:
    work = SCALES[scale][workload]
    steps = STEPS
    if scale == "full" and compress:
        steps = WINDOW // work.batch
    elif scale == "full" and "curvature_of" not in settings and "projection" not in settings:
        steps = work.steps  # windows: a run of this length shares their curvature
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder) / "run", Path(folder) / "small"
        run, _ = recorded_run(work, path, {**settings, "warmup_steps": LEARNED_FROM}, steps)
        if compress:
            run.compress(small)
        return sizes(small if compress else path)
