"""The text demo's report: one self-contained HTML file that needs no network."""

import html
from typing import Any

from ..run.run import Run
from .image_report import STYLE, drawn
from .text import TextResult

PASSAGES = """
.passage { border-left: 3px solid var(--line); padding: .2rem .8rem; margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 14px/1.4 ui-monospace, monospace; }
.helpful .passage { border-color: var(--good); } .harmful .passage { border-color: var(--bad); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
"""


def text_report(result: TextResult, run: Run) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    questions = "\n".join(_question(q, run) for q in result.questions)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Backstory: which passages taught the model that</title><style>{STYLE}{PASSAGES}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>Which passages taught the model that, from which source, and when?</h1>
<p>A small GPT on bytes of eight domains, AdamW; {result.steps:,} steps, {result.occurrences:,} passages recorded, each used once; loss on
unseen passages {result.loss:.2f} nats a byte. This page contains training data.</p>
<h2>Questions</h2>
<p class="note">One unseen passage of each domain. Influence is in nats of the passage's whole loss. Positive, <em>helped</em>: without the
training passage the loss would be higher. Negative, <em>hurt</em>: it would be lower.</p>
{questions}
<h2>How far to trust this</h2>
<ul>{"".join(f"<li>{html.escape(line)}</li>" for line in result.trust)}</ul>
<h2>Which source taught which domain?</h2>
<p class="note">Influence of all passages of a source (rows) on the mean loss of a domain's unseen passages (columns), in nats. Within a step whose
gradient was clipped influences add up to 0: there they say how sources trade off, not what the step was worth.</p>
{_matrix(result)}
<h2>When did it matter?</h2>
<p class="note">Mean absolute influence of a step's passages on the domains, divided by the step's learning rate (nats per unit of rate), and
the training loss.</p>
{_timeline(result)}
</body></html>
"""


def _question(q: dict[str, Any], run: Run) -> str:
    content = run.content([str(h["sample"]) for side in ("helpful", "harmful") for h in q[side]])
    sides = "".join(
        f'<div class="{side}"><strong>{title}</strong>{"".join(_passage(h, content) for h in q[side])}</div>'
        for side, title in (("helpful", "helped most"), ("harmful", "hurt most"))
    )
    return (
        f"<h3>{html.escape(q['domain'])}</h3>"
        f'<div class="passage">{html.escape(q["text"])}</div><div class="sides">{sides}</div>'
    )


def _passage(hit: dict[str, Any], content: dict[str, dict[str, Any]]) -> str:
    known = content.get(str(hit["sample"]), {})
    source, text = html.escape(str(known.get("source"))), html.escape(str(known.get("text")))
    return f'<div class="passage">{text}<div class="note">{hit["influence"]:+.4f}, {source}, step {hit["step"]}</div></div>'


def _matrix(result: TextResult) -> str:
    import plotly.graph_objects as go

    figure = go.Figure(
        go.Heatmap(
            z=result.matrix, x=result.domains, y=result.sources, colorscale="RdBu", zmid=0, colorbar={"title": "nats"}
        )
    )
    return drawn(figure, "unseen passages of this domain", "all passages of this source")


def _timeline(result: TextResult) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_scatter(y=result.timeline, mode="lines", name="mean |influence| / rate")
    figure.add_scatter(y=result.losses, mode="lines", name="training loss (nats a byte)", yaxis="y2", opacity=0.4)
    second = {"overlaying": "y", "side": "right", "title": "training loss (nats a byte)", "showgrid": False}
    figure.update_layout(yaxis2=second, legend={"orientation": "h", "y": 1.12})
    return drawn(figure, "training step", "mean |influence| / rate (nats per unit of rate)")
