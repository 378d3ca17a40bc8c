"""Rows in the store against one backward pass per sample; and how a recording behaves around them."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import (
    FULL,
    Batch,
    Interrupted,
    batch_of,
    cross_entropy,
    curved,
    ids_of,
    mlp,
    normal,
    one_backward_each,
    one_step,
    same_numbers,
    same_weights,
    sgd,
    stored,
    terms_of,
    train,
    trained_names,
)
from tests.support.oracles import assert_close
from tests.support.zoo import ZOO, Text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstory
from backstory.errors import CoverageError, DiskError, LockedError, NumericalError, StoreError, UsageError
from backstory.store import RunStore

CAUSES = (
    "A ratio of B or 1/B means the weight was not divided out once; a wrong sum over positions gives scattered ratios."
)
SIZE = 3


def weights_for(reduction: str, size: int) -> Tensor:
    if reduction == "weights":
        return torch.linspace(0.2, 1.1, size, dtype=torch.float64)
    return torch.full((size,), 1.0 if reduction == "sum" else 1 / size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "reduction"), [(n, "weights") for n in ZOO] + [(n, r) for r in ("mean", "sum") for n in list(ZOO)[::2]]
)
def test_rows_are_those_of_one_backward_per_sample(name: str, reduction: str, tmp_path: Path) -> None:
    model, batches = ZOO[name].make(), ZOO[name].batch
    optimizer, w = sgd(model, 0.01), weights_for(reduction, SIZE)
    expected = []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction=reduction, **FULL) as rec:
        for t in range(2):
            batch = batches(t, SIZE)
            expected.append(one_backward_each(model, batch, curved, trained_names(model)))
            optimizer.zero_grad()
            with rec.step([f"{t}-{i}" for i in range(SIZE)], weights=w if reduction == "weights" else None):
                (w * curved(model, batch)).sum().backward()
                optimizer.step()
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, torch.cat(expected), 1e-10, CAUSES)
    assert_close(actual.weight, w.repeat(2), 1e-15)
    assert actual.samples == [f"{t}-{i}" for t in range(2) for i in range(SIZE)]


LENGTHS = [5, 2, 1, 4]


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """ℓ is the *sum* over the tokens of a sample."""
    tokens, mask = batch
    logits = model(tokens)[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return (each * mask).sum(1)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("how", ["tokens", "mask"])
@pytest.mark.parametrize("name", ["positions (S,)", "positions (1, S)", "tied weights"])
def test_token_mean_keeps_sums_over_tokens_and_one_weight(name: str, how: str, micro: int, tmp_path: Path) -> None:
    model = ZOO[name].make()
    optimizer = sgd(model, 0.01)
    (tokens,) = ZOO["embedding"].batch(0, len(LENGTHS))
    mask = (torch.arange(tokens.shape[1] - 1) < torch.tensor(LENGTHS)[:, None]).double()
    expected = one_backward_each(model, (tokens, mask), token_losses, trained_names(model))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="token-mean", **FULL) as rec:
        with rec.step() as s:
            for part in torch.arange(len(LENGTHS)).chunk(micro):
                s.batch(part.tolist(), tokens=mask[part].sum(1).long() if how == "tokens" else None)
                if how == "mask":
                    s.outputs(model(tokens[part]), "cross-entropy", mask=mask[part])
                (token_losses(model, (tokens[part], mask[part])).sum() / sum(LENGTHS)).backward()
            optimizer.step()
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, expected, 1e-10, "A ratio of the sample's length means that a token mean was kept.")
    assert_close(actual.weight, torch.full((4,), 1 / sum(LENGTHS), dtype=torch.float64), 1e-15)


@pytest.mark.parametrize(("reduction", "sizes"), [("mean", [2, 2, 2]), ("sum", [3, 1, 2]), ("weights", [1, 4, 1])])
def test_micro_batches_are_one_step(reduction: str, sizes: list[int], tmp_path: Path) -> None:
    model = mlp()
    optimizer, w = sgd(model), weights_for(reduction, 6)
    batch = batch_of(range(6))
    expected = one_backward_each(model, batch, cross_entropy, trained_names(model))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction=reduction, **FULL) as rec:
        with rec.step() as s:
            for part in torch.arange(6).split(sizes):
                s.batch(part, weights=w[part] if reduction == "weights" else None)
                (w[part] * cross_entropy(model, (batch[0][part], batch[1][part]))).sum().backward()
            optimizer.step()
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, expected, 1e-10, CAUSES)
    assert actual.table.rows.tolist() == [6]
    assert_close(actual.weight, w, 1e-15)


def test_frozen_parameters_are_left_out_and_groups_are_kept(tmp_path: Path) -> None:
    model = ZOO["positions (1, S)"].make()
    model.get_parameter("norm.weight").requires_grad_(False)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": others, "lr": 0.3}, {"params": decayed, "weight_decay": 0.1}], lr=0.1)
    batch = ZOO["positions (1, S)"].batch(0, SIZE)
    expected = one_backward_each(model, batch, curved, trained_names(model))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with rec.step(range(SIZE)):
            curved(model, batch).mean().backward()
            optimizer.step()
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, expected, 1e-10, CAUSES)
    assert actual.table.groups["rate"].tolist() == [[0.3, 0.1]]
    assert actual.table.groups["l2"].tolist() == [[0.0, 0.1]]
    blocks = {b["name"]: b["group"] for b in backstory.open(tmp_path / "run").config["blocks"]}
    assert blocks == {"token.weight": 1, "position.weight": 1, "norm.bias": 0, "head.weight": 1}


def seeded_projection(kind: str, name: str, side: str, d: int, r: int, seed: int) -> Tensor:
    """The documented recipe of a side, written once more: sha256 of seed, name and size seeds a generator."""
    digest = hashlib.sha256(f"{seed}/{name}/{side}/{d}x{r}".encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    if kind == "random":
        drawn: Tensor = torch.randn(d, r, generator=g) / r**0.5
        return drawn.double()
    chosen: Tensor = torch.randperm(d, generator=g)[:r].sort().values
    return torch.eye(d, dtype=torch.float64)[:, chosen]


def projected(rows: Tensor, model: nn.Module, sides: dict[str, Tensor]) -> Tensor:
    """Each parameter's part of full rows as vec(Lᵀ G R), by dense products."""
    out, lo = [], 0
    for name in trained_names(model):
        p = model.get_parameter(name)
        G = rows[:, lo : lo + p.numel()].reshape(len(rows), p.shape[0], -1)
        lo += p.numel()
        left, right = sides.get(f"{name}/left"), sides.get(f"{name}/right")
        left = torch.eye(G.shape[1]).double() if left is None else left
        right = torch.eye(G.shape[2]).double() if right is None else right
        out.append(torch.einsum("boi,or,ik->brk", G, left, right).flatten(1))
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", ["random", "mask"])
@pytest.mark.parametrize("name", ["positions (1, S)", "tied weights", "conv2d, all unequal"])
def test_seeded_subspaces_hold_projections_of_the_true_rows(name: str, kind: str, tmp_path: Path) -> None:
    model = ZOO[name].make()
    optimizer, batch = sgd(model, 0.01), ZOO[name].batch(0, SIZE)
    expected = one_backward_each(model, batch, curved, trained_names(model))
    settings: dict[str, Any] = {"projection": kind, "rank": (3, 2), "seed": 5, "encoding": "float64"}
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec:
        with rec.step(range(SIZE)):
            curved(model, batch).mean().backward()
            optimizer.step()
    sides = {}
    for n in trained_names(model):
        p = model.get_parameter(n)
        d_out, d_in = p.shape[0], p[0].numel() if p.dim() > 1 else 0
        r_out, r_in = (min(d_out, 3), min(d_in, 2)) if d_in else (min(d_out, 12), 0)
        for side, d, r in (("left", d_out, r_out), ("right", d_in, r_in)):
            if 0 < r < d:
                sides[f"{n}/{side}"] = seeded_projection(kind, n, side, d, r, seed=5)
    assert_close(stored(tmp_path / "run").rows, projected(expected, model, sides), 1e-10)


