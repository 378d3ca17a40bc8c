"""What the recorded steps are like: numbers against their definitions, words against the numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import adam
from tests.support.adam import adamw
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, one_backward_each, same_report, sgd, stored, train
from torch import nn

import backstory
from backstory.run.run import Run


def recorded(path: Path, *, rate: float = 0.1, clip: float | None = None, **settings: object) -> tuple[Run, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)
    with backstory.record(model, optimizer, path, loss_reduction="mean", encoding="float32", **settings) as rec:  # type: ignore[arg-type]
        for _ in range(6):
            with rec.step(range(10)):
                F.cross_entropy(model(x), y).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            optimizer.zero_grad()
    return backstory.open(path), model


def test_growth_is_the_largest_eigenvalue_over_its_limit(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "r", rate=30.0, projection="full")
    actual = run.recording_report()
    block = run._store.read(0, 60, dtype=torch.float64)
    assert block.rows is not None
    each = [30.0 / 10 * torch.linalg.matrix_norm(g, 2) ** 2 / 2 for g in block.rows.split(10)]
    assert actual.largest_growth == pytest.approx(float(max(each)), rel=1e-4)
    assert actual.largest_growth_step == int(torch.stack(each).argmax())
    assert actual.expanding_steps == tuple(t for t, x in enumerate(each) if x > 1) != ()
    assert "steps are above it" in " ".join(actual.words[:2])


def test_energy_coverage_and_clipping(tmp_path: Path) -> None:
    full, _ = recorded(tmp_path / "full", projection="full", clip=0.1)
    assert full.recording_report().retained == pytest.approx(1.0, rel=1e-4)
    assert full.recording_report().clipped == 1.0
    small, _ = recorded(tmp_path / "small", rank=1, warmup_steps=2)
    assert 0.05 < small.recording_report().retained < 0.999
    part, _ = recorded(tmp_path / "part", projection="full", layers=["2.*"])
    assert 0 < part.recording_report().coverage < 1
    assert part.recording_report().retained == pytest.approx(1.0, rel=1e-4), (
        "energy is measured within what is recorded"
    )


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_head_on_a_backbone_that_nobody_trains_is_covered_whole(max_norm: float | None, tmp_path: Path) -> None:
    model = mlp()
    head = [model.get_parameter("2.weight"), model.get_parameter("2.bias")]
    train(tmp_path / "run", model, torch.optim.SGD(head, lr=0.1), 3, max_norm=max_norm)
    run = backstory.open(tmp_path / "run")
    assert run.steps().coverage.max() < 0.999, "the backbone has gradients"
    assert run.recording_report().coverage == 1.0
    assert "Recorded parameters cover 100.0% of the gradient (squared norm)." in run.recording_report().words
    assert run.config["left_out"] == []
    assert [n for n in run.caveats() if "parameters" in n] == [
        "2 parameters are in no optimizer group and are treated as frozen"
    ]


def test_what_is_not_recorded_is_measured_against_what_is_trained(tmp_path: Path) -> None:
    """The first weight is in no group, the first bias has a rate of 0 in the first step, the last bias is not recorded."""
    model = mlp()
    names = ["0.bias", "2.weight", "2.bias"]
    slow, *fast = (model.get_parameter(n) for n in names)
    groups: list[dict[str, Any]] = [{"params": [slow], "lr": 0.0}, {"params": fast}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    expected = []

    def seen(t: int, ids: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * t
        mean = one_backward_each(model, batch_of(ids), cross_entropy, names).mean(0).square()
        first, weight, bias = (float(x.sum()) for x in mean.split([4, 8, 2]))
        expected.append(weight / (weight + bias) if t == 0 else (first + weight) / (first + weight + bias))

    train(tmp_path / "run", model, optimizer, 2, layers=["!2.bias"], seen=seen, max_norm=0.01)
    run = backstory.open(tmp_path / "run")
    assert stored(tmp_path / "run").table.trained.tolist() == pytest.approx(expected, rel=1e-9)
    assert run.recording_report().coverage == pytest.approx(sum(expected) / 2, rel=1e-9)
    (note,) = [n for n in run.caveats() if "not recorded" in n]
    assert (
        note
        == f"1 parameters are not recorded; the recorded ones cover {sum(expected) / 2:.1%} of the gradient (squared norm)"
    )


class Renamed(torch.optim.SGD):
    """Steps as SGD does."""


def test_an_optimizer_without_a_second_moment_is_followed_exactly_whatever_its_name(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, Renamed(model.parameters(), lr=0.1), 2)
    assert "Renamed's steps are modelled exactly." in backstory.open(tmp_path / "run").recording_report().words


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}, {}])
def test_sgd_as_a_proxy_of_itself_names_what_it_drops(settings: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model, **settings), 2, optimizer_model="sgd")
    run = backstory.open(tmp_path / "run")
    said = {"momentum": "momentum 0.9 and Nesterov", "weight_decay": "weight decay 0.01"}.get(next(iter(settings), ""))
    answer = run.query(model, cross_entropy, batch_of(ids_of(0)))
    assert answer.recording is not None
    if said is None:
        assert "SGD's steps are modelled exactly." in answer.recording.words
        assert not any("proxy" in n for n in (*run.caveats(), *answer.caveats))
        return
    assert answer.recording.words[0] == f"SGD's steps are modelled as plain SGD (the paper's proxy), without {said}."
    assert answer.recording.proxy
    note = f"SGD's steps are treated as plain SGD (the paper's proxy), without {said}: expect weaker results"
    assert note in answer.caveats
    assert note in run.caveats()


def test_answers_carry_the_same_report_however_they_are_computed(tmp_path: Path) -> None:
    run, model = recorded(tmp_path / "r", projection="full")
    x = torch.ones(2, 6)

    def ask(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m(batch)
        return out.sum(1)

    adjoint = run.query(model, ask, x)
    run.embed()
    embedded = run.query(model, ask, x)
    assert (adjoint.method, embedded.method) == ("adjoint", "embeddings")
    same_report(embedded.recording, adjoint.recording)
    same_report(run.recording_report(), adjoint.recording)
    assert adjoint.recording is not None
    assert not adjoint.recording.proxy
    assert "empirical Fisher" in adjoint.recording.words[0]


def test_adam_is_reported_with_its_second_moment_and_its_drift(tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "r", model, adamw(model), 6, projection="random", rank=2)
    run = backstory.open(tmp_path / "r")
    actual = run.recording_report()
    text = " ".join(actual.words)
    assert "AdamW's steps are modelled with the second moment of the run, factored over rows and columns." in text
    assert actual.drift == pytest.approx(run.steps().drift.mean(), rel=1e-12)
    assert actual.drift > 0
    assert f"change by {actual.drift:.1%} from step to step; this change is ignored." in text
    told = run.query(model, cross_entropy, batch_of([0])).recording
    assert told is not None
    assert told.words == actual.words
    rows = run._store.read(0, 18, dtype=torch.float64).rows
    assert rows is not None
    energy = [float(g.mean(0).square().sum() / (s.whole * s.half).square().sum())
              for g, s in zip(rows.split(3), seen, strict=True)]  # fmt: skip
    assert actual.retained == pytest.approx(sum(energy) / 6, rel=1e-5), "within Adam's own coordinates"


def test_the_exact_diagonal_has_no_drift_and_counts_in_the_growth(tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "r", model, adamw(model), 6, projection="full")
    actual = backstory.open(tmp_path / "r").recording_report()
    text = " ".join(actual.words)
    assert "AdamW's steps are modelled with the second moment of the run." in text
    assert actual.drift == 0
    assert "change by" not in text
    rate = torch.cat([torch.full((p.numel(),), 0.02 if p.dim() > 1 else 0.05).double() for p in model.parameters()])
    each = []
    for t, s in enumerate(seen):
        effect = 0.2 / (1 - 0.8 ** (t + 1))  # of the fresh gradient, in the first moment's average
        H = s.rows.T @ s.rows / 3
        root = (rate * s.P).sqrt()
        each.append(float(torch.linalg.eigvalsh(root[:, None] * H * root)[-1]) * effect / (2 * 1.8))
    assert actual.largest_growth == pytest.approx(max(each), rel=1e-4)
    assert actual.largest_growth_step == each.index(max(each))
