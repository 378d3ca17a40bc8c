"""What the rivals' scripts share: the same training, its clock, one JSON line last."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from experiments.bench.peers.harness import Bench, linear_names, run
from experiments.bench.timing import Times
from experiments.bench.training import Plain
from experiments.bench.workloads import TINY
from tests.support.oracles import assert_same
from torch import Tensor

from experiments.bench.peers import harness


def test_a_trained_model_has_seen_one_step_and_one_epoch() -> None:
    bench, plain = Bench(TINY["A"]), Plain(TINY["A"])
    model = bench.trained()
    plain.advance(1)
    plain.at = 0
    plain.advance(TINY["A"].epoch)
    for p, q in zip(model.parameters(), plain.model.parameters(), strict=True):
        assert_same(p, q, 4 * (6 + 5 + 3 + 2 * 8))  # 4 steps: inputs, width, classes, batches of 8 there and back
    assert bench.result()["plain_s"] > 0


def test_a_rival_in_the_loop_sees_every_sample_once() -> None:
    bench, seen = Bench(replace(TINY["B"], turn=2)), []  # three steps: the last is no whole turn

    def recorded(ids: Tensor, x: Tensor, y: Tensor) -> None:
        assert torch.equal(x, bench.x[ids])
        seen.extend(ids.tolist())

    bench.side_by_side(recorded)
    assert seen == list(range(TINY["B"].samples))
    assert bench.result().keys() >= {"plain_s", "record_s", "plain_cpu_s", "record_cpu_s", "peak_bytes"}


def test_parts_of_one_name_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(work: Callable[[], object]) -> Times:
        work()
        return Times(1.0, 0.5)

    monkeypatch.setattr(harness, "timed_once", second)
    bench = Bench(TINY["A"])
    assert [bench.time("index", lambda: 7), bench.time("index", lambda: 8)] == [7, 8]
    assert bench.times["index"] == Times(2.0, 1.0)


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--workload", "B", "--scale", "tiny"])

    def measure(bench: Bench) -> None:
        bench.time("query", lambda: None)
        bench.facts["configuration"] = bench.work.name

    run("torch", measure)
    actual = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert actual["configuration"] == "B"
    assert actual["version"] == torch.__version__
    assert actual["query_s"] >= 0


def test_linear_layers_by_name() -> None:
    assert linear_names(TINY["A"].start()[0]) == ["0", "2"]
    assert len(linear_names(TINY["B"].start()[0])) == 5
