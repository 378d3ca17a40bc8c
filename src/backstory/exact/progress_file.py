"""How far a backward sweep has come, on disk: its adjoint and its scores in one file, replaced at each checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..replay.update import Slots
from ..store.files import read_metadata, read_tensors, write_tensors
from .rows import FORMAT, digest

Saved = tuple[int, Slots, Tensor]


class ProgressFile:
    """One sweep's file under a folder, named by what decides the sweep; without a folder nothing is kept."""

    def __init__(
        self, folder: Path | None, kind: str, run: tuple[str, str], base: Tensor, bounds: Sequence[int]
    ) -> None:
        self._path: Path | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = digest({"format": FORMAT, "run": list(run), "base": base.tolist(), "bounds": list(bounds)})
            self._path = Path(folder) / f"{kind}-{name}.safetensors"

    def load(self) -> Saved | None:
        """`(the step that is done, adjoint before it, scores)`, or None."""
        if self._path is None or not self._path.exists():
            return None
        tensors = read_tensors(self._path)
        parts = [
            tuple(tensors[f"{part}.{i}"] for i in range(sum(name.startswith(f"{part}.") for name in tensors)))
            for part in Slots._fields
        ]
        return int(read_metadata(self._path)["step"]), Slots(*parts), tensors["scores"]

    def save(self, step: int, x: Slots, scores: Tensor) -> None:
        """Replace what was saved."""
        if self._path is not None:
            parts = {f"{name}.{i}": y for name, part in x._asdict().items() for i, y in enumerate(part)}
            write_tensors(self._path, {**parts, "scores": scores}, {"step": str(step)})
