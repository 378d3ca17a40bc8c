"""The warm-up spool: whole steps kept as files until their projection is known.

One safetensors file a step, with its other facts as JSON in the file's metadata; a step is there or not.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import StoreError
from .files import TEMPORARY, fsync, read_metadata, read_tensors, write_tensors

_NAME = re.compile(r"step-(\d{8,})\.safetensors")


class Spool:
    """The folder `spool` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def put(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
        """Keep one step, durably; its size in bytes."""
        if not self.folder.exists():
            self.folder.mkdir()
            fsync(self.folder.parent)
        write_tensors(self._file(step), tensors, {"meta": json.dumps(dict(meta))})
        return self._file(step).stat().st_size

    def steps(self) -> list[int]:
        """The steps kept, in order."""
        names = [p.name for p in self.folder.iterdir()] if self.folder.exists() else []
        return sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))

    def get(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `put` was given."""
        file = self._file(step)
        if not file.exists():
            raise StoreError(f"step {step} is not in {self.folder}; it holds {self.steps()}. Ask for one of these.")
        return read_tensors(file), json.loads(read_metadata(file).get("meta", "{}"))

    def clear(self, from_step: int = 0) -> None:
        """Drop the steps from `from_step` on, last first: a crash leaves no gap."""
        if not self.folder.exists():
            return
        for leftover in self.folder.glob(f"*{TEMPORARY}"):
            leftover.unlink()
        for step in reversed(self.steps()):
            if step >= from_step:
                self._file(step).unlink()
        fsync(self.folder)
