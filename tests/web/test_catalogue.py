"""Samples are found by id, text, source, label and step, and shown with what the run holds."""

from urllib.parse import unquote

import numpy as np
import pytest
from tests.web.recipes import BATCH, SOURCES, STEPS, TEXTS, recipe

from backstory.web.errors import Refused
from backstory.web.state import Opened


def names(opened: Opened, **asked: object) -> list[str]:
    found = opened.catalogue.found(**asked)  # type: ignore[arg-type]
    return [opened.catalogue.ids[j] for j in found]


def used(name: str) -> list[int]:
    return [t for t, (ids, _) in enumerate(recipe().batches) for x in ids if x == name]


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_sample_is_shown_with_its_steps_and_a_quoted_path(opened: Opened, name: str) -> None:
    shown = opened.catalogue.sample(opened.catalogue.number(name))
    assert (shown.id, shown.source, shown.steps) == (name, SOURCES[name], used(name))
    assert unquote(shown.path.removeprefix("/samples/")) == name
    assert set(shown.path.removeprefix("/samples/")) & set("/?#&='\"<> ") == set()
    assert (shown.image is not None) == name.startswith("law")


def test_occurrences_add_up(opened: Opened) -> None:
    rows = np.concatenate([opened.catalogue.rows(j) for j in range(len(opened.catalogue))])
    assert sorted(rows.tolist()) == list(range(STEPS * BATCH))


def test_searching(opened: Opened) -> None:
    assert names(opened) == sorted(TEXTS)
    assert names(opened, text="COURT") == ["law/1/0", "law/2/0"]
    assert names(opened, text="poems/1") == ["poems/1/0", "poems/1/12"]  # in the id
    assert names(opened, text="%") == ["a'b\"c?d#e&f=%41"]  # letters, not a pattern
    assert names(opened, source="odd") == sorted(n for n, s in SOURCES.items() if s == "odd")
    assert names(opened, source="law", text="judge") == ["law/1/12"]
    assert names(opened, label="label 1") == sorted(n for n in TEXTS if len(n) % 2)
    assert names(opened, source="nothing") == []
    first = recipe().batches[0][0]
    assert names(opened, first_step=0, last_step=0) == sorted(str(x) for x in first)
    assert names(opened, first_step=STEPS) == []


def test_sorting(opened: Opened) -> None:
    catalogue = opened.catalogue
    everyone = catalogue.found()
    firsts = [used(catalogue.ids[j])[0] for j in catalogue.sorted(everyone, "step", None)]
    assert firsts == sorted(firsts)
    values = np.random.default_rng(0).standard_normal(len(catalogue))
    assert catalogue.sorted(everyone, "value", values).tolist() == np.argsort(values).tolist()


def test_images_are_given_only_where_they_are(opened: Opened) -> None:
    assert opened.catalogue.image(opened.catalogue.number("law/1/0")) == b"\x89PNG\r\n\x1a\nlaw/1/0"
    with pytest.raises(Refused, match="no image") as error:
        opened.catalogue.image(opened.catalogue.number("tags"))
    assert error.value.code == 404


def test_an_unknown_id_is_refused_and_not_repeated(opened: Opened) -> None:
    with pytest.raises(Refused, match="no sample of this id") as error:
        opened.catalogue.number("../../etc/shadow")
    assert error.value.code == 404
    assert "shadow" not in error.value.message


def test_what_can_be_chosen_from(opened: Opened) -> None:
    assert opened.catalogue.values("source") == ["law", "odd", "poems"]
    assert opened.catalogue.has.model_dump() == {"text": True, "image": True, "source": True, "label": True}
