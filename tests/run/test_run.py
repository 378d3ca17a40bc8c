"""A recorded run, asked: against finite differences through torch's own optimizer, and against autograd's unrolling."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import oracles
from tests.support.loops import (
    FULL,
    Batch,
    batch_of,
    cross_entropy,
    curved,
    ids_of,
    mlp,
    one_backward_each,
    sgd,
    snapshot,
    stored,
    terms_of,
    train,
    trained_names,
)
from tests.support.oracles import assert_close, assert_same
from tests.support.zoo import ZOO
from torch import Tensor, nn

import backstory
from backstory.errors import LockedError, MismatchError, StoreError, UsageError
from backstory.maths.steps import Contraction
from backstory.results.influence import Hit
from backstory.run.run import Run

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.05},
}
QUERY = batch_of([3, 7])


def two_groups(model: nn.Module, settings: dict[str, Any]) -> torch.optim.SGD:
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return torch.optim.SGD(
        [{"params": first, "lr": 0.3}, {"params": second, "weight_decay": 0.02}], lr=0.15, **settings
    )


def one_group(model: nn.Module, settings: dict[str, Any]) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.2, **settings)


class Trained:
    """A recorded run with everything that a replay needs."""

    def __init__(self, path: Path, name: str, grouped: bool, max_norm: float | None, steps: int = 6) -> None:
        self.make = two_groups if grouped else one_group
        self.settings, self.max_norm, self.path = OPTIMIZERS[name], max_norm, path
        self.model = mlp()
        self.optimizer = self.make(self.model, self.settings)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.states: list[dict[str, Any]] = []
        self.grads: list[Tensor] = []
        train(path, self.model, self.optimizer, steps, max_norm=max_norm, schedule=schedule, seen=self._keep)
        self.run = backstory.open(path)

    def _keep(self, t: int, ids: Any) -> None:
        self.states.append(snapshot(self.model, self.optimizer))
        self.grads.append(one_backward_each(self.model, batch_of(ids), cross_entropy, trained_names(self.model)))

    def last_step_again(self, factor: Tensor) -> Tensor:
        """Query losses after the last step, taken once more with the samples' weights multiplied."""
        model = mlp()
        optimizer = self.make(model, self.settings)
        model.load_state_dict(self.states[-1]["model"])
        optimizer.load_state_dict(copy.deepcopy(self.states[-1]["optimizer"]))
        optimizer.zero_grad()
        ids = ids_of(len(self.states) - 1)
        (factor / len(ids) * cross_entropy(model, batch_of(ids))).sum().backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        return cross_entropy(model, QUERY).detach()


CASES = [(n, g, c) for n in OPTIMIZERS for g, c in ((False, None), (True, 0.05))] + [("plain", False, 0.05)]


@pytest.mark.parametrize(("name", "grouped", "max_norm"), CASES)
def test_the_last_step_agrees_with_finite_differences(
    name: str, grouped: bool, max_norm: float | None, tmp_path: Path
) -> None:
    """Positive: with less of the sample, the query's loss would be higher."""
    trained = Trained(tmp_path / "run", name, grouped, max_norm)
    answer = trained.run.query(trained.model, cross_entropy, QUERY, contraction="never")
    h, expected = 1e-4, []
    for i in range(3):
        less, more = (torch.ones(3).double() for _ in range(2))
        less[i], more[i] = 1 - h, 1 + h
        expected.append((trained.last_step_again(less) - trained.last_step_again(more)) / (2 * h))
    assert_close(answer.scores[:, -3:], torch.stack(expected, 1), 1e-7, "-1 is the sign; a common ratio the weight.")


