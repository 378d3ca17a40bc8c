"""Candidates take turns."""

from backstory.benchmarks.timing import interleave


def test_candidates_take_turns_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    times = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
    assert times["a"].wall >= 0
    assert set(times) == {"a", "b"}
