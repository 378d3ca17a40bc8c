"""The samples of a run as people look for them: by id, text, source, label, step; held in memory but for their images.

Shapes:  N occurrences, M samples, in the order of their ids as text.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .errors import Refused
from .reader import Reader
from .schemas import Has, Sample

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
COLUMNS = ("text", "label", "source")


class Catalogue:
    """Which samples there are, when they were used, and what the run holds to show of them."""

    def __init__(self, reader: Reader) -> None:
        run = reader.run
        self._reader, self._numbers = reader, run.config.get("ids") == "int"
        samples, steps = run.store.occurrences(run.store.n_rows())
        names, inverse, counts = np.unique(samples, return_inverse=True, return_counts=True)
        self.ids: list[str] = names.tolist()
        self.inverse: Ints = inverse.astype(np.int64)  # (N,) the sample of each occurrence
        self.steps: Ints = np.asarray(steps, dtype=np.int64)  # (N,)
        self._order, self._ends = np.argsort(inverse, kind="stable"), np.cumsum(counts)
        self._number = {name: j for j, name in enumerate(self.ids)}
        found = run.store.samples(None)
        place = pc.index_in(pa.array(self.ids, pa.string()), found["id"].combine_chunks())
        self._columns = {name: found[name].combine_chunks().take(place) for name in COLUMNS}
        self._images: NDArray[np.bool_] = pc.is_valid(found["image"].combine_chunks().take(place)).to_numpy(
            zero_copy_only=False
        )
        self.has = Has(image=bool(self._images.any()), **{k: c.null_count < len(c) for k, c in self._columns.items()})

    def __len__(self) -> int:
        return len(self.ids)

    def number(self, name: str) -> int:
        """Where a sample stands; refused where there is none of this id."""
        if name not in self._number:
            raise Refused(404, "the run has no sample of this id.", "Look for samples at /samples.")
        return self._number[name]

    def own_id(self, j: int) -> int | str:
        """A sample's id as it was when it was recorded."""
        return int(self.ids[j]) if self._numbers else self.ids[j]

    def rows(self, j: int) -> Ints:
        """The occurrences of a sample, in the order of time."""
        end = int(self._ends[j])
        lo = int(self._ends[j - 1]) if j else 0
        return self._order[lo:end]

    def text(self, j: int) -> str | None:
        """A sample's text, if the run holds it."""
        found: str | None = self._columns["text"][j].as_py()
        return found

    def sample(self, j: int, value: float | None = None) -> Sample:
        """A sample as it is shown."""
        shown = {name: column[j].as_py() for name, column in self._columns.items()}
        path = quote(self.ids[j], safe="")
        return Sample(
            id=self.ids[j],
            path=f"/samples/{path}",
            image=f"/images/{path}" if self._images[j] else None,
            steps=self.steps[self.rows(j)].tolist(),
            value=value,
            **shown,
        )

    def image(self, j: int) -> bytes:
        """The PNG bytes of a sample; refused where the run holds none."""
        found = (
            self._reader.run.content([self.own_id(j)]).get(self.ids[j], {}).get("image") if self._images[j] else None
        )
        if not isinstance(found, bytes) or not found.startswith(b"\x89PNG\r\n\x1a\n"):
            raise Refused(404, "the run holds no image of this sample.", "Its text and label are at /samples.")
        return found

    def values(self, column: str, most: int = 200) -> list[str]:
        """The different sources or labels, sorted."""
        return sorted(x for x in pc.unique(self._columns[column]).to_pylist() if x is not None)[:most]

    def found(
        self,
        text: str | None = None,
        source: str | None = None,
        label: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> Ints:
        """Samples whose text or id has these letters, with this source and label, used in these steps."""
        keep = np.ones(len(self), dtype=bool)
        if text:
            keep &= self._with(self._columns["text"], text) | self._with(pa.array(self.ids, pa.string()), text)
        for name, wanted in (("source", source), ("label", label)):
            if wanted:
                keep &= _truth(pc.equal(self._columns[name], wanted))
        if first_step is not None or last_step is not None:
            lo, hi = first_step or 0, self.steps.max(initial=0) if last_step is None else last_step
            used = np.zeros(len(self), dtype=bool)
            used[self.inverse[(self.steps >= lo) & (self.steps <= hi)]] = True
            keep &= used
        return np.flatnonzero(keep)

    def _with(self, column: Any, letters: str) -> NDArray[np.bool_]:
        return _truth(pc.match_substring(column, letters, ignore_case=True))

    def sorted(self, found: Ints, by: str, values: Floats | None) -> Ints:
        """Samples by id (as numbers where they are), by first step, or by value, most negative first."""
        if by == "value" and values is not None:
            keys: Sequence[Any] = values[found].tolist()
        elif by == "step":
            keys = [int(self.steps[self.rows(int(j))[0]]) for j in found]
        else:
            keys = [self.own_id(int(j)) for j in found]
        return found[np.array(sorted(range(len(found)), key=keys.__getitem__), dtype=np.int64)]


def _truth(column: Any) -> NDArray[np.bool_]:
    """A column of truth values, absent ones false."""
    out: NDArray[np.bool_] = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
    return out
