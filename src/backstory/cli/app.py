"""The commands. Each parses its arguments, calls one function, and prints text or JSON."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import BackstoryError
from . import demo, exact, insight, inspect, leave_out, output, plan, quality, query, recipe, recipes, serve
from .options import At, Contraction, Encoding, Json, PerLayer, RunPath, parse_ids

HELP = "Which training samples made the model do that, and when?"
app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback(help=HELP)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options of no command."""


def embed(
    run: RunPath,
    at: At = "final",
    per_layer: PerLayer = False,
    contraction: Contraction = "auto",
    encoding: Encoding = "float16",
    segments: Annotated[
        int | None,
        typer.Option(help="Number of segments (Algorithm 2); gives results at every checkpoint.", min=1),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Parallel processes; without --segments, also the number of segments.", min=1)
    ] = 1,
    json: Json = False,
) -> None:
    """Compute data value embeddings (Algorithms 1 and 2 of Wang et al., ICLR 2025)."""
    from ..run.run import Run

    with output.one_bar("embed") as progress:
        report = Run(run).embed(
            at, per_layer=per_layer, contraction=contraction, encoding=encoding, segments=segments, workers=workers,
            progress=progress,
        )  # fmt: skip
    if json:
        output.emit(report.as_dict())
        return
    cut = f"{report.segments} segments, " if report.segments > 1 else ""
    output.line(
        f"{report.occurrences:,} embeddings of {report.dims:,} dimensions for the model at step {report.at}, {report.form}, "
        f"{'per layer' if report.per_layer else 'joint'}, {cut}{report.seconds:.1f} s."
    )
    if report.expanding_steps:
        steps = ", ".join(map(str, report.expanding_steps[:10]))
        output.line(f"Steps that expand in the literal form (learning rate × curvature above its limit): {steps}")


def compress(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="A new folder for the compressed run.", show_default=False)],
    rank: Annotated[int, typer.Option(help="Curvature directions per window (0 keeps all).", min=0)] = 512,
    windows: Annotated[
        int | None,
        typer.Option(help="Number of windows, for a run without any; chosen automatically if not given.", min=1),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="float16, int8, float32 or float64; the run's own if not given.", metavar="NAME")
    ] = None,
    json: Json = False,
) -> None:
    """Write a smaller copy of a run: fewer curvature directions per window, or another encoding."""
    from ..run.run import Run

    with output.one_bar("compress") as progress:
        report = Run(run).compress(out, rank=rank or None, windows=windows, encoding=encoding, progress=progress)
    if json:
        output.emit(report.as_dict())
        return
    output.line(
        f"{report.bytes_before / 1e6:,.1f} MB became {report.bytes_after / 1e6:,.1f} MB in {report.path}: {report.rows:,} "
        f"curvature samples in {report.windows} windows retain {report.energy:.1%} of the curvature's trace."
    )


def export(
    run: RunPath,
    to: Annotated[str, typer.Option(help="File format: parquet or csv.")] = "parquet",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("export"),
    json: Json = False,
) -> None:
    """Write the run's tables as Parquet or CSV, without vectors."""
    from ..run.export import export as export_run

    files = export_run(run, out, to)
    if json:
        output.emit({"files": files})
    else:
        for name, rows in files.items():
            output.line(f"{name}: {rows:,} rows")


def erase(
    run: RunPath,
    ids: Annotated[
        list[str] | None, typer.Argument(help="IDs of the samples whose content to erase.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Erase the content of all samples.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation prompt.")] = False,
    json: Json = False,
) -> None:
    """Erase the content of samples from the disk.

    Text, image, label and source are erased; gradients stay.
    """
    from ..run.run import Run

    if bool(ids) == everything:
        raise typer.BadParameter("name samples, or pass --all (not both).")
    if not yes:
        which = "all samples" if everything else f"{len(ids or [])} samples"
        typer.confirm(f"Erase the content of {which}? This cannot be undone.", abort=True)
    erased = Run(run).erase_content(None if everything else parse_ids(run, ids or []))
    if json:
        output.emit({"erased": erased})
    else:
        output.line(f"Erased the content of {erased:,} samples. Their gradients stay in the run.")


for command in (
    demo.demo, plan.plan, inspect.inspect, embed, query.query, exact.exact, leave_out.leave_out, quality.calibrate, quality.check, *insight.COMMANDS, compress, serve.report, serve.serve, export, erase,
):  # fmt: skip
    app.command()(command)
app.add_typer(recipe.recipe, name="recipe")


def main() -> None:
    """Entry point."""
    recipes.leave_the_folder_out()
    guarded(app)


def guarded(commands: typer.Typer) -> None:
    """Run the command that was typed; a user error is one plain sentence and exit code 2."""
    try:
        commands()
    except BackstoryError as error:
        output.err.print(f"backstory: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
