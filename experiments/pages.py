"""The pages of measured tables in `experiments/results`: where their figures come from, and the tables as JSON beside them.

A page begins with a table of provenance: the command, date, commit and machine of each group of figures. Its JSON has
every table of the page, cells as they stand there; nothing else is computed from it.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from experiments.tables import markdown

RESULTS = Path(__file__).parent / "results"
PROVENANCE = ("command", "date", "commit", "machine")
NOTE = "The tables of the page of the same name, cells as they stand there, written by experiments/pages.py."


def provenance(commands: Iterable[str]) -> str:
    """The table that a page begins with, for figures that these commands measure here and now."""
    here = (date.today().isoformat(), _commit(), _machine())
    return markdown(PROVENANCE, [(f"`{command}`", *here) for command in commands])


def _commit() -> str:
    try:
        words = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a copy of the sources without their history


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} cores, {platform.machine()}, one thread, torch {torch.__version__}"


def write_page(file: Path, text: str) -> None:
    """Write a page, and its tables beside it."""
    file.write_text(text, encoding="utf-8")
    file.with_suffix(".json").write_text(tables_json(text), encoding="utf-8")


def tables_json(text: str) -> str:
    """The JSON of a page."""
    return json.dumps({"note": NOTE, "tables": read_tables(text)}, ensure_ascii=False, indent=1) + "\n"


def read_tables(text: str) -> list[dict[str, Any]]:
    """Every table of a page, in order: the section that it stands in, its columns, its rows."""
    tables: list[dict[str, Any]] = []
    section, inside = "", False
    for line in re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            inside = False
        elif not inside:
            tables.append({"section": section, "columns": _cells(line), "rows": []})
            inside = True
        elif set(line) - set("|-: "):
            tables[-1]["rows"].append(_cells(line))
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
