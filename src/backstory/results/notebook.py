"""How runs and results look in a notebook: a heading, a pandas table, and what must be said; every text is escaped.

A method `_repr_html_` is what notebooks ask for; where it gives None they print the plain words instead.
"""

import html
from collections.abc import Sequence
from typing import Any

ROWS = 10  # of a table that are shown


def shown(title: str, table: Any, notes: Sequence[str] = ()) -> str:
    """A DataFrame's first rows under a heading, and notes below."""
    drawn = table.head(ROWS).to_html(
        index=False, escape=True, border=0, justify="left", float_format=lambda x: f"{x:+.4g}"
    )
    more = f"<p>{len(table):,} rows, of which {ROWS} are shown; .to_pandas() has all.</p>" if len(table) > ROWS else ""
    said = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<div><p><strong>{html.escape(title)}</strong></p>{drawn}{more}<ul>{said}</ul></div>"
