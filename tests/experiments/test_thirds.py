"""Agreement by thirds of a run, on scores that are known beforehand; ranks are counted one by one, medians are NumPy's."""

import json

import numpy as np
import pytest
import torch
from experiments.harness import CEILING, Row, Scores, Seed, third_of
from experiments.thirds import FEWEST, PARTS, against_exact, retrained
from tests.exact.test_spearman import counted
from torch import Tensor

WHICH = "sequences"
PER_THIRD = 7


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seed_of(number: int, when: Tensor, scores: Tensor, exact: Tensor, removals: Tensor | None = None) -> Seed:
    """A seed whose removals are single occurrences: the first ones, or these; their truth is `noise`."""
    gone = torch.arange(len(when)) if removals is None else removals
    seed = Seed({WHICH: noise(len(gone), exact.shape[1], seed=100 + number)}, when=when, removed={WHICH: when[gone]})
    for name, values in ((CEILING, exact), ("ours", scores)):
        made = Scores({WHICH: values[gone]}, occurrences=values)
        seed.rows[name] = Row({WHICH: values[gone]}, torch.arange(len(gone)), made)
    return seed


def seeds() -> list[Seed]:
    """Two seeds of different lengths; the order of the occurrences is no matter."""
    out = []
    for number in (0, 1):
        n = 3 * (PER_THIRD + number)
        when = torch.tensor([i % 3 for i in range(n)])
        exact = noise(n, 4, seed=number)
        out.append(seed_of(number, when, 2 * exact + noise(n, 4, seed=10 + number), exact))
    return out


def expected_of(one: Seed, part: str) -> tuple[list[Tensor], list[Tensor]]:
    scores, exact = (one.rows[name].made.occurrences for name in ("ours", CEILING))
    assert scores is not None
    assert exact is not None
    assert one.when is not None
    chosen = [i for i, k in enumerate(one.when.tolist()) if part == "all" or PARTS[k] == part]
    return [scores[i] for i in chosen], [exact[i] for i in chosen]


@pytest.mark.parametrize("part", [*PARTS, "all"])
def test_ranks_and_sizes_are_means_over_queries_then_seeds(part: str) -> None:
    actual = against_exact(seeds(), "ours")
    ranks, sizes = [], []
    for one in seeds():
        scores, exact = (torch.stack(x) for x in expected_of(one, part))
        ranks.append(np.mean([counted(scores[:, q], exact[:, q]) for q in range(4)]))
        medians = [np.median(np.abs(x.numpy()), axis=0) for x in (scores, exact)]
        sizes.append(np.mean(medians[0] / medians[1]))
    assert actual["against_exact"][part] == pytest.approx(np.mean(ranks))
    assert actual["against_exact_seeds"][part] == pytest.approx(ranks)
    assert actual["size_against_exact"][part] == pytest.approx(np.mean(sizes))


def test_exact_unrolling_agrees_with_itself() -> None:
    actual = against_exact(seeds(), CEILING)
    assert actual["against_exact"] == dict.fromkeys([*PARTS, "all"], pytest.approx(1.0))
    assert actual["size_against_exact"] == dict.fromkeys([*PARTS, "all"], pytest.approx(1.0))


def test_a_method_that_knows_no_time_has_no_numbers_against_exact() -> None:
    made = seeds()
    values = made[1].rows["ours"].values
    made[1].rows["ours"] = Row(values, torch.arange(len(values[WHICH])), Scores(values))
    assert set(against_exact(made, "ours").values()) == {None}
    del made[0].rows[CEILING]
    assert set(against_exact(made[:1], "ours").values()) == {None}


