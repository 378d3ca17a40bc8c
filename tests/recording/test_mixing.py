"""Samples that affect each other's gradients: noticed in the first step, no false alarm, and nothing of the training changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import FULL, Interrupted, batch_of, ids_of, mlp, normal, seeded, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstory
from backstory.recording.mixing import APART, FOUND

B, C = 6, 4
Y = torch.arange(B) % C
Loss = Callable[[Tensor], Tensor]


def net(middle: nn.Module | None = None) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), middle or nn.Identity(), nn.Linear(6, C)))


def recorded(path: Path, model: nn.Module, loss: Loss, rows: int = B, **settings: Any) -> backstory.Run:
    optimizer = sgd(model)
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", curvature="empirical", **FULL, **settings
    ) as rec:
        for t in range(2):
            optimizer.zero_grad()
            with rec.step(range(rows)):
                loss(model(normal(rows, 5, seed=t))).backward()
                optimizer.step()
    return backstory.open(path)


def found(run: backstory.Run) -> tuple[str, str]:
    kept: dict[str, str] = run._store.config["mixing"]
    return kept["loss"], kept["layers"]


def cox(f: Tensor) -> Tensor:
    """Partial likelihood: each sample against all who live longer."""
    risk = f[:, 0].flip(0).logcumsumexp(0).flip(0)
    return (risk - f[:, 0]).mean()


def focal(f: Tensor) -> Tensor:
    log = F.cross_entropy(f, Y, reduction="none")
    return ((1 - (-log).exp()) ** 2 * log).mean()


MIXING: dict[str, Loss] = {
    "InfoNCE": lambda f: F.cross_entropy(F.normalize(f) @ F.normalize(f).T.roll(1, 0) / 0.5, torch.arange(len(f))),
    "Cox": cox,
    "RMSE over the batch": lambda f: F.mse_loss(f[:, 0], Y.double()).sqrt(),
    "variance of the batch": lambda f: f.var(0).sum(),
}
ORDINARY: dict[str, Loss] = {
    "cross-entropy": lambda f: F.cross_entropy(f, Y),
    "class weights": lambda f: F.cross_entropy(f, Y, weight=torch.tensor([0.2, 1.0, 3.0, 0.5]).double()),
    "smoothing": lambda f: F.cross_entropy(f, Y, label_smoothing=0.1),
    "MSE": lambda f: F.mse_loss(f[:, 0], Y.double()),
    "Huber": lambda f: F.huber_loss(f[:, 0], Y.double()),
    "BCE": lambda f: F.binary_cross_entropy_with_logits(f[:, 0], (Y % 2).double()),
    "focal": focal,
    "L1": lambda f: F.l1_loss(f[:, 0], Y.double() + 0.1),
    "token mean": lambda f: F.cross_entropy(
        f.view(-1, 2), (Y.repeat_interleave(2) % 2).where(torch.arange(2 * B) % 5 > 0, -100)
    ),
    "multi-task": lambda f: F.cross_entropy(f[:, :3], Y % 3) + 0.5 * F.mse_loss(f[:, 3], Y.double()),
    "KL to soft labels": lambda f: F.kl_div(f.log_softmax(1), normal(B, C).softmax(1), reduction="batchmean"),
}


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Attention(nn.Module):
    """Between the samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).softmax(1) @ x


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_is_noticed_and_said_in_every_result(name: str, tmp_path: Path) -> None:
    model = net()
    run = recorded(tmp_path / "run", model, MIXING[name])
    assert found(run) == (FOUND, APART)
    result = run.query(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (normal(2, 5), Y[:2]))
    (words,) = [c for c in result.caveats if "the loss compares samples" in c]
    assert "leave-out" in words
    assert "groups=" in words
    assert result.recording is not None
    assert any("The loss compares samples" in x for x in result.recording.words)


