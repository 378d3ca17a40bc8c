"""Effects of groups as a result: what is below rounding, the matrix of combinations, tables, figures, plain values."""

import json
from dataclasses import replace

import torch

from backstory.results import GroupEffects
from backstory.results.effects import RETRAINED

VALUES = torch.tensor(
    [[[0.0, 0.0], [0.4, 0.2]], [[0.5, 0.1], [-0.3, -0.1]], [[1e-9, 1e-9], [2e-9, -1e-9]]], dtype=torch.float64
)
TWINS = torch.tensor([[[1e-8, 0.0], [-3e-8, 2e-8]], [[-2e-8, 0.0], [1e-8, 0.0]]], dtype=torch.float64)
RESULT = GroupEffects(
    kind=RETRAINED, by=("source", "parts:2"), groups=("web, steps 4–7", "web, steps 0–3", "wiki, steps 0–3"),
    keys=(("web", "steps 4–7"), ("web", "steps 0–3"), ("wiki", "steps 0–3")), samples=(3, 3, 2), occurrences=(4, 3, 2),
    first_steps=(4, 0, 1), checkpoints=(4, 8), queries=("a", "b"), losses=torch.ones(2, 2), values=VALUES, twins=TWINS, at=8,
)  # fmt: skip


def test_what_is_not_larger_than_the_twins_show_is_not_clear() -> None:
    assert RESULT.floor is not None
    assert RESULT.floor.tolist() == [[2e-8, 0.0], [3e-8, 2e-8]]
    assert RESULT.clear[:, 1].tolist() == [[True, True], [True, True], [False, False]]
    assert RESULT.mean_clear[:, 1].tolist() == [True, True, False]
    alone = replace(RESULT, twins=TWINS[:0])
    assert alone.floor is None
    assert bool(alone.clear[2].all())


def test_sentences_name_the_largest_and_what_is_rounding() -> None:
    assert RESULT.words == (
        "Leaving out web, steps 4–7 raises the loss most: +0.300.",
        "Leaving out web, steps 0–3 lowers the loss most: -0.200.",
        "wiki, steps 0–3: below rounding, the same as no change.",
    )
    assert RESULT.sign.startswith("positive: the group helped, removing it would raise the query's loss")


def test_combinations_of_two_are_a_matrix() -> None:
    assert RESULT.grid is not None
    down, across, z, sure = RESULT.grid
    assert (down, across) == (["web", "wiki"], ["steps 4–7", "steps 0–3"])
    torch.testing.assert_close(torch.tensor(z), torch.tensor([[0.3, -0.2], [0.0, 5e-10]]))
    assert sure == [[True, True], [False, False]]
    assert replace(RESULT, by=("source",)).grid is None


def test_table_figures_and_plain_values() -> None:
    table = RESULT.table()
    assert len(table["effect"]) == 3 * 2 * 2
    row = {name: column[6] for name, column in table.items()}
    assert row == {
        "group": "web, steps 0–3", "checkpoint": 8, "query": "a", "effect": -0.3, "floor": 3e-8, "samples": 3,
        "occurrences": 3, "first_step": 0, "clear": True,
    }  # fmt: skip
    assert list(RESULT.drawings()) == ["effects", "matrix", "checkpoints"]
    drawn = replace(
        RESULT, by=("group",), queries=("a",), values=VALUES[:, 1:, :1], checkpoints=(8,), twins=TWINS[:, 1:, :1]
    )
    assert list(drawn.drawings()) == ["effects"]
    sent = json.loads(json.dumps(RESULT.as_dict(), allow_nan=False))
    assert sent["values"][1][1] == [-0.3, -0.1]
    assert sent["floor"][1] == [3e-8, 2e-8]
    assert sent["clear"][2][1] == [False, False]
