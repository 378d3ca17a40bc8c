"""Curvature rows lie beside the gradient rows: R to each occurrence, under the same checksum."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.store.builders import LAYERS, WIDTH, record

from backstory.errors import NumericalError, UsageError
from backstory.store import RunStore, StepRecord

R = 3


def with_curvature(step: int, rows: int = R) -> StepRecord:
    plain = record(step)
    g = torch.Generator().manual_seed(1000 + step)
    B = len(plain.samples)
    return replace(
        plain,
        curvature=torch.randn(B, rows, WIDTH, generator=g, dtype=torch.float64),
        kappa=torch.rand(B, rows, generator=g, dtype=torch.float64),
        hdot=torch.randn(B, rows, generator=g, dtype=torch.float64),
    )


def new(path: Path, encoding: str = "float64") -> RunStore:
    return RunStore.create(path, layers=LAYERS, encoding=encoding, n_groups=2, config={}, curvature_rows=R)


@pytest.mark.parametrize(
    ("encoding", "error"), [("float64", 0.0), ("float32", 1e-7), ("float16", 1e-3), ("int8", 5e-3)]
)
def test_curvature_comes_back(tmp_path: Path, encoding: str, error: float) -> None:
    made = [with_curvature(t) for t in range(5)]
    with new(tmp_path / "run", encoding) as store:
        store.append(made)
    store = RunStore.open(tmp_path / "run")
    blocks = list(store.chunks(5, dtype=torch.float64, chunk_bytes=8 * WIDTH * (R + 1) * 4))
    assert len(blocks) > 1
    actual = torch.cat([b.curvature for b in reversed(blocks) if b.curvature is not None])
    expected = torch.cat([r.curvature for r in made if r.curvature is not None])
    for lo, hi in ((0, 5), (5, 12)):
        size = expected[..., lo:hi].abs().amax(-1, keepdim=True)
        assert ((actual - expected)[..., lo:hi].abs() <= error * size).all()
    for name in ("kappa", "hdot"):
        whole = torch.cat([getattr(b, name) for b in reversed(blocks)])
        assert torch.equal(whole, torch.cat([getattr(r, name) for r in made]))
    assert store.verify() == []
    assert store.read(0, 2).curvature is None


def test_a_changed_curvature_byte_is_found(tmp_path: Path) -> None:
    made = [with_curvature(t) for t in range(3)]
    with new(tmp_path / "run") as store:
        store.append(made)
    needle = made[1].curvature
    assert needle is not None
    wanted = needle[0, 2].numpy().tobytes()
    files = [p for p in (tmp_path / "run" / "rows.lance" / "data").iterdir() if wanted in p.read_bytes()]
    assert len(files) == 1
    data = bytearray(files[0].read_bytes())
    data[data.index(wanted) + 3] ^= 1
    files[0].write_bytes(bytes(data))
    assert [x for x in RunStore.open(tmp_path / "run").verify() if "step 1" in x]


def test_every_occurrence_has_the_same_number(tmp_path: Path) -> None:
    with new(tmp_path / "run") as store:
        for wrong in (record(0), with_curvature(0, rows=2)):
            with pytest.raises(UsageError, match="expected curvature of shape"):
                store.append([wrong])
        bad = with_curvature(0)
        assert bad.curvature is not None
        bad.curvature[0, 1, 2] = torch.inf
        with pytest.raises(NumericalError):
            store.append([bad])
        assert store.n_steps() == 0


def test_bytes_per_row_counts_them(tmp_path: Path) -> None:
    with new(tmp_path / "run") as store:
        assert store.bytes_per_row >= 8 * WIDTH * (R + 1)
