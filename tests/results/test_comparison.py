"""Rankings compared: places at every checkpoint, and what two queries share."""

from dataclasses import replace

import numpy as np
import torch

from backstory.results import figures
from backstory.results.comparison import Ranking, compare, rank, rankings_of
from backstory.results.influence import Influence

IDS, STEPS = np.array(["a", "b", "c", "d"]), np.array([0, 1, 2, 3])


def influence(*scores: float, at: int = 4, caveats: tuple[str, ...] = ()) -> Influence:
    return Influence(torch.tensor([scores], dtype=torch.float64), IDS, STEPS, "str", "adjoint", at=at, caveats=caveats)


def test_a_ranking_has_both_ends() -> None:
    assert rank(influence(3.0, 1.0, -1.0, -2.0), 2) == Ranking(4, ("a", "b"), ("d", "c"))
    both = replace(influence(3.0, 1.0, -1.0, -2.0), scores=torch.tensor([[3.0, 1, -1, -2], [-9, 1, -1, -2]]))
    assert rank(both, 1) == Ranking(4, ("b",), ("a",))  # of the mean


def test_two_values_of_different_origin_are_told_apart() -> None:
    left, right = influence(3.0, 1.0, -1.0, -2.0), influence(1.0, 3.0, -2.0, -1.0)
    assert compare(left, right).origin == "From the recording, by reverse sweep."
    assert compare(left, replace(right, method="exact unrolling")).origin == "Partly exact, partly from the recording."


def test_places_are_those_of_the_rankings_at_every_checkpoint() -> None:
    each = [
        influence(3.0, 1.0, -1.0, -2.0, at=4, caveats=("x",)),
        influence(1.0, 3.0, -2.0, -1.0, at=8, caveats=("y",)),
    ]
    result = rankings_of(each, 8, top=2)
    assert result.as_dict()["rankings"] == [
        {"at": 4, "hits": ["a", "b"], "harmful": ["d", "c"]},
        {"at": 8, "hits": ["b", "a"], "harmful": ["c", "d"]},
    ]
    assert (result.at, result.caveats) == (8, ("y",))
    drawn = result.drawings()
    assert list(drawn) == ["places_hits", "places_harmful"]
    lines = {line["name"]: line for line in drawn["places_hits"]["data"]}
    assert {name: line["y"] for name, line in lines.items()} == {"b": [2, 1], "a": [1, 2]}
    assert {line["line"]["color"] for line in drawn["places_harmful"]["data"]} == {figures.HURT}
    assert result.to_pandas().to_dict("list") == {
        "checkpoint": [4] * 4 + [8] * 4,
        "side": ["hits", "hits", "harmful", "harmful"] * 2,
        "place": [1, 2] * 4,
        "sample": ["a", "b", "d", "c", "b", "a", "c", "d"],
    }


def test_two_queries_share_what_is_at_the_same_end_of_both() -> None:
    one, two = influence(3.0, 1.0, -1.0, -2.0, caveats=("x", "y")), influence(-3.0, 2.0, 1.0, -2.0, caveats=("y", "z"))
    assert compare(one, two, top=2).as_dict()["both"] == ["b", "d"]
    assert compare(one, two, top=1).both == []
    result = compare(one, two)
    assert result.caveats == ("x", "y", "z")
    (drawn,) = result.drawings().values()
    assert [line["name"] for line in drawn["data"]] == ["first query", "second query"]
    table = result.to_pandas()
    assert table["first"].tolist() == [3.0, 1.0, -1.0, -2.0]
    assert table["second"].tolist() == [-3.0, 2.0, 1.0, -2.0]
