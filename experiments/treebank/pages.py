"""The pages of the treebank study: one HTML file for each figure, none of which needs the network."""

import html
from collections.abc import Mapping
from typing import Any

from backstory.results.figures import page
from backstory.results.words import common_words, mark_words
from experiments.plots import COLOURS, figure, smooth
from experiments.treebank.copies import COSINE, FUNCTION, METHODS, OURS
from experiments.treebank.proofs import summary
from experiments.treebank.study import CAUTION, TreebankResult

WHEN = "Influence of one occurrence on the mean loss of unseen sequences, divided by the step's learning rate."
FADE = (
    "Influence of what was used in each third of the steps (early, middle, late) on the model at every checkpoint; the queries are asked of that "
    "model. First the size of one occurrence's influence, then the mean with its sign."
)
NAMED = (
    "Each query is a copy of a training sequence. A copy's gradient is its original's, so that gradient cosine finds every "
    "original, learned or not."
)
LINES: dict[str, dict[str, Any]] = {
    OURS: {"width": 2},
    FUNCTION: {"width": 6},
    COSINE: {"dash": "dot"},
}  # which may lie on each other
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: .6rem 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: 1rem; }
.text { border-left: 3px solid #6c757d; padding: .2rem .8rem; margin: .5rem 0; font-size: 14px; overflow-wrap: anywhere; }
.own { border-color: #3a7d44; background: #eef6ef; } .note { color: #555; font-size: 13px; } mark { background: #ffe0a3; }
"""


def pages(result: TreebankResult) -> dict[str, str]:
    """Every page by its file's name."""
    more = (
        f"In the sizes without that division: {result.undivided.words} In the mean with its sign: {result.signed.words}"
    )
    when = f"{WHEN} Phases in the sizes of influences: {result.timeline.phases.words} {more} {CAUTION}"
    return {
        "timeline.html": page(
            "Penn Treebank: when did data matter?", when, sizes_figure(result), result.timeline.figure()
        ),
        "evolution.html": page(
            "Penn Treebank: how influence fades", f"{FADE} {CAUTION}", faded_figure(result), result.evolution.figure()
        ),
        "copies.html": page(
            "Penn Treebank: do copies find their originals?", f"{NAMED} {_proven(result)}", copies_figure(result)
        ),
        "examples.html": examples_page(result),
    }


def sizes_figure(result: TreebankResult) -> Any:
    """Mean size of influences by learning rate and as it is, both on scales of ratios, with the phases' borders."""
    when = result.timeline
    drawn = figure(
        ("Mean size of one occurrence's influence, by learning rate", "The same, not divided by the rate"),
        "training step", ("nats a word per unit of rate", "nats a word"),
    )  # fmt: skip
    for row, y in enumerate((when.size, when.size * when.rate), 1):
        drawn.add_scatter(
            y=smooth(y).tolist(), mode="lines", line={"color": COLOURS[1]}, showlegend=False, row=row, col=1
        )
    for side, text in ((when.phases.warm_up, "warm-up ends"), (when.phases.ascent, "ascent begins")):
        if side.boundary is not None:
            drawn.add_vline(x=side.boundary, line_dash="dot", annotation_text=text, row=1, col=1)
    drawn.update_yaxes(type="log", dtick="D2")  # ticks at 1, 2 and 5
    return drawn


def faded_figure(result: TreebankResult) -> Any:
    """Mean size of the influence of one occurrence of each third, at every checkpoint, on a scale of ratios."""
    drawn = figure(
        ("Mean size of one occurrence's influence at each checkpoint",), "checkpoint (step)", ("nats a word",)
    )
    groups = zip(COLOURS, result.evolution.groups, result.faded, strict=False)
    for colour, name, y in groups:
        x = list(result.evolution.checkpoints)
        drawn.add_scatter(x=x, y=y.tolist(), mode="lines+markers", name=name, line={"color": colour})
    drawn.update_yaxes(type="log", dtick="D2")  # ticks at 1, 2 and 5
    return drawn


def copies_figure(result: TreebankResult) -> Any:
    """Share of originals that rank first, and their median rank, at each epoch's end."""
    drawn = figure(("Originals that rank first", "Median rank of the original"), "epoch", ("share", "rank"))
    for colour, method in zip(COLOURS, METHODS, strict=False):
        own = [one for one in result.ranks if one.method == method]
        values = [one.result.share_first for one in own], [one.result.median_rank for one in own]
        for row, y in enumerate(values, 1):
            drawn.add_scatter(
                x=[one.epoch for one in own], y=list(y), mode="lines+markers", name=method, legendgroup=method,
                showlegend=row == 1, line={"color": colour, **LINES[method]}, row=row, col=1,
            )  # fmt: skip
    drawn.update_xaxes(dtick=1)
    drawn.update_yaxes(range=[0, 1.05], row=1, col=1)
    drawn.update_yaxes(rangemode="tozero", row=2, col=1)
    return drawn


def examples_page(result: TreebankResult) -> str:
    """The first copies, with what ours names after each epoch and the influence function after the last."""
    last = max(one.epoch for one in result.ranks)
    parts = "\n".join(_example(k, one, last) for k, one in enumerate(result.examples, 1))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penn Treebank: three copies</title><style>{STYLE}</style></head><body>
<h1>Which training sequences does a copy of one name?</h1>
<p>The first {len(result.examples)} copies that the seed drew. Green: the original. Marked: words of four letters or more that also stand in the
copy. Influence in nats of the copy's whole loss. {html.escape(f"{_proven(result)} {CAUTION}")} This page contains training data.</p>
{parts}
</body></html>
"""


def _proven(result: TreebankResult) -> str:
    """What retraining says of the ranks after the first epoch."""
    if not result.proofs:
        return ""
    told = summary(result.proofs)
    return (
        f"Retraining the first epoch without the original, for {told['originals']} copies: {told['originals_truth']:+.2g} nats at the median, where ours says "
        f"{told['originals_said']:+.2g}; the original was worth more in {told['original_was_worth_more']} of the {told['others']} cases in which ours names another first."
    )


def _example(k: int, example: Mapping[str, Any], last: int) -> str:
    chosen = [n for n in example["named"] if n["method"] == OURS or (n["method"] == FUNCTION and n["epoch"] == last)]
    chosen.sort(key=lambda n: n["method"] != OURS)
    columns = "".join(_column(n, example["text"]) for n in chosen)
    return f"""<h2>Copy {k}</h2><div class="text">{html.escape(example["text"])}</div>
<div class="columns">{columns}</div>"""


def _column(named: Mapping[str, Any], query: str) -> str:
    texts = "".join(_text(hit, query) for hit in named["best"])
    title = f"{named['method']}, after epoch {named['epoch']}"
    return f'<div><h3>{html.escape(title)}</h3><div class="note">original: rank {named["rank"]:.0f}</div>{texts}</div>'


def _text(hit: Mapping[str, Any], query: str) -> str:
    pieces = [
        f"<mark>{html.escape(p.text)}</mark>" if p.common else html.escape(p.text)
        for p in mark_words(hit["text"], common_words(hit["text"], query))
    ]
    kind = "text own" if hit["own"] else "text"
    when = "" if hit["step"] is None else f", mattered most at step {hit['step']}"
    note = f'<div class="note">{hit["influence"]:+.3g}{when}</div>'
    return f'<div class="{kind}">{"".join(pieces)}{note}</div>'
