"""Packages that may be missing."""

import logging
import sys

import pytest

from backstory.baselines.extras import extra, quiet, subclass
from backstory.errors import UnsupportedError


def test_a_missing_package_says_how_to_get_it() -> None:
    with pytest.raises(UnsupportedError, match=r"pip install 'backstory\[baselines\]'"):
        extra("no_such_package", "no-such-package")
    assert extra("json", "json").dumps([]) == "[]"


def test_quiet_gives_the_root_logger_back(capfd: pytest.CaptureFixture[str]) -> None:
    before, level = list(logging.getLogger().handlers), logging.getLogger().level
    with quiet():
        logging.getLogger().addHandler(logging.StreamHandler())
        logging.getLogger().setLevel(1)
        sys.stderr.write("a progress bar")
    assert logging.getLogger().handlers == before
    assert logging.getLogger().level == level
    assert capfd.readouterr().err == ""


def test_a_subclass_has_its_members() -> None:
    assert subclass(dict, hello=lambda self: len(self))(a=1).hello() == 1
