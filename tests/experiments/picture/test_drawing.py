"""The picture: small images stand at their steps and do not overlap, words say what up and down mean."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from experiments.picture.drawing import AXIS, GAP, LEFT, RIGHT, THUMB, Example, Story, _spread, draw

STORY = Story(
    image=b"query", label="7", predicted="9", probability=0.614, towards=[Example(b"nine", "9", 30), Example(b"other", "9", 10)],
    away=[Example(b"seven", "7", 0)], up=np.linspace(0, 1, 40), down=-np.linspace(0.5, 0, 40), epochs=2, without_towards=0.51, without_away=0.7,
)  # fmt: skip


def test_the_picture_is_one_file_with_words_and_images() -> None:
    text = draw(STORY)
    root = ElementTree.fromstring(text)
    words = " ".join(root.itertext())
    for expected in (
        "take this 7 for a 9?",
        "predicted: 9 (61%)",
        "Towards 9: the 2 strongest training images.",
        "Away from 9: the 1 strongest training images.",
        "the summed effect of all images",
        "of its batch on this prediction.",
        "from 61% to 51%",
        "from 61% to 70%",
    ):
        assert expected in words
    images = root.findall("{*}image")
    assert len(images) == 4
    assert all(image.attrib["href"].startswith("data:image/png;base64,") for image in images)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", text)


def test_bars_and_marks_stand_at_their_step() -> None:
    root = ElementTree.fromstring(draw(STORY))
    marks = sorted(float(mark.attrib["cx"]) for mark in root.findall("{*}circle"))
    width = (RIGHT - LEFT) / 40
    assert marks == pytest.approx([LEFT + width * (step + 0.5) for step in (0, 10, 30)], abs=0.06)
    up, down = (path.attrib["d"] for path in root.findall("{*}path") if f" {AXIS}v" in path.attrib["d"])
    assert up.count("M") == down.count("M") == 39  # a step without influence has no bar
    assert float(up.rpartition("v")[2]) == -2 * float(down.split("v")[1].split("M")[0])


@pytest.mark.parametrize("places", [[300.0], [LEFT, LEFT, LEFT], [RIGHT, RIGHT], [300.0, 310.0, 600.0, 605.0, 610.0]])
def test_small_images_do_not_overlap(places: list[float]) -> None:
    actual = _spread(places)
    assert np.diff(actual).min(initial=GAP) >= GAP - 1e-9
    assert min(actual) >= LEFT + THUMB / 2
    assert max(actual) <= RIGHT - THUMB / 2


def test_what_is_far_apart_stays_where_it_is() -> None:
    assert _spread([300.0, 400.0, 500.0]) == [300.0, 400.0, 500.0]