# -- behaviour around the rows ---------------------------------------------------------------------------------------


def test_coefficients_of_every_step_are_those_of_the_optimizer(tmp_path: Path) -> None:
    model = mlp()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = torch.optim.SGD(
        [{"params": first, "momentum": 0.9, "nesterov": True}, {"params": second, "weight_decay": 0.01, "lr": 0.2}],
        lr=0.1, momentum=0.5, dampening=0.0,
    )  # fmt: skip
    optimizer.param_groups[1]["dampening"] = 0.3
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms: list[float] = []
    train(tmp_path / "run", model, optimizer, 3, max_norm=0.05, schedule=schedule,
          seen=lambda t, ids: norms.append(_gradient_norm(model, ids)))  # fmt: skip
    table = stored(tmp_path / "run").table
    g = table.groups
    np.testing.assert_allclose(g["rate"], [[0.1, 0.2], [0.05, 0.1], [0.025, 0.05]], rtol=1e-15)
    assert g["momentum"].tolist() == [[0.0, 0.0], [0.9, 0.5], [0.9, 0.5]]  # the first update begins from nothing
    assert g["l2"].tolist() == [[0.0, 0.01]] * 3
    assert g["decay"].tolist() == [[0.0, 0.0]] * 3
    assert g["tau"].tolist() == [[0.0, 0.0], [0.0, 0.3], [0.0, 0.3]]  # torch's first update ignores dampening
    assert g["a"].tolist() == [[0.9, 1.0]] * 3
    assert g["n"].tolist() == [[1.0, 0.0]] * 3
    np.testing.assert_allclose(table.norm, norms, rtol=1e-12)
    np.testing.assert_allclose(table.clip, [0.05 / (n + 1e-6) for n in norms], rtol=1e-12)
    assert table.coverage.tolist() == pytest.approx([1.0] * 3, abs=1e-12)


