r"""Curvature that the steps of a window share, on disk: rows that wait in the open window, and what is kept of closed ones.

Of the N seen steps t of a window, the mean of their curvature is kept as few orthogonal rows (`maths.shared_curvature`):

    VᵀV ≈ 1/N Σ_t H_t,      H_t ← VᵀV  for every step of the window

Where a step was clipped, ⟨v, ∇L_t⟩ of these rows is needed. In raw coordinates it is ⟨v, n⟩, n = Σ w g. In Adam's, ∇L_t is seen
through the smallest vector d_t that has the recorded products with the step's own rows: ⟨h, d_t⟩ = ⟨h, ∇L_t⟩.

    window/rows-<from>-<to>.safetensors         of the steps of one commit, written before it: `<t>/V` the rows √κ h, `<t>/d`
    curvature-<from>-<to>.safetensors           of a closed window: `V` and `d`, one row for each clipped step

both encoded like rows, with `…/scale`, and a checksum of each tensor. A window is closed once the steps that end it are committed, from what
waits on disk alone, so a death at any moment changes nothing. What waits is dropped when the *next* window is closed, and at the end of a
run: one that is resumed within its last two windows goes on as if it had not stopped. Resumed further back, or once it had ended, the
window is cut there: its rows stay those of all its steps, later ones too.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import torch
from torch import Tensor

from ..errors import StoreError
from ..maths import encoding as enc
from ..maths.shared_curvature import leading, orthogonal, orthogonal_again
from ..maths.windows import Grid, Span
from . import files
from .schema import StepRecord

FOLDER = "window"
_CLOSED = re.compile(r"curvature-(\d{8,})-(\d{8,})\.safetensors")
_SPOOLED = re.compile(r"rows-(\d{8,})-(\d{8,})\.safetensors")


class Window(NamedTuple):
    """What is kept for the steps of one window."""

    V: Tensor  # (R, p), orthogonal rows
    d: Tensor | None  # one row for each clipped step, in Adam's coordinates only


class Coded(NamedTuple):
    """Rows as they lie on disk."""

    codes: Tensor  # (n, p)
    scales: Tensor | None


class Pieces(Sequence[Tensor]):
    """Rows of the steps of a window, decoded whenever they are looked at: a window's rows take ten times as much memory as its result."""

    def __init__(self, coded: Sequence[Coded], dims: Sequence[int], dtype: torch.dtype) -> None:
        self._coded, self._dims, self._dtype = coded, dims, dtype

    @property
    def sizes(self) -> list[int]:
        """How many rows each has."""
        return [len(one.codes) for one in self._coded]

    def __len__(self) -> int:
        return len(self._coded)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> "Pieces": ...
    def __getitem__(self, i: int | slice) -> "Tensor | Pieces":
        """Step i's rows, (n, p)."""
        if isinstance(i, slice):
            return Pieces(self._coded[i], self._dims, self._dtype)
        return enc.decode(*self._coded[i], self._dims, self._dtype)


