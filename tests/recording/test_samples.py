"""Samples as people mean them: of several rows, drawn twice in a batch, and in two calls of one step; against one backward pass for each."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.adam import adamw
from tests.support.loops import (
    FULL,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    normal,
    one_backward_each,
    seeded,
    sgd,
    stored,
    trained_names,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.recording.from_checkpoints import record_checkpoints
from backstory.replay.recipe import take_step

B, STEPS = 4, 3


class Tokens(nn.Module):
    """Every kind of contribution: an embedding, matrices and vectors with positions, a norm, a convolution in groups, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.conv = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.head, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * self.conv(self.norm(self.table(x)).mT).mT
        out: Tensor = self.head(h.tanh()).sum((1, 2))
        return out


def tokens(t: int, rows: int) -> Tensor:
    return torch.randint(0, 7, (rows, 5), generator=torch.Generator().manual_seed(t))


def dpo(score: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(score[chosen] - 0.3 * score[rejected])


def each(model: nn.Module, losses: Any) -> Tensor:
    """∇ of each entry, (B, Σ numel), on the model as it is."""
    parameters = [model.get_parameter(n) for n in trained_names(model)]
    rows = []
    for i in range(len(losses(model))):
        grads = torch.autograd.grad(losses(model)[i], parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


PAIRS = {
    "one after the other": ([0, 1, 2, 3] * 2, torch.arange(4), torch.arange(4) + 4),
    "interleaved": ([0, 0, 1, 1, 2, 2, 3, 3], 2 * torch.arange(4), 2 * torch.arange(4) + 1),
    "some have more": ([0, 1, 2, 3, 0, 1, 2, 3, 1, 3], torch.arange(4), torch.tensor([4, 8, 6, 9])),
}


@pytest.mark.parametrize(
    "settings", [{}, {"projection": "learned", "rank": "full", "warmup_steps": 2}], ids=["full", "learned"]
)
@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_one_sample_are_added_up_and_weigh_as_one(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    groups, chosen, rejected = PAIRS[name]
    model = Tokens()
    seeded(model)
    optimizer, expected = sgd(model), []
    settings = {} if not settings else {"projection": "learned", "rank": 7, "warmup_steps": 2}
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **{**FULL, **settings}) as rec:
        for t in range(STEPS):
            x = tokens(t, len(groups))
            expected.append(each(model, lambda m, x=x: dpo(m(x), chosen, rejected)))
            optimizer.zero_grad()
            with rec.step([10 * t + i for i in range(4)], groups=groups) as s:
                losses = dpo(model(x), chosen, rejected)
                s.losses(losses)
                losses.mean().backward()
                optimizer.step()
    actual = stored(tmp_path / "run")
    assert actual.samples == [str(10 * t + i) for t in range(STEPS) for i in range(4)]
    assert actual.weight.tolist() == [0.25] * len(actual.weight)
    if not settings:
        assert_close(actual.rows, torch.cat(expected), 1e-10)
    else:  # in another basis, with all of the energy
        assert_close(actual.rows @ actual.rows.T, torch.cat(expected) @ torch.cat(expected).T, 1e-9)
    assert not backstory.open(tmp_path / "run").caveats(), "rows of one sample may be compared with each other"


def pairs() -> backstory.Recipe:
    model = Tokens()
    seeded(model)
    chosen, rejected = torch.arange(4), torch.arange(4) + 4
    return backstory.Recipe(
        model=model,
        optimizer=sgd(model),
        loss=lambda m, batch: dpo(m(batch[0]), chosen, rejected),
        batches=[([10 * t + i for i in range(4)], (tokens(t, 8),)) for t in range(STEPS)],
        groups=lambda batch: [0, 1, 2, 3] * 2,
    )


def test_a_recipe_of_pairs_is_planned_and_recorded_from_its_checkpoints(tmp_path: Path) -> None:
    made, given = pairs(), []
    with backstory.record(made.model, made.optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(STEPS):
            given.append((t, copy.deepcopy(made.model.state_dict()), None))
            with rec.step(made.batches[t][0], groups=[0, 1, 2, 3] * 2):
                take_step(made, t)
    given.append((STEPS, copy.deepcopy(made.model.state_dict()), None))
    record_checkpoints(pairs(), given, tmp_path / "made", nearest="before", **FULL)
    assert_close(stored(tmp_path / "made").rows, stored(tmp_path / "run").rows, 1e-12)
    assert backstory.plan(pairs, steps=100, seconds=0.1).steps == 100


def test_a_pair_loss_across_samples_is_still_noticed(tmp_path: Path) -> None:
    model = Tokens()
    seeded(model)
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with rec.step(range(4), groups=[0, 1, 2, 3] * 2):
            score = model(tokens(0, 8))
            F.softplus(score[4:].roll(1) - score[:4]).mean().backward()
            optimizer.step()
    assert any("compares samples" in c for c in backstory.open(tmp_path / "run").caveats())


def test_rows_that_are_not_declared_are_refused(tmp_path: Path) -> None:
    model = mlp()
    with backstory.record(model, sgd(model), tmp_path, loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match="declares 6 samples"), rec.step(range(3), groups=[0, 1, 2] * 2):
            cross_entropy(model, batch_of([0, 1, 2])).mean().backward()
        with pytest.raises(UsageError, match="which of the 3 ids"), rec.step(range(3), groups=[0, 1] * 2):
            pass


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_sample_that_is_drawn_twice_has_two_occurrences(kind: str, tmp_path: Path) -> None:
    """Each with its own row; results add them up, as two samples of different names."""
    draws = [[0, 1, 1], [2, 2, 2], [1, 0, 2]]
    scores = []
    renamed: list[list[Any]] = [[f"{x}#{i}" for i, x in enumerate(ids)] for ids in draws]
    for names in (draws, renamed):
        model = mlp()
        optimizer = sgd(model, momentum=0.5) if kind == "sgd" else adamw(model)
        path, expected = tmp_path / type(names[0][0]).__name__, []
        with backstory.record(model, optimizer, path, loss_reduction="mean", curvature="empirical", **FULL) as rec:
            for ids, name in zip(draws, names, strict=True):
                expected.append(one_backward_each(model, batch_of(ids), cross_entropy, trained_names(model)))
                optimizer.zero_grad()
                with rec.step(name):
                    cross_entropy(model, batch_of(ids)).mean().backward()
                    optimizer.step()
        assert_close(stored(path).rows, torch.cat(expected), 1e-10)
        run = backstory.open(path)
        scores.append(run.query(model, cross_entropy, batch_of([0, 1, 2])))
        if names is draws:
            removed = run.predict_removal([1, 2], model, cross_entropy, batch_of([0]))
            known = run.query(model, cross_entropy, batch_of([0]))
            assert_close(removed.plain, torch.stack([known.sum_over([i]) for i in (1, 2)], 1), 1e-9)
            assert bool(removed.corrected.isfinite().all())
    twice, apart = scores
    assert twice.sample_ids.tolist() == [str(x) for ids in draws for x in ids]
    assert_close(twice.scores, apart.scores, 1e-12)


def gan(path: Path, declared: str, reduction: str = "mean") -> list[Tensor]:
    """A discriminator's step on real and fake samples."""
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = sgd(model)
    real, fake, truth = normal(B, 3), normal(B, 3, seed=1), []
    weights: dict[str, Any] = {"weights": [1 / B] * B} if reduction == "weights" else {}
    with backstory.record(model, optimizer, path, loss_reduction=reduction, **FULL) as rec:
        truth = [each(model, lambda m: F.softplus(-m(real)[:, 0])), each(model, lambda m: F.softplus(m(fake)[:, 0]))]
        with rec.step() as s:
            s.batch([f"real {i}" for i in range(B)], **weights)
            one = F.softplus(-model(real)).mean()
            if declared == "two passes":
                one.backward()
            if declared == "both":
                s.batch([f"fake {i}" for i in range(B)], **weights)
            two = F.softplus(model(fake)).mean()
            (two if declared == "two passes" else one + two).backward()
            optimizer.step()
    return truth


@pytest.mark.parametrize("declared", ["one pass", "two passes"])
def test_real_and_fake_are_not_added_up_in_silence(declared: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"called more than once in a micro-batch.*real and fake.*s\.batch\(ids\)"):
        gan(tmp_path / "run", declared)


def test_real_and_fake_have_their_own_rows_once_they_are_declared(tmp_path: Path) -> None:
    truth = gan(tmp_path / "run", "both", "weights")
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, torch.cat(truth), 1e-10)
    assert actual.samples[B] == "fake 0"


def test_two_views_by_dropout_are_one_sample(tmp_path: Path) -> None:
    """The same inputs twice."""
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)))
    x, y = batch_of(ids_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", **FULL) as rec,
            rec.step(ids_of(0)),
        ):
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()
            rec.watcher.reader.optimizer.step()


def test_calls_that_the_loss_compares_are_one_sample(tmp_path: Path) -> None:
    """Chosen and rejected in two calls, a triplet in three: row i of each belongs to sample i."""
    model = mlp()
    optimizer = sgd(model)
    x = [normal(3, 3, seed=i) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec,
            rec.step(ids_of(0)),
        ):
            anchor, near, far = (model(v) for v in x)
            F.triplet_margin_loss(anchor, near, far, margin=9.0).backward()
            optimizer.step()
    assert not backstory.open(tmp_path / "run").caveats()