def _gradient_norm(model: nn.Module, ids: Any) -> float:
    rows = one_backward_each(model, batch_of(ids), cross_entropy, trained_names(model))
    return float(rows.mean(0).norm())


def test_gdot_is_the_product_with_the_whole_gradient(tmp_path: Path) -> None:
    model = mlp()
    rows = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, trained_names(model))
    train(tmp_path / "run", model, sgd(model), 1)
    assert_close(stored(tmp_path / "run").gdot, rows @ rows.mean(0), 1e-10)


def test_training_is_the_same_with_and_without_recording(tmp_path: Path) -> None:
    recorded, plain = mlp(), mlp()
    opt_recorded, opt_plain = sgd(recorded), sgd(plain)
    train(tmp_path / "run", recorded, opt_recorded, 4, max_norm=0.1)
    for t in range(4):
        opt_plain.zero_grad()
        cross_entropy(plain, batch_of(ids_of(t))).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        opt_plain.step()
    same_weights(recorded.state_dict(), plain.state_dict(), terms_of(plain, 4))
    assert opt_recorded.state_dict() == opt_plain.state_dict(), "reading the optimizer left something in its state"


def test_losses_are_kept_where_they_are_given(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(2):
            optimizer.zero_grad()
            with rec.step([0, 1]) as s:
                losses = cross_entropy(model, batch_of([0, 1]))
                if t == 0:
                    s.losses(losses)
                    expected = losses.detach()
                losses.mean().backward()
                optimizer.step()
    actual = stored(tmp_path / "run").loss
    assert torch.equal(actual[:2], expected)
    assert bool(actual[2:].isnan().all())


@pytest.mark.parametrize("style", ["no_grad", "never differentiated", "eval"])
def test_an_evaluation_inside_a_step_records_nothing(style: str, tmp_path: Path) -> None:
    plain, model = mlp(), mlp()
    train(tmp_path / "plain", plain, sgd(plain), 2)
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(2):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                model.train(style != "eval")
                with torch.set_grad_enabled(style == "never differentiated"):
                    cross_entropy(model, batch_of(range(7)))
                model.train()
                optimizer.step()
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "plain"), terms_of(model, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_a_call_once(reentrant: bool, tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    x, y = batch_of(range(3))
    expected = one_backward_each(model, (x, y), cross_entropy, trained_names(model))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with rec.step(range(3)):
            out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            F.cross_entropy(out, y).backward()
            optimizer.step()
    assert_close(stored(tmp_path / "run").rows, expected, 1e-10, "2 means that the recomputed call was counted too.")


def test_a_step_that_raises_is_no_step_and_training_goes_on(tmp_path: Path) -> None:
    plain, model = mlp(), mlp()
    train(tmp_path / "plain", plain, sgd(plain), 3)
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            if t == 1:
                with pytest.raises(Interrupted):
                    one_step(rec, model, optimizer, [1, 2, 3], names=[100, 101, 102], updates=0, error=Interrupted)
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                optimizer.step()
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "plain"), terms_of(model, 3))
    answer = backstory.open(tmp_path / "run").query(model, cross_entropy, batch_of([0, 1]))
    assert not [n for n in answer.caveats if "verified" in n]


