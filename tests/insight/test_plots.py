"""Figures and pages: offline, escaped, and a plain word where the package is missing."""

import sys

import pytest
from backstory.insight.plots import figure, frame, page

from backstory.errors import UnsupportedError


def test_a_page_needs_no_network() -> None:
    drawn = figure(("one", "two"), "x", ("a", "b"))
    drawn.add_scatter(y=[1, 2], row=2, col=1)
    text = page("a < b", "words & more", drawn)
    assert "a &lt; b" in text
    assert "words &amp; more" in text
    assert '<script src="http' not in text
    assert len(text) > 1_000_000, "Plotly's script is not in the page"


@pytest.mark.parametrize(
    ("package", "make"), [("plotly", lambda: figure(("t",), "x", ("y",))), ("pandas", lambda: frame({}))]
)
def test_a_missing_package_is_named_with_its_remedy(
    package: str, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    assert callable(make)
    with pytest.raises(UnsupportedError, match=r"pip install 'backstory\["):
        make()
