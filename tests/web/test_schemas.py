"""The shapes describe: frozen, with known fields and finite numbers only, and results by the types of what they show."""

import math
from typing import Any, cast

import pytest
from pydantic import ValidationError
from tests.web import examples

from backstory import insight
from backstory.insight.sources import Value
from backstory.web import schemas


def test_an_unknown_field_is_refused_and_nothing_can_be_changed() -> None:
    with pytest.raises(ValidationError):
        schemas.QuerySet.model_validate({"name": "a", "count": 1, "path": "/etc/passwd"})
    queries = schemas.QuerySet(name="a", count=1)
    with pytest.raises(ValidationError):
        queries.count = 2


RESULTS = ("timeline", "evolution", "overwriting", "sources", "harmful", "result", "compare")


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_what_every_result_has(name: str) -> None:
    shape, data = getattr(schemas, examples.SHAPES[name]), examples.PAGES[name]().data
    for key in schemas.COMMON:
        with pytest.raises(ValidationError, match=key):
            shape.model_validate({k: v for k, v in data.items() if k != key})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "much"])
@pytest.mark.parametrize("place", ["influence", ("phases", "basin"), ("phases", "warm_up", "p")])
def test_a_number_that_is_none_is_refused(value: Any, place: str | tuple[str, ...]) -> None:
    data = examples.timeline().data
    inner = data
    for key in place[:-1] if isinstance(place, tuple) else ():
        inner = cast(dict[str, Any], inner[key])
    if isinstance(place, tuple):
        inner[place[-1]] = value
    else:
        inner[place] = [value]
    with pytest.raises(ValidationError):
        schemas.Timeline.model_validate(data)


def test_a_shape_follows_the_types_of_its_result() -> None:
    document = schemas.Sources.model_json_schema()
    value = document["$defs"]["Value"]["properties"]
    assert list(value) == Value.columns()
    assert value["samples"]["type"] == "integer"
    assert value["low"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert value["words"]["description"].startswith("Helps or hurts")
    assert document["properties"]["cells"]["items"]["items"] == {"$ref": "#/$defs/Value"}
    assert document["properties"]["interval"]["type"] == "string"
    assert set(document["required"]) == {*insight.Sources.shown, *schemas.COMMON, "paths"}
