"""Which occurrence is in which group."""

import numpy as np
import pytest
from tests.insight.runs import SOURCES, STEPS, Small, small
from tests.support.loops import ids_of

from backstory.errors import UsageError
from backstory.run.groups import grouped, places_of

IDS = [i for t in range(STEPS) for i in ids_of(t)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return small("sgd", tmp_path_factory.mktemp("groups") / "run")


def test_thirds_are_samples_by_their_first_use(plain: Small) -> None:
    names, group, *_ = grouped(plain.run, "thirds")
    order = list(dict.fromkeys(IDS))
    assert names == ("early", "middle", "late")
    assert group.tolist() == [order.index(i) // 3 for i in IDS]


def test_steps_are_occurrences_by_when_they_were(plain: Small) -> None:
    assert grouped(plain.run, "steps")[1].tolist() == [t // 4 for t in range(STEPS) for _ in range(3)]


def test_sources_labels_and_names(plain: Small) -> None:
    names, group, *_ = grouped(plain.run, "source")
    assert [names[k] for k in group] == [SOURCES[i % 3] for i in IDS]
    names, group, *_ = grouped(plain.run, "label")
    assert [names[k] for k in group] == [str(i % 2) for i in IDS]
    names, group, *_ = grouped(plain.run, {"a": [1, 2], "b": [5]})
    assert names == ("a", "b", "(others)")
    assert group.tolist() == [0 if i in (1, 2) else 1 if i == 5 else 2 for i in IDS]
    assert grouped(plain.run, {"all": range(9)})[0] == ("all",)


def test_an_epoch_is_the_kth_use_of_each_sample(plain: Small) -> None:
    names, group, *_ = grouped(plain.run, "epoch")
    assert [int(names[k].removeprefix("epoch ")) for k in group] == [IDS[: n + 1].count(i) for n, i in enumerate(IDS)]


def test_parts_are_equal_parts_of_the_steps(plain: Small) -> None:
    names, group, *_ = grouped(plain.run, "parts:5")
    assert names == ("steps 0–1", "steps 2–3", "steps 4–6", "steps 7–8", "steps 9–11")
    assert [names[k] for k in group[::3]] == [names[k] for k in (0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4)]


def test_a_comma_combines(plain: Small) -> None:
    both = grouped(plain.run, "source, parts:2")
    halves = ("steps 0–5", "steps 6–11")
    expected = [(SOURCES[i % 3], halves[t >= 6]) for t in range(STEPS) for i in ids_of(t)]
    assert [both.keys[k] for k in both.of] == expected
    assert both.names == tuple(f"{a}, {b}" for a in sorted(SOURCES) for b in halves)
    assert both.by == ("source", "parts:2")


def test_places_are_positions_inside_the_steps(plain: Small) -> None:
    steps = plain.run.occurrences()[1]
    actual = places_of(steps, np.array([i in (1, 5) for i in IDS]))
    expected = {t: [k for k, i in enumerate(ids_of(t)) if i in (1, 5)] for t in range(STEPS)}
    assert actual == {t: gone for t, gone in expected.items() if gone}


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("colour", "'thirds', 'steps', 'source', 'label', 'epoch', 'parts:K'"),
        ("source,source", "different things"),
        ("parts:0", "into K parts, 1 to 12"),
        ("parts:13", "into K parts, 1 to 12"),
        ({"a": [77]}, "are not in the run"),
        ({"a": [1], "b": [1]}, "two groups"),
        ({}, "at least one sample"),
    ],
)
def test_errors_say_what_to_do(plain: Small, by: str | dict[str, list[int]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        grouped(plain.run, by)


def test_samples_without_a_source_are_a_group_of_their_own(plain: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    content = plain.run.content(range(9))
    monkeypatch.setattr(type(plain.run), "content", lambda self, ids: {k: v for k, v in content.items() if k != "4"})
    names, group, *_ = grouped(plain.run, "source")
    assert {names[k] for k, i in zip(group, IDS, strict=True) if i == 4} == {"(not given)"}
    monkeypatch.setattr(type(plain.run), "content", lambda self, ids: {})
    with pytest.raises(UsageError, match="has no source for its samples"):
        grouped(plain.run, "source")
    assert np.unique(group).tolist() == [0, 1, 2, 3]
