"""AdamW and rows by groups of positions, resumed after an interruption: equal to an undisturbed run up to rounding."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.test_run_adam import next_token, sequences
from tests.support.adam import Tiny, adamw, block_of
from tests.support.loops import (
    Interrupted,
    ids_of,
    mlp,
    restore,
    same_numbers,
    seeded,
    sgd,
    snapshot,
    stored,
    terms_of,
    train,
)
from tests.support.oracles import assert_same
from torch import nn

import backstory
from backstory.errors import MismatchError
from backstory.store import RunStore


class Keyed(Tiny):
    """Without the bias of keys: its gradient is zero but for rounding, and Adam would make steps of that."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)


def make() -> nn.Module:
    return seeded(Keyed())


STEPS, WARM = 7, 4
TERMS = terms_of(make(), STEPS, 3 * 5)
CASES: dict[str, dict[str, Any]] = {
    "learned": {"projection": "learned", "rank": 2, "warmup_steps": WARM},
    "random": {"projection": "random", "rank": 2},
    "full": {"projection": "full"},
}
MORE = [("random", 0), ("random", 2), ("full", 2)]
State = dict[str, Any]


def loop(
    path: Path,
    case: str,
    *,
    start: int = 0,
    state: State | None = None,
    stop: int | None = None,
    seen: Callable[[int, State], None] = lambda t, state: None,
) -> None:
    """The training loop of a user who saves model and optimizer, with a planned checkpoint at step 5."""
    model = make()
    optimizer = adamw(model)
    if state is not None:
        restore(state, model, optimizer)
    settings = {"loss_reduction": "token-mean", "curvature": "empirical/3", "encoding": "float64", **CASES[case]}
    settings |= {"steps": 10, "checkpoints": 1}
    settings |= {} if state is None else {"resume": True, "start": start}
    with backstory.record(model, optimizer, path, **settings) as rec:
        for t in range(start, STEPS):
            seen(t, snapshot(model, optimizer))
            optimizer.zero_grad()
            with rec.step() as s:
                for part in torch.tensor(ids_of(t)).split([2, 1]):
                    s.batch(part, tokens=[4] * len(part))
                    (4 * next_token(model, sequences(part.tolist())).sum() / 12).backward()
                if t == stop:
                    raise Interrupted
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()


def same_run(a: Path, b: Path, ended: int | None = None) -> None:
    """All tables and files agree, but for what an interruption after `ended` steps left at its own end."""
    first, second = RunStore.open(a), RunStore.open(b)
    same_numbers(stored(a), stored(b), TERMS)
    one, two = block_of(a), block_of(b)
    for name in () if first.has_windows else ("curvature", "kappa", "hdot"):
        assert_same(getattr(two, name), getattr(one, name), TERMS)
    more = set(second.tensor_names()) - set(first.tensor_names())
    assert more <= (set() if ended is None else {f"{x}-{ended:08d}" for x in ("scale", "checkpoint", "state")})
    for name in first.tensor_names():  # basis, checkpoints, states, scales
        x, y = first.load_tensors(name), second.load_tensors(name)
        assert x.keys() == y.keys()
        for k in (k for k in x if not k.startswith("random/")):  # the user does not save these here
            assert_same(y[k], x[k], TERMS)
    P, Q = first.diagonal(0, STEPS), second.diagonal(0, STEPS)
    assert (P is None) == (Q is None) == (first.config["settings"]["projection"] != "full")
    if P is not None and Q is not None:
        torch.testing.assert_close(Q, P, rtol=2.0**-22, atol=0)  # kept in float32: the next number
    assert second.verify() == []
    assert second.spool.steps() == []
    assert first.config["fingerprints"].keys() <= second.config["fingerprints"].keys()


def names(store: RunStore) -> list[str]:
    return [n for n in store.tensor_names() if n.startswith("scale-")]


@pytest.mark.parametrize(
    ("case", "back"),
    [("learned", 0), ("learned", 2), ("full", 0), *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE)],
)
def test_after_an_exception_before_during_and_after_the_warm_up(case: str, back: int, tmp_path: Path) -> None:
    loop(tmp_path / "whole", case)
    for stop in range(back, STEPS):
        path, kept = tmp_path / f"{stop}", list[State]()
        with pytest.raises(Interrupted):
            loop(path, case, stop=stop, seen=lambda t, state, kept=kept: kept.append(state))  # type: ignore[misc]
        loop(path, case, start=stop - back, state=kept[stop - back])
        same_run(tmp_path / "whole", path, ended=stop)


@pytest.mark.parametrize("case", ["learned", "random"])
def test_after_a_death_without_a_word(case: str, tmp_path: Path) -> None:
    kept: list[State] = []

    def photograph(t: int, state: State) -> None:
        shutil.copytree(tmp_path / "whole", tmp_path / f"{t}")
        kept.append(state)

    loop(tmp_path / "whole", case, seen=photograph)
    for t in range(STEPS):
        store = RunStore.open(tmp_path / f"{t}")
        held = store.n_steps() or len(store.spool.steps())
        loop(tmp_path / f"{t}", case, start=held, state=kept[held])
        same_run(tmp_path / "whole", tmp_path / f"{t}")


def test_scales_of_replaced_steps_are_gone_and_a_resumed_end_has_its_own(tmp_path: Path) -> None:
    """Also where training is not taken up again: the optimizer knows its second moment from before."""
    kept: list[State] = []
    loop(tmp_path / "run", "random", seen=lambda t, state: kept.append(state))
    assert names(RunStore.open(tmp_path / "run")) == ["scale-00000005", "scale-00000007"]
    before = RunStore.open(tmp_path / "run").load_tensors("scale-00000005")
    model = make()
    optimizer = adamw(model)
    for start in (5, 3):
        restore(kept[start], model, optimizer)
        settings = {
            "curvature": "empirical/3",
            "encoding": "float64",
            "resume": True,
            "start": start,
            **CASES["random"],
        }
        with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="token-mean", **settings):
            pass
        store = RunStore.open(tmp_path / "run")
        assert names(store) == [f"scale-{start:08d}"]
        if start == 5:
            for k, actual in store.load_tensors("scale-00000005").items():
                assert_same(actual, before[k], 3 * max(actual.shape[0], 9))  # of the same moments: sums over 9, 12 or 4
        assert len(backstory.open(tmp_path / "run").query(model, next_token, sequences([1]))) == 3 * start


@pytest.mark.parametrize("projection", ["full", "random"])
def test_another_optimizer_is_refused(projection: str, tmp_path: Path) -> None:
    """Its rows would be in other coordinates than those before them."""
    model = mlp()
    train(tmp_path / "adam", model, adamw(model), 2, projection=projection, rank=2)
    groups = [{"params": g["params"]} for g in adamw(model).param_groups]
    with pytest.raises(MismatchError, match=r"recorded with AdamW, but the optimizer is SGD. Resume with"):
        train(tmp_path / "adam", model, torch.optim.SGD(groups, lr=0.1), 3, start=2, projection=projection, rank=2)
    assert backstory.open(tmp_path / "adam").n_steps == 2
    train(tmp_path / "sgd", model, sgd(model), 2, projection=projection, rank=2)
    with pytest.raises(MismatchError, match=r"recorded with SGD, but the optimizer is AdamW"):
        optimizer = torch.optim.AdamW(model.parameters())
        train(tmp_path / "sgd", model, optimizer, 3, start=2, projection=projection, rank=2)
