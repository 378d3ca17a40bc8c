"""The commands. Each parses its arguments, calls one function, and prints text or JSON."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import BackstoryError
from . import compress, data, datasets, demo, insight, plan, recipes, report, serve, show
from .options import Json

app = typer.Typer(
    help="Which training examples made the model do that, and when?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(datasets.app, name="data")

RunPath = Annotated[Path, typer.Argument(help="The folder of a recorded run.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Which training examples made the model do that, and when?"""


app.command()(demo.demo)
app.command()(plan.plan)


@app.command()
def inspect(
    run: RunPath,
    verify: Annotated[bool, typer.Option(help="Read everything again and check it against its checksums.")] = False,
    json: Json = False,
) -> None:
    """Say what a run holds, and whether it is sound."""
    from ..run.export import inspect as inspect_run

    found = inspect_run(run, verify=verify)
    if json:
        show.emit(found)
    else:
        for section, values in found.items():
            if isinstance(values, dict):
                show.table(section, ("what", "value"), list(values.items()))
            elif isinstance(values, list):
                lines = [str(x) for x in values]
                show.out.print(f"{section}: " + ("; ".join(lines) if lines else "none"), soft_wrap=True)
            else:
                show.out.print(f"{section}: {values}", soft_wrap=True)
    if found.get("damage"):
        raise typer.Exit(1)


@app.command()
def embed(
    run: RunPath,
    at: Annotated[str, typer.Option(help="final, or the step whose model is asked.")] = "final",
    per_layer: Annotated[bool, typer.Option(help="Take parameters as independent, as the paper does.")] = False,
    literal: Annotated[
        bool, typer.Option(help="The paper's literal recursion, which noisy curvature can expand.")
    ] = False,
    encoding: Annotated[str, typer.Option(help="float16, int8, float32 or float64.")] = "float16",
    segments: Annotated[
        int | None,
        typer.Option(help="Cut the run into so many parts (Algorithm 2): answers at every checkpoint.", min=1),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(help="Processes that embed segments at the same time; without --segments as many parts.", min=1),
    ] = 1,
    json: Json = False,
) -> None:
    """Compute the data value embedding of every occurrence (Algorithms 1 and 2)."""
    from ..run.run import Run

    with show.progress() as say:
        report = Run(run).embed(
            data.at(at),
            per_layer=per_layer,
            contraction="never" if literal else "auto",
            encoding=encoding,
            segments=segments,
            workers=workers,
            progress=lambda done, total: say("embed", done, total),
        )
    if json:
        show.emit(report.as_dict())
        return
    show.out.print(
        f"{report.occurrences:,} embeddings of {report.dims:,} dimensions for the model at step {report.at}, "
        f"{report.form}, {'per layer' if report.per_layer else 'joint'}, "
        + (f"{report.segments} segments, " if report.segments > 1 else "")
        + f"{report.seconds:.1f} s."
    )
    if report.expanding_steps:
        shown = ", ".join(map(str, report.expanding_steps[:10]))
        show.out.print(f"Steps that expand in the literal form (rate × curvature above its limit): {shown}")


@app.command()
def query(
    run: RunPath,
    queries: Annotated[str, typer.Option("--set", help="A query set: stored in the run, or of the recipe.")],
    index: Annotated[int | None, typer.Option(help="One query of the set; without it, the mean over the set.")] = None,
    at: Annotated[str, typer.Option(help="final, or a checkpoint's step.")] = "final",
    k: Annotated[int, typer.Option(help="How many samples to show on either side.", min=1)] = 5,
    per: Annotated[str, typer.Option(help="sample (occurrences summed) or occurrence.")] = "sample",
    per_layer: Annotated[bool, typer.Option(help="Take parameters as independent, as the paper does.")] = False,
    literal: Annotated[bool, typer.Option(help="The paper's literal recursion.")] = False,
    recipe: Annotated[str | None, typer.Option(help="package.module:function that gives model and loss.")] = None,
    trust_recipe: Annotated[bool, typer.Option(help="Import the recipe that is named in the run.")] = False,
    json: Json = False,
) -> None:
    """Which training samples helped and hurt the model on a query?"""
    from .ask import ask

    name = recipes.confirm(run, recipe, trust_recipe)  # a question and a bar do not share a terminal
    with show.progress() as say:
        found = ask(
            run, queries, index=index, at=data.at(at), k=k, per=per, recipe=name,
            per_layer=per_layer, contraction="never" if literal else "auto", progress=lambda done, total: say("query", done, total),
        )  # fmt: skip
    if json:
        show.emit(found)
        return
    for side, title in (("hits", "Helped most"), ("harmful", "Hurt most")):
        rows = [(h["sample"], h["step"], h["occurrences"], f"{h['influence']:+.6g}", h["words"]) for h in found[side]]
        show.table(title, ("sample", "step", "occurrences", "influence", "in words"), rows)
    for note in found["remarks"]:
        show.out.print(f"note: {note}", soft_wrap=True)


for command in insight.COMMANDS:
    app.command()(command)
app.command()(compress.compress)
app.command()(report.report)
app.command()(serve.serve)


@app.command()
def export(
    run: RunPath,
    to: Annotated[str, typer.Option(help="parquet or csv.")] = "parquet",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("export"),
    json: Json = False,
) -> None:
    """Write the run's tables (without the vectors) as Parquet or CSV."""
    from ..run.export import export as export_run

    files = export_run(run, out, to)
    if json:
        show.emit({"files": files})
    else:
        for name, rows in files.items():
            show.out.print(f"{name}: {rows:,} rows", soft_wrap=True)


@app.command()
def erase(
    run: RunPath,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Samples whose content is erased.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Erase the content of all samples.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Erase sample content (text, image, label, source) from the disk; gradient rows stay."""
    from ..run.run import Run

    if bool(ids) == everything:
        raise typer.BadParameter("name samples, or pass --all (not both).")
    if not yes:
        typer.confirm(
            f"Erase the content of {'all samples' if everything else f'{len(ids or [])} samples'}?", abort=True
        )
    gone = Run(run).erase_content(None if everything else data.ids(run, ids or []))
    if json:
        show.emit({"erased": gone})
    else:
        show.out.print(f"Erased the content of {gone:,} samples. Their gradient rows stay: they are part of the run.")


def main() -> None:
    """Entry point."""
    recipes.leave_the_folder_out()
    guarded(app)


def guarded(commands: typer.Typer) -> None:
    """Run the command that was typed; what the user can mend is one plain sentence and exit code 2."""
    try:
        commands()
    except BackstoryError as error:
        show.err.print(f"backstory: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
