"""Fresh processes of one thread."""

import os

import pytest

from backstory.run.processes import spread


@pytest.mark.slow
def test_work_is_done_elsewhere_with_one_thread() -> None:
    before = dict(os.environ)
    found = dict(spread(os.getenv, [("OMP_NUM_THREADS",), ("MKL_NUM_THREADS",)], 2))
    assert found == {0: "1", 1: "1"}
    assert dict(os.environ) == before
