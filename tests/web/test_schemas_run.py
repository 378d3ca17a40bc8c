"""The shapes that show a run say the sign in words, and cannot be changed."""

import pytest
from pydantic import ValidationError

from backstory.web import schemas as shapes
from backstory.web import schemas_run as shapes_run


def test_the_sign_is_said_in_words() -> None:
    for shape in (shapes.Timeline, shapes.Life, shapes.Sources, shapes.Harmful, shapes.Answer, shapes.Overview):
        said = shape.model_fields["sign"].default
        assert "helped, without it the loss would be higher" in said, shape.__name__
        assert "hurt, without it the loss would be lower" in said, shape.__name__


def test_a_shape_cannot_be_changed() -> None:
    found = shapes_run.QuerySet(name="a", count=1)
    with pytest.raises(ValidationError):
        found.count = 2


def test_every_shape_has_one_name() -> None:
    here = {
        name
        for name, value in vars(shapes_run).items()
        if isinstance(value, type) and value.__module__ == shapes_run.__name__
    }
    assert here <= set(shapes.__all__), here - set(shapes.__all__)
