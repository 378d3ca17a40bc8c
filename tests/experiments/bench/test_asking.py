"""Index and questions: all samples, all queries, both ways."""

from pathlib import Path

import torch
from experiments.bench.asking import bench_query, query_losses, questions
from experiments.bench.training import recorded_run
from experiments.bench.workloads import TINY


def test_one_line_for_each_workload_and_configuration() -> None:
    actual = bench_query(scale="tiny", repeats=1)["rows"]
    assert [(x["workload"][0], x["occurrences"], x["queries"]) for x in actual] == [
        ("A", 24, 3), ("A", 24, 3), ("B", 12, 2), ("B", 12, 2),
    ]  # fmt: skip
    for line in actual:
        assert line["index_and_query_s"] == line["index_s"] + line["embeddings_s"]
        assert line["adjoint_s"] > 0
        assert line["settings"]


def test_both_ways_answer_the_same(tmp_path: Path) -> None:
    work = TINY["A"]
    run, model = recorded_run(work, tmp_path / "run", {"projection": "random", "rank": 4}, work.epoch)
    asked = questions(run, model, work, per_layer=False)
    asked["index"]()
    by_embeddings, by_adjoint = asked["embeddings"](), asked["adjoint"]()
    assert by_embeddings.method == "embeddings"  # type: ignore[attr-defined]
    torch.testing.assert_close(by_embeddings.scores, by_adjoint.scores, rtol=0.01, atol=1e-6)  # type: ignore[attr-defined]
    assert query_losses(model, work.queries()).shape == (3,)
