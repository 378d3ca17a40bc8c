"""LoRA through peft: only the adapters are trained and recorded, and their rows are those of one backward per sample."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.language import adamw, make, shaken, train
from tests.support.oracles import assert_close
from torch import nn

import backstory
from backstory.errors import CoverageError

TARGETS = {"GPT-2": ["c_attn", "c_proj", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}
EMBEDDINGS = {"GPT-2": "wte", "Llama": "embed_tokens"}


def adapted(name: str, **settings: Any) -> nn.Module:
    config = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS[name], "fan_in_fan_out": name == "GPT-2", **settings}
    from peft import LoraConfig, get_peft_model  # 10 s

    model: nn.Module = get_peft_model(make(name), LoraConfig(**config)).double()
    return model


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_adapters_are_those_of_one_backward_per_sample(name: str, tmp_path: Path) -> None:
    model = shaken(adapted(name))  # B begins as 0, and A then has no gradient: here both have one
    actual, expected = train(tmp_path / "run", model, adamw(model))
    assert_close(actual.rows, expected, 1e-9, "2 or 1/2: the adapter's scale lora_alpha / r was counted twice or not.")
    assert all(".lora_A.default.weight" in n or ".lora_B.default.weight" in n for n in actual.names), actual.names
    assert actual.names == [n for n, p in model.named_parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert actual.rows.shape[1] < frozen, "the frozen base was recorded"


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("projection", ["full", "random", "learned"])
def test_the_usual_start_from_zero_is_recorded(name: str, projection: str, tmp_path: Path) -> None:
    """At the first step A has no gradient, and Adam's second moment of it is 0."""
    model = adapted(name)
    actual, expected = train(tmp_path / "run", model, adamw(model), projection=projection, rank=3, steps=3)
    assert bool(actual.rows.isfinite().all())
    if projection == "full":
        assert_close(actual.rows, expected, 1e-9)


@pytest.mark.parametrize("name", TARGETS)
def test_layers_are_chosen_by_pefts_names(name: str, tmp_path: Path) -> None:
    model = shaken(adapted(name))
    chosen = ["*.lora_B.*", f"!*.1.*{TARGETS[name][-1]}*"]
    actual, expected = train(tmp_path / "run", model, adamw(model), layers=chosen)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    wanted = [
        "lora_B" in n and not (".1." in n and TARGETS[name][-1] in n) for n, p in trained for _ in range(p.numel())
    ]
    assert_close(actual.rows, expected[:, torch.tensor(wanted)], 1e-9)
    assert 0 < len(actual.names) < len(trained) / 2


@pytest.mark.parametrize(("name", "norm"), [("GPT-2", "ln_f"), ("Llama", "norm")])
def test_modules_that_are_trained_whole_beside_adapters(name: str, norm: str, tmp_path: Path) -> None:
    model = shaken(adapted(name, modules_to_save=[norm]))
    actual, expected = train(tmp_path / "run", model, adamw(model))
    assert_close(actual.rows, expected, 1e-9)
    assert any(f"{norm}.modules_to_save.default.weight" in n for n in actual.names)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("kind", "left"), [("embedding", "lora_embedding_A"), ("dora", "lora_magnitude_vector.default.weight")]
)
def test_adapters_that_are_no_layers_have_the_general_rule(name: str, kind: str, left: str, tmp_path: Path) -> None:
    settings = {"use_dora": True} if kind == "dora" else {"target_modules": [EMBEDDINGS[name]], "fan_in_fan_out": False}
    model = shaken(adapted(name, **settings))
    with pytest.raises(CoverageError, match=rf"(?s)no layer rule covers.*{left}.*backstory\.register.*uncovered="):
        backstory.record(model, adamw(model), tmp_path / "run", loss_reduction="token-mean", uncovered="error")
    assert not (tmp_path / "run").exists()
    actual, expected = train(tmp_path / "run", model, adamw(model))
    assert any(left in n for n in actual.names)
    assert_close(actual.rows, expected, 1e-9)


def test_adapters_of_embeddings_can_be_left_out(tmp_path: Path) -> None:
    model = shaken(adapted("GPT-2", target_modules=["wte", "c_attn"]))
    actual, expected = train(tmp_path / "run", model, adamw(model), layers=["!*lora_embedding*"])
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    wanted = torch.tensor(["lora_embedding" not in n for n, p in trained for _ in range(p.numel())])
    assert_close(actual.rows, expected[:, wanted], 1e-9)


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    example = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)[1]
    import peft

    exec(
        compile(example, "models.md", "exec"),
        {"torch": torch, "backstory": backstory, "peft": peft, "model": make("GPT-2")},
    )
    names = [b["name"] for b in backstory.open(tmp_path / "runs" / "lora").config["blocks"]]
    assert names == [f"base_model.model.transformer.h.{i}.attn.c_attn.lora_B.default.weight" for i in (0, 1)]
    assert names[0] in page