def test_an_update_that_was_made_but_not_recorded_ends_the_recording(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        one_step(rec, model, optimizer, [0, 1])
        with pytest.raises(Interrupted):
            one_step(rec, model, optimizer, [2, 3], error=Interrupted)
        with pytest.raises(UsageError, match=r"not recorded.*step 1.*resume=True"), rec.step([4, 5]):
            pass
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 1
    assert str(1) not in run.config["fingerprints"], "the model has moved on, so its fingerprint is not that of step 1"


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_loop_leaves_a_usable_run(error: type[BaseException], tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    with pytest.raises(error):
        train(tmp_path / "run", model, optimizer, 9, stop=5, error=error)
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 5
    assert run._store.verify() == []
    assert run.config["closed"] is False
    answer = run.query(model, cross_entropy, batch_of([0]))
    assert len(answer) == 15
    assert not [n for n in answer.caveats if "verified" in n]


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_afterwards(fails: bool, tmp_path: Path) -> None:
    model = ZOO["positions (S,)"].make()
    optimizer = sgd(model)

    def hooks() -> int:
        actual = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        actual += sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
        return actual + len(optimizer._optimizer_step_pre_hooks)

    assert hooks() == 0
    try:
        with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL):
            assert hooks() > 5
            if fails:
                raise Interrupted
    except Interrupted:
        pass
    assert hooks() == 0


def test_steps_outside_the_context_are_refused(tmp_path: Path) -> None:
    model = mlp()
    rec = backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", **FULL)
    with pytest.raises(UsageError, match=r"outside `with backstory.record"), rec.step([0]):
        pass
    with rec:
        pass
    with pytest.raises(UsageError, match=r"outside `with backstory.record"), rec.step([0]):
        pass


def test_steps_do_not_nest(tmp_path: Path) -> None:
    model = mlp()
    with backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match="cannot be nested"), rec.step([0]), rec.step([1]):
            pass


def test_a_missing_update_is_refused_unless_a_scaler_decides(tmp_path: Path) -> None:
    model = mlp()
    with backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match=r"was not called inside rec.step\(\) \(step 0\).*scaler="), rec.step([0]):
            cross_entropy(model, batch_of([0])).mean().backward()


def test_a_second_update_in_one_step_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match="called twice inside one"):
            one_step(rec, model, optimizer, [0], updates=2)


def test_a_step_without_samples_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with rec.step():
            cross_entropy(model, batch_of([0])).mean().backward()
            with pytest.raises(UsageError, match=r"step 0 declares no samples.*s.batch\(ids\)"):
                optimizer.step()
            rec.watcher.reader.scaler = object()  # as if a scaler had skipped it, so that the step may end


def test_the_wrong_number_of_ids_is_refused_and_names_the_layer(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match=r"'2'.*\(3, 2\).*declares 2 samples.*one id per sample"):
            with rec.step([0, 1]):
                cross_entropy(model, batch_of([0, 1, 2])).mean().backward()
        before = copy.deepcopy(model.state_dict())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_ids_of_another_kind_in_a_later_step_are_refused_before_the_update(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for ids in ([0, 1], [2, 3]):
            optimizer.zero_grad()
            with rec.step(ids):
                cross_entropy(model, batch_of(ids)).mean().backward()
                optimizer.step()
            with pytest.raises(UsageError, match=r"str ids.*int"), rec.step(["a", "b"]):
                pass
    assert backstory.open(tmp_path / "run").n_steps == 2
    again = backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=2, **FULL)
    with again as rec, pytest.raises(UsageError, match=r"str ids.*int"), rec.step(["a", "b"]):
        pass


