"""`backstory demo`: train, record and query; with images, text, or a pretrained model. `backstory data`: the data sets."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import output
from .options import Json

data = typer.Typer(help="List and fetch the data sets of demos and experiments.", no_args_is_help=True)


def demo(
    what: Annotated[str, typer.Argument(help="images, text, or stories.")] = "images",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the run and report.html; if not given, demo, demo-text or demo-stories."),
    ] = None,
    source: Annotated[
        str, typer.Option(help="For images: mnist, digits, or auto (digits if MNIST cannot be fetched).")
    ] = "auto",
    json: Json = False,
) -> None:
    """Train a small model, record it, and trace its predictions to training samples.

    images: a small model on digits; a few results are checked by retraining. text: a small GPT on eight domains, with AdamW.
    stories: a pretrained Llama of 15 million weights, fine-tuned on one domain; when did its data matter?
    """
    import torch

    if what not in ("images", "text", "stories"):
        raise UsageError(f"found {what!r}; expected images, text or stories.")
    torch.set_num_threads(1)
    if what == "text":
        _text(out or Path("demo-text"), json)
    elif what == "stories":
        _stories(out or Path("demo-stories"), json)
    else:
        _images(out or Path("demo"), source, json)


def _images(out: Path, source: str, json: bool) -> None:
    output.need("plotly", "sklearn", "PIL", extra="demo")
    from ..demo.image_report import html_report
    from ..demo.images import demo as run_demo

    with output.progress() as progress:
        result = run_demo(out, source=source, say=progress)
    _finish(result, out / "report.html", html_report, print_images, json)


def _text(out: Path, json: bool) -> None:
    output.need("plotly", extra="demo")
    from ..demo.text import text_demo
    from ..demo.text_report import text_report

    with output.progress() as progress:
        result = text_demo(out, say=progress)
    _finish(result, out / "report.html", text_report, print_text, json)


def _finish(result: Any, page: Path, report: Any, print_tables: Any, json: bool) -> None:
    """Write the report, print the tables and where everything lies."""
    from ..run.run import Run

    page.write_text(report(result, Run(result.run)), encoding="utf-8")
    print_tables(result, Run(result.run))
    _print_paths(result, page)
    if json:
        output.emit({**result.as_dict(), "report": str(page)})


def _stories(out: Path, json: bool) -> None:
    output.need("plotly", extra="demo")
    output.need("transformers", extra="hf")
    from ..demo.stories import heading, stories
    from ..results.figures import page as html_page

    with output.progress() as progress:
        runs = stories(out, say=progress)
    page = out / "report.html"
    words = " ".join(
        f"{heading(one)} Phases in the sizes: {one.timeline.phases.words} In the mean with its sign: {one.signed.words}"
        for one in runs
    )
    figures = [one.timeline.figure().update_layout(title=heading(one)) for one in runs]
    page.write_text(html_page("stories15M fine-tuned: when did data matter?", words, *figures), encoding="utf-8")
    print_stories(runs, page)
    if json:
        output.emit({"runs": [one.as_dict() for one in runs], "report": str(page)})


def print_images(result: Any, run: Any) -> None:
    """The image demo's queries, and the retraining that checks them."""
    output.line(
        f"{result.data}: {result.steps} steps, {result.occurrences:,} occurrences, accuracy {result.accuracy:.1%}"
    )
    rows = [
        (k, f"{q['label']} (predicted {q['predicted']})", _first(q["helpful"]), _first(q["harmful"]))
        for k, q in enumerate(result.queries, 1)
    ]
    title = "Influence on the loss of five test images (nats; + helped, − hurt)"
    output.table(title, ("query", "digit", "helped most: sample", "hurt most: sample"), rows)
    output.line(
        f"Retrained without {len({p.sample for p in result.proofs})} samples: rank correlation with the prediction "
        f"{result.spearman:.2f} (drawn at random: {result.spearman_blind:.2f}), same sign in {result.same_sign:.0%}."
    )


def _first(hits: Any) -> str:
    return f"{hits[0]['sample']}  {hits[0]['influence']:+.4f}  step {hits[0]['step']}"


def print_text(result: Any, run: Any) -> None:
    """Each query of the text demo, and the passage that helped it most."""
    output.line(
        f"A GPT on eight domains: {result.steps:,} steps, {result.occurrences:,} passages, {result.loss:.2f} nats a byte on "
        "unseen ones"
    )
    best = [q["helpful"][0] for q in result.questions]
    content = run.content([h["sample"] for h in best])
    rows = [
        (q["domain"], output.shorten(q["text"], 40), f"{h['influence']:+.4f}", content[h["sample"]]["source"], h["step"],
         output.shorten(content[h["sample"]]["text"], 40))
        for q, h in zip(result.questions, best, strict=True)
    ]  # fmt: skip
    output.table(
        "The passage that helped an unseen one most (nats of its whole loss; + helped)",
        ("unseen passage of", "begins", "influence", "helped by", "at step", "which begins"),
        rows,
    )
    for text in result.trust:
        output.line(f"- {text}")


def print_stories(runs: Any, page: Path) -> None:
    """Losses and phases of each fine-tuning."""
    rows = [
        (one.setup.passes, one.setup.sequences, one.setup.steps, f"{one.before:.2f}", f"{one.after:.2f}", one.timeline.phases.words,
         one.undivided.words, one.signed.words)
        for one in runs
    ]  # fmt: skip
    names = "passes", "sequences", "steps", "before", "after"
    phases = "phases in the sizes", "in the sizes, not by learning rate", "in the mean with its sign"
    output.table("stories15M fine-tuned; loss on unseen sequences in nats a token", (*names, *phases), rows)
    output.line(f"Time: {sum(one.seconds for one in runs):.0f} s.\nReport: {page}")


def _print_paths(result: Any, page: Path) -> None:
    times = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    program = sys.argv[0] if Path(sys.argv[0]).name == "backstory" else "backstory"
    output.line(f"Time: {times}.\nRun: {result.run}\nReport: {page}\nOpen it:  {program} serve {result.run}")


@data.command("list")
def list_all(json: Json = False) -> None:
    """List all data sets: size, whether they are cached, licence."""
    from ..demo.data import cache_dir
    from ..demo.data.catalogue import catalogue

    entries = catalogue().values()
    if json:
        output.emit({"cache": str(cache_dir()), "data": [entry.as_dict() for entry in entries]})
        return
    rows = [(e.name, f"{e.megabytes:.1f}", "yes" if e.cached else "no", e.licence, e.what) for e in entries]
    output.table("Data sets", ("name", "MB", "cached", "licence", "what"), rows)
    output.line(f"Cache: {cache_dir()} (set BACKSTORY_CACHE for another)")


@data.command()
def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names from `list`; corpus for its sources, or all.")
    ],
    json: Json = False,
) -> None:
    """Fetch data sets into the cache and check their hashes."""
    from ..demo.data.catalogue import chosen

    entries = chosen(names)
    with output.one_bar(f"fetch {', '.join(names)}") as progress:
        for done, entry in enumerate(entries):
            progress(done, len(entries))
            entry.get()
            if not json:
                output.line(f"{entry.name}: {entry.path} (hash checked; {entry.licence})")
        progress(len(entries), len(entries))
    if json:
        output.emit({"fetched": [{**entry.as_dict(), "checked": True} for entry in entries]})
