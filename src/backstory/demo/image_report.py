"""The demo's report: one self-contained HTML file that needs no network."""

import base64
import html
from typing import Any

from ..run.run import Run
from .images import DemoResult

STYLE = """
:root { color-scheme: light dark; --line: #8885; --good: #1a7f5a; --bad: #b3402a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.query { display: flex; flex-wrap: wrap; gap: 1.5rem; border-top: 1px solid var(--line); padding: 1rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; text-align: center; font-size: .75rem; }
img { width: 56px; height: 56px; image-rendering: pixelated; border: 1px solid var(--line); background: #fff; }
.big img { width: 96px; height: 96px; }
.helpful figcaption { color: var(--good); } .harmful figcaption { color: var(--bad); }
@media (prefers-color-scheme: dark) { :root { --good: #58c49a; --bad: #ef8a74; } }
.note { color: GrayText; font-size: .9rem; }
"""


def html_report(result: DemoResult, run: Run) -> str:
    """The whole page as text."""
    questions = "\n".join(_question(k, q, run) for k, q in enumerate(result.queries))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Backstory: which training images made the model do that</title><style>{STYLE}</style></head><body>
<h1>Which training images made the model do that, and when?</h1>
<p>{html.escape(result.data)}; {result.steps:,} steps, {result.occurrences:,} occurrences recorded; accuracy on test
images {result.accuracy:.1%}. This page contains training data.</p>
<h2>Questions</h2>
<p class="note">Test images about which the model is most torn. Influence is in units of the image's loss (nats).
Positive, <em>helped</em>: without the training image the loss would be higher. Negative, <em>hurt</em>: it would be lower.
A training image's influence is the sum over all its occurrences.</p>
{questions}
<h2>When did it matter?</h2>
<p class="note">Mean absolute influence of one occurrence on the questions above, by training step (logarithmic), and the
training loss. Each step overwrites some of what earlier ones taught; recorded curvature overstates that for early steps.</p>
{_timeline(result)}
<h2>Proof: predicted against retrained</h2>
<p class="note">Each point is one training image and one question: the change of loss that the influence predicts, and the
change when the net is trained again without that image. Rank correlation (Spearman) {result.spearman:.2f} over all pairs,
{result.spearman_blind:.2f} over images drawn at random; same sign in {result.same_sign:.0%} of the pairs.</p>
{_proofs(result)}
</body></html>
"""


def _question(k: int, q: dict[str, Any], run: Run) -> str:
    ids = [str(h["sample"]) for side in ("helpful", "harmful") for h in q[side]]
    content = run.content(ids)
    sides = "".join(
        f'<div class="{side}"><strong>{title}</strong><div class="cards">'
        + "".join(_card(h, content.get(str(h["sample"]), {})) for h in q[side])
        + "</div></div>"
        for side, title in (("helpful", "helped most"), ("harmful", "hurt most"))
    )
    image = base64.b64encode(bytes.fromhex(q["image"])).decode()
    return (
        f'<div class="query"><figure class="big"><img alt="question {k + 1}" src="data:image/png;base64,{image}">'
        f"<figcaption>is a {q['label']}<br>model says {q['predicted']}</figcaption></figure>{sides}</div>"
    )


def _card(hit: dict[str, Any], content: dict[str, Any]) -> str:
    image = base64.b64encode(content.get("image") or b"").decode()
    label = html.escape(str(content.get("label", "?")))
    return (
        f'<figure title="sample {html.escape(str(hit["sample"]))}: {html.escape(hit["words"])}">'
        f'<img alt="training image {html.escape(str(hit["sample"]))}, a {label}" src="data:image/png;base64,{image}">'
        f"<figcaption>{hit['influence']:+.4f}<br>a {label}, step {hit['step']}</figcaption></figure>"
    )


def drawn(figure: Any, x: str, y: str) -> str:
    """A figure as part of a page that has Plotly's script."""
    figure.update_layout(
        template="plotly_white", height=380, margin={"l": 60, "r": 60, "t": 20, "b": 50}, xaxis_title=x, yaxis_title=y
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _timeline(result: DemoResult) -> str:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs

    figure = go.Figure()
    figure.add_scatter(y=result.timeline, mode="lines", name="mean |influence| of an occurrence (nats)")
    figure.add_scatter(y=result.losses, mode="lines", name="training loss (nats)", yaxis="y2", opacity=0.4)
    figure.update_layout(
        yaxis={"type": "log"},
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "title": "training loss (nats)",
            "tickmode": "auto",
            "showgrid": False,
        },
        legend={"orientation": "h", "y": 1.12},
    )
    script = f"<script>{get_plotlyjs()}</script>"
    return script + drawn(figure, "training step", "mean |influence| (nats)")


def _proofs(result: DemoResult) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for blind, name in ((False, "named by an answer"), (True, "drawn at random")):
        chosen = [p for p in result.proofs if p.blind == blind]
        figure.add_scatter(
            x=[p.predicted for p in chosen],
            y=[p.retrained for p in chosen],
            mode="markers",
            name=name,
            text=[f"sample {p.sample}, question {p.query + 1}" for p in chosen],
        )
    ends = [p.predicted for p in result.proofs] or [0.0]
    figure.add_scatter(
        x=[min(ends), max(ends)], y=[min(ends), max(ends)], mode="lines", name="equal", line={"dash": "dot"}
    )
    return drawn(figure, "predicted influence (nats)", "loss retrained without − with (nats)")
