"""Measured tables live in `experiments/results`; the site has them as pages, copied to `docs/results` when it is built.

Pages link to the files themselves, so that links also work where the repository is read; here they become links to the pages.
"""

import re
import shutil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "experiments" / "results"


def copy_results(app: Any, config: Any) -> None:
    """Copy the tables, with their times, so that unchanged ones are not read again."""
    shutil.rmtree(DOCS / "results", ignore_errors=True)
    shutil.copytree(RESULTS, DOCS / "results")


def follow_results(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to the results, and links from there to pages, to their places on the site."""
    if docname.startswith("results/"):
        source[0] = source[0].replace("](../../docs/", "](../")
    else:
        source[0] = re.sub(r"\]\(\.\./((?:\.\./)*)experiments/results/", r"](\1results/", source[0])


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", copy_results)
    app.connect("source-read", follow_results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
