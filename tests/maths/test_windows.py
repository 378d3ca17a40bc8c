"""Windows of a run, counted one after the other, and the steps of each that give rows."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstory.maths.windows import Grid

grids = st.builds(
    Grid, first=st.integers(1, 40), growing=st.booleans(), seen=st.integers(1, 90), rank=st.integers(1, 600)
)


def laid(first: int, growing: bool, until: int) -> list[tuple[int, int]]:
    """Windows laid one after the other until step `until`: twelve of a length, and then twice as long ones."""
    out, lo, size = list[tuple[int, int]](), 0, first
    while lo < until:
        for _ in range(12):
            out.append((lo, lo + size))
            lo += size
        size *= 2 if growing else 1
    return out


@given(grids)
def test_windows_lie_side_by_side_and_double_after_twelve(grid: Grid) -> None:
    for lo, hi in laid(grid.first, grid.growing, 40 * grid.first):
        for step in {lo, (lo + hi) // 2, hi - 1}:
            assert grid.window(step) == (lo, hi), step


def test_every_step_lies_in_one_window() -> None:
    """Written down by hand: twelve of three steps, twelve of six, then of twelve."""
    grid = Grid(3, True, 1, 1)
    sizes = [3] * 12 + [6] * 12 + [12] * 2
    expected = [i for i, size in enumerate(sizes) for _ in range(size)]
    met: dict[tuple[int, int], int] = {}
    assert [met.setdefault(grid.window(t), len(met)) for t in range(len(expected))] == expected
    assert all(a[1] == b[0] for a, b in pairwise(met))


def test_windows_of_a_run_of_known_length_stay_as_they_are() -> None:
    assert {hi - lo for lo, hi in (Grid(7, False, 2, 5).window(t) for t in range(2000))} == {7}


@given(grids, st.integers(0, 30))
def test_as_many_steps_are_seen_as_are_wanted(grid: Grid, k: int) -> None:
    lo, hi = laid(grid.first, grid.growing, 31 * 13 * grid.first)[k]
    seen = [t for t in range(lo, hi) if grid.is_seen(t)]
    assert len(seen) == min(grid.seen, hi - lo)
    assert seen[0] == lo, "a window that has just begun has rows"
    gaps = Counter(b - a for a, b in pairwise([*seen, hi]))
    assert max(gaps) - min(gaps) <= 1, "evenly spread"


@given(grids, st.integers(0, 4000), st.integers(0, 600))
def test_the_windows_of_a_stretch_are_cut_at_its_ends(grid: Grid, lo: int, more: int) -> None:
    hi = lo + more
    spans = grid.windows(lo, hi)
    whole = laid(grid.first, grid.growing, hi)
    assert spans == [(max(a, lo), min(b, hi)) for a, b in whole if a < hi and b > lo and more]
    assert sum(b - a for a, b in spans) == more


@given(grids)
def test_a_config_holds_it_whole(grid: Grid) -> None:
    assert Grid.from_dict({**grid._asdict(), "something": "else"}) == grid


@pytest.mark.parametrize(("steps", "windows"), [(300, 12), (900, 24), (2100, 36), (10_000, 61), (100_000, 100)])
def test_long_runs_have_few_windows(steps: int, windows: int) -> None:
    """Twelve times the doublings of 300 steps, not a share of the steps."""
    assert len(Grid(25, True, 7, 512).windows(0, steps)) == windows
