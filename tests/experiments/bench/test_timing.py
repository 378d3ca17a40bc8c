"""Candidates take turns; sums and medians are of wall and CPU time each."""

import pytest
from experiments.bench.timing import Times, interleave, median, peak_bytes, timed, total, turns

from experiments.bench import timing


def test_candidates_take_turns_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    times = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
    assert set(times) == {"a", "b"}


def test_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([Times(100, 100), Times(1, 2), Times(3, 4), Times(5, 6)])
    monkeypatch.setattr(timing, "timed", lambda work: next(clock))
    assert interleave({"a": lambda: None}, 3) == {"a": Times(3, 4)}


def test_turns_keep_every_time() -> None:
    order: list[str] = []
    actual = turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 3
    assert [len(times) for times in actual.values()] == [3, 3]


def test_medians_and_sums_of_both_clocks() -> None:
    actual = [Times(1, 10), Times(5, 20), Times(2, 60)]
    assert median(actual) == (2, 20)
    assert total(actual) == (8, 90)


def test_cpu_time_is_counted() -> None:
    assert timed(lambda: sum(range(200_000))).cpu > 0


def test_memory_is_at_least_that_of_an_interpreter() -> None:
    assert peak_bytes() > 10 << 20
