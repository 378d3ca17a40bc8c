"""What recording costs: the same training steps, plain and recorded, in turns, disk included.

A run of N steps is taken in turns of a few steps: plain, then each configuration, then plain again. A learned projection is
known only after its warm-up, so there are three figures:

    ratio        recorded turn / plain turn beside it, the median over the turns after the warm-up, disk included
    mean_cpu_ratio   all these turns together, in CPU time: also of windows that are closed in a few of them only
    one_off_s    seconds that the turns of the warm-up took more than as many steady turns: learning the projection
    learning_s   the same in CPU time
    peak_memory_ratio   the highest memory of a process that trains and records, beyond an idle one, over that of one that trains
    run_ratio    the whole run of N steps, opening and closing included, over the plain one
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backstory.recording.settings import PRESETS
from backstory.recording.settings import Settings as RecordSettings
from backstory.run.run import Run
from backstory.store import RunStore
from experiments.bench.children import in_child
from experiments.bench.planning import planned
from experiments.bench.timing import Times, median, peak_bytes, timed, total, turns
from experiments.bench.training import Plain, Recorded, Settings, sizes
from experiments.bench.workloads import SCALES, Workload
from experiments.harness import STEPS

Say = Callable[[str], None]
JOINT = 10_000  # numbers a row, at most, that are embedded jointly here

OWN = "own: learned 16×16, every step's curvature"  # every occurrence keeps its own curvature samples
CONFIGURATIONS: dict[str, Settings] = {
    "default": {},
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
    OWN: {"rank": 16, "warmup_steps": 20, **STEPS},
    "paper: random 32×32, empirical": {"projection": "random", "rank": 32, "curvature": "empirical"},
}
STUDIED = {  # the configuration's line in `python -m experiments gpt`
    "default": "default",
    "fast": "fast",
    "best": "best",
    OWN: "learned-16-empirical/6",
    f"{OWN}, compressed": "learned-16-empirical/6-compressed",
}
COMPRESSED = (OWN,)  # configurations that are compressed afterwards, where they have curvature rows
REMEMBERED = 20  # steps of a process whose memory is looked at
EMBEDDED = 1024  # occurrences whose embedding is timed, at most


def quiet(text: str) -> None:
    """Says nothing."""


def bench_record(
    *,
    workloads: Sequence[str] = "ABCDE",
    scale: str = "full",
    study: Mapping[str, Any] | None = None,
    say: Say = quiet,
) -> dict[str, Any]:
    """One line for each workload and configuration; `study`, what `experiments gpt --json` found, gives language models' fidelity."""
    rows: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    known = {row["method"]: row["mean"] for row in (study or {}).get("rows", [])}
    for name in workloads:
        work = SCALES[scale][name]
        say(f"record: {work.words}, {work.steps} steps, plain and {len(CONFIGURATIONS)} configurations in turns")
        lines = compare(work, for_workload(work))
        say(f"record: what `backstory plan` says of {work.name}")
        plans.append(planned(work, lines[0], seconds=1.0 if scale == "full" else 0.01))
        fidelity = {name: known.get(row) for name, row in STUDIED.items()} if work.language else {}
        rows += [{**line, "fidelity": fidelity.get(line["configuration"])} for line in lines]
    return {"threads": torch.get_num_threads(), "rows": rows, "plans": plans}


def for_workload(work: Workload) -> dict[str, Settings]:
    """The configurations as they make sense there: samples without positions have no groups of them."""
    if work.language:
        return CONFIGURATIONS
    return {**CONFIGURATIONS, OWN: {**CONFIGURATIONS[OWN], "curvature": "empirical"}}


