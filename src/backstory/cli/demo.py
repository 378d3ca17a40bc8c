"""`backstory demo`: train, record, ask, and show; with images, with text, or with a pretrained model."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import data, show
from .options import Json


def demo(
    what: Annotated[str, typer.Argument(help="images, text, or stories.")] = "images",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the run and report.html; demo, demo-text or demo-stories without it."),
    ] = None,
    source: Annotated[
        str, typer.Option(help="Of images: mnist, digits, or auto: digits where no registry is in reach.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Train a small net, record it, and ask which samples made it do that.

    images: a net on digits; a few answers are proven by retraining. text: a small GPT on eight domains, with AdamW.
    stories: a pretrained Llama of 15 million weights, fine-tuned on one domain; when did its data matter?
    """
    import torch

    if what not in ("images", "text", "stories"):
        raise UsageError(f"found {what!r}; expected images or text, or stories.")
    torch.set_num_threads(1)
    if what == "text":
        _text(out or Path("demo-text"), json)
    elif what == "stories":
        _stories(out or Path("demo-stories"), json)
    else:
        _images(out or Path("demo"), source, json)


def _images(out: Path, source: str, json: bool) -> None:
    data.need("plotly", "sklearn", extra="demo")
    from ..demo.image_report import html_report
    from ..demo.images import demo as run_demo
    from ..run.run import Run

    with show.progress() as say:
        result = run_demo(out, source=source, say=say)
    page = out / "report.html"
    page.write_text(html_report(result, Run(result.run)), encoding="utf-8")
    show_demo(result, page)
    if json:
        show.emit({**result.as_dict(), "report": str(page)})


def _text(out: Path, json: bool) -> None:
    data.need("plotly", extra="demo")
    from ..demo.text import text_demo
    from ..demo.text_report import text_report
    from ..run.run import Run

    with show.progress() as say:
        result = text_demo(out, say=say)
    page = out / "report.html"
    page.write_text(text_report(result, Run(result.run)), encoding="utf-8")
    show_text(result, Run(result.run), page)
    if json:
        show.emit({**result.as_dict(), "report": str(page)})


def _stories(out: Path, json: bool) -> None:
    data.need("plotly", extra="demo")
    data.need("transformers", extra="hf")
    from ..demo.stories import heading, stories
    from ..results.figures import page as html_page

    with show.progress() as say:
        found = stories(out, say=say)
    page = out / "report.html"
    words = " ".join(
        f"{heading(one)} Phases in the sizes: {one.timeline.phases.words} In the mean with its sign: {one.signed.words}"
        for one in found
    )
    figures = [one.timeline.figure().update_layout(title=heading(one)) for one in found]
    page.write_text(html_page("stories15M fine-tuned: when did data matter?", words, *figures), encoding="utf-8")
    show_stories(found, page)
    if json:
        show.emit({"runs": [one.as_dict() for one in found], "report": str(page)})


def show_demo(result: Any, page: Path) -> None:
    """The demo's short table."""
    show.out.print(
        f"{result.data}: {result.steps} steps, {result.occurrences:,} occurrences, accuracy {result.accuracy:.1%}"
    )
    rows = [
        (
            k + 1,
            f"{q['label']} (model says {q['predicted']})",
            f"{q['helpful'][0]['sample']}  {q['helpful'][0]['influence']:+.4f}  step {q['helpful'][0]['step']}",
            f"{q['harmful'][0]['sample']}  {q['harmful'][0]['influence']:+.4f}  step {q['harmful'][0]['step']}",
        )
        for k, q in enumerate(result.queries)
    ]
    show.table(
        "Influence on the loss of five test images (nats; + helped, − hurt)",
        ("question", "digit", "helped most: sample", "hurt most: sample"),
        rows,
    )
    show.out.print(
        f"Retrained without {len({p.sample for p in result.proofs})} samples: rank correlation with the prediction "
        f"{result.spearman:.2f} (drawn at random: {result.spearman_blind:.2f}), same sign in {result.same_sign:.0%}."
    )
    _where(result, page)


def show_text(result: Any, run: Any, page: Path) -> None:
    """Each question, and the passage that helped it most."""
    show.out.print(
        f"A GPT on eight domains: {result.steps:,} steps, {result.occurrences:,} passages, {result.loss:.2f} nats a byte on "
        "unseen ones",
        soft_wrap=True,
    )
    best = [q["helpful"][0] for q in result.questions]
    content = run.content([h["sample"] for h in best])
    rows = [
        (q["domain"], _short(q["text"]), f"{h['influence']:+.4f}", content[h["sample"]]["source"], h["step"],
         _short(content[h["sample"]]["text"]))
        for q, h in zip(result.questions, best, strict=True)
    ]  # fmt: skip
    show.table(
        "The passage that helped an unseen one most (nats of its whole loss; + helped)",
        ("unseen passage of", "begins", "influence", "helped by", "at step", "which begins"),
        rows,
    )
    for line in result.trust:
        show.out.print(f"- {line}", soft_wrap=True, highlight=False, markup=False)
    _where(result, page)


def show_stories(found: Any, page: Path) -> None:
    """Losses and phases of each fine-tuning."""
    rows = [
        (one.setup.passes, one.setup.sequences, one.setup.steps, f"{one.before:.2f}", f"{one.after:.2f}", one.timeline.phases.words,
         one.undivided.words, one.signed.words)
        for one in found
    ]  # fmt: skip
    show.table(
        "stories15M fine-tuned; loss on unseen sequences in nats a token",
        (
            "passes",
            "sequences",
            "steps",
            "before",
            "after",
            "phases in the sizes",
            "in the sizes, not by rate",
            "in the mean with its sign",
        ),
        rows,
    )
    show.out.print(f"Time: {sum(one.seconds for one in found):.0f} s.\nReport: {page}", soft_wrap=True)


def _short(text: str) -> str:
    """The beginning of a passage, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= 40 else words[:39] + "…"


def _where(result: Any, page: Path) -> None:
    times = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    show.out.print(f"Time: {times}.\nRun: {result.run}\nReport: {page}", soft_wrap=True)
    program = sys.argv[0] if Path(sys.argv[0]).name == "backstory" else "backstory"
    show.out.print(f"Look at it:  {program} serve {result.run}", soft_wrap=True, highlight=False)