@pytest.mark.parametrize("middle", [Centered(), Attention()], ids=["batch mean", "attention"])
def test_layers_that_mix_are_noticed(middle: nn.Module, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", net(middle), ORDINARY["cross-entropy"])
    assert found(run) == (APART, FOUND)
    assert any("layers of the model mix the samples" in c for c in run.caveats())


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_loss_raises_no_alarm(name: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", net(), ORDINARY[name])
    assert found(run) == (APART, APART)
    assert not run.caveats()


def test_a_pair_loss_with_a_hinge_is_not_seen(tmp_path: Path) -> None:
    """Its second derivative is 0; the page on limits says so."""
    run = recorded(tmp_path / "run", net(), lambda f: (1 + f[:, :1] - f[:, 1:2].T).relu().mean())
    assert found(run) == (APART, APART)


class Parts(nn.Module):
    """A model of which people call the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, C), nn.Linear(5, C)


@pytest.mark.parametrize("mixes", [True, False])
def test_two_towers_that_are_called_by_themselves(mixes: bool, tmp_path: Path) -> None:
    model = Parts()
    seeded(model)
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec, rec.step(range(B)):
        a, b = model.left(normal(B, 5)), model.right(normal(B, 5, seed=1))
        loss = F.cross_entropy(a @ b.T, torch.arange(B)) if mixes else (a * b).sum(1).sigmoid().mean()
        loss.backward()
        optimizer.step()
    assert found(backstory.open(tmp_path / "run"))[0] == (FOUND if mixes else APART)


class Own(torch.autograd.Function):
    """What torch cannot differentiate twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = 2 * g * x / x.numel()
        return out


def ctc(f: Tensor) -> Tensor:
    log = f.log_softmax(1)[None].expand(3, -1, -1)
    return F.ctc_loss(log, torch.ones(B, 1, dtype=torch.long), torch.full((B,), 3), torch.ones(B, dtype=torch.long))


@pytest.mark.parametrize("loss", [Own.apply, ctc], ids=["own function", "CTC"])
def test_what_torch_cannot_differentiate_twice_is_not_checked(loss: Loss, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", net(), loss)
    assert found(run)[0].startswith("not checked: ")
    assert found(run)[1] == APART
    assert not run.caveats()


def test_one_sample_has_nobody_to_mix_with(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", net(), lambda f: f.square().mean(), rows=1)
    assert found(run) == ("not checked: the first batch has one sample",) * 2


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, with dropout, and a buffer that counts its calls."""

    seen: Tensor

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(5, 6), nn.Linear(6, C), reentrant
        self.register_buffer("seen", torch.zeros(()))

    def block(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return F.dropout(self.inner(x.tanh()), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_buffers_random_numbers_and_backward_are_the_users(
    reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step with and without a look: the same weights, the same buffers, the same next random number."""
    ends = []
    original = torch.autograd.backward
    for look in (True, False):
        if not look:
            monkeypatch.setattr("backstory.recording.mixing.Mixing._look", lambda *args: None)
        torch.manual_seed(0)
        model = seeded(Checkpointed(reentrant))
        optimizer = sgd(model)
        path = tmp_path / str(look)
        with backstory.record(model, optimizer, path, loss_reduction="mean", **FULL) as rec, rec.step(range(B)) as s:
            out = model(normal(B, 5))
            out.retain_grad()
            losses = F.cross_entropy(out, Y, reduction="none")
            s.losses(losses)
            losses.mean().backward()
            optimizer.step()
        ends.append([*(p.detach() for p in model.parameters()), *model.buffers(), out.grad, torch.rand(1)])
        if look:
            checked = "not checked" if reentrant else APART
            assert found(backstory.open(path))[1].startswith(checked)
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)
    assert torch.autograd.backward is original


def test_backward_is_put_back_after_an_error(tmp_path: Path) -> None:
    original, model = torch.autograd.backward, mlp()
    with (
        pytest.raises(Interrupted),
        backstory.record(model, sgd(model), tmp_path, loss_reduction="mean") as rec,
        rec.step(ids_of(0)),
    ):
        assert torch.autograd.backward is not original
        raise Interrupted
    assert torch.autograd.backward is original


def test_only_the_first_step_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    original = torch.autograd.backward
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                looks.append(torch.autograd.backward is not original)
                F.cross_entropy(model(batch_of(ids_of(t))[0]), batch_of(ids_of(t))[1]).backward()
                optimizer.step()
    assert looks == [True, False, False]


def test_batch_norm_is_said_once(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", net(nn.BatchNorm1d(6)), ORDINARY["cross-entropy"])
    assert found(run) == (APART, "found, in layers that share statistics")
    (words,) = run.caveats()
    assert "shared statistics in training" in words


class Sequences(nn.Module):
    """Attention over positions, the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.head = nn.Linear(3, 4), nn.MultiheadAttention(4, 1), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.head(self.mix(h, h, h, need_weights=False)[0])
        return out


@pytest.mark.parametrize("length", [B, B + 1])
def test_positions_are_not_taken_for_samples(length: int, tmp_path: Path) -> None:
    """Where a sequence-first model has as many positions as samples."""
    model = seeded(Sequences())
    optimizer = sgd(model)
    path = tmp_path / "run"
    settings: dict[str, Any] = {**FULL, "curvature": "empirical", "batch_dim": 1}
    with backstory.record(model, optimizer, path, loss_reduction="mean", **settings) as rec, rec.step(range(B)):
        F.cross_entropy(model(normal(length, B, 3)).mean(0), Y).backward()
        optimizer.step()
    assert all(x.startswith("not checked") for x in found(backstory.open(path)))
    assert not backstory.open(path).caveats()


class Compared(nn.Module):
    """Returns what compares samples beside what does not, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, C), nn.Linear(5, C)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = self.left(x), self.right(x.flip(1))
        return {"left": a, "right": b, "logits_per_left": a @ b.T}


@pytest.mark.parametrize("used", ["each", "all"])
def test_outputs_that_the_loss_does_not_use_do_not_count(used: str, tmp_path: Path) -> None:
    model = seeded(Compared())
    optimizer = sgd(model)
    path = tmp_path / "run"
    with (
        backstory.record(model, optimizer, path, loss_reduction="mean", curvature="empirical", **FULL) as rec,
        rec.step(range(B)),
    ):
        out = model(normal(B, 5))
        if used == "each":
            (out["left"] * out["right"]).sum(1).sigmoid().mean().backward()
        else:
            F.cross_entropy(out["logits_per_left"], torch.arange(B)).backward()
        optimizer.step()
    assert found(backstory.open(path)) == (APART, APART if used == "each" else FOUND)


class Relative(nn.Module):
    """A table of positions (S, S, d) with as many positions as samples, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias, self.head = nn.Embedding(9, 4), nn.Embedding(2 * B, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(B)[:, None] - torch.arange(B)[None] + B
        h = (self.table(x)[:, None] * self.bias(places)[None]).sum(2).tanh()
        out: Tensor = self.head(h).mean(1)
        return out


def test_a_table_of_positions_is_no_first_layer(tmp_path: Path) -> None:
    model = seeded(Relative())
    optimizer = sgd(model)
    path = tmp_path / "run"
    with (
        backstory.record(model, optimizer, path, loss_reduction="mean", curvature="empirical", **FULL) as rec,
        rec.step(range(B)),
    ):
        F.cross_entropy(model(torch.arange(B * B).view(B, B) % 9), Y).backward()
        optimizer.step()
    assert found(backstory.open(path)) == (APART, APART)
