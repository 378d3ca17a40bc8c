"""Which tokens have a loss, and each sample's own, against transformers' own losses; by what a loss was divided."""

from typing import Any

import pytest
import torch
from tests.integrations.causal import VOCABULARY, built, collate, llama, make, texts
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, LlamaForSequenceClassification

from backstory.errors import UnsupportedError
from backstory.integrations.losses import Part, counts, field, fitting, scored, shifts, targets, weight


def bert(kind: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return built(kind, BertConfig, **sizes, vocab_size=VOCABULARY, max_position_embeddings=16).eval()


def adapted() -> nn.Module:
    import peft  # 10 s

    actual: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return actual


def test_models_of_the_next_token_shift_their_labels() -> None:
    assert [shifts(m) for m in (make("Llama"), make("GPT-2"), adapted())] == [True, True, True]
    assert [shifts(bert(kind)) for kind in (BertForMaskedLM, BertForTokenClassification)] == [False, False]
    assert shifts(llama(LlamaForSequenceClassification)) is False
    assert shifts(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("kind", ["Llama", "GPT-2", "adapted", "BERT"])
def test_samples_losses_make_the_models_loss(kind: str) -> None:
    model = adapted() if kind == "adapted" else bert(BertForMaskedLM) if kind == "BERT" else make(kind)
    batch = collate(texts()[:5])
    outputs = model(**batch)
    actual = scored(batch, outputs, bool(shifts(model)))
    assert actual is not None
    assert float(actual.losses().sum() / counts(actual.labels).sum()) == pytest.approx(
        float(outputs.loss.detach()), rel=1e-6
    )


def test_tokens_are_counted_where_a_label_is_predicted() -> None:
    labels = torch.tensor([[5, -100, 6, 7], [5, 6, -100, -100]])
    shifted = targets({"labels": labels}, True)
    assert shifted is not None
    assert counts(shifted).tolist() == [2, 1]
    assert counts(labels).tolist() == [3, 2]
    assert targets({"labels": labels, "shift_labels": labels}, True) is labels
    assert targets({"labels": labels.float()}, True) is None
    assert targets({}, True) is None


def test_outputs_are_dicts_or_tuples() -> None:
    one, two = torch.zeros(()), torch.ones(2)
    assert field({"loss": one, "logits": two}, "logits") is two
    assert field((one, two), "loss") is one
    assert field((one,), "logits") is None
    assert field(one, "logits") is None


def test_logits_that_do_not_fit_the_labels_are_left_alone() -> None:
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert scored({"labels": labels}, {"logits": torch.zeros(2, 1, 5)}, True) is None
    assert scored({"labels": labels}, {"logits": torch.zeros(2, 4, 1)}, True) is None
    assert scored({"labels": labels}, {"loss": torch.zeros(())}, True) is None


def test_the_divisor_is_found_by_the_loss() -> None:
    assert fitting(2.0, 18.0, [9, 3]) == [9]
    assert fitting(6.0, 18.0, [9, 3]) == [3]
    assert fitting(2.01, 18.0, [9, 3]) == [9], "half precision is coarse"
    assert fitting(0.0, 0.0, [9]) == [9], "a text without a loss"
    assert fitting(2.0, 18.0, []) == []
    with pytest.raises(UnsupportedError, match=r"loss is 3, but .* divided by \[9, 3\] give \[2.0, 6.0\]"):
        fitting(3.0, 18.0, [9, 3])


def test_a_third_is_taken_for_exact() -> None:
    third = 0.3333333432674408  # in float32
    assert weight(third, 4) == 1 / 12
    assert weight(1.0, 7) == 1 / 7
    assert weight(2.0, 8) == 0.25
    assert weight(0.4, 2) == 0.2


def test_the_trainers_divisor_comes_first_and_nothing_is_no_divisor() -> None:
    assert Part(9, 3).divisors() == [9, 3]
    assert Part(None, 3).divisors() == [3]
    assert Part(9, 0).divisors() == [9]
    assert Part(None, None).divisors() == []
