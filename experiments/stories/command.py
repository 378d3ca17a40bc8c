"""`python -m experiments stories`: stories15M fine-tuned on one domain, each sequence once or three times; two timelines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backstory.cli import output
from experiments.cli import Json, app, begin

if TYPE_CHECKING:
    from experiments.stories.study import FineTuning


@app.command()
def stories(
    out: Annotated[Path, typer.Option(help="Folder for the runs and report.html.")] = Path("stories"),
    json: Json = False,
) -> None:
    """When did data matter to a pretrained Llama of 15 million weights, fine-tuned on one domain?"""
    from backstory.results.figures import page as html_page
    from experiments.stories.study import fine_tune, heading

    output.need("transformers", extra="hf")
    page = out / "report.html"
    out.mkdir(parents=True, exist_ok=True)
    begin(page)
    with output.progress() as progress:
        runs = fine_tune(out, progress=progress)
    words = " ".join(
        f"{heading(one)} Phases in the sizes: {one.timeline.phases.words} In the mean with its sign: {one.signed.words}"
        for one in runs
    )
    figures = [one.timeline.figure().update_layout(title=heading(one)) for one in runs]
    page.write_text(html_page("stories15M fine-tuned: when did data matter?", words, *figures), encoding="utf-8")
    if json:
        output.emit({"runs": [one.as_dict() for one in runs], "report": str(page)})
        return
    print_tables(runs)
    output.line(f"Time: {sum(one.seconds for one in runs):.0f} s.\nReport: {page}")


def print_tables(runs: "list[FineTuning]") -> None:
    """Losses and phases of each fine-tuning."""
    rows = [
        (one.setup.passes, one.setup.sequences, one.setup.steps, f"{one.before:.2f}", f"{one.after:.2f}", one.timeline.phases.words,
         one.undivided.words, one.signed.words)
        for one in runs
    ]  # fmt: skip
    names = "passes", "sequences", "steps", "before", "after"
    phases = "phases in the sizes", "in the sizes, not by learning rate", "in the mean with its sign"
    output.table("stories15M fine-tuned; loss on unseen sequences in nats a token", (*names, *phases), rows)
