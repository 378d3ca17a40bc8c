"""TRAK by its package, against our own."""

import importlib.util

import pytest
import torch
from tests.baselines.problems import by_id, correlation, data, mlp, queries, ratio, recipe
from tests.support.oracles import assert_close

from backstory.baselines.trak import trak
from backstory.baselines.traker import traker
from backstory.errors import UnsupportedError

HERE = importlib.util.find_spec("trak") is not None
needs = pytest.mark.skipif(not HERE, reason="needs the extra: pip install 'backstory[baselines]' (traker)")
BIG = data(80)


@needs
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_without_projection_it_is_ours(damping: float) -> None:
    kept = ["2"]  # the last layer: its 18 coordinates are well determined by 80 samples
    made = recipe(xy=BIG)
    damping += 1e-3
    found = traker(made, queries(), proj_dim=None, layers=kept, damping=damping)
    own = trak(made, queries(), layers=kept, damping=damping)
    scale = ratio(found.scores, own.scores)
    assert scale > 0, "the sign is turned"
    assert_close(found.scores / scale, own.scores, 2e-2, "float32 and one inverse; the package's scale is its own")
    assert "traker 0" in " ".join(found.caveats)
    assert "rank only" in " ".join(found.caveats)


@needs
def test_with_models_and_projection_it_is_close_to_ours() -> None:
    made = recipe(xy=BIG)
    states = [mlp(s).state_dict() for s in (1, 2)]
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    exact = by_id(trak(made, queries(), models=states, damping=1.0), 80)
    found = by_id(traker(made, queries(), models=states, damping=1.0, proj_dim=400), 80)
    assert correlation(found, exact) > 0.9
    again = by_id(traker(made, queries(), models=states, damping=1.0, proj_dim=400), 80)
    assert_close(found, again, 2e-2, "the same draws, in float32 with one inverse; other draws differ by far more")
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())


@needs
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    traker(recipe(xy=BIG), queries(), proj_dim=16)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(HERE, reason="traker is installed")
def test_without_the_package_the_error_says_how_to_get_it() -> None:
    with pytest.raises(UnsupportedError, match=r"pip install 'backstory\[baselines\]'"):
        traker(recipe(), queries())
