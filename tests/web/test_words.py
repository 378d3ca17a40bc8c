"""Captions follow the sign and the time of the numbers that they stand under."""

import pytest
from tests.web import examples

from backstory.web import schemas as shapes
from backstory.web import words


def life(values: list[float | None]) -> shapes.Life:
    found = [shapes.AtCheckpoint(at=40 * (k + 1), influence=x) for k, x in enumerate(values)]
    return examples.life(evolution=found)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.04, 0.02, 0.01], "Its help became smaller: later samples took its lesson over"),
        ([0.01, 0.02, 0.04], "Its help grew"),
        ([-0.04, -0.02, -0.01], "Its harm became smaller: later samples made up for it"),
        ([None, -0.01, -0.04], "Its harm grew"),
        ([0.01, -0.01], "Its sign turned: at first it helped, in the end it hurt"),
        ([0.01, 0.0101], "It hardly changed: it helped"),
        ([None, None, -0.03], "one value: it hurt"),
        ([None, None], "used at none of them"),
    ],
)
def test_how_a_life_went(values: list[float | None], said: str) -> None:
    assert said in words.evolution(life(values))


def test_a_late_harm_is_not_called_a_lesson() -> None:
    used = [shapes.Occurrence(step=118, influence=-0.02, norm=1.0)]
    found = words.occurrences(examples.life(occurrences=used))
    assert "It hurt." in found
    assert "step 118 came in the last tenth of training" in found
    assert "lesson" not in found


def test_early_uses_are_counted_by_sign() -> None:
    found = words.occurrences(examples.life())
    assert "2 of 3 helped, 1 hurt." in found
    assert "last tenth" not in found


def test_how_many_of_the_harmful_came_late() -> None:
    found = words.lateness(examples.harmful(late=3, late_from=108))
    assert "3 of these 4 samples were last used in the last tenth of training (from step 108)" in found
    assert words.lateness(examples.harmful(items=[])) == ""
    assert "This sample was not last used" in words.lateness(examples.harmful(items=examples.harmful().items[:1]))


def test_labels_that_are_numbers_have_their_word() -> None:
    said = words.labelled
    assert (said("2"), said("law 0"), said("2", "source")) == ("label 2", "law 0", "2")
