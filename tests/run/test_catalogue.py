"""Samples are found by id, text, source, label and step, and shown with what the run holds."""

import pytest
from tests.web.recipes import SOURCES, STEPS, TEXTS, recipe, recorded

import backstory
from backstory.run.catalogue import Catalogue
from backstory.run.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return backstory.open(recorded(tmp_path_factory.mktemp("catalogue") / "text", embed=False))


@pytest.fixture(scope="module")
def catalogue(run: Run) -> Catalogue:
    return Catalogue(run)


def used(name: str) -> list[int]:
    return [t for t, (ids, _) in enumerate(recipe().batches) for x in ids if x == name]


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_sample_is_shown_with_its_steps(catalogue: Catalogue, name: str) -> None:
    sample = catalogue.sample(name)
    assert (sample["id"], sample["source"], sample["steps"]) == (name, SOURCES[name], used(name))
    assert sample["has_image"] == name.startswith("law")
    assert name in catalogue
    assert catalogue.recorded_id(name) == name


def test_searching(catalogue: Catalogue) -> None:
    assert catalogue.find() == sorted(TEXTS)
    assert catalogue.find(text="COURT") == ["law/1/0", "law/2/0"]
    assert catalogue.find(text="poems/1") == ["poems/1/0", "poems/1/12"]  # in the id
    assert catalogue.find(text="%") == ["a'b\"c?d#e&f=%41"]  # letters, not a pattern
    assert catalogue.find(source="odd") == sorted(n for n, s in SOURCES.items() if s == "odd")
    assert catalogue.find(source="law", text="judge") == ["law/1/12"]
    assert catalogue.find(label="label 1") == sorted(n for n in TEXTS if len(n) % 2)
    assert catalogue.find(source="nothing") == []
    assert catalogue.find(first_step=0, last_step=0) == sorted(str(x) for x in recipe().batches[0][0])
    assert catalogue.find(first_step=STEPS) == []


def test_sorting(catalogue: Catalogue) -> None:
    everyone = catalogue.find()
    firsts = [used(name)[0] for name in catalogue.sort(everyone, "step")]
    assert firsts == sorted(firsts)
    values = {name: (7 * k) % 5 - 2.0 for k, name in enumerate(everyone)}
    ranked = catalogue.sort(everyone, "value", values)
    assert ranked == sorted(everyone, key=lambda name: (values[name], name))
    assert catalogue.sort(everyone[::-1], "id") == everyone


def test_images_are_given_only_where_they_are(run: Run, catalogue: Catalogue) -> None:
    assert catalogue.image(run, "law/1/0") == b"\x89PNG\r\n\x1a\nlaw/1/0"
    assert catalogue.image(run, "tags") is None


def test_what_can_be_chosen_from(catalogue: Catalogue) -> None:
    assert catalogue.values("source") == ["law", "odd", "poems"]
    assert catalogue.has == {"text": True, "image": True, "source": True, "label": True}
    assert (len(catalogue), catalogue.n_occurrences) == (9, 72)
