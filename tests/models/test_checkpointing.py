"""Activation checkpointing: a forward pass that is computed again counts once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.language import PARTS, Nano, NanoBlock, adamw, make, train
from tests.support.oracles import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstory.errors import UsageError

CAUSES = "2 means that the recomputed call was counted too, 0 that none was."


def checkpointed(name: str, reentrant: bool) -> nn.Module:
    """The same model, its blocks checkpointed by its own switch, or by hand."""
    model = make(name)
    if isinstance(model, Nano):
        for block in model.blocks:
            assert isinstance(block, NanoBlock)
            wrap(block, reentrant)
        return model
    model.train()
    enable: Any = model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model


def wrap(block: NanoBlock, reentrant: bool) -> None:
    plain = block.forward

    def forward(h: Tensor) -> Tensor:
        out: Tensor = checkpoint(plain, h, use_reentrant=reentrant)
        return out

    block.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "nanoGPT"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_are_those_without_checkpointing(name: str, reentrant: bool, tmp_path: Path) -> None:
    model, plain = checkpointed(name, reentrant), make(name)
    actual, _ = train(tmp_path / "run", model, adamw(model), truth=plain)
    same, expected = train(tmp_path / "plain", plain, adamw(plain))
    assert_close(actual.rows, expected, 1e-9, CAUSES)
    assert actual.curvature is not None
    assert same.curvature is not None
    assert_close(actual.curvature.flatten(1), same.curvature.flatten(1), 1e-9, CAUSES)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "nanoGPT"])
@pytest.mark.parametrize("curvature", ["sampled:2", "sampled:1/3"])
def test_extra_passes_go_through_checkpoints(name: str, curvature: str, tmp_path: Path) -> None:
    model, plain = checkpointed(name, reentrant=False), make(name)
    actual, _ = train(tmp_path / "run", model, adamw(model), truth=plain, curvature=curvature, outputs=True)
    same, expected = train(tmp_path / "plain", plain, adamw(plain), curvature=curvature, outputs=True)
    assert_close(actual.rows, expected, 1e-9, CAUSES)
    assert actual.curvature is not None
    assert same.curvature is not None
    assert_close(actual.curvature.flatten(1), same.curvature.flatten(1), 1e-9, CAUSES)
    assert bool((same.curvature.norm(dim=2) > 0).any())


@pytest.mark.parametrize("name", ["GPT-2", "nanoGPT"])
def test_extra_passes_through_reentrant_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    model = checkpointed(name, reentrant=True)
    with pytest.raises(UsageError, match=r"incompatible with \.grad\(\).*pass use_reentrant=False"):
        train(tmp_path / "run", model, adamw(model), curvature="sampled", outputs=True, truth=make(name))


def test_checkpoints_are_recomputed_at_all() -> None:
    """Else the tests above would show nothing."""
    model, calls = checkpointed("GPT-2", reentrant=False), []
    layer = model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda *args: calls.append(1))
    ids = torch.tensor([PARTS[0]])
    model(input_ids=ids).logits.sum().backward()
    assert len(calls) == 2