@pytest.mark.parametrize("third", range(3))
def test_retraining_counts_the_removals_of_a_third(third: int) -> None:
    made = seeds()
    actual = retrained(made, "ours", WHICH)[PARTS[third]]
    assert actual is not None
    each = []
    for one in made:
        assert one.when is not None
        chosen = [i for i, k in enumerate(one.when.tolist()) if k == third]
        scores, truth = one.rows["ours"].values[WHICH][chosen], one.truth[WHICH][chosen]
        each.append(np.mean([counted(scores[:, q], truth[:, q]) for q in range(4)]))
    assert actual["seeds"] == pytest.approx(each)
    assert actual["mean"] == pytest.approx(np.mean(each))
    assert actual["removals"] == [PER_THIRD, PER_THIRD + 1]
    assert actual["interval"]["lower"] < actual["mean"] < actual["interval"]["upper"]


def test_removals_that_span_thirds_or_do_not_count_are_left_out() -> None:
    (one, _) = seeds()
    row = one.rows["ours"]
    one.removed[WHICH] = torch.where(torch.arange(len(one.removed[WHICH])) < 3, -1, one.removed[WHICH])
    spread = retrained([one], "ours", WHICH)
    assert [x and x["removals"] for x in spread.values()] == [[PER_THIRD - 1]] * 3
    one.rows["ours"] = Row(row.values, row.counted[1::2], row.made)
    assert set(retrained([one], "ours", WHICH).values()) == {None}, "three are too few for a rank correlation"
    assert CEILING in one.rows
    assert retrained([one], CEILING, WHICH)["early"] is not None


def test_a_swept_row_has_its_own_half_of_the_removals_by_thirds() -> None:
    when = torch.tensor([i % 3 for i in range(42)])
    one = seed_of(5, when, noise(42, 2, seed=5), noise(42, 2, seed=6))
    row = one.rows["ours"]
    one.rows["ours"] = Row(row.values, row.counted[1::2], row.made)
    actual = retrained([one], "ours", WHICH)["middle"]
    assert actual is not None
    chosen = [i for i in range(1, 42, 2) if i % 3 == 1]
    pairs = zip(row.values[WHICH][chosen].T, one.truth[WHICH][chosen].T, strict=True)
    assert actual["mean"] == pytest.approx(np.mean([counted(x, y) for x, y in pairs]))


@pytest.mark.parametrize("few", [0, 1, FEWEST - 1, FEWEST])
def test_a_third_with_few_points_in_one_seed_has_no_numbers(few: int) -> None:
    when = torch.tensor([0] * few + [1] * 8 + [2] * 8)
    exact = noise(len(when), 2, seed=3)
    made = [*seeds(), seed_of(2, when, exact + noise(len(when), 2, seed=4), exact)]
    for one in made:
        one.truth = {WHICH: one.truth[WHICH][:, :2]}
        for row in one.rows.values():
            row.values[WHICH] = row.values[WHICH][:, :2]
    actual = {**against_exact(made, "ours"), "thirds": retrained(made, "ours", WHICH)}
    for numbers in (actual["against_exact"], actual["size_against_exact"], actual["thirds"]):
        assert (numbers["early"] is None) == (few < FEWEST)
        assert numbers["middle"] is not None
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual


def test_sizes_relative_to_nothing_are_none() -> None:
    (one, _) = seeds()
    exact = one.rows[CEILING].made.occurrences
    assert exact is not None
    assert one.when is not None
    exact[one.when == 0, 1] = 0.0
    actual = against_exact([one], "ours")["size_against_exact"]
    assert actual["early"] is None
    assert actual["late"] > 0


def test_thirds_of_a_run_are_a_third_long() -> None:
    assert [third_of(t, 300) for t in (0, 99, 100, 199, 200, 299)] == [0, 0, 1, 1, 2, 2]
    assert [third_of(t, 100) for t in (32, 33, 66, 67)] == [0, 1, 1, 2]
    for total in (3, 4, 5, 7, 100):
        sizes = np.bincount([third_of(t, total) for t in range(total)], minlength=3)
        assert sizes.sum() == total
        assert sizes.max() - sizes.min() <= 1
