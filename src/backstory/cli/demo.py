"""`backstory demo`: train, record and query; with images or text."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import output
from .insight import print_sources
from .options import Json
from .serve import REPORT_NEEDS, write_report

if TYPE_CHECKING:
    from ..demo.digits import ImageDemo
    from ..demo.texts import TextDemo
    from ..results.influence import Hit


def demo(
    what: Annotated[str, typer.Argument(help="images or text.")] = "images",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run and report.html; if not given, demo or demo-text.")
    ] = None,
    source: Annotated[
        str, typer.Option(help="For images: mnist, digits, or auto (digits if MNIST cannot be fetched).")
    ] = "auto",
    json: Json = False,
) -> None:
    """Train a small model, record it, and trace its predictions to training samples.

    images: a small model on digits; a few results are checked by retraining. text: a small GPT, pretrained and then fine-tuned
    on text from eight sources with AdamW.
    """
    import torch

    if what not in ("images", "text"):
        raise UsageError(f"there is no demo {what!r}. Choose images or text.")
    torch.set_num_threads(1)
    if what == "text":
        _text(out or Path("demo-text"), json)
    else:
        _images(out or Path("demo"), source, json)


def _images(out: Path, source: str, json: bool) -> None:
    output.need(*REPORT_NEEDS, "sklearn", "PIL", extra="demo")
    from ..demo.digits import image_demo

    with output.progress() as progress:
        result = image_demo(out, source=source, progress=progress)
    print_images(result)
    _finish(result, out / "report.html", json, check=result.check, caveats=(result.scope,))


def _text(out: Path, json: bool) -> None:
    output.need(*REPORT_NEEDS, "tokenizers", extra="demo")
    from ..demo.texts import text_demo

    with output.progress() as progress:
        result = text_demo(out, progress=progress)
    print_text(result)
    _finish(result, out / "report.html", json, caveats=(result.scope,))


def _finish(result: "ImageDemo | TextDemo", page: Path, json: bool, **more: Any) -> None:
    """Write the report, and print where everything lies."""
    output.line("Writing the report …")
    began = time.perf_counter()
    write_report(result.run, result.recipe, page, result.queries, **more)
    result.seconds["report"] = time.perf_counter() - began
    times = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    output.line(f"Time: {times}.")
    print_paths(result.run, page)
    if json:
        output.emit({**result.as_dict(), "report": str(page)})


def print_images(result: "ImageDemo") -> None:
    """The first and the last sample of each query's result, when data mattered, and the check by retraining."""
    influence = result.influence
    output.line(f"{result.data}: {influence.at} steps, {len(influence):,} occurrences, accuracy {result.accuracy:.1%}")
    rows = [
        (f"{result.queries}:{k}", f"{label} (predicted {predicted})", *(_row(*ends(1, query=k)) for ends in (influence.top, influence.bottom)))
        for k, (label, predicted) in enumerate(zip(result.labels, result.predicted, strict=True))
    ]  # fmt: skip
    title = f"Influence on the loss of the true digit, {len(rows)} test images (+ helped, − hurt)"
    output.table(title, ("query", "true digit", "helped it most: sample", "hurt it most: sample"), rows)
    output.line("In nats: a loss of 1 nat is a probability of 1/e ≈ 37% for the true digit.")
    judged = () if influence.quality is None else (influence.quality.sentence,)
    for text in (*judged, *result.timeline.words, result.scope, *result.check.words):
        output.line(text)


def _row(hit: "Hit") -> str:
    return f"{hit.sample}  {hit.influence:+.4f}  step {hit.step}"


def print_text(result: "TextDemo") -> None:
    """The passage that helped each query most, what each source is worth, when data mattered, and how reliable that is."""
    influence = result.influence
    output.line(
        f"A pretrained GPT, fine-tuned on text from {len(result.domains)} sources: {influence.at:,} steps, {len(influence):,} passages; "
        f"{result.before:.3f} nats per token on unseen passages before, {result.loss:.3f} after"
    )
    output.line(result.scope)
    best = [influence.top(1, query=k)[0] for k in range(influence.n_queries)]
    rows = [
        (domain, output.shorten(text, 40), f"{hit.influence:+.4f}", hit.source, hit.step, output.shorten(hit.text, 40))
        for domain, text, hit in zip(result.domains, result.passages, best, strict=True)
    ]
    output.table(
        "The passage that helped an unseen one most (nats of its whole loss; + helped)",
        ("unseen passage of", "begins", "influence", "helped by", "at step", "which begins"),
        rows,
    )
    print_sources(result.sources)
    for text in result.timeline.words:
        output.line(text)
    output.remarks(influence, everything=True)


def print_paths(run: str, page: Path) -> None:
    """Where run and report lie, and last the command that opens the run's page."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "backstory" else "backstory"
    output.line(f"Open {page} in a browser, or explore the run:  {program} serve {run}")
