"""Backstory's own lines have what a rival's have."""

from experiments.bench.ours import bench_ours


def test_lines_beside_rivals() -> None:
    actual = bench_ours(scale="tiny", repeats=1)
    assert [(x["rival"], x["workload"]) for x in actual] == [("Backstory", w) for w in "AABB"]
    for line in actual:
        assert line["record_over_plain"] == line["record_s"] / line["plain_s"]
        assert line["index_over_plain"] == line["index_s"] / line["plain_s"]
        assert min(line[k] for k in ("query_s", "adjoint_s", "store_bytes", "dims")) > 0
    assert actual[2]["configuration"] == "learned, rank 32, empirical/6, int8, joint"
