"""Sentences follow the sign and the time of the numbers; words that two texts share."""

import shlex
from pathlib import Path

import pytest

from backstory.results.words import (
    command_on,
    common_words,
    describe_change,
    describe_signs,
    late_from,
    mark_words,
    name_label,
    name_method,
)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.04, 0.02, 0.01], "Its help shrank: later samples overwrote its effect"),
        ([0.01, 0.02, 0.04], "Its help grew"),
        ([-0.04, -0.02, -0.01], "Its harm shrank: later samples made up for it"),
        ([None, -0.01, -0.04], "Its harm grew"),
        ([0.01, -0.01], "Its sign flipped: at first it helped, in the end it hurt"),
        ([0.01, 0.0101], "Its influence hardly changed: it helped"),
        ([None, None, -0.03], "just before the last checkpoint, where it hurt"),
        ([0.0], "It had no influence. Only one checkpoint is stored"),
        ([None, None], "not used before any of these checkpoints"),
    ],
)
def test_how_an_influence_went(values: list[float | None], words: str) -> None:
    assert words in describe_change(values)


def test_uses_are_counted_by_sign() -> None:
    assert describe_signs([0.1, -0.1, 0.2]) == "2 of 3 helped, 1 hurt."
    assert describe_signs([-0.1]) == "It hurt."


def test_the_last_tenth_of_training() -> None:
    assert [late_from(at) for at in (120, 100, 5, 1)] == [108, 90, 4, 0]


def test_labels_that_are_numbers_have_their_word() -> None:
    assert (name_label("2"), name_label("law 0"), name_label("2", "source")) == ("label 2", "law 0", "2")


def test_methods_have_names_that_people_read() -> None:
    assert [name_method(x) for x in ("adjoint", "segments", "trak")] == ["reverse sweep", "embedded segments", "trak"]


def test_words_are_common_whatever_their_case_and_signs_around_them() -> None:
    text, query = "The Tank, a heavy tank!", "Heavy tanks and one TANK."
    assert common_words(text, query) == {"tank", "heavy"}
    assert [p.text for p in mark_words(text, {"tank", "heavy"}) if p.common] == ["Tank", "heavy", "tank"]


def test_short_words_are_not_common() -> None:
    assert common_words("the cat sat", "the cat sat") == set()
    assert common_words("the cat sat", "the cat", shortest=3) == {"the", "cat"}


def test_pieces_are_the_text() -> None:
    text, query = " größe, Größe\n(straße) – 12345 ", "GRÖSSE STRASSE 12345"
    pieces = mark_words(text, common_words(text, query))
    assert "".join(p.text for p in pieces) == text
    assert [p.text for p in pieces if p.common] == ["größe", "Größe", "straße", "12345"]
    assert mark_words("", {"x"}) == []
    assert not any(p.common for p in mark_words("nothing here", set()))


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        ("runs/a", "runs/a"),
        ("/data/my run", "/data/my run"),
        ("{here}/runs/it's", "runs/it's"),
        ("{here}", "."),
        ("{here}-2/a", "{here}-2/a"),
        ("-run", "./-run"),
        ("../a", "../a"),
    ],
)
def test_a_command_is_what_a_shell_reads(run: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = command_on(run.format(here=tmp_path), "exact", "--queries", "two words; $x")
    assert shlex.split(made) == ["backstory", "exact", shown.format(here=tmp_path), "--queries", "two words; $x"]
    assert command_on("runs/a", "exact", "--queries", "test:4") == "backstory exact runs/a --queries test:4"
