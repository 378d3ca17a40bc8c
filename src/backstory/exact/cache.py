"""What exact jobs cache on disk: the results of `leave_out`, one small file per removal; the progress of `reverse` and `tangent`.

A file's name is a hash of what decides its content: the weights before and after the run, the query losses after it, the removed
occurrences and their share. A recipe that changes in anything that matters therefore never meets an old file. Nor does one
that rounds differently (another processor): the hash takes the bits, because a bound wide enough for rounding in float32
would let small changes of a recipe through. Such rows are computed again, which costs time and no truth.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..store.files import read_json, read_metadata, read_tensors, write_json, write_tensors
from .derivative import State

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

    def get(self, places: dict[int, list[int]], share: float, twin: int | None = None) -> Tensor | None:
        """The stored differences (Q,), or None."""
        path = self._path(places, share, twin)
        if path is None or not path.exists():
            return None
        return torch.tensor(read_json(path)["leave_out"], dtype=torch.float64)

    def put(self, places: dict[int, list[int]], share: float, twin: int | None, row: Tensor) -> None:
        """Keep a row."""
        path = self._path(places, share, twin)
        if path is not None:
            write_json(path, {**_removal(places, share, twin), "run": self._about["run"], "leave_out": row.tolist()})

    def _path(self, places: dict[int, list[int]], share: float, twin: int | None) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest(_removal(places, share, twin))}.json"


def _removal(places: dict[int, list[int]], share: float, twin: int | None) -> dict[str, Any]:
    removed = {"occurrences": [[t, i] for t in sorted(places) for i in places[t]], "share": share}
    return removed if twin is None else {**removed, "twin": twin}


Saved = tuple[int, State, Tensor]


class ProgressFile:
    """One sweep's file under a folder, named by what decides the sweep; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._path: Path | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._path = Path(folder) / f"{name}.safetensors"

    def load(self) -> Saved | None:
        """`(the step where it stands, adjoint or tangents before it, rows)`, or None."""
        if self._path is None or not self._path.exists():
            return None
        tensors = read_tensors(self._path)
        step = int(read_metadata(self._path)["step"])
        return step, State(*(tensors[part] for part in State._fields)), tensors["rows"]

    def save(self, step: int, x: State, rows: Tensor) -> None:
        """Replace what was saved."""
        if self._path is not None:
            write_tensors(self._path, {**x._asdict(), "rows": rows}, {"step": str(step)})
