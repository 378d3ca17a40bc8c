"""What is said of a result's quality follows from what was measured, and takes the worse of both correlations."""

import json
from dataclasses import replace

import numpy as np
import pytest

from backstory.results.figures import strip
from backstory.results.quality import Agreement, FirstOrder, Quality, bounds, name_rank, part_of

AT = 30
TENTHS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def agreement(first: int, last: int, rank: float | None) -> Agreement:
    return Agreement(first, last, rank, None if rank is None else rank - 0.1, None if rank is None else rank + 0.05, 40)


RECORDED = Quality(
    on="the mean of `test`",
    whole=agreement(0, AT, 0.41),
    thirds=tuple(agreement(10 * k, 10 * k + 10, x) for k, x in enumerate((0.12, 0.55, 0.91))),
    tenths=tuple(agreement(3 * k, 3 * k + 3, x) for k, x in enumerate(TENTHS)),
    factors=tuple(float(20 - k) for k in range(20)),
    first_order=FirstOrder(0.97, 0.9, 0.99, trainings=24, clear=23),
)


def limited(rank: float) -> Quality:
    return replace(RECORDED, first_order=FirstOrder(rank, rank - 0.2, rank + 0.2, trainings=24, clear=20))


@pytest.mark.parametrize(
    ("rank", "words"),
    [(1.0, "well"), (0.8, "well"), (0.79, "partly"), (0.5, "partly"), (0.49, "poorly"), (0.2, "poorly"), (0.19, "not at all"), (-0.9, "not at all")],
)  # fmt: skip
def test_words_for_a_rank(rank: float, words: str) -> None:
    assert name_rank(rank) == words


def test_zero_has_no_sign() -> None:
    assert "(rank correlation 0.00)" in replace(RECORDED, whole=agreement(0, AT, -0.001)).sentence
    assert "(-0.01)" in replace(RECORDED, thirds=(agreement(0, 10, -0.01), agreement(10, 30, 0.5))).sentence


def test_one_sentence_names_the_parts_and_what_was_measured() -> None:
    assert RECORDED.sentence == (
        "Overall, ranks uses poorly (rank correlation 0.41): well in the last third (0.91), partly in the middle third (0.55), not at all "
        "in the first third (0.12); "
        "measured on the mean of `test`."
    )


def test_the_worse_of_both_correlations_is_told() -> None:
    """A recording that agrees with exact values is no better than these are at predicting retraining."""
    close = replace(limited(0.26), whole=agreement(0, AT, 0.95))
    assert close.rank == 0.26
    assert close.sentence.startswith("Overall, ranks uses poorly (rank correlation 0.26)")
    assert "well" not in close.sentence.split(";")[0]
    assert (
        "first order is the limit: exact values predict leave-one-out retraining poorly (rank correlation 0.26 over 24 uses)"
        in close.sentence
    )
    assert limited(0.99).rank == 0.41


def test_retraining_that_rounding_drowns_is_no_fault_of_first_order() -> None:
    close = replace(RECORDED, whole=agreement(0, AT, 0.95))
    drowned = replace(close, first_order=FirstOrder(0.1, -0.3, 0.5, trainings=24, clear=11))
    assert drowned.sentence.endswith(
        "; rounding is the limit: exact values predict leave-one-out retraining not at all (rank correlation 0.10 over 24 uses, "
        "only 11 of which changed the loss by more than rounding does)."
    )
    assert (
        "; first order is the limit"
        in replace(drowned, first_order=FirstOrder(0.1, -0.3, 0.5, trainings=24, clear=12)).sentence
    )


CHAOTIC = replace(
    RECORDED,
    whole=agreement(0, AT, 0.6),
    thirds=tuple(agreement(10 * k, 10 * k + 10, x) for k, x in enumerate((0.4, 0.6, 0.85))),
    tenths=tuple(agreement(3 * k, 3 * k + 3, 0.9) for k in range(10)),
    first_order=FirstOrder(0.3, 0.0, 0.6, trainings=24, clear=20),
    retrained=tuple(agreement(10 * k, 10 * k + 10, x) for k, x in enumerate((0.1, 0.7, 0.95))),
)


def test_a_part_takes_the_worse_of_its_own_two() -> None:
    """First order fails in the first third and holds in the last, whatever it does over the whole run."""
    assert CHAOTIC.by_third == (0.1, 0.6, 0.85)
    assert CHAOTIC.rank == 0.3
    straddling = (0.1 + 2 * 0.7) / 3, (2 * 0.7 + 0.95) / 3  # steps 9 to 11, and 18 to 20
    expected = [0.1] * 3 + [straddling[0]] + [0.7] * 2 + [straddling[1]] + [0.9] * 3
    assert CHAOTIC.by_tenth == pytest.approx(expected)
    assert CHAOTIC.weak == ((0, 9),)
    assert CHAOTIC.ranked([0, 8, 9, 29]).tolist() == [False, False, True, True]
    assert CHAOTIC.sentence.startswith(
        "Overall, ranks uses poorly (rank correlation 0.30): well in the last third (0.85), partly in the middle third "
        "(0.60), not at all in the first third (0.10); measured on the mean of `test`; first order is the limit: exact"
    )


def test_the_strip_under_a_time_axis_shows_the_worse_of_both() -> None:
    cells = strip(CHAOTIC)
    assert [rank for _, _, rank, _ in cells] == pytest.approx([0.1] * 3 + [0.5] + [0.7] * 2 + [2.35 / 3] + [0.9] * 3)
    assert [weak for *_, weak in cells] == [True] * 3 + [False] * 7


