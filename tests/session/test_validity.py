"""The validity report: numbers against their definitions, words against the numbers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.session import adam
from tests.session.adam import adamw
from tests.session.loops import batch_of, cross_entropy, mlp, same_report
from torch import nn

import backstory
from backstory.session.run import Run
from backstory.session.validity import Validity


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
    run, _ = recorded(tmp_path / "r", rate=30.0, subspace="full")
    found = run.validity()
    block = run.store.read(0, 60, dtype=torch.float64)
    assert block.rows is not None
    each = [30.0 / 10 * torch.linalg.matrix_norm(g, 2) ** 2 / 2 for g in block.rows.split(10)]
    assert found.largest_growth == pytest.approx(float(max(each)), rel=1e-4)
    assert found.largest_growth_step == int(torch.stack(each).argmax())
    assert found.expanding_steps == [t for t, x in enumerate(each) if x > 1] != []
    assert "times its stable limit" in found.words()[0] or "times its stable limit" in found.words()[1]


def test_energy_coverage_and_clipping(tmp_path: Path) -> None:
    full, _ = recorded(tmp_path / "full", subspace="full", clip=0.1)
    assert full.validity().kept == pytest.approx(1.0, rel=1e-4)
    assert full.validity().clipped == 1.0
    small, _ = recorded(tmp_path / "small", rank=1, warmup_steps=2)
    assert 0.05 < small.validity().kept < 0.999
    part, _ = recorded(tmp_path / "part", subspace="full", layers=["2.*"])
    assert 0 < part.validity().coverage < 1
    assert part.validity().kept == pytest.approx(1.0, rel=1e-4), "energy is measured within what is recorded"


def test_answers_carry_the_same_report_however_they_are_computed(tmp_path: Path) -> None:
    run, model = recorded(tmp_path / "r", subspace="full")
    x = torch.ones(2, 6)

    def ask(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m(batch)
        return out.sum(1)

    adjoint = run.query(model, ask, x)
    run.embed()
    embedded = run.query(model, ask, x)
    assert (adjoint.how, embedded.how) == ("adjoint", "embeddings")
    same_report(embedded.validity, adjoint.validity)
    same_report(run.validity().as_dict(), adjoint.validity)


def test_words_follow_the_numbers() -> None:
    good = Validity(10, 0.0, 1.0, "SGD", "exactly", "exact:10", "full", kept=1.0, largest_growth=0.4)
    bad = Validity(10, 0.5, 0.7, "AdamW", "as plain SGD steps, the paper's proxy", "empirical", "learned", kept=0.3,
                   largest_growth=2.0, largest_growth_step=4, expanding_steps=[4, 5])  # fmt: skip
    assert len(bad.words()) == 6
    text = " ".join(bad.words())
    for part in (
        "proxy",
        "70.0%",
        "30%",
        "at step 4",
        "2 of 10 steps",
        "empirical Fisher",
        "50% of the steps were clipped",
    ):
        assert part in text
    assert "empirical" not in " ".join(good.words())
    assert "proxy" in bad.words()[0]


def test_adam_is_reported_with_its_second_moment_and_its_drift(tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "r", model, adamw(model), 6, subspace="random", rank=2)
    run = backstory.open(tmp_path / "r")
    found = run.validity()
    text = " ".join(found.words())
    assert (
        "AdamW's steps are modelled with its second moment as it was in the run, factored over rows and columns."
        in text
    )
    assert found.drift == pytest.approx(run.store.steps().drift.mean(), rel=1e-12)
    assert found.drift > 0
    assert f"change by {found.drift:.1%} from step to step; that change is left out." in text
    told = run.query(model, cross_entropy, batch_of([0])).validity
    assert told is not None
    assert told["words"] == found.words()
    rows = run.store.read(0, 18, dtype=torch.float64).rows
    assert rows is not None
    energy = [float(g.mean(0).square().sum() / (s.whole * s.half).square().sum())
              for g, s in zip(rows.split(3), seen, strict=True)]  # fmt: skip
    assert found.kept == pytest.approx(sum(energy) / 6, rel=1e-5), "within Adam's own coordinates"


def test_the_exact_diagonal_has_no_drift_and_counts_in_the_growth(tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "r", model, adamw(model), 6, subspace="full")
    found = backstory.open(tmp_path / "r").validity()
    text = " ".join(found.words())
    assert "AdamW's steps are modelled with its second moment as it was in the run." in text
    assert found.drift == 0
    assert "change by" not in text
    rate = torch.cat([torch.full((p.numel(),), 0.02 if p.dim() > 1 else 0.05).double() for p in model.parameters()])
    each = []
    for t, s in enumerate(seen):
        effect = 0.2 / (1 - 0.8 ** (t + 1))  # of the fresh gradient, in the first moment's average
        H = s.rows.T @ s.rows / 3
        root = (rate * s.P).sqrt()
        each.append(float(torch.linalg.eigvalsh(root[:, None] * H * root)[-1]) * effect / (2 * 1.8))
    assert found.largest_growth == pytest.approx(max(each), rel=1e-4)
    assert found.largest_growth_step == each.index(max(each))