@pytest.mark.parametrize(("name", "grouped", "max_norm"), CASES)
def test_all_steps_agree_with_autograd_through_the_recorded_steps(
    name: str, grouped: bool, max_norm: float | None, tmp_path: Path
) -> None:
    """Rows by one backward each, coefficients from the loop itself: nothing that is compared was read from the run."""
    trained = Trained(tmp_path / "run", name, grouped, max_norm)
    settings, steps = trained.settings, []
    p = trained.grads[0].shape[1]
    first = 16  # parameters of the first layer
    for t, G in enumerate(trained.grads):
        one = torch.ones(p, dtype=torch.float64)
        rate = one * (0.15 if grouped else 0.2) * 0.8**t
        l2 = one * settings.get("weight_decay", 0.0)
        if grouped:
            rate[:first], l2[first:] = 0.3 * 0.8**t, 0.02
        mu, nesterov = settings.get("momentum", 0.0), settings.get("nesterov", False)
        tau = settings.get("dampening", 0.0) if t else 0.0
        steps.append(
            oracles.Recorded(
                G=G, w=one[:3] / 3, H=G.T @ G / 3, max_norm=max_norm or 1e30, rate=rate,
                l2=l2, decay=0 * one, momentum=mu * one, tau=tau * one, a=(mu if nesterov else 1) * one, n=nesterov * one, P=one,
            )
        )  # fmt: skip
    embeddings, _ = oracles.unrolled(steps)
    v = one_backward_each(trained.model, QUERY, cross_entropy, trained_names(trained.model))
    expected = v @ torch.cat(embeddings).T
    for method in ("adjoint", "embeddings"):
        trained.run.embed(contraction="never", dtype=torch.float64, encoding="float64")
        answer = trained.run.query(trained.model, cross_entropy, QUERY, contraction="never", method=method)
        assert answer.method == method
        assert_close(answer.scores, expected, 1e-9)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("contraction", ["never", "always"])
@pytest.mark.parametrize(("name", "grouped", "max_norm"), CASES[::3])
def test_embeddings_and_adjoint_agree(
    name: str, grouped: bool, max_norm: float | None, contraction: Contraction, per_layer: bool, tmp_path: Path
) -> None:
    trained = Trained(tmp_path / "run", name, grouped, max_norm)
    trained.run.embed(contraction=contraction, per_layer=per_layer, dtype=torch.float64, encoding="float64")
    by = {
        method: trained.run.query(
            trained.model, cross_entropy, QUERY, contraction=contraction, per_layer=per_layer, method=method
        )
        for method in ("adjoint", "embeddings")
    }
    assert by["embeddings"].method == "embeddings"
    assert_close(by["embeddings"].scores, by["adjoint"].scores, 1e-10)


def test_a_question_at_a_step_is_the_same_as_to_a_run_that_ended_there(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "long", model, sgd(model, momentum=0.9), 9, planned=9, checkpoints=2)
    short = mlp()
    train(tmp_path / "short", short, sgd(short, momentum=0.9), 6)
    run = backstory.open(tmp_path / "long")
    assert run.checkpoints == [0, 3, 6, 9]
    asked = run.load_weights(mlp(seed=4), at=6)
    expected = backstory.open(tmp_path / "short").query(short, cross_entropy, QUERY)
    actual = run.query(asked, cross_entropy, QUERY, at=6)
    assert_same(actual.scores, expected.scores, 2 * terms_of(short, 6))
    assert (actual.sample_ids.tolist(), actual.steps.tolist()) == (
        expected.sample_ids.tolist(),
        expected.steps.tolist(),
    )
    assert actual.at == 6
    run.embed(at=6, dtype=torch.float64, encoding="float64")
    by_embeddings = run.query(asked, cross_entropy, QUERY, at=6)
    assert by_embeddings.method == "embeddings"
    assert_close(by_embeddings.scores, expected.scores, 1e-10)
    with pytest.raises(
        StoreError,
        match=r"at step 5 \(stored at steps \[0, 3, 6, 9\]\)\. Load your own copy .* query\(\), or record with steps=…, checkpoints=K",
    ):
        run.load_weights(asked, at=5)
    with pytest.raises(MismatchError, match=r"weights do not match the model: .*Build the model they were saved from"):
        run.load_weights(nn.Linear(2, 2), at=6)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Run, nn.Module]:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 6)
    return backstory.open(tmp_path / "run"), model


Pair = tuple[Run, nn.Module]


def test_another_model_is_refused_and_a_wrapped_one_is_not(run: Pair) -> None:
    opened, model = run
    expected = opened.query(model, cross_entropy, QUERY).scores
    other = copy.deepcopy(model)
    other.get_parameter("2.bias").data[0] += 1e-12
    with pytest.raises(MismatchError, match=r"weights are not those of step 6\. Pass the model unchanged .*, or load"):
        opened.query(other, cross_entropy, QUERY)
    with pytest.raises(MismatchError, match="in its original precision"):
        opened.query(copy.deepcopy(model).float(), cross_entropy, QUERY)
    assert_same(opened.query(nn.DataParallel(model), cross_entropy, QUERY).scores, expected, 2 * terms_of(model, 6))
    wrapped = nn.Module()
    wrapped._orig_mod = model
    again = opened.query(wrapped, lambda m, b: cross_entropy(model, b), QUERY).scores
    assert_same(again, expected, 2 * terms_of(model, 6))


