"""The paper's table: every stage in turn, on one run; LoGRA's influence is that of `backstory.baselines`."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from experiments.bench.efficiency import bench_efficiency, recipe
from experiments.bench.workloads import TINY
from tests.support.oracles import assert_same

from backstory.baselines.influence import influence_function
from experiments.bench import efficiency


def test_every_stage_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(function: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**getattr(efficiency, function.partition(":")[2])(**values), "peak_bytes": 1}

    monkeypatch.setattr(efficiency, "in_child", here)
    actual = bench_efficiency(scale="tiny")
    assert [x["method"].split()[0] for x in actual] == ["Backstory"] * 3 + ["LoGRA"] * 2
    for line in actual:
        assert line["samples_per_s"] == TINY["B"].samples / line["work_s"]
        assert line["peak_bytes"] == 1
    assert [x.get("storage_bytes") is not None for x in actual] == [True, True, False, True, False]
    assert actual[0]["storage_bytes"] > 12 * 2 * 1008  # rows of float16
    assert actual[1]["storage_bytes"] > 12 * 2 * 1008  # embeddings


def test_logra_is_the_influence_function_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    real = torch.stack

    def stack(parts: list[torch.Tensor]) -> torch.Tensor:
        made.append(real(parts).sum(0))
        return real(parts)

    monkeypatch.setattr(torch, "stack", stack)
    efficiency.logra_influence("tiny")
    monkeypatch.undo()
    work = TINY["B"]
    expected = influence_function(recipe(work), work.queries(), rank=32, per_layer=True, damping=efficiency.DAMPING)
    terms = 2 * 5 * (8 + 32 + 11) + expected.scores.shape[1]  # 5 tokens there and back, then all rows; rows in float32
    assert_same(made[-1], expected.scores, terms, dtype=torch.float32)
