"""The GPT study's outcome as Markdown: what `docs/fidelity.md` shows."""

from collections.abc import Mapping
from typing import Any

from experiments.fidelity.text import interval_text, list_text

HEAD = "| row | form | dimensions | mean | seeds {} | − paper | recording | an occurrence | s to ask |"


def markdown(found: Mapping[str, Any]) -> str:
    """Agreement, difference to the paper's method, and cost, on one line each; then other differences."""
    top = found["ceiling"]
    best = f"| exact unrolling: **ceiling** | – | – | {top['mean']:.3f} | {list_text(top['seeds'])} | – | – | – | – |"
    lines = [HEAD.format(", ".join(map(str, found["seeds"]))), "|---" * 9 + "|", best, *map(_row, found["rows"])]
    contrasts = [f"| `{c['method']}` − `{c['against']}` | {interval_text(c)} |" for c in found["contrasts"]]
    lines += ["", "| difference | mean |", "|---|---|", *contrasts] if contrasts else []
    left_out = ["", "Left out: " + "; ".join(found["failed"]) + "."] if found["failed"] else []
    return "\n".join([*lines, *left_out]) + "\n"


def _row(row: Mapping[str, Any]) -> str:
    name = f"`{row['method']}`" + (" (**the default**)" if row["default"] else "")
    ratio, size = row["recording_ratio"], row["bytes_per_occurrence"]
    cells = [name, row["optimizer_model"], f"{row['dims']:,}", f"{row['mean']:.3f}", list_text(row["seeds"])]
    cells += [interval_text(row["against_paper"]), "–" if ratio is None else f"{ratio:.1f} ×"]
    cells += ["–" if size is None else f"{size / 1000:.0f} kB", f"{row['seconds']:.1f}"]
    return f"| {' | '.join(cells)} |"
