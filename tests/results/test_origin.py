"""Sentences on where values come from, and on the command and the time that would make them exact."""

import pytest

from backstory.results.origin import (
    BY_REPLAY,
    EXACT,
    IN_PART,
    NEEDS_RECIPE,
    Remedy,
    Sweep,
    describe_mixture,
    describe_origin,
    join_remedies,
)
from backstory.results.words import describe_duration


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ([EXACT], BY_REPLAY),
        ([EXACT, "adjoint"], IN_PART),
        (["adjoint"], "From the recording, by reverse sweep."),
        (["adjoint", "embeddings", "adjoint"], "From the recording, by reverse sweep and stored embeddings."),
        (["TracIn"], ""),
        ([], ""),
    ],
)
def test_where_values_come_from(methods: list[str], words: str) -> None:
    assert describe_origin(methods) == words


def test_a_mixture_is_told_and_nothing_else() -> None:
    (words,) = describe_mixture(["adjoint", EXACT, EXACT], ["a", "b", "c"], "Query sets")
    assert words.startswith("Query sets: b, c exact; a from the recording")
    assert describe_mixture([EXACT, EXACT], ["a", "b"], "Query sets") == ()
    assert describe_mixture(["adjoint"], ["a"], "Query sets") == ()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.01, "1 second"),
        (59.4, "59 seconds"),
        (60, "1 minute"),
        (240, "4 minutes"),
        (5000, "1 hour"),
        (9e3, "2 hours"),
    ],
)
def test_a_time_to_wait(seconds: float, words: str) -> None:
    assert describe_duration(seconds) == words


def test_the_command_and_its_time() -> None:
    one = Remedy((Sweep("runs/a", "test", False, None, 240.0),))
    assert str(one) == "To get exact values: `backstory exact runs/a --queries test` (about 4 minutes)."
    early = Remedy((Sweep("runs/a", "test", True, 12, None),))
    assert str(early) == "To get exact values: `backstory exact runs/a --queries test --each --at 12`."
    unnamed = str(Remedy((Sweep("runs/a", None, False, None, 60.0),)))
    assert "`backstory exact runs/a --queries NAME` (about 1 minute), where NAME is" in unnamed
    assert str(Remedy((Sweep("runs/a", "test", False, None, 1.0),), recipe=False)) == NEEDS_RECIPE.format(
        "backstory exact runs/a --queries test"
    )


def test_several_are_one_sentence_and_their_times_add_up() -> None:
    steps = join_remedies([Remedy((Sweep("runs/a", "test", False, at, 60.0),)) for at in (6, 12, None)] + [None])
    assert str(steps) == (
        "To get exact values: `backstory exact runs/a --queries test --at 6`, and the same with --at 12, --at final "
        "(about 3 minutes)."
    )
    sets = join_remedies([Remedy((Sweep("runs/a", name, True, None, None),)) for name in ("a", "b")])
    assert (
        str(sets) == "To get exact values: `backstory exact runs/a --queries a --each`, and the same with --queries b."
    )
    assert join_remedies([None]) is None
