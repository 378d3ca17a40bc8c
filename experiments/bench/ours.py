"""Backstory as a line beside its rivals: recording against plain training in turns, then index and questions."""

import tempfile
from pathlib import Path
from typing import Any

from backstory._version import __version__
from backstory.run.run import Run
from experiments.bench.asking import ASKED, questions
from experiments.bench.recording import Say, figures, quiet, warmup
from experiments.bench.rivals import with_ratios
from experiments.bench.timing import interleave, timed, total, turns
from experiments.bench.training import Plain, Recorded, Settings, sizes
from experiments.bench.workloads import SCALES, Workload


def bench_ours(
    *, scale: str = "full", repeats: int = 3, workloads: str = "AB", say: Say = quiet
) -> list[dict[str, Any]]:
    """One line for each workload and configuration, as a rival's."""
    lines = []
    for workload in workloads:
        for name, (settings, per_layer) in ASKED.items():
            say(f"peers: Backstory on {workload}, {name}")
            result = _measured(SCALES[scale][workload], settings, per_layer, repeats)
            lines.append(
                {
                    "rival": "Backstory",
                    "workload": workload,
                    **with_ratios(result),
                    "configuration": f"{result['settings']}, {'per layer' if per_layer else 'joint'}",
                }
            )
    return lines


def _measured(work: Workload, settings: Settings, per_layer: bool, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        plain, recorded = Plain(work), Recorded(work, path, settings)
        try:
            loops = {"plain": lambda: plain.advance(work.turn), "record": lambda: recorded.advance(work.turn)}
            took = turns(loops, work.epoch // work.turn)
            rest = timed(lambda: recorded.advance(work.epoch - recorded.at))
        finally:
            ends = timed(recorded.close)
        steady = figures(work, took["plain"], took["record"], total([rest, ends]), warmup(settings))
        asked = interleave(questions(Run(path), recorded.model, work, per_layer), repeats)
        kept = sizes(path)
    steps = work.epoch / 1e3
    return {
        "version": __version__,
        "settings": kept["settings"],
        "dims": kept["dims"],
        "store_bytes": round(kept["bytes_per_occurrence"] * kept["occurrences"]) + kept["other_bytes"],
        "kept": "on disk, embeddings among it",
        "plain_s": steps * steady["plain_ms_per_step"],
        "record_s": steps * steady["recorded_ms_per_step"],
        "one_off_s": steady["one_off_s"],
        "index_s": asked["index"].wall,
        "query_s": asked["embeddings"].wall,
        "adjoint_s": asked["adjoint"].wall,
        "index_cpu_s": asked["index"].cpu,
        "query_cpu_s": asked["embeddings"].cpu,
        "adjoint_cpu_s": asked["adjoint"].cpu,
        "query_over_passes": asked["embeddings"].cpu / asked["passes"].cpu,
    }
