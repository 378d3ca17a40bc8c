"""`python -m experiments bench`: speed against rivals, in one run, one thread."""

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from backstory.errors import UsageError
from experiments.cli import Json, app

bench = typer.Typer(help="Measure speed; one thread, medians of interleaved repeats.", no_args_is_help=True)
Repeats = Annotated[int, typer.Option(help="Repeats of what is short.", min=1)]
Scale = Annotated[str, typer.Option(help="full, or tiny to try the commands.", hidden=True)]
Venvs = Annotated[Path, typer.Option(help="Folder for the rivals' virtual environments, made when they are missing.")]
Study = Annotated[
    Path | None,
    typer.Option(help="Output of `python -m experiments gpt --json`, for the fidelity of each configuration."),
]
PEERS = Path(".peers")
app.add_typer(bench, name="bench")


@bench.command()
def record(
    workloads: Annotated[str, typer.Option(help="Some of A, B, C, D and E.")] = "ABCDE",
    study: Study = None,
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """Recorded against plain training, disk included."""
    _finish("record", _record(scale, workloads, study), json)


@bench.command()
def embed(
    p: Annotated[int, typer.Option(help="Dimensions, in memory.", min=1)] = 1024,
    repeats: Repeats = 5,
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """The backward recursion: in memory, from disk, and how it grows."""
    _finish("embed", _embed(scale, repeats, p), json)


@bench.command()
def query(repeats: Repeats = 3, scale: Scale = "full", json: Json = False) -> None:
    """Index and ask, recording excluded."""
    _finish("query", _query(scale, repeats), json)


@bench.command()
def exact(repeats: Repeats = 2, scale: Scale = "full", json: Json = False) -> None:
    """Exact results, in multiples of the plain training's CPU time."""
    _finish("exact", _exact(scale, repeats), json)


@bench.command()
def store(scale: Scale = "full", json: Json = False) -> None:
    """Bytes per occurrence, and the paper's efficiency table."""
    _finish("store", _store(scale), json)


@bench.command()
def peers(
    venvs: Venvs = PEERS,
    rivals: Annotated[str, typer.Option(help="Some of the rivals, with commas; all without it.")] = "",
    workloads: Annotated[str, typer.Option(help="A, B or both.")] = "AB",
    repeats: Repeats = 3,
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """Rivals on the same workloads, each in an environment of its own."""
    _finish("peers", _peers(scale, repeats, venvs, rivals, workloads), json)


@bench.command()
def device(
    name: Annotated[str, typer.Argument(help="As torch calls it: cuda, cuda:1, mps.")] = "cuda",
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """Is recording right on your GPU, and what does it cost? About 5 minutes.

    Backstory is tested on CPUs only: please send what this prints to the project, failures too.
    """
    from experiments.bench.device import check_device

    result = check_device(name, scale=scale, say=_say)
    _finish("device", result, json)
    if not all(check["passed"] for check in result["checks"]):
        raise typer.Exit(1)


@bench.command()
def serve(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run of text; without it one of 20,480 occurrences is made.", show_default=False),
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 32,
    seconds: Annotated[float, typer.Option(help="How long they ask.", min=0.1)] = 60.0,
    questions: Annotated[int, typer.Option(help="Questions one after the other.", min=1)] = 100,
    starts: Annotated[int, typer.Option(help="Cold starts.", min=1)] = 5,
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """Typed text to ranked answer over HTTP: cold, warm, and many clients at once.

    With RUN, the code of the recipe that the run names is imported.
    """
    output.need("fastapi", "uvicorn", extra="web")
    from experiments.bench.serving import bench_serve

    result = bench_serve(
        run, scale=scale, clients=clients, seconds=seconds, questions=questions, starts=starts, say=_say
    )
    _finish("serve", result, json)


@bench.command(name="all")
def everything(
    write: Annotated[
        Path | None, typer.Option(help="A Markdown file for the tables; a JSON file is written beside it.")
    ] = None,
    study: Study = None,
    venvs: Venvs = PEERS,
    scale: Scale = "full",
    json: Json = False,
) -> None:
    """Every benchmark, one after the other; the file is written after each."""
    from experiments.bench.page import page
    from experiments.pages import write_page

    work: dict[str, Callable[[], dict[str, Any]]] = {
        "record": lambda: _record(scale, "ABC", study),
        "embed": lambda: _embed(scale, 3, 1024),
        "query": lambda: _query(scale, 3),
        "exact": lambda: _exact(scale, 2),
        "store": lambda: _store(scale),
        "peers": lambda: _peers(scale, 1, venvs),  # `query` has the same with more repeats
        "serve": lambda: _serve(scale),
    }
    result: dict[str, dict[str, Any]] = {}
    for name, run in work.items():
        result[name] = run()
        _show(name, result[name])
        if write is not None:
            write_page(write, page(result))
    if json:
        output.emit(result)


def _record(scale: str, workloads: str, study: Path | None) -> dict[str, Any]:
    from experiments.bench.recording import bench_record

    _one_thread()
    result = None if study is None else _last_json(study)
    return bench_record(workloads=workloads, scale=scale, study=result, say=_say)


def _last_json(path: Path) -> dict[str, Any]:
    """The JSON object on the last line of what a command with --json wrote."""
    try:
        value = json_module.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{path} is not the output of a command with --json ({error}). Write it again.") from None
    if not isinstance(value, dict):
        raise UsageError(f"the last line of {path} must be a JSON object, got {type(value).__name__}.")
    return value


def _embed(scale: str, repeats: int, p: int) -> dict[str, Any]:
    from experiments.bench.embedding import bench_in_memory
    from experiments.bench.sweeping import bench_sweep

    _one_thread()
    _say(f"embed: in memory, p = {p}")
    memory = bench_in_memory(p=p, repeats=repeats, rows=4096 if scale == "full" else 32)
    return {"threads": 1, "memory": memory, **bench_sweep(scale=scale, repeats=repeats, say=_say)}


def _query(scale: str, repeats: int) -> dict[str, Any]:
    from experiments.bench.asking import bench_query

    _one_thread()
    return bench_query(scale=scale, repeats=repeats, say=_say)


def _exact(scale: str, repeats: int) -> dict[str, Any]:
    from experiments.bench.exact import bench_exact

    _one_thread()
    return bench_exact(scale=scale, repeats=repeats, say=_say)


def _store(scale: str) -> dict[str, Any]:
    from experiments.bench.efficiency import bench_efficiency
    from experiments.bench.storing import bench_store

    _one_thread()
    rows = bench_store(scale=scale, say=_say)
    return {"threads": 1, "rows": rows, "efficiency": bench_efficiency(scale=scale, say=_say)}


def _peers(scale: str, repeats: int, venvs: Path, names: str = "", workloads: str = "AB") -> dict[str, Any]:
    from experiments.bench.ours import bench_ours
    from experiments.bench.rivals import RIVALS, bench_rivals, named

    chosen = named(names) if names else RIVALS
    _one_thread()
    rows = bench_ours(scale=scale, repeats=repeats, workloads=workloads, say=_say)
    rows += bench_rivals(venvs, scale=scale, rivals=chosen, workloads=workloads, say=_say)
    return {"threads": 1, "rows": sorted(rows, key=lambda row: row["workload"])}


def _serve(scale: str) -> dict[str, Any]:
    from experiments.bench.serving import bench_serve

    output.need("fastapi", "uvicorn", extra="web")
    few: dict[str, Any] = {} if scale == "full" else {"clients": 2, "seconds": 0.5, "questions": 3, "starts": 1}
    return bench_serve(scale=scale, say=_say, **few)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _say(text: str) -> None:
    output.err.print(text, highlight=False, markup=False, soft_wrap=True)


def _finish(name: str, values: dict[str, Any], json: bool) -> None:
    if json:
        output.emit(values)
    else:
        _show(name, values)


def _show(name: str, values: dict[str, Any]) -> None:
    """The tables of one benchmark."""
    from experiments.bench.page import TABLES, filled, short

    for part, columns in TABLES[name].items():
        rows = values.get(part, [])
        kept = filled(rows, columns)
        cells = [[short(row.get(key)) for key, _ in kept] for row in rows]
        output.table(f"{name}: {part}", [heading for _, heading in kept], cells)
