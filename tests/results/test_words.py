"""Words that two texts share."""

from backstory.insight.words import common_words, marked


def test_words_are_common_whatever_their_case_and_signs_around_them() -> None:
    text, query = "The Tank, a heavy tank!", "Heavy tanks and one TANK."
    assert common_words(text, query) == {"tank", "heavy"}
    assert [p.text for p in marked(text, query) if p.common] == ["Tank", "heavy", "tank"]


def test_short_words_are_not_marked() -> None:
    assert common_words("the cat sat", "the cat sat") == set()
    assert common_words("the cat sat", "the cat", shortest=3) == {"the", "cat"}


def test_pieces_are_the_text() -> None:
    text = " größe, Größe\n(straße) – 12345 "
    pieces = marked(text, "GRÖSSE STRASSE 12345")
    assert "".join(p.text for p in pieces) == text
    assert [p.text for p in pieces if p.common] == ["größe", "Größe", "straße", "12345"]
    assert marked("", "x") == []
    assert [p.common for p in marked("nothing here", "")] == [False]
