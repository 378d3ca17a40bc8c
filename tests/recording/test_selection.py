"""Each way out that an error names, taken: layers left out by name and uncovered ones skipped, and the rest still exact."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import Batch, batch_of, cross_entropy, ids_of, one_backward_each, seeded, sgd, stored, train
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError, UsageError

CAUSES = "1 means that a layer inside the attention is recorded, although torch never calls it"


class Attention(nn.Module):
    """nn.MultiheadAttention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        h, _ = self.attention(h, h, h, need_weights=False)
        out: Tensor = self.out(h).mean(1)
        return out


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer, whose other layers are called as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=3, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.into(x))).mean(1)
        return out


MODELS: dict[str, tuple[type[nn.Module], str]] = {"attention": (Attention, "attention"), "encoder": (Encoder, "encoder.self_attn")}  # fmt: skip
REMEDIES: dict[str, Callable[[str, list[str]], dict[str, Any]]] = {
    "skip": lambda module, missing: {"uncovered": "skip"},
    "the module": lambda module, missing: {"layers": [f"!{module}"]},
    "a pattern of modules": lambda module, missing: {"layers": [f"!*{module[-9:]}"]},
    "its parameters": lambda module, missing: {"layers": [f"!{name}" for name in missing]},
}


def sequences(ids: Any) -> Batch:
    x, y = batch_of(ids)
    return x[:, None] * torch.arange(1, 4)[:, None], y


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_left_out_by_each_way_that_the_error_names(name: str, remedy: str, tmp_path: Path) -> None:
    make, inside = MODELS[name]
    model = seeded(make())
    with pytest.raises(CoverageError, match=r"layers=\['!name'\].*uncovered='skip'") as refused:
        train(tmp_path / "refused", model, sgd(model), 1, batch=sequences, uncovered="error")
    missing = re.findall(r"^  (\S+)  \S+% of the trained", str(refused.value), re.MULTILINE)
    assert missing == [n for n, _ in model.named_parameters() if n.startswith(inside)]
    kept = [n for n, _ in model.named_parameters() if n not in missing]
    expected = one_backward_each(model, sequences(ids_of(0)), cross_entropy, kept)
    whole = one_backward_each(model, sequences(ids_of(0)), cross_entropy, [*kept, *missing]).mean(0)
    train(tmp_path / "run", model, sgd(model), 1, batch=sequences, **REMEDIES[remedy](inside, missing))
    actual, run = stored(tmp_path / "run"), backstory.open(tmp_path / "run")
    assert [b["name"] for b in run.config["blocks"]] == kept
    assert_close(actual.rows, expected, 1e-10, CAUSES)
    assert run.config["left_out"] == missing
    share = float(expected.mean(0).square().sum() / whole.square().sum())
    assert actual.table.trained.tolist() == pytest.approx([share], rel=1e-9)
    assert (
        f"{len(missing)} parameters are not recorded; the recorded ones cover {share:.1%} of the gradient (squared norm)"
        in run.caveats()
    )
    answer = run.query(model, cross_entropy, sequences([1]))
    v = one_backward_each(model.eval(), sequences([1]), cross_entropy, kept)
    assert_close(answer.scores, 0.1 / 3 * v @ expected.T, 1e-6, "of a query by the same layers")


def test_only_the_attention_of_an_encoder_or_the_whole_of_it(tmp_path: Path) -> None:
    model = seeded(Encoder())
    outer = ["into.weight", "into.bias", "out.weight", "out.bias"]
    expected = one_backward_each(model, sequences(ids_of(0)), cross_entropy, outer)
    train(tmp_path / "run", model, sgd(model), 1, batch=sequences, layers=["!encoder"])
    assert_close(stored(tmp_path / "run").rows, expected, 1e-10)


class Block(nn.Module):
    """A bare parameter beside layers that are called, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.first, self.second = nn.Parameter(torch.ones(3)), nn.Linear(3, 3), nn.Linear(3, 3)
        self.out = nn.Linear(3, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.second(self.first(self.gain * x).tanh()))
        return out


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"uncovered": "skip"}, ["first.weight", "first.bias", "second.bias", "out.weight", "out.bias"]),
        ({"layers": ["second"]}, ["first.weight", "second.bias"]),
        ({"layers": ["!second", "!gain"]}, ["first.bias", "out.weight", "out.bias"]),
    ],
)
def test_layers_below_a_bare_parameter_and_shared_weights_are_recorded_whole(
    settings: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    model = seeded(Block())
    expected = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, kept)
    train(tmp_path / "run", model, sgd(model), 1, **settings)
    assert [b["name"] for b in backstory.open(tmp_path / "run").config["blocks"]] == kept
    assert_close(stored(tmp_path / "run").rows, expected, 1e-10)


@pytest.mark.parametrize(
    ("wrong", "says"), [("attentoin", "Did you mean: attention"), (3, "must contain names, patterns .* got 3")]
)
def test_what_names_no_layer_is_refused(wrong: Any, says: str, tmp_path: Path) -> None:
    model = seeded(Attention())
    with pytest.raises(UsageError, match=says):
        backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", layers=["!attention", wrong])
