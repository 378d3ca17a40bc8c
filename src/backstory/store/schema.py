"""What is stored of a step, as it is written and as it is read, and its columns.

    rows     step, pos, sample, weight, loss, gdot, g[Σp] codes, s[L] scales (scaled encodings only),
             own where occurrences keep κ, what their gradients hold of their curvature,
             and where curvature rows are kept, R to an occurrence: h[R·Σp], hs[R·L], kappa[R], hdot[R];
             split runs have no g and s: there the gradient is the sum of the curvature rows
    steps    step, row_start, rows, clip, norm, coverage, size, drift, trained, crc, and one list over parameter groups
             each for rate, l2, decay, momentum, tau, a, n; P[Σp], the optimizer's diagonal, where it is kept;
             for replays batch, a checksum of its data, generators[4], those of the random states after it, and random,
             the states before it where something was drawn since the step before
    samples  id, text, image, label, source
    emb-*    step, pos, e[Σp] codes, se[L] scales

Shapes:  B samples in a step, n rows, L layers, Σp numbers in a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NumericalError, UsageError
from ..maths import encoding as enc
from ..maths.encoding import Block, parts

GROUP_KEYS = ("rate", "l2", "decay", "momentum", "tau", "a", "n")
STEP_NUMBERS = ("clip", "norm", "coverage", "size", "drift")
ROW_SCALARS = ("step", "pos", "sample", "weight", "loss", "gdot")
GENERATORS = 4  # kinds of random states: torch, python, numpy, cuda
SAMPLE_COLUMNS = ("id", "text", "image", "label", "source")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as capture hands it over; its tensors must not change afterwards."""

    step: int
    samples: Sequence[str]  # B ids
    weight: Tensor  # (B,) float64
    loss: Tensor  # (B,) float64, NaN where not given
    gdot: Tensor  # (B,) float64, ⟨g, ∇L⟩
    rows: Tensor  # (B, Σp) raw gradient rows, blocks side by side
    groups: Mapping[str, Sequence[float]]  # GROUP_KEYS -> one number per parameter group
    clip: float  # 1.0 = not clipped
    norm: float  # ‖∇L‖ before clipping
    coverage: float  # share of ‖∇L‖² that the rows cover, 0..1, over all parameters that have a gradient
    size: float = 0.0  # ‖∇L‖² of the recorded parameters in the run's coordinates, before the projection
    drift: float = 0.0  # change of log P since the step before, root mean square
    trained: float | None = None  # `coverage` among the parameters that the optimizer updates; None: the same
    P: Tensor | None = None  # (Σp,) the optimizer's diagonal, where rows are kept without it
    curvature: Tensor | None = None  # (B, R, Σp) curvature rows, where they are not the gradient rows
    kappa: Tensor | None = None  # (B, R) float64, their scales κ
    hdot: Tensor | None = None  # (B, R) float64, ⟨h, ∇L⟩
    own: Tensor | None = None  # (B,) float64, κ of κ g gᵀ, what its gradient holds of an occurrence's curvature
    shared: Tensor | None = None  # (N, Σp) rows √κ h for the curvature of the step's window, where it gives any
    dual: Tensor | None = None  # (Σp,) what ∇L of a clipped step is to the window's rows, in Adam's coordinates
    batch: int | None = None  # checksum of the tensors that reached the model
    generators: Sequence[int] = (0,) * GENERATORS  # checksums of the random states after the step
    random: bytes | None = None  # the random states before the step, packed; None: as after the step before

    @property
    def nbytes(self) -> int:
        """Memory that the record holds, about."""
        more = sum(0 if x is None else x.nbytes for x in (self.curvature, self.P, self.shared, self.dual)) + len(
            self.random or b""
        )
        return self.rows.nbytes + more + 100 * len(self.samples) + 1000


class StepTable(NamedTuple):
    """Columns of consecutive steps, in time order."""

    step: NDArray[np.int64]  # (T,)
    row_start: NDArray[np.int64]  # (T,)
    rows: NDArray[np.int64]  # (T,)
    clip: NDArray[np.float64]  # (T,)
    norm: NDArray[np.float64]  # (T,)
    coverage: NDArray[np.float64]  # (T,)
    size: NDArray[np.float64]  # (T,)
    drift: NDArray[np.float64]  # (T,)
    trained: NDArray[np.float64]  # (T,)
    groups: dict[str, NDArray[np.float64]]  # (T, n_groups) each
    crc: NDArray[np.int64]  # (T,)
    batch: NDArray[np.int64]  # (T,) −1 where it is not known
    generators: NDArray[np.int64]  # (T, 4)

    def spans(self, most_rows: int) -> list[tuple[int, int]]:
        """Whole steps (from, to), counted from the first one here, with at most so many rows; the latest first."""
        starts, ends = self.row_start.tolist(), (self.row_start + self.rows).tolist()
        out, hi = [], len(starts)
        while hi:
            lo = hi - 1
            while lo and ends[hi - 1] - starts[lo - 1] <= most_rows:
                lo -= 1
            out.append((lo, hi))
            hi = lo
        return out


