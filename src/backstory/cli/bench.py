"""`backstory bench`: speed against rivals, in one run, one thread.

Knows nothing of how it is measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import show

app = typer.Typer(help="Measure speed; one thread, medians of interleaved repeats.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last.")]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@app.command()
def embed(
    p: Annotated[int, typer.Option(help="Dimensions.", min=1)] = 1024,
    batch: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    json: Json = False,
) -> None:
    """The backward recursion against the best matrix product and the paper's pseudocode."""
    from ..benchmarks import bench_embed

    _one_thread()
    _show("embed", bench_embed(p=p, batch=batch, repeats=repeats), json)


@app.command()
def record(repeats: Annotated[int, typer.Option(min=1)] = 7, json: Json = False) -> None:
    """Recorded against plain training."""
    from ..benchmarks import bench_record

    _one_thread()
    _show("record", bench_record(repeats=repeats), json)


@app.command(name="all")
def everything(
    write: Annotated[Path | None, typer.Option(help="A Markdown file for the figures.")] = None, json: Json = False
) -> None:
    """Every benchmark, one after the other."""
    from ..benchmarks import bench_embed, bench_record

    _one_thread()
    work: dict[str, Callable[[], dict[str, Any]]] = {"embed": bench_embed, "record": bench_record}
    found = {name: run() for name, run in work.items()}
    if write is not None:
        write.write_text(_markdown(found), encoding="utf-8")
    for name, values in found.items():
        _show(name, values, False)
    if json:
        show.emit(found)


def _show(name: str, values: dict[str, Any], json: bool) -> None:
    if json:
        show.emit(values)
        return
    show.table(name, ("what", "value"), [(k, _short(v)) for k, v in values.items() if not isinstance(v, list)])
    for workload in values.get("workloads", []):
        show.table(workload["name"], ("what", "value"), [(k, _short(v)) for k, v in workload.items() if k != "name"])


WORDS = [
    "`share_of_peak`: 4 p² operations for each row, over the speed of a 2048 × 2048 float32 product in the same run.",
    "`against_literal`: how many times as fast as the paper's pseudocode, transcribed line by line. `damped`: the implicit",
    "form at every step. `ratio` and `cpu_ratio`: recorded over plain training, wall and CPU time, disk included.",
]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(found: dict[str, dict[str, Any]]) -> str:
    import platform

    import torch

    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench`: one thread, medians of interleaved repeats, "
        f"{platform.machine()}, torch {torch.__version__}.",
    ]
    lines += ["", *WORDS]
    for name, values in found.items():
        lines += ["", f"## `backstory bench {name}`", "", "| what | value |", "|---|---|"]
        lines += [f"| {k} | {_short(v)} |" for k, v in values.items() if not isinstance(v, list)]
        for workload in values.get("workloads", []):
            lines += ["", f"**{workload['name']}**", "", "| what | value |", "|---|---|"]
            lines += [f"| {k} | {_short(v)} |" for k, v in workload.items() if k != "name"]
    return "\n".join(lines) + "\n"