@pytest.mark.parametrize("projection", ["full", "learned"])
def test_nan_in_one_row_names_step_layer_and_sample(projection: str, tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    bad = torch.tensor([1.0, 1.0, float("nan"), 1.0]).double()
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", projection=projection) as rec:
        one_step(rec, model, optimizer, range(4), names=[10, 11, 12, 13])
        with pytest.raises(
            NumericalError, match=r"sample '12' in step 1 .*'(0|2)\.(weight|bias)'.*not recorded.*Check that sample"
        ):
            one_step(rec, model, optimizer, range(4), names=[10, 11, 12, 13], factor=bad)
    store = RunStore.open(tmp_path / "run")
    assert (store.n_steps() or len(store.spool.steps())) == 1


def test_a_sample_of_weight_zero_has_no_row(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    w = torch.tensor([0.5, 0.0]).double()
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="weights", **FULL) as rec:
        with rec.step([0, 1], weights=w):
            (w * cross_entropy(model, batch_of([0, 1]))).sum().backward()
            optimizer.step()
    actual = stored(tmp_path / "run")
    assert actual.rows[1].abs().max() == 0 < actual.rows[0].abs().max()


class FakeScaler:
    """Multiplies the loss; skips a step whose scaled gradients are said to overflow."""

    def __init__(self, scale: float, skips: set[int]) -> None:
        self.value, self.skips, self.calls = scale, skips, 0

    def get_scale(self) -> float:
        return self.value

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= self.value
        if self.calls - 1 not in self.skips:
            optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("scale", "dtype"), [(2.0**16, torch.float64), (1000.0, torch.float64), (1000.0, torch.float32)]
)
def test_scaled_losses_give_the_same_run_and_skipped_steps_are_none(
    scale: float, dtype: torch.dtype, max_norm: float | None, tmp_path: Path
) -> None:
    plain, model = mlp().to(dtype), mlp().to(dtype)

    def batch(ids: Any) -> Batch:
        x, y = batch_of(ids)
        return x.to(dtype), y

    train(tmp_path / "plain", plain, sgd(plain), 3, max_norm=max_norm, batch=batch)
    optimizer, scaler = sgd(model), FakeScaler(scale, {1})
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", scaler=scaler, **FULL) as rec:
        for ids in (ids_of(0), [50, 51], ids_of(1), ids_of(2)):
            optimizer.zero_grad()
            with rec.step(ids):
                (cross_entropy(model, batch([i % 9 for i in ids])).mean() * scale).backward()
                if max_norm is not None:
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad /= scale
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad *= scale
                scaler.step(optimizer)
    actual, expected = stored(tmp_path / "run"), stored(tmp_path / "plain")
    close = 1e-10 if dtype == torch.float64 else 1e-5
    assert_close(actual.rows, expected.rows, close, f"{scale} or its inverse: the loss scale was not taken out once.")
    np.testing.assert_allclose(actual.table.clip, expected.table.clip, rtol=close)
    if max_norm is None:
        assert actual.table.clip.tolist() == [1.0] * 3, "rounding of the scale must not be taken for clipping"
    assert backstory.open(tmp_path / "run").config["skipped"] == 1


def test_torchs_own_scaler(tmp_path: Path) -> None:
    model = mlp().float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", scaler=scaler, **FULL) as rec:
        expected = []
        for t in range(4):
            x, y = batch_of(ids_of(t))
            batch = (x.float(), y)
            bad = torch.inf if t == 1 else 1.0
            if t != 1:
                expected.append(one_backward_each(model, batch, cross_entropy, trained_names(model)))
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                scaler.scale(cross_entropy(model, batch).mean() * bad).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                scaler.step(optimizer)
                scaler.update()
    actual = stored(tmp_path / "run")
    assert rec.skipped == 1
    assert_close(actual.rows, torch.cat(expected), 1e-5, "1024 or its inverse: the loss scale was not taken out once.")
    assert actual.table.clip.tolist() == [1.0] * 3


