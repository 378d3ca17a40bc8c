"""The cost of exact results, on something tiny; what is timed does what it says."""

import torch
from experiments.bench.exact import bench_exact, left_out, nudge
from experiments.bench.live import peak_of
from experiments.bench.page import EXACT
from tests.support import examples
from torch import nn

from backstory.replay.tape import Removal


def test_costs_are_multiples_of_the_training() -> None:
    result = bench_exact(scale="tiny", repeats=1)
    for part in (result, result["large"]):
        assert part["training_s"] > 0
        assert set(part["reverse"]) == {"1", "4", "16"}
        assert set(part["leave_out"]) == set(part["tangent"]) == {"8"}
        assert min(*part["reverse"].values(), part["leave_out"]["8"], part["tangent"]["8"]) > 0
        assert 1 < part["memory"], "a sweep holds the parameters and the optimizer's state at least"
    wanted = [name for name, _ in EXACT]
    assert [set(row) >= set(wanted) for row in result["rows"]] == [True, True]
    assert [row["reverse 16"] for row in result["rows"]] == [
        part["reverse"]["16"] for part in (result, result["large"])
    ]


def test_sources_are_left_out_and_twins_differ_by_rounding() -> None:
    def query(model: nn.Module) -> torch.Tensor:
        return examples.loss(model, examples.make().queries["q"])

    changes, twins = left_out(examples.make, [Removal((0, 1)), Removal((2,))], query)
    assert changes.shape == (2, 3)
    assert twins.shape == (3, 3)
    noise = float((twins - twins[0]).abs().max())
    assert 0 < noise < 1e-6 * float(changes.abs().max())


def test_a_nudge_is_one_rounding_unit() -> None:
    model = examples.make().model
    before = [p.detach().clone() for p in model.parameters()]
    nudge(model, 0)
    for p, x in zip(model.parameters(), before, strict=True):
        away = torch.nextafter(x, torch.full_like(x, torch.inf)) - x
        assert bool(((p.detach() - x).abs() <= away).all())
        assert not torch.equal(p, x)


def test_the_highest_number_of_bytes() -> None:
    there = torch.zeros(1000)

    def work() -> None:
        a = there + 1  # 4,000 bytes
        b = a.view(10, 100) * 2  # and 4,000
        del a
        b.sum()  # and 4
        del b
        torch.zeros(1500)  # 6,000

    assert peak_of(work) == 8000
