"""What a run holds to show beside its rows: samples as a person wants to see them, and query sets."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..capture.ids import as_text
from ..errors import UsageError
from ..store import RunStore


class Contents:
    """The part of an open run that shows content."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.store = RunStore.open(self.path)

    def describe(self, ids: Iterable[int | str] | Tensor, **content: Sequence[Any] | None) -> None:
        """Store text, image (PNG bytes), label or source of samples, after the fact."""
        label = content.get("label")
        if label is not None and not isinstance(label, str):
            content["label"] = [str(x) for x in label]
        with RunStore.open(self.path, write=True) as store:
            store.put_samples(as_text(ids)[0], **content)
        self.store = RunStore.open(self.path)

    def erase_content(self, ids: Iterable[int | str] | Tensor | None) -> int:
        """Erase the stored content of these samples (None: of all) from the disk; their rows stay. Returns how many."""
        names = None if ids is None else as_text(ids)[0]
        unknown = set(names or ()) - set(self.content(names or []))
        if unknown:
            raise UsageError(
                f"{len(unknown)} of these samples have no content in the run, e.g. {min(unknown)!r}. Nothing was erased: leave these "
                "ids out, or pass None to erase all content."
            )
        with RunStore.open(self.path, write=True) as store:
            gone = store.erase_samples(names)
        self.store = RunStore.open(self.path)
        return gone

    def content(self, ids: Iterable[int | str] | Tensor) -> dict[str, dict[str, Any]]:
        """What the run holds to show of these samples: id (as text) -> {text, image, label, source}."""
        return {row["id"]: row for row in self.store.samples(as_text(ids)[0]).to_pylist()}

    def add_queries(self, name: str, batch: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Store a query set under a name: a tensor, a tuple of tensors, or a dict of tensors."""
        kind, tensors = _as_tensors(batch)
        with RunStore.open(self.path, write=True) as store:
            store.save_tensors(f"queries-{name}", tensors, {"kind": kind})

    @property
    def query_sets(self) -> list[str]:
        """Names of the stored query sets."""
        return [n.removeprefix("queries-") for n in self.store.tensor_names() if n.startswith("queries-")]

    def queries(self, name: str) -> Any:
        """A stored query set, as it was given."""
        names = self.query_sets
        if name not in names:
            raise UsageError(
                f"no query set {name!r}; the run has {', '.join(names) or 'none'}. Add it with run.add_queries()."
            )
        tensors = self.store.load_tensors(f"queries-{name}")
        kind = self.store.tensor_metadata(f"queries-{name}")["kind"]
        if kind == "dict":
            return tensors
        values = tuple(tensors[k] for k in sorted(tensors, key=int))
        return values if kind == "tuple" else values[0]


def _as_tensors(batch: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    if isinstance(batch, Tensor):
        return "tensor", {"0": batch}
    if isinstance(batch, Mapping):
        return "dict", dict(batch)
    return "tuple", {str(i): x for i, x in enumerate(batch)}
