"""TracIn over checkpoints and in the run, against explicit sums."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.baselines.problems import by_id, correlation, cross_entropy, data, mlp, queries, recipe, rows
from tests.recording.conftest import _no_flush
from tests.support.oracles import assert_close
from torch import nn

import backstory
from backstory import Recipe, Run
from backstory.baselines.tracin import run_checkpoints, tracin, tracin_run
from backstory.errors import MismatchError, UsageError

__all__ = ["_no_flush"]  # an autouse fixture: no waiting for the disk


def checkpoints() -> list[tuple[dict[str, torch.Tensor], float]]:
    return [(dict(mlp(seed).state_dict()), rate) for seed, rate in ((1, 0.1), (2, 0.03), (3, 0.2))]


def test_checkpoints_are_summed_with_their_rates() -> None:
    made = recipe()
    before = copy.deepcopy(made.model.state_dict())
    parts = [
        rate * rows(mlp(seed), cross_entropy, queries()) @ rows(mlp(seed), cross_entropy, data()).T
        for seed, rate in ((1, 0.1), (2, 0.03), (3, 0.2))
    ]
    answer = tracin(made, queries(), checkpoints())
    assert_close(by_id(answer), torch.stack(parts).sum(0), 1e-12)
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())
    assert "rank only" in " ".join(answer.caveats)
    assert "3 checkpoints" in " ".join(answer.caveats)


def test_batch_size_does_not_matter() -> None:
    expected = by_id(tracin(recipe(), queries(), checkpoints()))
    assert_close(by_id(tracin(recipe(size=11, seed=4), queries(), checkpoints())), expected, 1e-12)


def test_a_rate_for_each_group() -> None:
    model = mlp()
    made = recipe(model)
    split = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1.0)  # type: ignore[index]
    made = Recipe(model=model, optimizer=split, loss=made.loss, batches=made.batches)
    actual = tracin(made, queries(), [(model.state_dict(), (0.1, 0.5))])
    G, V = rows(model, cross_entropy, data()), rows(model, cross_entropy, queries())
    expected = 0.1 * V[:, :25] @ G[:, :25].T + 0.5 * V[:, 25:] @ G[:, 25:].T
    assert_close(by_id(actual), expected, 1e-12)
    with pytest.raises(UsageError, match="one learning rate per parameter group, got 1 for 2 groups"):
        tracin(made, queries(), [(model.state_dict(), (0.1,))])


def test_no_checkpoint_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        tracin(recipe(), queries(), [])


def record(made: Recipe, path: Path, max_norm: float | None = None, **settings: Any) -> list[dict[str, torch.Tensor]]:
    """Train and record; the weights before every step, and at the end."""
    states = []
    told = {"projection": "full", "encoding": "float64", "loss_reduction": "mean", "steps": len(made.batches)}
    with backstory.record(made.model, made.optimizer, path, **{**told, **settings}) as rec:
        for t, (ids, batch) in enumerate(made.batches):
            made.optimizer.param_groups[0]["lr"] = 0.3 / (1 + t)
            states.append(copy.deepcopy(made.model.state_dict()))
            made.optimizer.zero_grad()
            with rec.step(ids):
                made.loss(made.model, batch).mean().backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(made.model.parameters(), max_norm)
                made.optimizer.step()
    return [*states, copy.deepcopy(made.model.state_dict())]


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_in_the_run_each_occurrence_is_rate_weight_product(tmp_path: Path, max_norm: float | None) -> None:
    made = recipe()
    states = record(made, tmp_path / "run", max_norm)
    answer = tracin_run(Run(tmp_path / "run"), made.model, cross_entropy, queries())
    V = rows(made.model, cross_entropy, queries())
    column = 0
    for t, (ids, batch) in enumerate(made.batches):
        then = mlp()
        then.load_state_dict(states[t])
        G = rows(then, cross_entropy, batch)
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (float(G.mean(0).norm()) + 1e-6))
        expected = clip * 0.3 / (1 + t) / len(ids) * V @ G.T
        assert_close(answer.scores[:, column : column + len(ids)], expected, 1e-9)
        assert answer.sample_ids[column : column + len(ids)].tolist() == [str(i) for i in ids]
        column += len(ids)
    assert len(answer) == column == 60


def test_in_the_run_agrees_with_the_run_for_short_training(tmp_path: Path) -> None:
    """With tiny rates nothing bends a displacement: the propagator is 1."""
    made = recipe(epochs=1)
    with backstory.record(made.model, made.optimizer, tmp_path / "r", projection="full", encoding="float64",
                          loss_reduction="mean", steps=5) as rec:  # fmt: skip
        made.optimizer.param_groups[0]["lr"] = 1e-6
        for ids, batch in made.batches:
            made.optimizer.zero_grad()
            with rec.step(ids):
                made.loss(made.model, batch).mean().backward()
                made.optimizer.step()
    run = Run(tmp_path / "r")
    full = run.query(made.model, cross_entropy, queries())
    assert_close(tracin_run(run, made.model, cross_entropy, queries()).scores, full.scores, 1e-4, "sign or weight")


def test_checkpoints_of_a_run_come_with_their_rates(tmp_path: Path) -> None:
    made = recipe()
    states = record(made, tmp_path / "run", checkpoints=4)
    run = Run(tmp_path / "run")
    actual = list(run_checkpoints(run, made.model))
    assert len(actual) == len(run.checkpoints) >= 2
    for step, (weights, rate) in zip(run.checkpoints, actual, strict=True):
        assert all(torch.equal(v, states[step][k]) for k, v in weights.items())
        assert rate == pytest.approx([0.3 / (1 + min(step, 9))])
    by_run = tracin(made, queries(), run_checkpoints(run, made.model))
    by_hand = tracin(made, queries(), [(states[s], 0.3 / (1 + min(s, 9))) for s in run.checkpoints])
    assert_close(by_run.scores, by_hand.scores, 1e-12)


def test_momentum_is_said_and_another_model_refused(tmp_path: Path) -> None:
    made = recipe()
    made.optimizer.param_groups[0]["momentum"] = 0.9
    record(made, tmp_path / "run")
    run = Run(tmp_path / "run")
    answer = tracin_run(run, made.model, cross_entropy, queries())
    assert "momentum is ignored: influences are about 10 × too small" in " ".join(answer.caveats)
    assert correlation(answer.scores, run.query(made.model, cross_entropy, queries()).scores) > 0.3
    with pytest.raises(MismatchError):
        tracin_run(run, mlp(5), cross_entropy, queries())


def test_adams_momentum_adds_up_to_one_and_is_no_caveat(tmp_path: Path) -> None:
    made = recipe()
    made = replace(made, optimizer=torch.optim.AdamW(made.model.parameters(), lr=1e-3, weight_decay=0.0))
    record(made, tmp_path / "run")
    answer = tracin_run(Run(tmp_path / "run"), made.model, cross_entropy, queries())
    assert not any("momentum" in caveat for caveat in answer.caveats), answer.caveats


def test_a_label_that_is_not_given_is_none(tmp_path: Path) -> None:
    made = recipe()
    record(made, tmp_path / "run")
    run = Run(tmp_path / "run")
    first, second = made.batches[0][0][:2]
    run.describe([first, second], label=[None, 7])
    assert [run.content([i])[str(i)]["label"] for i in (first, second)] == [None, "7"]


def test_captum_agrees() -> None:
    """captum 0.9.0: TracInCP with one backward pass for each sample."""
    captum = pytest.importorskip("captum.influence", reason="compares with captum: pip install captum")
    model, (x, y) = mlp(), data()

    def load(m: nn.Module, checkpoint: tuple[dict[str, torch.Tensor], float]) -> float:
        m.load_state_dict(checkpoint[0])
        return checkpoint[1]

    peer = captum.TracInCP(
        copy.deepcopy(model), torch.utils.data.TensorDataset(x, y), checkpoints(), checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="none"), batch_size=8,
    )  # fmt: skip
    assert_close(by_id(tracin(recipe(model), queries(), checkpoints())), peer.influence(queries()).double(), 1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peer
def test_dattri_agrees() -> None:
    """dattri 0.3.0: TracInAttributor by torch.func, summed in float32."""
    algorithm = pytest.importorskip("dattri.algorithm", reason="compares with dattri: pip install dattri")
    task = pytest.importorskip("dattri.task")
    model = mlp()

    def loss(params: Any, sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(model, params, sample[0][None])
        return nn.functional.cross_entropy(out, sample[1][None])

    def loader(xy: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*xy), batch_size=8)

    made = task.AttributionTask(loss_func=loss, model=copy.deepcopy(model), checkpoints=[w for w, _ in checkpoints()])
    peer = algorithm.TracInAttributor(
        task=made, weight_list=torch.tensor([r for _, r in checkpoints()]), normalized_grad=False, device="cpu"
    )
    peer.projector_kwargs = None  # it would project 43 coordinates to 512 random ones
    expected = peer.attribute(loader(data()), loader(queries())).T.double()
    assert_close(by_id(tracin(recipe(mlp()), queries(), checkpoints())), expected, 1e-5)