def test_weights_of_another_step_are_recognised(tmp_path: Path) -> None:
    model = mlp()
    start = copy.deepcopy(model)
    train(tmp_path / "run", model, sgd(model), 6, planned=6, checkpoints=1)
    run = backstory.open(tmp_path / "run")
    third = run.load_weights(mlp(seed=5), at=3)
    with pytest.raises(
        MismatchError, match=r"are those of step 3, not of step 6\. Pass at=3, or load its weights with run\."
    ):
        run.query(third, cross_entropy, QUERY)
    with pytest.raises(MismatchError, match=r"those of step 0, not of step 6\. Pass the trained model, or load"):
        run.query(start, cross_entropy, QUERY)


def test_a_step_without_fingerprint_is_answered_only_on_request_and_with_a_note(run: Pair) -> None:
    opened, model = run
    with pytest.raises(MismatchError, match=r"not at step 4.*unverified=True"):
        opened.query(model, cross_entropy, QUERY, at=4)
    answer = opened.query(model, cross_entropy, QUERY, at=4, unverified=True)
    assert "model not verified: the run has no fingerprint of step 4" in answer.caveats
    assert "evaluated in eval mode" in answer.caveats


@pytest.mark.parametrize("at", [0, 7, -1, "last", 2.0])
def test_steps_that_do_not_exist_are_refused(run: Pair, at: Any) -> None:
    with pytest.raises(UsageError, match=r"at must be 'final' or a step from 1 to 6"):
        run[0].query(run[1], cross_entropy, QUERY, at=at)


def test_keep_gives_the_ends_of_the_whole_answer(run: Pair) -> None:
    opened, model = run
    everything = opened.query(model, cross_entropy, QUERY)
    for k in (1, 4, 9, 50):
        kept = opened.query(model, cross_entropy, QUERY, keep=k)
        assert len(kept) == min(2 * k, 18)
        for q in range(2):
            for ask in ("top", "bottom"):
                expected = getattr(everything, ask)(k, query=q, per="occurrence")
                same_hits(getattr(kept, ask)(k, query=q, per="occurrence"), expected)
                same_hits(getattr(kept, ask)(k, query=q), expected)
                same_hits(getattr(kept, ask)(1000, query=q, per="occurrence")[:k], expected)
                most = k if 2 * k < 18 else 18
                assert len(getattr(kept, ask)(1000, query=q, per="occurrence")) == most, "no lowest among the highest"
    with pytest.raises(UsageError, match=r"keep must be at least 1"):
        opened.query(model, cross_entropy, QUERY, keep=0)


def same_hits(actual: list[Hit], expected: list[Hit]) -> None:
    assert [(h.sample, h.step) for h in actual] == [(h.sample, h.step) for h in expected]
    one, two = (torch.tensor([h.influence for h in x], dtype=torch.float64) for x in (actual, expected))
    assert_same(one, two, 2 * terms_of(mlp(), 6))


def test_methods(run: Pair) -> None:
    opened, model = run
    assert opened.query(model, cross_entropy, QUERY).method == "adjoint"
    with pytest.raises(
        UsageError,
        match=r"no embeddings for step 6 with per_layer=False, contraction='when_expanding'. Call run\.embed",
    ):
        opened.query(model, cross_entropy, QUERY, method="embeddings")
    with pytest.raises(UsageError, match="method must be one of 'auto', 'exact', 'adjoint', 'embeddings', got 'magic'"):
        opened.query(model, cross_entropy, QUERY, method="magic")
    opened.embed(per_layer=True)
    assert opened.query(model, cross_entropy, QUERY).method == "adjoint", "embeddings of another form do not fit"
    independent = opened.query(model, cross_entropy, QUERY, per_layer=True)
    assert independent.method == "embeddings"
    assert "parameters treated as independent" in independent.caveats


def test_ready_vectors_are_checked(run: Pair) -> None:
    opened, model = run
    width = opened.width
    v = one_backward_each(model, QUERY, cross_entropy, trained_names(model))
    assert_close(opened.query_gradients(v).scores, opened.query(model, cross_entropy, QUERY).scores, 1e-10)
    for bad in (torch.zeros(width), torch.zeros(1, width + 1), torch.full((1, width), torch.nan)):
        with pytest.raises(UsageError, match=rf"must be finite and of shape \(Q, {width}\)"):
            opened.query_gradients(bad)


