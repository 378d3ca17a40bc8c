"""GPT-2, GPT-NeoX, Llama, Qwen3, Gemma2 and a plain GPT: rows against one backward pass per sample, in float64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.language import (
    LENGTHS,
    MODELS,
    PARTS,
    adamw,
    kept,
    logits_of,
    make,
    one_backward_each,
    text,
    token_losses,
    train,
)
from tests.support.bases import as_matrix
from tests.support.loops import terms_of
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import UnsupportedError
from backstory.maths.layers import rule_for, scaled_norm
from backstory.store import RunStore

CAUSES = (
    "The sample's length: a token mean was kept. 16: the weight was not divided out. Scattered: a wrong layer rule."
)
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
TOTAL = sum(LENGTHS) - len(LENGTHS)  # the first token of a sample has no loss


@pytest.mark.parametrize("name", MODELS)
def test_padded_micro_batches_give_the_rows_of_one_backward_per_sample(name: str, tmp_path: Path) -> None:
    model = make(name)
    actual, expected = train(tmp_path / "run", model, adamw(model))
    close = 1e-6 if name == "Gemma2" else 1e-9  # Gemma2 rounds a product of the weight to float32
    assert_close(actual.rows, expected, close, CAUSES)
    assert_close(actual.weight, torch.full((10,), 1 / TOTAL, dtype=torch.float64), 1e-15)
    assert actual.names == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("name", ["GPT-2", "Llama, tied"])
def test_rows_of_a_random_subspace_are_projections_of_the_true_ones(name: str, tmp_path: Path) -> None:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"projection": "random", "rank": 3, "curvature": "empirical/3"}
    actual, expected = train(tmp_path / "run", model, optimizer, **settings)
    assert_close(actual.rows, projected(expected, model, tmp_path / "run"), 1e-9, CAUSES)
    assert actual.curvature is not None
    assert actual.curvature.shape[1] == 3
    assert_close(actual.curvature.sum(1), actual.rows, 1e-12, "the groups of positions do not make up the gradient")


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.parametrize("projection", ["random", "learned"])
def test_groups_of_positions_sum_to_the_row_in_adams_coordinates(name: str, projection: str, tmp_path: Path) -> None:
    model = make(name)
    settings: dict[str, Any] = {
        "projection": projection,
        "rank": 3,
        "curvature": "empirical/3",
        "curvature_of": "steps",
    }
    actual, _ = train(tmp_path / "run", model, adamw(model), **settings)
    assert actual.curvature is not None
    assert_close(actual.curvature.sum(1), actual.rows, 1e-9)
    sizes = actual.curvature.norm(dim=2)  # (N, K)
    assert bool((sizes[[0, 5]] > 0).all()), "the longest sequence has all its groups"
    assert bool((sizes[3, 1:] == 0).all()), "padding has no gradient"


def projected(rows: Tensor, model: nn.Module, run: Path) -> Tensor:
    """Each parameter's part of full rows as Cᵀ vec(Lᵀ G R), by dense products with the matrices of the run's own file."""
    sides, out, lo = RunStore.open(run).load_tensors("basis"), [], 0
    for name, p in model.named_parameters():
        G = rows[:, lo : lo + p.numel()].reshape(len(rows), p.shape[0], -1)
        lo += p.numel()
        left, right = (
            as_matrix(sides.get(f"{name}/{s}"), d) for s, d in zip(("left", "right"), G.shape[1:], strict=True)
        )
        row = torch.einsum("boi,or,ik->brk", G, left, right).flatten(1)
        out.append(row @ as_matrix(sides.get(f"{name}/core"), row.shape[1]))
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_the_loss_that_transformers_computes(name: str, tmp_path: Path) -> None:
    """`num_items_in_batch` makes it a sum over tokens, divided by the tokens of the whole step."""
    model, batch = make(name), text()
    optimizer = adamw(model)
    expected = one_backward_each(model, batch)
    full: dict[str, Any] = {"projection": "full", "encoding": "float64"}
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="token-mean", **full) as rec:
        with rec.step() as s:
            for chosen in ([0, 1, 2], [3, 4]):
                part = batch.part(chosen)
                s.batch(chosen, tokens=part.tokens)
                inputs = {"input_ids": part.ids, "attention_mask": part.mask, "labels": part.labels}
                model(**inputs, num_items_in_batch=batch.tokens.sum()).loss.backward()
            optimizer.step()
    assert_close(kept(tmp_path / "run").rows, expected, 1e-5, CAUSES)  # transformers takes the loss in float32


def test_positions_are_told_apart_by_sample(tmp_path: Path) -> None:
    """GPT-2 looks positions up once, as (1, S): each sample still has its own gradient of that table."""
    model = make("GPT-2")
    for name, p in model.named_parameters():
        p.requires_grad_("wpe" in name)
    actual, expected = train(tmp_path / "run", model, adamw(model), parts=[[0, 1, 2, 3, 4]])
    assert actual.names == ["transformer.wpe.weight"]
    assert_close(actual.rows, expected, 1e-9)
    assert bool((actual.rows[3].reshape(16, 8)[2:] == 0).all()), "sample 3 has two tokens"


def test_a_model_that_was_recorded_gives_the_same_logits_afterwards(tmp_path: Path) -> None:
    model, twin = make("GPT-2"), make("GPT-2")
    train(tmp_path / "run", model, adamw(model))
    plain, batch = adamw(twin), text()
    for _ in range(2):
        plain.zero_grad()
        for chosen in PARTS:
            part = batch.part(chosen)
            (token_losses(logits_of(twin, part), part).sum() / batch.tokens.sum()).backward()
        plain.step()
    assert_same(logits_of(model, batch), logits_of(twin, batch), terms_of(twin, 2, sum(LENGTHS)))


def test_a_norm_keeps_its_weight_and_its_hooks_are_not_called_again() -> None:
    norm = next(m for m in make("Llama").modules() if type(m).__name__ == "LlamaRMSNorm")
    assert rule_for(norm) is scaled_norm
    before, calls = norm.get_parameter("weight").clone(), []
    norm.register_forward_hook(lambda *args: calls.append(args))
    x = torch.ones(2, 3, 8, dtype=torch.float64)
    scaled_norm(norm, (x,), x)
    assert torch.equal(norm.get_parameter("weight"), before)
    assert calls == []


def test_the_loop_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, batch = make("GPT-2", torch.float32), text()
    expected = one_backward_each(model, batch)
    parts = [batch.part(chosen) for chosen in PARTS]
    step = [
        {"sample_id": chosen, "input_ids": x.ids, "attention_mask": x.mask, "labels": x.labels}
        for chosen, x in zip(PARTS, parts, strict=True)
    ]
    loop = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)[0].replace(
        '"token-mean"', '"token-mean", projection="full", encoding="float64"'
    )
    exec(compile(loop, "models.md", "exec"), {"torch": torch, "backstory": backstory, "model": model, "steps": [step]})
    assert_close(kept(tmp_path / "runs" / "gpt2").rows, expected, 1e-4, CAUSES)


REFUSED = re.findall(r"^\| (.*) and others \| refused", PAGE, flags=re.M)[0].split(", ")


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_are_not_modelled_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    model = make("GPT-2")
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)  # all that Muon takes
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with pytest.raises(UnsupportedError, match=rf"{name} is not supported.*optimizer_model='sgd'"):
        train(tmp_path / "run", model, optimizer)
    assert not (tmp_path / "run").exists()
    actual, expected = train(tmp_path / "run", model, optimizer, optimizer_model="sgd")
    assert_close(actual.rows, expected, 1e-9, CAUSES)
