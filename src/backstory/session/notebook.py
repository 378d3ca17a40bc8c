"""How runs and results look in a notebook: a heading, a pandas table, and what must be said; every text is escaped.

A method `_repr_html_` is what notebooks ask for; where it gives None they print the plain words instead.
Knows nothing of influence.
"""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

ROWS = 10  # of a table that are shown


def shown(title: str, table: Any, notes: Sequence[str] = ()) -> str:
    """A DataFrame's first rows under a heading, and notes below."""
    drawn = table.head(ROWS).to_html(
        index=False, escape=True, border=0, justify="left", float_format=lambda x: f"{x:+.4g}"
    )
    more = f"<p>{len(table):,} rows, of which {ROWS} are shown; .to_pandas() has all.</p>" if len(table) > ROWS else ""
    said = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<div><p><strong>{html.escape(title)}</strong></p>{drawn}{more}<ul>{said}</ul></div>"


def of_run(run: "Run") -> str | None:
    """What a run holds; None without pandas."""
    try:
        import pandas as pd
    except ImportError:
        return None
    config, store = run.config, run.store
    facts = {
        "steps": f"{run.n_steps:,}",
        "occurrences": f"{store.n_rows():,}",
        "optimizer": config["optimizer"]["class"],
        "kept of a gradient": f"{store.width:,} {config['settings']['subspace']} dimensions",
        "curvature": config["settings"]["curvature"],
        "checkpoints": ", ".join(map(str, run.checkpoints)) or "none",
        "embeddings": ", ".join(map(str, sorted(store.embeddings()))) or "none",
        "query sets": ", ".join(run.query_sets) or "none",
        "recipe": config.get("recipe") or "none",
    }
    return shown(f"Run {run.path}", pd.DataFrame({"what": list(facts), "value": list(facts.values())}), run.notes())
