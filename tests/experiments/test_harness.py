"""A recipe under the recorder: the same training, and a run that can be asked."""

from pathlib import Path

import pytest
import torch
from experiments.data.images import mean_loss, recipe, setup_of
from experiments.recorded import recorded

from backstory.replay.recipe import take_step

TINY = setup_of("tiny", "gelu", "sgd", 1, 48)


@pytest.mark.parametrize("curvature", ["empirical", "exact:10"])
def test_the_model_is_trained_as_without_recording(tmp_path: Path, curvature: str) -> None:
    plan, plain = recipe(TINY, 0), recipe(TINY, 0)
    run = recorded(plan, tmp_path / "run", curvature=curvature, rank=4, warmup_steps=2)
    for t in range(len(plain.batches)):
        take_step(plain, t)
    for p, q in zip(plan.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    answer = run.query(plan.model, mean_loss, plan.queries["test"])
    assert answer.scores.shape == (1, 48)
    assert run.config["settings"]["curvature"] == curvature
    assert not plan.model._forward_hooks
