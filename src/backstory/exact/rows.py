"""The rows of a job on disk: one small file for each removal, written when it is known, found again by its content.

A row's name is a hash of what decides it: the weights before and after the run, the query losses after it, the removed
occurrences and their share. A recipe that changes in anything that matters therefore never meets an old row. Nor does one
that rounds differently (another processor): the hash takes the bits, because a bound wide enough for rounding in float32
would let small changes of a recipe through. Such rows are computed again, which costs time and no truth.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..store.files import read_json, write_json

FORMAT = 1


def digest(value: Any) -> str:
    """32 hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class Rows:
    """The rows of one run and one set of queries under a folder; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, run: tuple[str, str], base: Tensor) -> None:
        self.base = base
        self._about = {"format": FORMAT, "run": list(run), "base": base.tolist()}
        self._folder = None if folder is None else Path(folder) / f"leave_out-{digest(self._about)}"
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, places: dict[int, list[int]], share: float) -> Tensor | None:
        """The stored differences (Q,), or None."""
        path = self._path(places, share)
        if path is None or not path.exists():
            return None
        return torch.tensor(read_json(path)["leave_out"], dtype=torch.float64)

    def put(self, places: dict[int, list[int]], share: float, row: Tensor) -> None:
        """Keep a row."""
        path = self._path(places, share)
        if path is not None:
            write_json(path, {**_removal(places, share), "run": self._about["run"], "leave_out": row.tolist()})

    def _path(self, places: dict[int, list[int]], share: float) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest(_removal(places, share))}.json"


def _removal(places: dict[int, list[int]], share: float) -> dict[str, Any]:
    return {"occurrences": [[t, i] for t in sorted(places) for i in places[t]], "share": share}
