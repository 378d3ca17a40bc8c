"""Parameters without a layer rule, and batches that are not first: rows against one backward pass per sample.

The truth is the whole batch's forward pass with the step's own random numbers, and the gradient of each sample's loss alone.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.language import kept
from tests.support.loops import generator
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import BackstoryError, UnsupportedError, UsageError

D = torch.float64
SAMPLES, LENGTH, WIDTH = 4, 5, 6


class Bare(nn.Module):
    """A token and a scale that belong to no layer, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.into = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.mixers = nn.ParameterList([torch.randn(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.into(x)], 1)
        out: Tensor = (h @ self.mixers[0]).tanh().mean(1)
        return out


class Tuples(nn.Module):
    """Outputs in a dataclass, one of them made from another, and nested inputs by keyword."""

    @dataclass
    class Out:
        raw: Tensor
        gated: Tensor
        same: Tensor

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, parts: list[Tensor], *, more: dict[str, Tensor], drop: float = 0.0) -> "Tuples.Out":
            raw = (parts[0] + more["x"]) @ self.matrix
            return Tuples.Out(raw, raw.sigmoid() * raw, raw)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tuples.Inner()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner([x], more={"x": x * 2})
        again = self.inner([out.raw], more={"x": out.gated})
        mean: Tensor = (out.raw + again.gated * out.same + again.raw).mean(1)
        return mean


class Noisy(nn.Module):
    """Noise of its own, drawn in an order that only a call with the whole batch repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.last = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[1], x.shape[0], dtype=x.dtype).T[..., None]
        out: Tensor = self.last((x @ self.matrix + noise).tanh().mean(1))
        return out


class Borrowed(nn.Module):
    """A weight that the module above uses without calling its owner, and a table that sees no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.key, self.norm = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table = self.key(self.norm(self.table.weight))  # (9, d)
        out: Tensor = (self.key(x) @ table.T).softmax(-1).mean(1)
        return out


class Relative(nn.Module):
    """Attention with a bias by distance, looked up once for all samples: (S, S) indices."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.bias = nn.Linear(WIDTH, WIDTH), nn.Embedding(2 * 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = self.bias(at[None] - at[:, None] + 9)[..., 0]
        out: Tensor = ((self.q(x) @ x.mT + bias).softmax(-1) @ x).mean(1)
        return out


class Counted(nn.Embedding):
    """Positions counted from a mask, with rows that are never used and one that is padding."""

    def forward(self, mask: Tensor) -> Tensor:
        return super().forward((mask.cumsum(1) * mask + 1).long())


class Offset(nn.Module):
    """A table with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.out = Counted(12, WIDTH, padding_idx=1), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out((x + self.at(x[..., 0] > -0.5)).tanh()).mean(1)
        return out


class Normed(nn.Module):
    """A convolution with a weight in two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.mT).tanh().mean(2)
        return out


class Flattened(nn.Module):
    """Batch and sequence as one dimension inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x + self.down(self.up(x.flatten(0, 1)).relu()).view_as(x)).softmax(1).mean(1)
        return out


class Interleaved(nn.Module):
    """The same with the sequence first, so that a sample's rows are not neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.transpose(0, 1).flatten(0, 1)).relu()
        out: Tensor = (x + h.view(x.shape[1], len(x), -1).transpose(0, 1)).softmax(1).mean(1)
        return out


class Second(nn.Module):
    """The sequence first inside."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.transpose(0, 1))
        out: Tensor = self.head(h[0] if isinstance(h, tuple) else h).tanh().mean(0)
        return out


