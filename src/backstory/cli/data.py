"""Small conversions between what people type and what the library takes."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError


def at(text: str) -> int | str:
    """`final`, or a step."""
    if text == "final":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"found --at {text!r}; expected 'final' or a step number.") from None


def ids(run: Path, texts: Sequence[str]) -> list[int | str]:
    """Ids as the run has them: ints where the run's ids are ints."""
    from ..run.run import Run

    if Run(run).config.get("ids") != "int":
        return list(texts)
    try:
        return [int(x) for x in texts]
    except ValueError as error:
        raise UsageError(f"the ids of this run are integers; {error}.") from None


def last_json(path: Path) -> dict[str, Any]:
    """The JSON object on the last line of what a command with --json wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{path} is not the output of a command with --json ({error}). Write it again.") from None
    if not isinstance(found, dict):
        raise UsageError(f"found {type(found).__name__} on the last line of {path}; expected a JSON object.")
    return found


def writable(*files: Path | None) -> None:
    """Refuse a file whose folder is not there, before the work starts."""
    for file in filter(None, files):
        if not file.resolve().parent.is_dir():
            raise UsageError(
                f"there is no folder {file.resolve().parent} for {file.name}. Make it first, or name another."
            )


def plotting(*files: Path | None) -> None:
    """What pages with figures need, where any is asked for: Plotly, and folders to write them into."""
    if any(file is not None for file in files):
        need("plotly", extra="plot")
    writable(*files)


def need(*packages: str, extra: str) -> None:
    """Raise if an optional package is missing, before any work is done."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"this command needs {', '.join(missing)}: pip install 'backstory[{extra}]'.")