def test_a_part_of_the_run_has_first_order_of_its_own() -> None:
    late, early = CHAOTIC.between(24, 30), CHAOTIC.between(0, 6)
    assert late.rank == pytest.approx(0.9)
    assert late.sentence.endswith("well (rank correlation 0.90); measured on the mean of `test`.")
    assert early.rank == pytest.approx(0.1)
    assert early.sentence.endswith(
        "; first order or rounding is the limit: exact values predict leave-one-out retraining not at all (rank correlation 0.10 "
        "over 40 uses)."
    )
    both = CHAOTIC.between(15, 25)  # five steps of the middle third, five of the last one
    assert both.first_order is not None
    assert both.first_order.rank == pytest.approx((0.7 + 0.95) / 2)
    assert both.first_order.trainings == 80
    few = replace(CHAOTIC, retrained=tuple(agreement(10 * k, 10 * k + 10, None) for k in range(3)))
    assert few.by_third == (0.3, 0.3, 0.3), "too few were left out of each third: the whole run's is what is known"
    assert few.between(24, 30).rank == 0.3


def test_exact_values_have_the_first_order_of_each_third() -> None:
    exact = Quality(exact=True, on="x", first_order=CHAOTIC.first_order, retrained=CHAOTIC.retrained)
    assert exact.by_third == (0.1, 0.7, 0.95)
    assert exact.sentence == (
        "Exact to first order: exact values predict leave-one-out retraining poorly (rank correlation 0.30 over 24 uses): well in "
        "the last third (0.95), partly in the middle third (0.70), not at all in the first third (0.10)."
    )
    late = exact.between(22, 30)
    assert late.rank == 0.95
    assert (
        late.sentence
        == "Exact to first order: exact values predict leave-one-out retraining well (rank correlation 0.95 over 40 uses)."
    )
    alike = replace(exact, retrained=tuple(agreement(10 * k, 10 * k + 10, x) for k, x in enumerate((0.9, 0.95, 0.99))))
    assert "third" not in alike.sentence
    assert "third" not in exact.between(12, 30).sentence, "two of them are no comparison of all"
    assert exact.between(0, AT) is exact


def test_what_is_not_ranked_is_grey() -> None:
    assert RECORDED.weak == ((0, 12),)
    assert limited(0.3).weak == ((0, AT),), "where first order fails, nothing is ranked"
    holed = replace(
        RECORDED, tenths=(agreement(0, 3, 0.9), agreement(3, 6, 0.1), agreement(6, 9, None), agreement(9, 12, 0.9))
    )
    assert holed.weak == ((3, 9),), "a tenth with too few uses is taken to be like the whole"
    assert RECORDED.ranked([0, 11, 12, 29]).tolist() == [False, False, True, True]
    assert not Quality().ranked([0, 1]).any()


def test_a_part_of_the_run_has_its_own_quality() -> None:
    late = RECORDED.between(24, AT)
    assert late.rank == pytest.approx((0.9 + 0.95) / 2)
    assert (
        late.sentence
        == "Ranks the uses of steps 24 to 29 well (rank correlation 0.93); measured on the mean of `test`."
    )
    assert RECORDED.between(0, AT) is RECORDED
    assert RECORDED.between(25, 26).rank == 0.9, "of the tenth that it lies in"


def test_what_was_not_measured_has_no_adjective_and_names_the_command() -> None:
    nothing = Quality(command="backstory calibrate RUN --queries test", seconds=200)
    assert nothing.sentence == (
        "Quality: not measured. To measure how reliable the ranking is: `backstory calibrate RUN --queries test` (about 3 minutes)."
    )
    assert (nothing.measured, nothing.rank, nothing.weak) == (False, None, ())
    assert not {"good", "fair", "weak", "well", "poorly"} & set(nothing.sentence.split())
    stale = replace(nothing, stale="it was measured on another form")
    assert stale.sentence.startswith(
        "Quality: not measured for these values: it was measured on another form. To measure"
    )


def test_exact_values_are_judged_by_retraining_alone() -> None:
    exact = Quality(exact=True, on="the mean of `test`", first_order=RECORDED.first_order)
    assert (
        exact.sentence
        == "Exact to first order: exact values predict leave-one-out retraining well (rank correlation 0.97 over 24 uses)."
    )
    assert exact.rank == 0.97
    assert (replace(exact, factors=RECORDED.factors).correction([0, 5], AT) == 1).all()
    assert "predict retraining" in Quality(exact=True, command="x").sentence


def test_factors_are_those_of_the_twentieths() -> None:
    steps = np.arange(AT)
    expected = [RECORDED.factors[int(20 * t / AT)] for t in range(AT)]
    assert RECORDED.correction(steps, AT).tolist() == expected
    assert (replace(RECORDED, factors=()).correction(steps, AT) == 1).all()


@pytest.mark.parametrize("at", [1, 7, 20, 33, 1000])
@pytest.mark.parametrize("parts", [3, 10, 20])
def test_bounds_are_where_parts_change(at: int, parts: int) -> None:
    of = part_of(np.arange(at), at, parts)
    for k, (first, last) in enumerate(bounds(at, parts)):
        assert np.flatnonzero(of == k).tolist() == list(range(first, last))


def test_json_has_numbers_and_the_sentence() -> None:
    sent = json.loads(json.dumps(RECORDED.as_dict(), allow_nan=False))
    assert sent["sentence"] == RECORDED.sentence
    assert (sent["rank"], sent["measured"], sent["weak"]) == (0.41, True, [[0, 12]])
    assert sent["tenths"][9]["rank"] == 0.95
    assert sent["first_order"]["trainings"] == 24
    assert json.loads(json.dumps(CHAOTIC.as_dict()))["by_third"] == [0.1, 0.6, 0.85]
