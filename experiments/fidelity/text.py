"""The fidelity study's outcome as Markdown: what `docs/fidelity.md` shows."""

from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("single", "all")
HEAD = "| method | projection | curvature | optimizer | single | all | single − paper | all − paper | s | store |"


def markdown(found: Mapping[str, Any]) -> str:
    """Three tables: means with differences to the paper's method, other differences, and every seed."""
    top, rows = found["ceiling"], found["rows"]
    best = f"| exact unrolling: **ceiling** | full | Hessian | – | {top['single']:.3f} | {top['all']:.3f} | – | – | – | – |"
    main = [HEAD, "|---" * 10 + "|", best, *map(_row, rows)]
    seeds = [{"method": "ceiling", **top}, *rows]
    each = [
        "| method | single | all |",
        "|---|---|---|",
        *(f"| {r['method']} | {list_text(r['single_seeds'])} | {list_text(r['all_seeds'])} |" for r in seeds),
    ]
    parts = ["\n".join(main), f"Each seed ({', '.join(map(str, found['seeds']))}):", "\n".join(each)]
    if found["contrasts"]:
        parts.insert(
            1, "\n".join(["| difference | single | all |", "|---|---|---|", *map(_contrast, found["contrasts"])])
        )
    if found["skipped"]:
        parts.append("Left out: " + "; ".join(found["skipped"]) + ".")
    return "\n\n".join(parts) + "\n"


def _row(row: Mapping[str, Any]) -> str:
    against = [interval_text(row.get(f"{kind}_against_paper")) for kind in KINDS]
    store = _size(row["store_bytes"]) if row["store_bytes"] else "–"
    cells = [f"`{row['method']}`", row["projection"], row["curvature"], row["optimizer_model"]]
    cells += [*(f"{row[kind]:.3f}" for kind in KINDS), *against, f"{row['seconds']:.1f}", store]
    return f"| {' | '.join(cells)} |"


def _contrast(row: Mapping[str, Any]) -> str:
    return f"| `{row['method']}` − `{row['against']}` | {' | '.join(interval_text(row[kind]) for kind in KINDS)} |"


def interval_text(value: Mapping[str, float] | None) -> str:
    """A difference with its interval; a dash where there is none."""
    return "–" if value is None else f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"


def list_text(values: Sequence[float]) -> str:
    """Numbers of two digits, side by side."""
    return " ".join(f"{v:.2f}" for v in values)


def _size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