class First(nn.Module):
    """A layer over sequences with the batch first."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        out: Tensor = self.head(h[0] if isinstance(h, tuple) else h).tanh().mean(1)
        return out


def encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare parameters": Bare,
    "outputs made from each other": Tuples,
    "noise": Noisy,
    "borrowed weights": Borrowed,
    "relative positions": Relative,
    "positions counted": Offset,
    "parametrized": Normed,
    "flattened": Flattened,
    "interleaved": Interleaved,
    "attention with dropout": lambda: First(nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)),
    "encoder": lambda: First(encoder(batch_first=True)),
    "LSTM": lambda: First(nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True, dropout=0.2), 8),
    "GRU": lambda: First(nn.GRU(WIDTH, 4, batch_first=True), 4),
    "LSTM, sequence first": lambda: Second(nn.LSTM(WIDTH, 4), 4),
    "encoder, sequence first": lambda: Second(encoder()),
    "transposed convolution": lambda: nn.Sequential(nn.ConvTranspose1d(LENGTH, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(24, 2)),
}  # fmt: skip
OF_ANY_LENGTH = [name for name in MODELS if name not in ("transposed convolution", "noise")]


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(D)


def batch(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randn(SAMPLES, length, WIDTH, generator=generator(seed), dtype=D)


def losses(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    out: Tensor = (model(x) - 0.3).square().flatten(1).sum(1)
    return out


def recorded(path: Path, model: nn.Module, *, length: int = LENGTH, steps: int = 2, **settings: Any) -> Tensor:
    """Train and record; the rows that one backward pass per sample gives."""
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.01), []
    full = {"projection": "full", "encoding": "float64", "curvature": "empirical", **settings}
    with backstory.record(model, optimizer, path, loss_reduction="mean", **full) as rec:
        for t in range(steps):
            expected.append(truth(copy.deepcopy(model), batch(t, length), t))
            optimizer.zero_grad()
            with rec.step([f"{t}-{z}" for z in range(SAMPLES)]):
                losses(model, batch(t, length), t).mean().backward()
                optimizer.step()
    return torch.cat(expected)


def truth(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    parameters = list(model.parameters())
    rows = []
    for z in range(len(x)):
        grads = torch.autograd.grad(losses(model, x, seed)[z], parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_one_backward_per_sample(name: str, tmp_path: Path) -> None:
    model = made(name)
    expected = recorded(tmp_path / "run", model)
    actual = kept(tmp_path / "run")
    assert actual.names == [n for n, _ in model.named_parameters()]
    assert_close(actual.rows, expected, 1e-9)


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_a_sequence_as_long_as_the_batch_is_not_taken_for_it(name: str, tmp_path: Path) -> None:
    expected = recorded(tmp_path / "run", made(name), length=SAMPLES)
    assert_close(kept(tmp_path / "run").rows, expected, 1e-9, "the dimension of the sequence may have been taken.")


@pytest.mark.parametrize("name", ["bare parameters", "LSTM", "encoder", "positions counted"])
def test_groups_of_positions_add_up(name: str, tmp_path: Path) -> None:
    expected = recorded_groups(tmp_path / "run", made(name))
    actual = kept(tmp_path / "run")
    assert actual.curvature is not None
    assert_close(actual.curvature.reshape(len(expected), 3, -1).sum(1), expected, 1e-9)
    assert bool((actual.curvature.norm(dim=-1) > 0).all())


def recorded_groups(path: Path, model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = truth(copy.deepcopy(model), batch(0), 0)
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", projection="full", encoding="float64", curvature="empirical/3"
    ) as rec, rec.step(list("abcd"), tokens=[1] * SAMPLES):  # fmt: skip
        losses(model, batch(0), 0).mean().backward()
        optimizer.step()
    return expected


@pytest.mark.parametrize("name", ["bare parameters", "encoder", "LSTM, sequence first"])
def test_records_at_its_defaults(name: str, tmp_path: Path) -> None:
    model = made(name).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean") as rec:
        for t in range(10):
            optimizer.zero_grad()
            with rec.step(list("abcd")):
                losses(model, batch(t).float(), t).mean().backward()
                optimizer.step()
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 10
    assert torch.isfinite(run.query(model, lambda m: losses(m, batch(0).float(), 0)).scores).all()


def test_exact_curvature_reaches_the_repeated_modules(tmp_path: Path) -> None:
    """GGN rows of a softmax: Σ over classes of √p (e_c − p), each by a backward pass of its own."""
    model = made("encoder")
    recorded(tmp_path / "a", copy.deepcopy(model), steps=1)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), batch(0)
    torch.manual_seed(0)
    twin = copy.deepcopy(model)
    probabilities = twin(x).softmax(1)
    expected = []
    for c in range(3):
        rows = []
        for z in range(SAMPLES):
            torch.manual_seed(0)
            f, p = twin(x)[z], probabilities[z].detach()
            value = p[c].sqrt() * (f[c] - (p * f).sum())
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(twin.parameters()))]))
        expected.append(torch.stack(rows))
    with backstory.record(
        model, optimizer, tmp_path / "run", loss_reduction="mean", projection="full", encoding="float64", curvature="exact:3"
    ) as rec, rec.step(list("abcd")) as s:  # fmt: skip
        torch.manual_seed(0)
        out = model(x)
        s.outputs(out, "cross-entropy")
        nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    actual = kept(tmp_path / "run").curvature
    assert actual is not None
    wanted = torch.stack(expected, 1)
    actual = actual.reshape(wanted.shape)
    for z in range(SAMPLES):
        torch.testing.assert_close(actual[z].T @ actual[z], wanted[z].T @ wanted[z], rtol=1e-8, atol=1e-10)


class Summing(nn.Module):
    """A bare parameter in a module that mixes the samples of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1) @ self.matrix
        return (h - h.mean(0)).tanh()


