"""Search the samples of a run by id, text, source, label or step; in memory, except for images.

Shapes:  N occurrences, M samples, in the order of their ids as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..store import RunStore
from .run import Run

Ints = NDArray[np.int64]
COLUMNS = ("text", "label", "source")
PNG = b"\x89PNG\r\n\x1a\n"


class Catalogue:
    """Which samples there are, when they were used, and what the run holds to show of them."""

    def __init__(self, run: Run) -> None:
        self._numeric = run.config.get("ids") == "int"
        samples, steps = run.occurrences()
        names, inverse, counts = np.unique(samples, return_inverse=True, return_counts=True)
        self.ids: list[str] = names.tolist()
        self.n_occurrences = len(steps)
        self._steps, self._inverse = np.asarray(steps, dtype=np.int64), inverse.astype(np.int64)  # (N,)
        self._order, self._ends = np.argsort(inverse, kind="stable"), np.cumsum(counts)
        self._number = {name: j for j, name in enumerate(self.ids)}
        content = RunStore.open(run.path).samples(None)
        place = pc.index_in(pa.array(self.ids, pa.string()), content["id"].combine_chunks())
        self._columns = {name: content[name].combine_chunks().take(place) for name in COLUMNS}
        images = pc.is_valid(content["image"].combine_chunks().take(place))
        self._images: NDArray[np.bool_] = images.to_numpy(zero_copy_only=False)
        self.has = {k: c.null_count < len(c) for k, c in self._columns.items()} | {"image": bool(self._images.any())}

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self._number

    def recorded_id(self, name: str) -> int | str:
        """A sample's id as it was when it was recorded."""
        return int(name) if self._numeric else name

    def sample(self, name: str) -> dict[str, Any]:
        """What the run holds of a sample: id, text, label and source, its steps, and whether it has an image."""
        j = self._number[name]
        content = {column: values[j].as_py() for column, values in self._columns.items()}
        return {"id": name, **content, "steps": self._steps[self._rows(j)].tolist(), "has_image": bool(self._images[j])}

    def image(self, run: Run, name: str) -> bytes | None:
        """The PNG bytes of a sample; None where the run holds none."""
        if not self._images[self._number[name]]:
            return None
        data = run.content([self.recorded_id(name)]).get(name, {}).get("image")
        return data if isinstance(data, bytes) and data.startswith(PNG) else None

    def values(self, column: str, most: int = 200) -> list[str]:
        """The different sources or labels, sorted."""
        return sorted(x for x in pc.unique(self._columns[column]).to_pylist() if x is not None)[:most]

    def find(
        self,
        text: str | None = None,
        source: str | None = None,
        label: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> list[str]:
        """Ids of the samples whose text or id has these letters, with this source and label, used in these steps."""
        fits = np.ones(len(self), dtype=bool)
        if text:
            fits &= _contains(self._columns["text"], text) | _contains(pa.array(self.ids, pa.string()), text)
        for name, wanted in (("source", source), ("label", label)):
            if wanted:
                fits &= _true(pc.equal(self._columns[name], wanted))
        if first_step is not None or last_step is not None:
            lo, hi = first_step or 0, self._steps.max(initial=0) if last_step is None else last_step
            used = np.zeros(len(self), dtype=bool)
            used[self._inverse[(self._steps >= lo) & (self._steps <= hi)]] = True
            fits &= used
        return [self.ids[j] for j in np.flatnonzero(fits)]

    def sort(self, names: Sequence[str], by: str, values: Mapping[str, float] | None = None) -> list[str]:
        """Samples by id (as numbers where they are), by first step, or by value, most negative first; equal ones by id."""
        ordered = sorted(names, key=self.recorded_id)
        if by == "value" and values is not None:
            return sorted(ordered, key=lambda name: values[name])
        if by == "step":
            return sorted(ordered, key=lambda name: int(self._steps[self._rows(self._number[name])[0]]))
        return ordered

    def _rows(self, j: int) -> Ints:
        """The occurrences of a sample, in the order of time."""
        return self._order[int(self._ends[j - 1]) if j else 0 : int(self._ends[j])]


def _contains(column: Any, letters: str) -> NDArray[np.bool_]:
    return _true(pc.match_substring(column, letters, ignore_case=True))


def _true(column: Any) -> NDArray[np.bool_]:
    """A column of truth values, absent ones false."""
    out: NDArray[np.bool_] = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
    return out