def test_a_proxy_is_said_in_every_answer(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(tmp_path / "run", model, optimizer, 3, optimizer_model="sgd")
    opened = backstory.open(tmp_path / "run")
    opened.embed()
    v = torch.zeros(1, opened.width)
    answers = [
        opened.query(model, cross_entropy, QUERY), opened.query(model, cross_entropy, QUERY, keep=2),
        opened.query(model, cross_entropy, QUERY, method="adjoint", at=2, unverified=True), opened.query_gradients(v),
        opened.query(model, cross_entropy, QUERY).between(0, 2),
    ]  # fmt: skip
    for answer in answers:
        assert any("AdamW's steps are treated as plain SGD" in n for n in answer.caveats)
        assert "AdamW's steps" in repr(answer)


def test_content_can_be_added_shown_and_erased(run: Pair) -> None:
    opened, model = run
    opened.describe([0, 1, 2], text=["a", "b", "c"], label=[5, 6, 5], source=["x", "y", "x"])
    assert opened.content(["1", "99"]) == {"1": {"id": "1", "text": "b", "image": None, "label": "6", "source": "y"}}
    answer = opened.query(model, cross_entropy, QUERY)
    sums = answer.group_by("label")
    assert sums.keys() == {"5", "6", "(not given)"}
    assert_close(sums["5"][None], (answer.sum_over([0]) + answer.sum_over([2]))[None], 1e-12)
    rows = stored(opened.path).rows
    assert opened.erase_content([0]) == 1
    assert opened.content(["0", "1"]).keys() == {"1"}
    assert opened.erase_content(None) == 2
    assert opened.content(["0", "1", "2"]) == {}
    assert torch.equal(stored(opened.path).rows, rows)
    with pytest.raises(UsageError, match=r"no source for its samples. Add it with run.describe"):
        answer.group_by("source")


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 3), (torch.ones(2), torch.zeros(3, dtype=torch.int64)), {"x": torch.ones(1)}]
)
def test_query_sets_come_back_as_they_were_given(run: Pair, batch: Any) -> None:
    opened, _ = run
    opened.add_queries("mine", batch)
    actual = backstory.open(opened.path).queries("mine")
    assert type(actual) is type(batch)
    pairs = [(actual, batch)] if isinstance(batch, Tensor) else list(zip(_values(actual), _values(batch), strict=True))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    with pytest.raises(UsageError, match=r"no query set 'yours'. It has: mine. Add it with run.add_queries"):
        opened.queries("yours")


def _values(batch: Any) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def test_ten_tensors_keep_their_order(run: Pair) -> None:
    batch = tuple(torch.tensor([i]) for i in range(12))
    run[0].add_queries("many", batch)
    assert [int(x) for x in run[0].queries("many")] == list(range(12))


def test_reading_while_recording(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        opened = backstory.open(tmp_path / "run")
        with pytest.raises(StoreError, match="has no complete step yet"):
            opened.query(model, cross_entropy, QUERY)
        with rec.step([0, 1]):
            cross_entropy(model, batch_of([0, 1])).mean().backward()
            optimizer.step()
        rec.flush()
        assert len(opened.query(model, cross_entropy, QUERY, unverified=True)) == 2
        with pytest.raises(LockedError):
            opened.embed()


def test_a_run_says_what_it_is(run: Pair) -> None:
    assert repr(run[0]).endswith("6 steps, 18 occurrences, 26 full dimensions)")
    with run[0] as same:
        assert same is run[0]


def test_tied_weights_can_be_asked(tmp_path: Path) -> None:
    model = ZOO["tied weights"].make()
    optimizer = sgd(model, 0.01)
    batches: list[Batch] = [ZOO["tied weights"].batch(t, 3) for t in range(2)]
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t, batch in enumerate(batches):
            rows = one_backward_each(model, batch, curved, trained_names(model))
            optimizer.zero_grad()
            with rec.step([f"{t}{i}" for i in range(3)]):
                curved(model, batch).mean().backward()
                optimizer.step()
    v = one_backward_each(model, batches[0], curved, trained_names(model))
    answer = backstory.open(tmp_path / "run").query(model, lambda m, b: curved(m, b), batches[0], contraction="never")
    assert_close(answer.scores[:, 3:], 0.01 / 3 * v @ rows.T, 1e-10)
    assert np.asarray(answer.steps).tolist() == [0, 0, 0, 1, 1, 1]


def test_embeddings_of_another_algorithm_are_not_used(run: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, model = run
    opened.embed()
    assert opened.query(model, cross_entropy, QUERY).method == "embeddings"
    monkeypatch.setattr("backstory.run.methods.ALGORITHM", -1)
    assert opened.query(model, cross_entropy, QUERY).method == "adjoint"