# -- room on the disk ------------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_is_refused_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"1,000,000,000,000 steps of 3 samples need about .* Nothing was recorded"):
        _planned(tmp_path / "disk", planned=10**12)
    with pytest.raises(DiskError, match=r"400 steps .*only 200,000 are available.*Lower rank="):
        _planned(tmp_path / "plan", max_bytes=200_000, planned=400)
    assert backstory.open(tmp_path / "plan").n_steps == 0


def _planned(path: Path, **settings: Any) -> None:
    model = mlp()
    optimizer = sgd(model)
    planned = settings.pop("planned", None)
    with backstory.record(model, optimizer, path, loss_reduction="mean", steps=planned, **FULL, **settings) as rec:
        for t in range(500):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                optimizer.step()


def test_max_bytes_ends_the_recording_and_keeps_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"before step (\d+).*max_bytes=60,000.*are safe"):
        _planned(tmp_path / "run", max_bytes=60_000)
    run = backstory.open(tmp_path / "run")
    assert 10 < run.n_steps < 100
    assert run._store.verify() == []


# -- one writer, one path --------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2)
    with pytest.raises(StoreError, match=r"already contains a run.*resume=True"):
        train(tmp_path / "run", model, sgd(model), 2)
    assert backstory.open(tmp_path / "run").n_steps == 2


@pytest.mark.parametrize("settings", [FULL, {"projection": "learned"}, {"projection": "random", "rank": 2}])
def test_an_attempt_that_recorded_nothing_is_replaced(settings: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, sgd(model), 2, stop=0, planned=2, checkpoints=1, **{"rank": 16, **settings})
    assert backstory.open(tmp_path / "run").checkpoints == [0]
    train(tmp_path / "run", model, sgd(model), 2, encoding="float32")
    run = backstory.open(tmp_path / "run")
    assert (run.n_steps, run.config["encoding"], run.checkpoints) == (2, "float32", [2])


def _one_step(path: Path) -> None:
    model = mlp()
    train(path, model, sgd(model), 1)


def _one_spooled(path: Path) -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        train(path, model, sgd(model), 2, stop=1, projection="learned", rank=2)


def _a_sample(path: Path) -> None:
    _nothing(path)
    backstory.open(path).describe([1], text=["one"])


def _a_query_set(path: Path) -> None:
    _nothing(path)
    backstory.open(path).add_queries("mine", torch.zeros(2))


def _a_file(path: Path) -> None:
    _nothing(path)
    (path / "my_model.safetensors").write_bytes(b"mine")


def _lost_rows(path: Path) -> None:
    """A step is there, and no row of it."""
    _one_step(path)
    with RunStore.open(path, write=True) as store:
        store._rows.delete("step >= 0")


def _nothing(path: Path) -> None:
    model = mlp()
    with backstory.record(model, sgd(model), path, loss_reduction="mean", **FULL):
        pass


@pytest.mark.parametrize("make", [_one_step, _one_spooled, _a_sample, _a_query_set, _a_file, _lost_rows])
def test_a_run_that_holds_anything_is_not_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "run")
    before = {p: p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file()}
    model = mlp()
    with pytest.raises(StoreError, match="already contains a run"):
        train(tmp_path / "run", model, sgd(model), 1)
    assert {p: p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_an_empty_run_that_is_being_recorded_is_not_replaced(tmp_path: Path) -> None:
    model = mlp()
    settings: dict[str, Any] = {"loss_reduction": "mean", **FULL}
    with backstory.record(model, sgd(model), tmp_path / "run", **settings):
        with pytest.raises(StoreError, match="already contains a run"):
            backstory.record(model, sgd(model), tmp_path / "run", **settings)


def test_a_second_recorder_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL):
        with pytest.raises(LockedError, match="being written by process"):
            backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, **FULL)


