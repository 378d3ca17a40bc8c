"""Which steps go together, by their rows and coefficients."""

import pytest
import torch
from tests.maths.examples import heavy, joined, plain

from backstory.maths.chunks import chunk_rows, groups, is_large
from backstory.maths.steps import Coefficients, Step


def step(rows: int, k: Coefficients | None = None, p: int = 8, curvature: int | None = None) -> Step:
    V = None if curvature is None else torch.zeros(curvature, p)
    return Step(torch.zeros(rows, p), torch.ones(rows), k or plain(0.1), V=V)


def sizes(steps: list[Step]) -> list[list[int]]:
    return [[len(s.w) for s in group] for group in groups(steps)]


@pytest.mark.parametrize(
    "chunks",
    [[[255, 1]], [[255], [1, 1]], [[3], [257], [2]], [[102, 102], [102, 102], [1, 255], [256], [1]]],
    ids=["exactly full", "one row more", "a step larger than a chunk", "many"],
)
def test_plain_steps_fill_chunks_from_the_end(chunks: list[list[int]]) -> None:
    assert sizes([step(rows) for chunk in chunks for rows in chunk]) == chunks


@pytest.mark.parametrize(("p", "rows"), [(8, 256), (1024, 256), (2000, 500), (4096, 1024), (50_000, 1024)])
def test_a_chunk_has_a_quarter_of_p_within_bounds(p: int, rows: int) -> None:
    assert chunk_rows(p) == rows
    assert sizes([step(1, p=p), step(rows - 1, p=p)]) == [[1, rows - 1]]
    assert sizes([step(1, p=p), step(rows, p=p)]) == [[1], [rows]]


@pytest.mark.parametrize(("p", "rows"), [(8, 64), (2048, 64), (3200, 100), (4096, 128), (50_000, 128)])
def test_with_momentum_large_steps_go_alone(p: int, rows: int) -> None:
    most, more = step(rows, heavy(0.1), p), step(rows + 1, heavy(0.1), p)
    assert not is_large(most)
    assert is_large(more)
    assert not is_large(step(rows + 1, p=p))
    assert sizes([most, most, more, most]) == [[rows, rows], [rows + 1], [rows]]


def test_curvature_rows_count_beside_gradient_rows() -> None:
    assert sizes([step(1, curvature=127), step(1, curvature=127)]) == [[1, 1]]
    assert sizes([step(1, curvature=127), step(1, curvature=128)]) == [[1], [1]]


def test_steps_of_unequal_groups_of_parameters_go_alone() -> None:
    apart = joined(plain(0.1), plain(0.2), (4, 4))
    assert sizes([step(1), step(2), step(3, apart), step(4, apart), step(5), step(6)]) == [[1, 2], [3], [4], [5, 6]]


def test_orthogonal_rows_go_together_where_they_are_the_same() -> None:
    first, second = (step(300, curvature=2)._replace(orthogonal=True) for _ in range(2))
    assert sizes([step(1), first, first, second, second, second, step(2)]) == [[1], [300] * 2, [300] * 3, [2]]