class RowBlock(NamedTuple):
    """Consecutive rows, in time order."""

    row_start: int
    step: Tensor  # (n,) int64
    pos: Tensor  # (n,) int64
    weight: Tensor  # (n,) float64
    loss: Tensor  # (n,) float64
    gdot: Tensor  # (n,) float64
    samples: list[str] | None  # only when asked
    rows: Tensor | None  # (n, Σp), only when asked
    curvature: Tensor | None = None  # (n, R, Σp), only when asked and kept
    kappa: Tensor | None = None  # (n, R) float64
    hdot: Tensor | None = None  # (n, R) float64
    own: Tensor | None = None  # (n,) float64, where kept


def vector_fields(code: str, scale: str, dims: Sequence[Block], encoding: str) -> list[pa.Field]:
    """The columns of encoded rows."""
    columns = zip((code, scale), _columns(tuple(parts(dims)), encoding), strict=True)
    return [pa.field(name, kind) for name, kind in columns if kind is not None]


@lru_cache(maxsize=64)
def _columns(sizes: tuple[int, ...], encoding: str) -> list[pa.DataType | None]:
    """The types of codes and scales, as those of no rows at all."""
    encoded = enc.encode(torch.zeros(0, sum(sizes)), sizes, encoding)
    return [None if x is None else pa.list_(pa.from_numpy_dtype(x.numpy().dtype), x.shape[1]) for x in encoded]


def rows_schema(
    dims: Sequence[Block], encoding: str, curvature_rows: int = 0, split: bool = False, own: bool = False
) -> pa.Schema:
    """Columns of `rows.lance`; with `split` the gradient is the sum of the curvature rows, and not kept apart."""
    scalars = [("step", pa.int32()), ("pos", pa.int32()), ("sample", pa.string())]
    scalars += [(name, pa.float64()) for name in ("weight", "loss", "gdot", *(["own"] if own else []))]
    fields = [pa.field(*s) for s in scalars] + ([] if split else vector_fields("g", "s", dims, encoding))
    if curvature_rows:
        fields += vector_fields("h", "hs", [*dims] * curvature_rows, encoding)
        fields += [pa.field(name, pa.list_(pa.float64(), curvature_rows)) for name in ("kappa", "hdot")]
    return pa.schema(fields)


def steps_schema(n_groups: int, diagonal: int = 0) -> pa.Schema:
    """Columns of `steps.lance`; `diagonal` is how many entries of P are kept."""
    fields = [("step", pa.int32()), ("row_start", pa.int64()), ("rows", pa.int32())]
    fields += [(name, pa.float64()) for name in STEP_NUMBERS]
    fields += [("trained", pa.float64()), ("crc", pa.int64())]
    fields += [(key, pa.list_(pa.float64(), n_groups)) for key in GROUP_KEYS]
    fields += [("batch", pa.int64()), ("generators", pa.list_(pa.int64(), GENERATORS)), ("random", pa.binary())]
    fields += [("P", pa.list_(pa.float32(), diagonal))] if diagonal else []
    return pa.schema(fields)


def samples_schema() -> pa.Schema:
    """Columns of `samples.lance`."""
    kinds = {"image": pa.binary()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in SAMPLE_COLUMNS])


def embeddings_schema(dims: Sequence[int], encoding: str) -> pa.Schema:
    """Columns of `emb-*.lance`."""
    scalars = [pa.field("step", pa.int32()), pa.field("pos", pa.int32())]
    return pa.schema(scalars + vector_fields("e", "se", dims, encoding))


def check_record(
    record: StepRecord,
    width: int,
    n_groups: int,
    curvature_rows: int = 0,
    diagonal: bool = False,
    own: bool = False,
) -> None:
    """Raise unless every part of `record` has the size that the run expects."""
    B, R, where = len(record.samples), curvature_rows, f"step {record.step}"
    shapes: dict[str, tuple[int, ...] | None] = {
        "rows": (B, width),
        "weight": (B,),
        "loss": (B,),
        "gdot": (B,),
        "own": (B,) if own else None,
        "curvature": (B, R, width) if R else None,
        "kappa": (B, R) if R else None,
        "hdot": (B, R) if R else None,
        "P": (width,) if diagonal else None,
    }
    for name, expected in shapes.items():
        value: Tensor | None = getattr(record, name)
        shape = None if value is None else tuple(value.shape)
        if shape != expected:
            raise UsageError(
                f"{where}: expected {name} of shape {expected}, got {shape}. Pass one id per sample, and do not change "
                "the layers, the curvature or the optimizer during a run."
            )
    sizes = {key: len(record.groups.get(key, ())) for key in GROUP_KEYS}
    if any(size != n_groups for size in sizes.values()):
        raise UsageError(
            f"{where}: expected {n_groups} values per coefficient, one per parameter group, got {sizes}. The "
            "optimizer's parameter groups must not change during a run."
        )
    vectors = (record.rows, record.curvature, record.P, record.shared, record.dual)
    if not all(enc.all_finite(x) for x in vectors if x is not None):
        raise NumericalError(
            f"{where} has NaN or Inf in its per-sample gradients, curvature samples or optimizer diagonal, so it was "
            "not recorded. Check for a diverging loss or numerical overflow at that step."
        )
