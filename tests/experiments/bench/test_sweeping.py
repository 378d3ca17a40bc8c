"""Embedding from disk: every line has its figures, or the reason why not."""

import pytest
from experiments.bench.sweeping import bench_sweep, steps_at, with_exponents

from experiments.bench import sweeping


def test_lines_and_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "product_peak", lambda: 1e9)
    monkeypatch.setattr(sweeping, "in_child", _here)
    actual = bench_sweep(scale="tiny", repeats=1)
    assert [(x["run"], x["per_layer"], x["rows"]) for x in actual["disk"]] == [
        (run, per_layer, rows)
        for run in ("SGD as a proxy", "AdamW as recorded")
        for per_layer in (True, False)
        for rows in (12, 48)
    ]
    dims = [64, 256, 192, 256, 88]  # 8×8, 24×8, 32×8, 8×32, 11×8, never over 32 a side
    for line in actual["disk"]:
        if not line["per_layer"] or line["rows"] == 12:
            assert "share_of_peak" not in line, "no matrix is made, so its operations are not done"
            continue
        each = (4 if line["run"].startswith("SGD") else 8) * sum(x * x for x in dims) * 48 / 1e9
        assert line["share_of_peak"] == pytest.approx(each / line["seconds"])
        assert line["read_share_of_peak"] == pytest.approx(each / line["read_s"])
    assert {x["against"] for x in actual["slopes"]} == {"steps", "p", "layers"}
    assert [x["value"] for x in actual["slopes"] if x["against"] == "layers"] == [4, 5]
    assert all(x["peak_bytes"] == 4 * x["value"] for x in actual["slopes"] if x["against"] == "steps")


def _here(function: str, values: dict[str, object]) -> dict[str, object]:
    """The child's work in this process; its occurrences stand for its memory."""
    return {"peak_bytes": sweeping.embed_run(**values)["occurrences"]}  # type: ignore[arg-type]


def test_a_matrix_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "product_peak", lambda: 1e9)
    monkeypatch.setattr(sweeping, "in_child", _here)
    monkeypatch.setattr(sweeping, "_free_memory", lambda: 1e5)
    joint = [x for x in bench_sweep(scale="tiny", repeats=1)["disk"] if not x["per_layer"]]
    assert all("GB of memory" in x["skipped"] and "seconds" not in x for x in joint)


def test_exponents() -> None:
    points = [("steps", 2, 1.0), ("steps", 8, 4.0), ("p", 2, 1.0), ("p", 4, 4.0), ("p", 4, 5.0)]
    lines = [{"against": what, "value": value, "seconds": seconds} for what, value, seconds in points]
    assert [x["exponent"] for x in with_exponents(lines)] == [None, pytest.approx(1), None, pytest.approx(2), None]


def test_steps_at() -> None:
    assert list(steps_at(64)) == [4, 16, 32, 64]
    assert list(steps_at(3)) == [1, 3]
