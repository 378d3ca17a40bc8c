"""Preference pairs in transformers' Trainer, laid out as TRL does, and TRL's own trainers where it is installed: rows of whole pairs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import stored
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

N, B, BETA, STEPS = 8, 4, 0.1, 2
FULL: dict[str, Any] = {"projection": "full", "encoding": "float64", "curvature": "empirical"}
Batch = dict[str, Tensor]


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": B, "max_steps": STEPS, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "learning_rate": 1e-2, "disable_tqdm": True,
    }  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=1, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """log p of each row's completion, (rows,)."""
    ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    out: Tensor = (each * mask.to(each)).sum(1)
    return out


def plain(model: Any) -> Any:
    """A copy with its own forward, which TRL replaces."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        module.__dict__.pop("forward", None)
    return twin


class Seen:
    """The model and the inputs of every step, from the method that makes a trainer's loss."""

    def __init__(self, trainer: Any, method: str) -> None:
        self.start, self.steps, original = (
            plain(trainer.model),
            list[tuple[Any, Batch]](),
            getattr(trainer, method),
        )

        def loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            batch = {k: inputs[k].clone() for k in ("input_ids", "attention_mask", "completion_mask")}
            self.steps.append(({k: v.clone() for k, v in model.state_dict().items()}, batch))
            return original(model, inputs, *args, **kwargs)

        setattr(trainer, method, loss)

    def rows(self, names: list[str]) -> Tensor:
        """∇ of each pair's loss, one pair at a time."""
        model, out = copy.deepcopy(self.start), []
        for state, batch in self.steps:
            model.load_state_dict(state)
            for i in range(B):
                pair = {k: v[[i, B + i]] for k, v in batch.items()}
                with torch.no_grad():
                    reference = log_probs(self.start, pair)
                chosen, rejected = log_probs(model, pair) - reference
                grads = torch.autograd.grad(
                    -F.logsigmoid(BETA * (chosen - rejected)), [model.get_parameter(n) for n in names]
                )
                out.append(torch.cat([g.flatten() for g in grads]).double())
        return torch.stack(out)


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        return {
            k: torch.randint(3, 33, (n,), generator=g)
            for k, n in (("prompt", 3), ("chosen", 2 + i % 3), ("rejected", 3))
        }


def collate(items: list[dict[str, Tensor]]) -> Batch:
    """Chosen rows first, then the rejected ones, padded on the right."""
    rows = [torch.cat([x["prompt"], x[side]]) for side in ("chosen", "rejected") for x in items]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    there = torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in rows])[:, None]
    return {
        "input_ids": ids,
        "attention_mask": there.long(),
        "completion_mask": (there & (torch.arange(ids.shape[1]) >= 3)).long(),
    }


def callback(path: Path, reduction: str = "mean", **settings: Any) -> Any:
    from backstory.integrations.huggingface import BackstoryCallback

    return BackstoryCallback(path, loss_reduction=reduction, **FULL, **settings)


def test_pairs_in_the_trainer_have_one_row_each(tmp_path: Path) -> None:
    reference = llama().eval()

    class PairTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any) -> Any:
            given = {k: v for k, v in inputs.items() if k != "completion_mask"}
            ids, mask = inputs["input_ids"], inputs["completion_mask"][:, 1:]
            logits = model(**given, use_cache=False).logits[:, :-1]
            score = (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask).sum(1)
            with torch.no_grad():
                known = log_probs(reference, inputs)
            chosen, rejected = (score - known).chunk(2)
            return -F.logsigmoid(BETA * (chosen - rejected)).mean()

    settings = transformers.TrainingArguments(**arguments(tmp_path), remove_unused_columns=False)
    trainer = PairTrainer(
        model=llama(),
        args=settings,
        train_dataset=Pairs(),
        data_collator=collate,
        callbacks=[callback(tmp_path / "run")],
    )
    seen = Seen(trainer, "compute_loss")
    trainer.train()
    check(tmp_path / "run", seen)


def check(path: Path, seen: Seen) -> None:
    run, actual = backstory.open(path), stored(path)
    names = [block["name"] for block in run.config["blocks"]]
    assert_close(actual.rows, seen.rows(names), 1e-4, "2 or 1/2: a pair's rows weigh as two samples.")
    assert actual.weight.tolist() == [1 / B] * (B * STEPS)
    assert len(set(actual.samples)) == N
    assert not [c for c in run.caveats() if "samples of a batch" in c]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(30))]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **names)


def texts() -> Any:
    datasets = pytest.importorskip("datasets")
    items = [Pairs()[i] for i in range(N)]
    return datasets.Dataset.from_list(
        [{k: " ".join(f"w{int(t) - 3}" for t in v) + " " * (k == "prompt") for k, v in x.items()} for x in items]
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapted", [True, False], ids=["LoRA", "all weights"])
def test_trls_dpo_trainer(adapted: bool, tmp_path: Path) -> None:
    """Its head computes log-probabilities from the weight itself, so that weight is left out where it is trained."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    lora = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}
    chosen: dict[str, Any] = lora if adapted else {"ref_model": llama()}
    watch = callback(tmp_path / "run", layers=None if adapted else ["!lm_head.weight"])
    trainer = trl.DPOTrainer(
        model=llama(), args=trl.DPOConfig(**arguments(tmp_path), max_length=32, bf16=False), train_dataset=texts(),
        processing_class=tokenizer(), callbacks=[watch], **chosen,
    )  # fmt: skip
    seen = Seen(trainer, "_compute_loss")
    trainer.train()
    check(tmp_path / "run", seen)


@pytest.mark.filterwarnings("ignore")
def test_trls_sft_trainer_scores_completions_alone(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    trainer = trl.SFTTrainer(
        model=llama(), args=trl.SFTConfig(**arguments(tmp_path), max_length=32, bf16=False), processing_class=tokenizer(),
        train_dataset=texts().rename_column("chosen", "completion").remove_columns("rejected"),
        callbacks=[callback(tmp_path / "run", "token-mean", layers=["!lm_head.weight"])],
    )  # fmt: skip
    seen = Seen.__new__(Seen)
    seen.steps, original, start = [], trainer.compute_loss, plain(trainer.model)

    def loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen.steps.append(
            (
                {k: v.clone() for k, v in model.state_dict().items()},
                {k: inputs[k].clone() for k in ("input_ids", "labels", "attention_mask")},
            )
        )
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = loss
    trainer.train()
    run, actual, rows = backstory.open(tmp_path / "run"), stored(tmp_path / "run"), []
    parameters = [start.get_parameter(block["name"]) for block in run.config["blocks"]]
    for state, batch in seen.steps:
        start.load_state_dict(state)
        for i in range(B):
            one = {"input_ids": batch["input_ids"][i : i + 1], "attention_mask": batch["attention_mask"][i : i + 1]}
            logits = start(**one, use_cache=False).logits[0, :-1]
            grads = torch.autograd.grad(F.cross_entropy(logits, batch["labels"][i, 1:], reduction="sum"), parameters)
            rows.append(torch.cat([g.flatten() for g in grads]).double())
    assert_close(actual.rows, torch.stack(rows), 1e-4)
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for _, batch in seen.steps]
    assert actual.weight.tolist() == pytest.approx([1 / n for n in tokens for _ in range(B)])
