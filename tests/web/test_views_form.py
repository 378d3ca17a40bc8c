"""The form says what can be asked, and lists the model's mistakes alone where it can tell them."""

import pytest
from tests.web.recipes import TOLD

from backstory.web import views_form
from backstory.web.errors import Refused
from backstory.web.state import Opened


def test_the_form_lists_mistakes_alone(opened: Opened) -> None:
    telling = Opened(opened.run.path, TOLD)
    whole, wrong = views_form.form(telling), views_form.form(telling, mistakes=True)
    assert [[x.mistake for x in s.items] for s in whole.query_sets] == [[False, False], [True, True]]
    assert [(s.fits, len(s.items), s.count) for s in wrong.query_sets] == [(0, 0, 2), (2, 2, 2)]
    assert [x.says for x in wrong.query_sets[1].items] == ["r", "b"]
    assert whole.can_tell
    assert not views_form.form(opened).can_tell
    with pytest.raises(Refused, match="cannot tell the model's mistakes") as error:
        views_form.form(opened, mistakes=True)
    assert "page.predict" in error.value.hint


def test_the_form_shows_the_stored_queries(opened: Opened) -> None:
    found = views_form.form(opened)
    assert [(s.name, s.count) for s in found.query_sets] == [("law", 2), ("poems", 2)]
    assert [(q.index, q.text, q.path) for q in found.query_sets[0].items] == [
        (0, "this court sa", "/queries/law/0"),
        (1, "that judge he", "/queries/law/1"),
    ]
