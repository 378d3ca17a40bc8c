"""A result checked by retraining: on a quadratic, against removals written out."""

from dataclasses import replace

import pytest
import torch
from tests.exact.test_leave_out import by_hand, make
from torch import Tensor, nn

import backstory
from backstory.errors import MismatchError, UsageError
from backstory.exact import Check, check
from backstory.replay.recipe import Recipe, take_step
from backstory.results.influence import Influence
from backstory.run.run import Run


def loss(model: nn.Module) -> Tensor:
    made = make()
    return made.loss(model, made.queries["one"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Influence]:
    made, path = make(), tmp_path_factory.mktemp("check") / "run"
    with backstory.record(made.model, made.optimizer, path, loss_reduction="mean", projection="full") as rec:
        for t, (ids, _) in enumerate(made.batches):
            with rec.step(ids):
                take_step(made, t)
    run = backstory.open(path)
    return run, run.query(made.model, made.loss, made.queries["one"])


@pytest.fixture(scope="module")
def actual(recorded: tuple[Run, Influence]) -> Check:
    return check(recorded[0], make, recorded[1], loss, random=4)


def test_the_ends_come_first_and_others_are_drawn_at_random(recorded: tuple[Run, Influence], actual: Check) -> None:
    run, influence = recorded
    assert list(actual.samples[: actual.ends]) == [influence.top(1)[0].sample, influence.bottom(1)[0].sample]
    assert len(set(actual.samples)) == len(actual.samples) == 6
    assert check(run, make, influence, loss, random=0).samples == actual.samples[:2]
    assert check(run, make, influence, loss, random=4, seed=1).samples[2:] != actual.samples[2:]


def test_each_sample_is_left_out_of_training_alone(recorded: tuple[Run, Influence], actual: Check) -> None:
    whole = by_hand({}, None, "mean")
    for k, sample in enumerate(actual.samples):
        without = by_hand({t: {int(sample)} for t in range(4)}, None, "mean")
        assert float(actual.retrained[k, 0]) == pytest.approx(without - whole, rel=1e-6, abs=1e-12)
        assert float(actual.predicted[k, 0]) == pytest.approx(float(recorded[1].sum_over([sample])[0]))


def test_it_says_whether_exact_values_were_checked(recorded: tuple[Run, Influence], actual: Check) -> None:
    assert (actual.method, actual.origin) == ("adjoint", "From the recording, by reverse sweep.")
    replay = actual.caveats[0]
    same = replace(recorded[1], method="exact unrolling", caveats=(replay, "evaluated in eval mode"))
    exact = check(recorded[0], make, same, loss, random=0)
    assert exact.origin == "Exact: computed through the replayed training."
    assert exact.caveats == (replay, "evaluated in eval mode"), "each is said once"


def made_up(predicted: list[float], retrained: list[float], ends: int) -> Check:
    first, second = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (predicted, retrained))
    return Check(tuple(range(len(predicted))), ends, first, second, at=4)


def test_agreement_is_of_all_and_of_those_drawn_at_random() -> None:
    few = made_up([3.0, -3.0, 1.0, 2.0, -1.0], [6.0, -1.0, 2.0, 1.0, 1.5], ends=2)
    assert few.spearman == pytest.approx(0.7)
    assert few.same_sign == pytest.approx(0.8)
    assert few.words == (
        "Retrained without each of 5 samples: rank correlation with the prediction 0.70 (the 3 drawn at random are too few "
        "to rank alone), same sign in 80%.",
    )
    assert few.as_dict()["spearman_random"] is None
    drawn = [float(x) for x in range(1, 9)]
    eight = made_up([30.0, -30.0, *drawn], [60.0, -10.0, *drawn[::-1]], ends=2)
    assert eight.spearman_random == pytest.approx(-1.0)
    assert "(-1.00 for the 8 drawn at random)" in eight.words[0]
    assert "too few" in made_up([30.0, -30.0, *drawn[1:]], [60.0, -10.0, *drawn[1:]], ends=2).words[0]
    none = made_up([3.0, -3.0], [6.0, -1.0], ends=2)
    assert none.as_dict()["spearman_random"] is None
    assert "at random" not in none.words[0]


def test_every_point_is_in_the_table_and_the_figure() -> None:
    one = made_up([3.0, -3.0, 1.0], [6.0, -1.0, 2.0], ends=2)
    table = one.to_pandas()
    assert table["random"].tolist() == [False, False, True]
    diagonal, ends, random = one.draw()["data"]
    assert (ends["x"], ends["y"], random["x"], random["y"]) == ([3.0, -3.0], [6.0, -1.0], [1.0], [2.0])
    assert diagonal["x"] == diagonal["y"] == [-3.0, 3.0]
    assert random["customdata"] == ["sample 2, query 0"]
    assert [k["name"] for k in one.draw()["layout"]["meta"]["key"]] == ["equal", "first or last", "drawn at random"]
    assert len(one.figure().data) == 3  # Plotly's own checker takes it


def test_a_result_on_an_earlier_model_is_refused(recorded: tuple[Run, Influence]) -> None:
    with pytest.raises(UsageError, match=r"must be at the final step, 4, .* got one at step 2"):
        check(recorded[0], make, replace(recorded[1], at=2), loss)


def test_another_recipe_or_another_number_of_losses_is_refused(recorded: tuple[Run, Influence]) -> None:
    def decayed() -> Recipe:
        made = make()
        made.optimizer.param_groups[0]["weight_decay"] = 0.1
        return made

    def shorter() -> Recipe:
        made = make()
        return replace(made, batches=made.batches[:3])

    run, influence = recorded
    with pytest.raises(MismatchError, match="pass verify=False"):
        check(run, decayed, influence, loss, random=0)
    assert "was not checked" in check(run, decayed, influence, loss, random=0, verify=False).caveats[0]
    with pytest.raises(MismatchError, match="the recipe has 3 steps, but the run has 4"):
        check(run, shorter, influence, loss, random=0)
    with pytest.raises(UsageError, match="query_loss must give 1 losses, as the result has, got 2"):
        check(run, make, influence, lambda model: torch.cat([loss(model), loss(model)]), random=0)


def test_samples_are_drawn_from_each_third_by_their_last_use(recorded: tuple[Run, Influence]) -> None:
    run, influence = recorded
    drawn = check(run, make, influence, loss, random=6).samples[2:]
    last = {str(x): k for k, x in enumerate(influence.sample_ids.tolist())}
    others = sorted(
        last[str(x)] for x in influence.per_sample()[0] if x not in check(run, make, influence, loss, random=0).samples
    )
    thirds = [others.index(last[str(x)]) * 3 // len(others) for x in drawn]
    assert thirds == sorted(thirds)
    assert len(set(thirds)) == 3


def test_twins_are_the_noise_that_changes_are_held_to(recorded: tuple[Run, Influence], actual: Check) -> None:
    assert actual.floor is None
    assert "rounding" not in actual.words[0]
    twinned = check(recorded[0], make, recorded[1], loss, random=4, twins=2)
    assert twinned.floor is not None
    assert 0 < float(twinned.floor[0]) < float(twinned.retrained.abs().max()), (
        "rounding, far below what leaving out does"
    )
    assert torch.equal(twinned.retrained, actual.retrained)
    assert twinned.clear == float((twinned.retrained.abs() > twinned.floor).double().mean())
    assert f"{twinned.clear:.0%} of the changes are larger than rounding alone makes them." in twinned.words[0]
    below = replace(twinned, floor=twinned.retrained.abs().amax(0) * 2)
    assert below.clear == 0