def test_a_module_that_mixes_samples_is_refused_and_can_be_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Summing()).to(D)
    with pytest.raises(UnsupportedError, match=r"layer '1' owns parameters.*mixes the samples.*layers=\['!name'\]"):
        recorded(tmp_path / "run", model)
    recorded(tmp_path / "again", nn.Sequential(nn.Linear(WIDTH, WIDTH), Summing()).to(D), layers=["!1.matrix"])


class Loss(nn.Module):
    """A table that sees no batch, in a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Relative()

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        out: Tensor = (self.inner.q(x).mean(-1) + self.inner.bias(at[None] - at[:, None] + 9)[0, :, 0]).square().mean()
        return out


def test_a_table_is_refused_where_no_module_around_it_has_outputs_of_samples(tmp_path: Path) -> None:
    model = Loss().to(D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rec = backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean")
    with rec, pytest.raises(BackstoryError, match=r"layers=\['!"), rec.step(list("abcd")):
        model(batch(0)).backward()
        optimizer.step()


class Rows(nn.Module):
    """Nothing but maps of each row: (B, S, d) looks the same both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


def test_a_batch_whose_place_cannot_be_told_is_refused_until_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"4 samples, and another dimension.*batch_dim=0"):
        recorded(tmp_path / "refused", Rows().to(D), length=SAMPLES)
    model = Rows().to(D)
    expected = recorded(tmp_path / "first", model, length=SAMPLES, batch_dim=0)
    assert_close(kept(tmp_path / "first").rows, expected, 1e-9)
    second = nn.Sequential(Rows()).to(D)
    optimizer, x = torch.optim.SGD(second.parameters(), lr=0.01), batch(0, SAMPLES).transpose(0, 1)
    rows = truth(copy.deepcopy(second[0]), batch(0, SAMPLES), 0)
    with backstory.record(
        second, optimizer, tmp_path / "second", loss_reduction="mean", projection="full", encoding="float64", batch_dim=1
    ) as rec, rec.step(list("abcd")):  # fmt: skip
        (second(x) - 0.3).square().sum((0, 2)).mean().backward()
        optimizer.step()
    assert_close(kept(tmp_path / "second").rows, rows, 1e-9)


def test_the_modules_own_hooks_and_random_numbers_are_left_alone(tmp_path: Path) -> None:
    """Training goes on with the numbers that it would have drawn."""
    plain, model = made("encoder"), made("encoder")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def take(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (m(batch(0)) - 0.3).square().sum().div(SAMPLES).backward()
        optimizer.step()

    torch.manual_seed(0)
    for _ in range(3):
        take(plain, optimizers[0])
    torch.manual_seed(0)
    with backstory.record(model, optimizers[1], tmp_path / "run", loss_reduction="mean") as rec:
        for _ in range(3):
            with rec.step(list("abcd")):
                take(model, optimizers[1])
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
