"""The shapes describe: frozen, with known fields and finite numbers only, and every result carries its sign and caveats."""

import pytest
from pydantic import ValidationError

from backstory.web import schemas


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        schemas.Neighbour(sample="a", similarity=value)


def test_an_unknown_field_is_refused_and_nothing_can_be_changed() -> None:
    with pytest.raises(ValidationError):
        schemas.QuerySet.model_validate({"name": "a", "count": 1, "path": "/etc/passwd"})
    queries = schemas.QuerySet(name="a", count=1)
    with pytest.raises(ValidationError):
        queries.count = 2


def test_every_result_has_what_every_result_has() -> None:
    for name in (
        "Timeline",
        "Evolution",
        "Overwriting",
        "Sources",
        "Harmful",
        "QueryResult",
        "Occurrences",
        "Neighbours",
    ):
        assert issubclass(getattr(schemas, name), schemas.Result), name
