"""The recording bench really records, and its figures follow from the times of its turns."""

import pytest
from experiments.bench.recording import COMPRESSED, CONFIGURATIONS, OWN, bench_record, figures, warmup
from experiments.bench.timing import Times
from experiments.bench.training import Recorded
from experiments.bench.workloads import TINY

from experiments.bench import recording

KEYS = {
    "workload", "configuration", "settings", "ratio", "cpu_ratio", "one_off_s", "steps", "run_ratio", "run_cpu_ratio",
    "plain_ms_per_step", "bytes_per_occurrence", "rows", "dims",
}  # fmt: skip


def test_figures_by_hand() -> None:
    work = TINY["A"]  # turns of one step, so that the warm-up is 20 turns
    plain = [Times(1.0, 1.0)] * 24
    recorded = [Times(2.0, 3.0)] * 19 + [Times(52.0, 3.0)] + [Times(1.5, 1.2)] * 3 + [Times(9.0, 9.0)]
    actual = figures(work, plain, recorded, Times(4.0, 0.0), 20)
    assert actual["ratio"] == 1.5
    assert actual["cpu_ratio"] == pytest.approx(1.2)
    assert actual["one_off_s"] == pytest.approx(19 * 2 + 52 - 20 * 1.5)
    assert actual["run_ratio"] == pytest.approx((19 * 2 + 52 + 3 * 1.5 + 9 + 4) / 24)
    assert (actual["steps"], actual["turns"]) == (24, 4)
    assert actual["plain_ms_per_step"] == 1000
    assert actual["learning_s"] == pytest.approx(20 * 3 - 20 * 1.2)
    assert figures(work, plain, recorded, Times(4.0, 0.0), 8)["turns"] == 16


def test_the_warm_up_is_that_of_the_settings() -> None:
    assert [warmup(settings) for settings in CONFIGURATIONS.values()] == [8, 4, 8, 20, 8]


def test_one_line_for_each_workload_and_configuration() -> None:
    said: list[str] = []
    known = {"default": 0.75, "best": 0.8, "learned-16-empirical/6-compressed": 0.77, "int8": 0.1}
    study = {"rows": [{"method": name, "mean": mean} for name, mean in known.items()]}
    actual = bench_record(workloads="AB", scale="tiny", study=study, say=said.append)
    assert [row["fidelity"] for row in actual["rows"]] == [None] * 5 + [0.75, None, 0.8, None, 0.77, None]
    assert all(row["embedding_s"] > 0 and row["embedded"] == row["occurrences"] for row in actual["rows"])
    assert [row["configuration"] for row in actual["rows"][:5]] == list(CONFIGURATIONS), "no curvature of its own"
    small = f"{OWN}, compressed"
    assert [row["configuration"] for row in actual["rows"][5:]] == [
        "default", "fast", "best", OWN, small, "paper: random 32×32, empirical",
    ]  # fmt: skip
    assert COMPRESSED == (OWN,)
    assert [row["configuration"] for row in actual["rows"] if "compress_s" in row] == [small]
    assert actual["rows"][9]["ratio"] == actual["rows"][8]["ratio"], "recording is the same"
    assert all(row["peak_memory_ratio"] > 0 for row in actual["rows"] if "compress_s" not in row)
    assert len(said) == 4  # and a plan each
    for row in actual["rows"]:
        assert row.keys() >= KEYS
        assert row["ratio"] > 0
        assert row["steps"] == 6
    assert [row["settings"] for row in actual["rows"][5:9]] == [
        "learned, rank 32, empirical/6, int8", "learned, rank 16, empirical/6, int8",
        "learned, rank 32, sampled:2/6, int8", "learned, rank 16, empirical/6, float16",
    ]  # fmt: skip


def test_all_recorders_end_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(recording, "turns", lambda *_: 1 / 0)
    monkeypatch.setattr(Recorded, "close", lambda self: closed.append(self.recorder.settings.encoding))
    with pytest.raises(ZeroDivisionError):
        recording.compare(TINY["A"], {"a": {"projection": "random"}, "b": {"projection": "random", "encoding": "int8"}})
    assert closed == ["float16", "int8"]
