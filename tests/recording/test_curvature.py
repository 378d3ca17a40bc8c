"""Recorded curvature rows against the generalised Gauss-Newton matrix, built from Jacobians by torch.func."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import same_weights, terms_of
from tests.support.oracles import assert_same
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import backstory
from backstory.errors import UnsupportedError, UsageError
from backstory.run.run import Run

D = torch.float64


def net(inplace: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, dtype=D), nn.ReLU(inplace=inplace), nn.Linear(5, 3, dtype=D))


def batch(kind: str, n: int = 6, out: int = 3, positions: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, *positions, 4, generator=g, dtype=D)
    if kind == "cross-entropy":
        return x, torch.randint(0, out, (n, *positions), generator=g)
    y = torch.rand(n, *positions, out, generator=g, dtype=D)
    return x, y.round() if kind == "bce" else y


def losses(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """The sum over each sample's loss terms, (B,)."""
    if kind == "cross-entropy":
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="none").reshape(len(f), -1).sum(1)
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(f, y, reduction="none").flatten(1).sum(1)
    return F.mse_loss(f, y, reduction="none").flatten(1).sum(1)


def ggn(model: nn.Module, kind: str, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Σ_z w_z Σ_s Jᵀ H J over all parameters, in the order of named_parameters."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    total = torch.zeros((), dtype=D)
    for i in range(len(x)):
        J = jacrev(lambda p, i=i: functional_call(model, p, (x[i : i + 1],)).reshape(-1))(parameters)
        J = torch.cat([J[k].flatten(1) for k in parameters], 1).detach()  # (outputs, p)
        f = functional_call(model, parameters, (x[i : i + 1],)).detach()
        H = torch.autograd.functional.hessian(
            lambda z, i=i, f=f: losses(kind, z.reshape(f.shape), y[i : i + 1]).sum(), f.reshape(-1)
        )
        total = total + w[i] * J.T @ H @ J
    return total


def record_one_step(
    path: Path, kind: str, curvature: str, *, reduction: str = "sum", **batch_args: object
) -> tuple[Run, Tensor]:
    """A step in full coordinates; also the true matrix at the weights before it."""
    model = net()
    x, y = batch(kind, **batch_args)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    terms = losses(kind, model(x), y).new_tensor(x[0, ..., 0].numel() * (1 if kind == "cross-entropy" else 3))
    inner = 1.0 if reduction == "sum" else 1.0 / terms
    expected = ggn(model, kind, x, y, torch.full((len(x),), 1 / len(x), dtype=D) * inner)
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", projection="full", encoding="float64", curvature=curvature
    ) as rec:
        with rec.step() as s:
            s.batch(range(len(x)))
            f = model(x)
            s.outputs(f, kind, reduction=reduction)
            (losses(kind, f, y) * inner).mean().backward()
            optimizer.step()
    return backstory.open(path), expected


def recorded_matrix(run: Run) -> Tensor:
    block = run._store.read(0, run.n_occurrences, dtype=D, curvature=True)
    assert block.curvature is not None
    assert block.kappa is not None
    V = (block.curvature * block.kappa.sqrt()[..., None]).flatten(0, 1)
    return V.T @ V


@pytest.mark.parametrize("kind", ["cross-entropy", "bce", "squared-error"])
@pytest.mark.parametrize(("positions", "reduction"), [((), "sum"), ((2,), "sum"), ((2,), "mean")])
def test_exact_rows_make_the_gauss_newton_matrix(
    tmp_path: Path, kind: str, positions: tuple[int, ...], reduction: str
) -> None:
    n = 3 * (2 if positions else 1)
    run, expected = record_one_step(tmp_path / "r", kind, f"exact:{n}", positions=positions, reduction=reduction)
    actual = recorded_matrix(run)
    ratio = (actual.diagonal() / expected.diagonal().clamp_min(1e-30)).median()
    torch.testing.assert_close(
        actual,
        expected,
        rtol=1e-10,
        atol=1e-13,
        msg=f"median ratio {ratio:.3f}: 2 or 0.5 is squared error's factor, S a mean",
    )


def test_sampled_rows_average_to_it(tmp_path: Path) -> None:
    run, expected = record_one_step(tmp_path / "r", "cross-entropy", "sampled:400")
    actual = recorded_matrix(run)
    assert (actual - expected).norm() / expected.norm() < 0.1