def test_content_given_while_recording_can_be_read(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        rec.describe([0, 1], text=["zero", "one"], label=[0, 1], source=["a", "b"])
        with rec.step([0, 1]):
            cross_entropy(model, batch_of([0, 1])).mean().backward()
            optimizer.step()
        rec.describe(torch.tensor([2]), image=[b"png"])
    content = backstory.open(tmp_path / "run").content(["0", "1", "2"])
    assert content["0"] == {"id": "0", "text": "zero", "image": None, "label": "0", "source": "a"}
    assert content["2"]["image"] == b"png"


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    model = mlp()
    cases: dict[str, dict[str, Any]] = {
        "loss_reduction must be one of 'mean', 'sum', .*, got 'average'": {"loss_reduction": "average"},
        "checkpoints=K needs steps=": {"checkpoints": 3},
        "recipe must be an import path 'package.module:function', got 'nothing'": {"recipe": "nothing"},
        "start=3 needs resume=True": {"start": 3},
        "encoding must be one of .*, got 'bits'": {"encoding": "bits"},
        "projection must be one of .*, got 'some'": {"projection": "some"},
    }
    for message, settings in cases.items():
        with pytest.raises(UsageError, match=message.replace("'", ".")):
            backstory.record(model, sgd(model), tmp_path / "run", **{"loss_reduction": "mean", **settings})
        assert not (tmp_path / "run").exists()


def test_checkpoints_lie_at_even_distances(tmp_path: Path) -> None:
    model = mlp()
    kept: dict[int, dict[str, Tensor]] = {}
    train(
        tmp_path / "run", model, sgd(model), 9, planned=9, checkpoints=2,
        seen=lambda t, ids: kept.update({t: copy.deepcopy(model.state_dict())}),
    )  # fmt: skip
    kept[9] = model.state_dict()
    run = backstory.open(tmp_path / "run")
    assert run.checkpoints == [0, 3, 6, 9]
    for at in run.checkpoints:
        loaded = run.load_weights(mlp(seed=5), at).state_dict()
        assert all(torch.equal(loaded[k], kept[at][k]) for k in loaded)


def test_the_final_weights_are_stored_whatever_was_asked_for(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 4)
    run = backstory.open(tmp_path / "run")
    assert run.checkpoints == [4]
    loaded = run.load_weights(mlp(seed=5))
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in model.state_dict().items())
    assert run.query(loaded, cross_entropy, batch_of([1])).at == 4