class Windows:
    """The windows of one run; `grid` is None where they were made once and for all."""

    def __init__(
        self,
        path: Path,
        dims: Callable[[], list[int]],
        encoding: str,
        grid: Callable[[], Grid | None],
        writable: Callable[[], None],
    ) -> None:
        self._path, self._folder = path, path / FOLDER
        self._dims, self._encoding, self._grid, self._writable = dims, encoding, grid, writable
        self._exact = torch.float64 if encoding == "float64" else torch.float32

    # what waits

    def spool(self, records: Sequence[StepRecord]) -> None:
        """Keep what consecutive steps give for their windows, before these steps are committed."""
        if self._grid() is None:
            return
        self._writable()
        if not self._folder.exists():
            self._folder.mkdir()
            files.fsync(self._path)
        tensors: dict[str, Tensor] = {}
        for record in records:
            for name, rows in (("V", record.shared), ("d", None if record.dual is None else record.dual[None])):
                if rows is not None:
                    tensors |= self._encoded(f"{record.step:08d}/{name}", rows)
        self._write_spooled((records[0].step, records[-1].step + 1), tensors)

    def _write_spooled(self, span: Span, tensors: dict[str, Tensor]) -> None:
        files.write_tensors(self._spool_file(span), tensors or {"none": torch.zeros(1)}, None, checked=True)
        for other in self._spooled():  # the same steps, of an attempt that was not committed
            if other[1] > span[0] and other != span:
                self._spool_file(other).unlink()

    def _spooled(self) -> list[Span]:
        return _spans(self._folder, _SPOOLED)

    def _spool_file(self, span: Span) -> Path:
        return self._folder / f"rows-{span[0]:08d}-{span[1]:08d}.safetensors"

    def _waits_for(self, step: int) -> bool:
        """Whether all from `step` on waits."""
        spans = self._spooled()
        return bool(spans) and spans[0][0] <= step

    # closed windows

    def spans(self, n: int) -> list[Span]:
        """All windows of the first `n` steps; those that are not closed as they are so far."""
        closed = [(lo, min(hi, n)) for lo, hi in self._closed().items() if lo < n]
        grid, done = self._grid(), closed[-1][1] if closed else 0
        return closed + (grid.windows(done, n) if grid is not None else [])

    def _closed(self) -> dict[int, int]:
        """From step -> to step, in order; of two that begin alike (one was cut, and a death came) the longer one."""
        return dict(_spans(self._path, _CLOSED))

    def ended(self) -> int:
        """The step at which the last closed window ends."""
        return max(self._closed().values(), default=0)

    def cut_at(self, step: int) -> int | None:
        """`step` where a window ends there that would go on, and no later step of it gives rows; None elsewhere."""
        grid = self._grid()
        if grid is None or not grid.window(step)[0] < step in self._closed().values():
            return None
        return None if any(map(grid.is_seen, range(step, grid.window(step)[1]))) else step

    def settle(self, n: int, *, end: bool = False) -> None:
        """Close the windows that end with the first `n` steps, all of which are committed; at the `end` of the run the last one too."""
        if (grid := self._grid()) is None:
            return
        self._writable()
        closed = self._closed()
        for lo, hi in grid.windows(max(closed.values(), default=0), n):
            if end or hi == grid.window(lo)[1]:
                self.write((lo, hi), self._from_waiting((lo, hi), self._exact, grid.rank))
                closed[lo] = hi
        for span in self._spooled():
            if closed and (end or span[1] <= max(closed)):
                self._spool_file(span).unlink()

    def write(self, span: Span, window: Window) -> None:
        """Keep the curvature of one window, in the run's encoding."""
        self._writable()
        tensors: dict[str, Tensor] = {}
        for name, rows in zip(Window._fields, window, strict=True):
            if rows is not None:
                tensors |= self._encoded(name, rows)
        files.write_tensors(self._closed_file(span), tensors, None, checked=True)

    def read(self, span: Span, dtype: torch.dtype) -> Window:
        """The curvature of one window; its rows are made orthogonal again after their rounding."""
        closed, grid = self._closed(), self._grid()
        if span[0] not in closed:
            if grid is None:
                raise self._missing(span)
            waiting = self._from_waiting(span, dtype, grid.rank)
            return waiting._replace(V=orthogonal(waiting.V))
        file = self._closed_file((span[0], closed[span[0]]))
        try:
            tensors = files.read_tensors(file)
        except StoreError as error:
            raise StoreError(
                f"the curvature of steps {span[0]} to {span[1] - 1} cannot be read: {file} is damaged. Restore it from a copy of the run, or "
                "record the run again."
            ) from error
        V, d = (self._decoded(tensors, name, dtype) if name in tensors else None for name in Window._fields)
        assert V is not None
        return Window(orthogonal_again(V), d)

    def _from_waiting(self, span: Span, dtype: torch.dtype, rank: int) -> Window:
        """The same of a window that is not closed."""
        if not self._waits_for(span[0]):
            raise self._missing(span)
        codes, duals, vectors = list[Coded](), list[Tensor](), sum(self._dims())
        for t, tensors in self._waiting(span):
            if (name := f"{t:08d}/V") in tensors:
                codes.append(Coded(tensors[name], tensors.get(f"{name}/scale")))
            if (name := f"{t:08d}/d") in tensors:
                duals.append(self._decoded(tensors, name, dtype))
        pieces = Pieces(codes, self._dims(), dtype)
        V = leading(pieces, pieces.sizes, rank) / len(codes) ** 0.5 if codes else torch.zeros(0, vectors, dtype=dtype)
        return Window(V, torch.cat(duals) if duals else None)

    def _waiting(self, span: Span) -> Iterator[tuple[int, dict[str, Tensor]]]:
        at = span[0]
        for lo, hi in self._spooled():  # two have the same steps where a death came while some were dropped
            if lo < span[1] and hi > at:
                tensors = files.read_tensors(self._spool_file((lo, hi)))
                yield from ((t, tensors) for t in range(max(lo, at), min(hi, span[1])))
                at = hi

    def _missing(self, span: Span) -> StoreError:
        return StoreError(
            f"the curvature of steps {span[0]} to {span[1] - 1} is missing from {self._path}. Restore "
            f"{self._closed_file(span).name} from a copy of the run, or record it again."
        )

    # going on

    def truncate(self, step: int, clipped: Callable[[int, int], int]) -> None:
        """Drop what belongs to steps from `step` on; `clipped` counts the clipped steps between two."""
        self._writable()
        for lo, hi in self._closed().items():
            if hi <= step:
                continue
            if lo < step and not self._waits_for(lo):
                V, d = self.read((lo, hi), self._exact)
                self.write((lo, step), Window(V, None if d is None else d[: clipped(lo, step)]))
            files.remove(self._closed_file((lo, hi)))
        for lo, hi in self._spooled():
            if hi > step > lo:
                tensors = files.read_tensors(self._spool_file((lo, hi)))
                self._write_spooled((lo, step), {k: x for k, x in tensors.items() if k < f"{step:08d}"})
            elif hi > step:
                self._spool_file((lo, hi)).unlink(missing_ok=True)

    def damage(self, n: int) -> Iterator[str]:
        """Sentences about what is missing or cannot be read; closed windows are read with the other tensors of the run."""
        done = 0
        for span in self.spans(n):
            if span[0] != done or (span[0] not in self._closed() and not self._waits_for(span[0])):
                yield f"the curvature of steps {done} to {(span[0] if span[0] != done else span[1]) - 1} is missing."
            done = span[1]
        if done < n:
            yield f"the curvature of steps {done} to {n - 1} is missing."
        for span in self._spooled():
            try:
                files.read_tensors(self._spool_file(span))
            except StoreError as error:
                yield str(error)

    def _closed_file(self, span: Span) -> Path:
        return self._path / f"{name_window(span)}.safetensors"

    def _encoded(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        codes, scales = enc.encode(rows, self._dims(), self._encoding)
        return {name: codes} if scales is None else {name: codes, f"{name}/scale": scales}

    def _decoded(self, tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        return enc.decode(tensors[name], tensors.get(f"{name}/scale"), self._dims(), dtype)


def name_window(span: Span) -> str:
    """Under which a closed window is kept."""
    return f"curvature-{span[0]:08d}-{span[1]:08d}"


def _spans(folder: Path, name: re.Pattern[str]) -> list[Span]:
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted((int(m[1]), int(m[2])) for x in names if (m := name.fullmatch(x)))
