"""The Hessian-vector form of SGD-influence."""

from functools import partial
from pathlib import Path

import pytest
from experiments.small.sgd_influence import sgd_influence
from tests.support import examples
from tests.support.oracles import assert_close, assert_same

from backstory.errors import UnsupportedError
from backstory.exact.reverse import reverse


@pytest.mark.parametrize("kind", ["sgd", "decay"])
def test_equals_exact_unrolling_and_differences(kind: str, tmp_path: Path) -> None:
    fresh = partial(examples.make, kind, schedule=True, dropout=0.2)
    found = sgd_influence(fresh, "q", cache=tmp_path)
    assert found.method == "SGD-influence"
    assert_same(found.scores, reverse(fresh, "q", cache=tmp_path).scores, 3 * examples.TERMS, size=1.0)
    assert_close(found.scores, examples.differences(fresh), rtol=1e-6)
    assert_same(found.scores, sgd_influence(fresh, "q", cache=tmp_path).scores, 3 * examples.TERMS, size=1.0)


@pytest.mark.parametrize(("kind", "clip"), [("momentum", None), ("adam", None), ("sgd", 1.0)])
def test_anything_but_plain_sgd_is_refused(kind: str, clip: float | None) -> None:
    with pytest.raises(UnsupportedError, match="plain SGD"):
        sgd_influence(partial(examples.make, kind, clip), "q")
