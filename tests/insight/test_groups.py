"""Which occurrence is in which group."""

import numpy as np
import pytest
from tests.insight.runs import SOURCES, STEPS, Small
from tests.support.loops import ids_of

from backstory.errors import UsageError
from backstory.insight.groups import grouped

IDS = [i for t in range(STEPS) for i in ids_of(t)]


def test_thirds_are_samples_by_their_first_use(plain: Small) -> None:
    names, group = grouped(plain.run, "thirds")
    order = list(dict.fromkeys(IDS))
    assert names == ("early", "middle", "late")
    assert group.tolist() == [order.index(i) // 3 for i in IDS]


def test_steps_are_occurrences_by_when_they_were(plain: Small) -> None:
    assert grouped(plain.run, "steps")[1].tolist() == [t // 4 for t in range(STEPS) for _ in range(3)]


def test_sources_labels_and_names(plain: Small) -> None:
    names, group = grouped(plain.run, "source")
    assert [names[k] for k in group] == [SOURCES[i % 3] for i in IDS]
    names, group = grouped(plain.run, "label")
    assert [names[k] for k in group] == [str(i % 2) for i in IDS]
    names, group = grouped(plain.run, {"a": [1, 2], "b": [5]})
    assert names == ("a", "b", "(others)")
    assert group.tolist() == [0 if i in (1, 2) else 1 if i == 5 else 2 for i in IDS]
    assert grouped(plain.run, {"all": range(9)})[0] == ("all",)


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("colour", "'thirds', 'steps', 'source', 'label'"),
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
    names, group = grouped(plain.run, "source")
    assert {names[k] for k, i in zip(group, IDS, strict=True) if i == 4} == {"(not given)"}
    monkeypatch.setattr(type(plain.run), "content", lambda self, ids: {})
    with pytest.raises(UsageError, match="has no source for its samples"):
        grouped(plain.run, "source")
    assert np.unique(group).tolist() == [0, 1, 2, 3]