def test_weights_that_only_an_earlier_end_stored_go_when_a_run_goes_on(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    settings: dict[str, Any] = {"loss_reduction": "mean", **FULL}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        one_step(rec, model, optimizer, ids_of(0))
    with backstory.record(model, optimizer, tmp_path / "run", resume=True, start=1, **settings) as rec:
        one_step(rec, model, optimizer, ids_of(1))
    assert backstory.open(tmp_path / "run").checkpoints == [2], "how often training paused must not change results"


def test_weights_that_no_step_made_are_not_stored_as_final(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    rec = backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL)
    rec.__enter__()
    one_step(rec, model, optimizer, ids_of(0))
    model.load_state_dict(mlp(seed=5).state_dict())
    with pytest.warns(UserWarning, match="changed after the last step"):
        rec.__exit__(None, None, None)
    run = backstory.open(tmp_path / "run")
    assert (run.checkpoints, run.n_steps, "1" in run.config["fingerprints"]) == ([], 1, False)
    with pytest.raises(StoreError, match="the model was changed after the last step"):
        run.load_weights(model)


def test_a_recording_that_failed_stores_no_weights(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(KeyError):
        with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
            one_step(rec, model, optimizer, ids_of(0))
            raise KeyError
    run = backstory.open(tmp_path / "run")
    assert run.checkpoints == []
    with pytest.raises(StoreError, match=r"Load your own copy of the model at step 1 and pass it to query\(\)"):
        run.load_weights(model)
    assert run.query(model, cross_entropy, batch_of([1])).at == 1


def test_without_room_for_its_final_weights_a_run_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    model.register_buffer("table", torch.zeros(10**5))
    with pytest.warns(UserWarning, match="which max_bytes= does not allow"):
        train(tmp_path / "small", model, sgd(model), 2, max_bytes=300_000)
    assert (backstory.open(tmp_path / "small").checkpoints, backstory.open(tmp_path / "small").n_steps) == ([], 2)

    def full(self: RunStore, name: str, *args: Any) -> None:
        if name.startswith("checkpoint"):
            raise DiskError("the disk is full.")
        save(self, name, *args)

    save = RunStore.save_tensors
    monkeypatch.setattr(RunStore, "save_tensors", full)
    with pytest.warns(UserWarning, match="the disk is full"):
        train(tmp_path / "full", model, sgd(model), 2)
    run = backstory.open(tmp_path / "full")
    assert (run.checkpoints, run.n_steps, run.config["closed"]) == ([], 2, True)


def test_a_parameter_that_begins_to_train_later_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    model.get_parameter("0.weight").requires_grad_(False)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            one_step(rec, model, optimizer, ids_of(t))
        model.get_parameter("0.weight").requires_grad_(True)
        with pytest.raises(CoverageError, match=r"1 parameters \(.*\(4, 3\)\).*frozen when recording began.*new run"):
            one_step(rec, model, optimizer, ids_of(3))
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_half_precision_rows_are_kept_wide(tmp_path: Path) -> None:
    model = mlp().to(torch.bfloat16)
    optimizer = sgd(model)
    x, y = batch_of(range(3))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        expected = one_backward_each(model.double(), (x.bfloat16().double(), y), cross_entropy, trained_names(model))
        model.bfloat16()
        with rec.step(range(3)):
            F.cross_entropy(model(x.bfloat16()), y).backward()
            optimizer.step()
    assert_close(stored(tmp_path / "run").rows, expected, 0.05)


def test_positions_that_could_be_samples_are_refused(tmp_path: Path) -> None:
    model = Text("(S,)").double()
    optimizer = sgd(model)
    tokens = torch.randint(0, 7, (5, 5))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with pytest.raises(UsageError, match=r"'position'.*0 … 4.*5 samples.*\(1, S\).*\(B, 1\)"), rec.step(range(5)):
            model(tokens)


def test_one_index_for_each_sample_is_left_alone(tmp_path: Path) -> None:
    """Classes of a batch may happen to be 0, 1, 2: that does not make them positions."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)).double()
    optimizer = sgd(model)
    expected = []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for index in ([4, 1, 1], [0, 1, 2]):
            batch = (torch.tensor(index),)
            expected.append(one_backward_each(model, batch, curved, trained_names(model)))
            optimizer.zero_grad()
            with rec.step(range(3)):
                assert model(*batch).shape == (3, 2)
                curved(model, batch).mean().backward()
                optimizer.step()
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected), 1e-10)


def test_normal_is_deterministic() -> None:
    assert torch.equal(normal(3, seed=1), normal(3, seed=1))


@pytest.mark.parametrize("when", [0, 2])
def test_an_update_outside_of_any_step_is_refused(tmp_path: Path, when: int) -> None:
    model = mlp()
    optimizer = sgd(model)

    def update() -> None:
        cross_entropy(model, batch_of([0, 1])).mean().backward()
        optimizer.step()

    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for _ in range(when):
            with rec.step([0, 1]):
                update()
            optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"outside rec\.step"):
            update()
    assert backstory.open(tmp_path / "run").n_steps == when


def test_a_stale_gradient_is_found_at_any_step(tmp_path: Path) -> None:
    """One parameter is checked in turn at every step, and staleness hits all of them."""
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(6):
            if t < 5:
                optimizer.zero_grad()
                with rec.step([t, t + 1]):
                    cross_entropy(model, batch_of([t, t + 1])).mean().backward()
                    optimizer.step()
                continue
            with pytest.raises(CoverageError, match="were still there"), rec.step([t, t + 1]):
                cross_entropy(model, batch_of([t, t + 1])).mean().backward()
                optimizer.step()


def test_negative_weights_are_refused(tmp_path: Path) -> None:
    model = mlp()
    with backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="weights", **FULL) as rec:
        with (
            pytest.raises(UsageError, match="weights must be ≥ 0"),
            rec.step([0, 1], weights=torch.tensor([1.0, -0.5])),
        ):
            pass