def compare(work: Workload, configurations: Mapping[str, Settings]) -> list[dict[str, Any]]:
    """Plain training and each configuration, in turns; one line for each configuration."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / str(i) for i, name in enumerate(configurations)}
        loops: dict[str, Plain] = {"plain": Plain(work)}
        ends: dict[str, Times] = {}  # opening and closing
        try:
            for name, settings in configurations.items():
                ends[name] = timed(partial(_open, loops, name, paths[name], settings))
            took = turns({name: _turn(loop) for name, loop in loops.items()}, work.steps // work.turn)
        finally:
            for name, loop in loops.items():
                if isinstance(loop, Recorded):
                    ends[name] = total([ends[name], timed(loop.close)])
        lines = []
        for name, path in paths.items():
            warm = warmup(configurations[name])
            seen = {"workload": work.words, **figures(work, took["plain"], took[name], ends[name], warm)}
            remembered = {"peak_memory_ratio": peak_memory(work, configurations[name])}
            lines.append({**seen, **remembered, "configuration": name, **sizes(path), **embedding(path)})
            if name in COMPRESSED and RunStore.open(path).curvature_rows:
                lines.append({**seen, **remembered, "configuration": f"{name}, compressed", **compressed(path)})
        return lines


def peak_memory(work: Workload, settings: Settings) -> float:
    """Of the recorded training over the plain one's, each in a process of its own, beyond what an idle one has."""
    peaks = [
        in_child("experiments.bench.recording:remember", {"work": asdict(work), "settings": chosen})
        for chosen in (None, dict(settings))
    ]
    plain, recorded = (x["peak_bytes"] - x["idle_bytes"] for x in peaks)
    return float(recorded / max(1, plain))


def remember(work: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train for a few steps, in a process of one's own; what it had before."""
    torch.set_num_threads(1)
    asked, idle = Workload(**work), peak_bytes()
    if settings is None:
        Plain(asked).advance(REMEMBERED)
        return {"idle_bytes": idle}
    with tempfile.TemporaryDirectory() as folder:
        loop = Recorded(asked, Path(folder) / "run", settings)
        loop.advance(REMEMBERED)
        loop.close()
    return {"idle_bytes": idle}


def compressed(path: Path) -> dict[str, Any]:
    """What `compress` makes of a run: its seconds, and the sizes and the embedding of what it writes."""
    small = path.with_name(f"{path.name}-compressed")
    took = timed(lambda: Run(path).compress(small))
    return {"compress_s": took.wall, **sizes(small), **embedding(small)}


def embedding(path: Path) -> dict[str, Any]:
    """Seconds that embedding the first occurrences takes, joint; per layer where a joint matrix would be too large."""
    run = Run(path)
    starts = run.steps().row_start
    at = max(1, int((starts < EMBEDDED).sum()))
    per_layer = run.width > JOINT
    took = timed(lambda: run.embed(at, per_layer=per_layer))
    rows = run.n_occurrences if at == run.n_steps else int(starts[at])
    return {"embedding_s": took.wall, "embedded": rows, "jointly": not per_layer}


def _open(loops: dict[str, Plain], name: str, path: Path, settings: Settings) -> None:
    loops[name] = Recorded(loops["plain"].work, path, settings)


def _turn(loop: Plain) -> Callable[[], None]:
    return lambda: loop.advance(loop.work.turn)


def warmup(settings: Settings) -> int:
    """Steps of the warm-up with these settings."""
    chosen = {**PRESETS[settings.get("preset", "default")], **settings}
    return int(chosen.get("warmup_steps", RecordSettings.warmup_steps))


def figures(
    work: Workload, plain: Sequence[Times], recorded: Sequence[Times], ends: Times, warmup: int
) -> dict[str, Any]:
    """The figures of one configuration from the times of its turns, and of its opening and closing."""
    warm = min(-(-warmup // work.turn), len(plain) - 1)  # turns that may hold a part of the warm-up
    steady, pairs = median(recorded[warm:]), list(zip(plain[warm:], recorded[warm:], strict=True))
    before, whole = total(recorded[:warm]), total([*recorded, ends])
    return {
        "ratio": statistics.median(r.wall / p.wall for p, r in pairs),
        "cpu_ratio": statistics.median(r.cpu / p.cpu for p, r in pairs),
        "mean_cpu_ratio": total(recorded[warm:]).cpu / total(plain[warm:]).cpu,
        "one_off_s": before.wall - warm * steady.wall,
        "one_off_cpu_s": before.cpu - warm * steady.cpu,
        "learning_s": max(0.0, before.cpu - warm * steady.cpu),
        "steps": len(plain) * work.turn,
        "run_ratio": whole.wall / total(plain).wall,
        "run_cpu_ratio": whole.cpu / total(plain).cpu,
        "plain_ms_per_step": 1e3 * median(plain[warm:]).wall / work.turn,
        "recorded_ms_per_step": 1e3 * steady.wall / work.turn,
        "turns": len(pairs),
    }
