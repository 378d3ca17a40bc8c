"""One word for how far to trust answers, with the reason that weighs most."""

from typing import Any

import pytest

from backstory.web.trust import EARLY, trust, verdict

SOUND: dict[str, Any] = {
    "steps": 252, "clipped": 0.0, "coverage": 1.0, "optimizer": "SGD", "modelled": "exactly", "curvature": "exact:10",
    "projection": "learned", "kept": 0.9, "largest_growth": 0.8, "largest_growth_step": 248, "expanding_steps": [], "drift": 0.0,
    "words": ["SGD's steps are modelled exactly."],
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "word", "reason"),
    [
        ({}, "good", "SGD's steps are modelled exactly, and the projection retains 90% of the gradients' squared norm."),
        ({"kept": 0.13}, "weak", "The projection retains 13% of the gradients' squared norm."),
        ({"kept": 0.6}, "fair", "keeps 60%"),
        ({"kept": 0.13, "projection": "random"}, "good", "SGD's steps are modelled exactly."),
        ({"coverage": 0.95}, "fair", "95.0% of the squared gradient norm"),
        ({"coverage": 0.4}, "weak", "40.0%"),
        ({"modelled": "as plain SGD steps, the paper's proxy, without momentum 0.9"}, "weak",
         "SGD's steps were treated as plain SGD steps, the paper's proxy, without momentum 0.9."),
        ({"curvature": "empirical/6"}, "fair", "empirical Fisher"),
        ({"expanding_steps": [1, 216]}, "fair", "2 of 252 steps are above"),
        ({"drift": 0.2}, "fair", "20%"),
        ({"curvature": "empirical", "kept": 0.2}, "weak", "keeps 20%"),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_heaviest_reason(more: dict[str, Any], word: str, reason: str) -> None:
    found = verdict({**SOUND, **more})
    assert found.verdict == word
    assert reason in found.words


def test_without_a_report_nothing_is_claimed() -> None:
    found = trust({})
    assert (found.verdict, found.words, found.kept, found.early) == ("not known", [], None, EARLY)
    assert "no report" in found.reason


def test_the_numbers_of_the_report_are_kept() -> None:
    found = trust({**SOUND, "expanding_steps": [3], "drift": float("nan")})
    assert (found.kept, found.expanding_steps, found.drift) == (0.9, 1, None)
    assert found.words == SOUND["words"]