def test_the_training_step_does_not_notice(tmp_path: Path) -> None:
    """Gradients, random numbers, buffers and weights are those of plain training."""

    def train(record: bool) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3)).double()
        model.register_buffer("seen", torch.zeros(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = batch("cross-entropy")
        if not record:
            for _ in range(4):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict(), torch.rand(3)
        with backstory.record(
            model,
            optimizer,
            tmp_path / "r",
            loss_reduction="mean",
            curvature="sampled:3",
            warmup_steps=2,
            curvature_of="steps",
        ) as rec:
            for _ in range(4):
                with rec.step(range(6)) as s:
                    f = model(x)
                    s.outputs(f, "cross-entropy")
                    F.cross_entropy(f, y).backward()
                    optimizer.step()
                optimizer.zero_grad()
        return model.state_dict(), torch.rand(3)

    (plain, after), (recorded, after_recorded) = train(False), train(True)
    same_weights(recorded, plain, 4 * (4 + 8 + 8 + 3 + 6))  # four steps of two layers and six samples
    assert torch.equal(after, after_recorded)


def test_warm_up_steps_have_the_same_rows(tmp_path: Path) -> None:
    """A step that waited for its basis equals a step that knew it."""
    model = net()
    x, y = batch("cross-entropy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with backstory.record(
        model, optimizer, tmp_path / "r", loss_reduction="mean", rank=2, encoding="float64", curvature="exact:3", warmup_steps=2, curvature_of="steps"
    ) as rec:  # fmt: skip
        for _ in range(4):
            with rec.step(range(6)) as s:
                f = model(x)
                s.outputs(f, "cross-entropy")
                F.cross_entropy(f, y).backward()
                optimizer.step()
            optimizer.zero_grad()
    run = backstory.open(tmp_path / "r")
    block = run._store.read(0, 24, dtype=D, curvature=True)
    for actual in (block.rows, block.curvature, block.kappa, block.hdot):
        assert actual is not None
        steps = actual.reshape(4, 6, -1)
        assert_same(steps[0], steps[3], terms_of(model, 1, 6))
        assert steps.abs().max() > 0


def test_adjoint_equals_embeddings_with_rows_of_their_own(tmp_path: Path) -> None:
    model = net()
    x, y = batch("cross-entropy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    with backstory.record(
        model, optimizer, tmp_path / "r", loss_reduction="mean", projection="full", encoding="float64", curvature="sampled:2"
    ) as rec:  # fmt: skip
        for _ in range(5):
            with rec.step(range(6)) as s:
                f = model(x)
                s.outputs(f, "cross-entropy")
                F.cross_entropy(f, y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
            optimizer.zero_grad()
    run = backstory.open(tmp_path / "r")
    assert (run.steps().clip < 1).any()

    def ask(m: nn.Module, q: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(q[0]), q[1], reduction="none")

    adjoint = run.query(model, ask, (x, y)).scores
    run.embed(dtype=D, encoding="float64")
    embedded = run.query(model, ask, (x, y), method="embeddings").scores
    assert_same(embedded, adjoint, 2 * terms_of(model, 5, 6))


@pytest.mark.parametrize(
    ("curvature", "call", "says"),
    [
        ("sampled", None, r"step\.outputs\(logits, kind\) before backward\(\)"),
        ("exact:5", ("cross-entropy", None), "exact:3"),
        ("sampled", ("other", None), "is not supported"),
        ("sampled:x", None, "curvature must be 'auto', 'ggn', 'ggn:K'"),
        ("exact", None, "curvature must be 'auto', 'ggn', 'ggn:K'"),
        ("sampled:0", None, "at least 1"),
        ("sampled", ("squared-error", None), "'sum' or 'mean' when a sample has several loss terms"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, curvature: str, call: tuple[str, None] | None, says: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=says):
        one_step(tmp_path / "r", curvature, None if call is None else call[0])


def one_step(path: Path, curvature: str, kind: str | None, *, late: bool = False) -> None:
    model = net()
    x, y = batch("cross-entropy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        backstory.record(model, optimizer, path, loss_reduction="mean", curvature=curvature) as rec,
        rec.step(range(6)) as s,
    ):
        f = model(x)
        if kind is not None and not late:
            s.outputs(f, kind)
        F.cross_entropy(f, y).backward()
        if kind is not None and late:
            s.outputs(f, kind)
        optimizer.step()


def test_outputs_after_backward_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="before backward"):
        one_step(tmp_path / "r", "sampled", "cross-entropy", late=True)
