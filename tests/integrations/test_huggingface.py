"""`transformers.Trainer` with one callback against a loop written by hand: the same rows, up to rounding."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.causal import (
    SAMPLES,
    SIZE,
    TERMS,
    by_hand,
    collate,
    llama,
    make,
    order,
    same_answers,
    same_rows,
    same_training,
    texts,
    trainer,
)
from tests.support.loops import Interrupted, generator, same_numbers, stored, terms_of
from tests.support.oracles import assert_same
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import LlamaForSequenceClassification, Trainer, TrainerCallback

import backstory
from backstory.capture import fingerprint
from backstory.errors import StoreError, UnsupportedError, UsageError
from backstory.integrations import huggingface
from backstory.store import RunStore


class Stop(TrainerCallback):
    """Raises in the middle of an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Interrupted


# -- the same rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "kind"), [(1, "Llama"), (3, "GPT-2")])
def test_rows_are_those_of_a_loop_by_hand(kind: str, parts: int, tmp_path: Path) -> None:
    """With clipping, a schedule, evaluation in between, a shuffled order and an epoch that ends inside of an update."""
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=make(kind), gradient_accumulation_steps=parts)
    made.train()
    steps = order(tmp_path / "run")
    assert sorted(i for ids in steps[: len(steps) // 2] for i in ids) == list(range(SAMPLES))
    assert [len(ids) for ids in steps[: len(steps) // 2]] == {1: [3] * 7 + [1], 3: [9, 9, 4]}[parts]
    model = by_hand(tmp_path / "hand", steps, make(kind), first_counts=kind == "GPT-2")
    same_training(tmp_path / "run", tmp_path / "hand", len(steps))
    same_answers(made.model, model, len(steps))
    assert RunStore.open(tmp_path / "run").config["closed"]


def test_workers_strings_as_ids_and_removed_columns(tmp_path: Path) -> None:
    names = [f"text {i} ü" for i in range(SAMPLES)]
    made, _ = trainer(tmp_path / "out", tmp_path / "run", record={"ids": names}, dataloader_num_workers=2)
    made.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", remove_unused_columns=True)
    plain.train()
    same_rows(tmp_path / "run", tmp_path / "plain", 16)
    assert stored(tmp_path / "run").samples == [f"text {i} ü" for step in order(tmp_path / "plain") for i in step]


def test_a_column_of_ids_that_the_model_does_not_take(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", record={"ids": "remark"}, max_steps=2)
    made.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", max_steps=2)
    plain.train()
    assert stored(tmp_path / "run").samples == [f"text {i}" for step in order(tmp_path / "plain") for i in step]


def test_recording_changes_nothing_about_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", **settings)
    made.train()
    plain, _ = trainer(tmp_path / "out", None, **settings)
    plain.train()
    same_answers(made.model, plain.model, 8)
    assert not made.model._forward_pre_hooks
    assert not made.model._forward_hooks


def test_the_trainers_own_optimizer_with_two_groups(tmp_path: Path) -> None:
    own: dict[str, Any] = {"optimizer": lambda model: None, "record": {"checkpoints": 1}}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", weight_decay=0.1, **own)
    made.train()
    assert "checkpoint-00000008" in RunStore.open(tmp_path / "run").tensor_names(), "the planned steps are known"
    table = stored(tmp_path / "run").table
    assert (table.groups["decay"] == [0.1, 0.0]).all()
    assert (table.clip < 1).any()


@pytest.mark.parametrize(("of", "rows"), [("auto", 0), ("steps", 4)])
def test_learned_subspace_and_sampled_curvature_by_default_settings(of: str, rows: int, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"projection": "learned", "rank": 3, "warmup_steps": 4, "curvature": "sampled:2/2"}
    more: dict[str, Any] = {"record": {**chosen, "curvature_of": of}, "gradient_accumulation_steps": 2}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", **more)
    made.train()
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 8
    assert run._store.config["curvature_rows"] == rows
    store = run._store.windows
    kept = [store.read(span, torch.float32).V for span in store.spans(run.n_steps)]
    assert bool(kept) == (rows == 0)
    assert all(bool(V.isfinite().all()) and float(V.abs().max()) > 0 for V in kept)


def test_half_precision_is_autocast(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=make().float(), bf16=True)
    made.train()
    assert torch.isfinite(stored(tmp_path / "run").rows).all()
    whole, _ = trainer(tmp_path / "out", tmp_path / "whole", model=make().float(), max_steps=1)
    whole.train()
    a, b = (stored(tmp_path / x).rows[:SIZE] for x in ("run", "whole"))
    assert not torch.equal(a, b)
    assert float((a - b).norm() / b.norm()) < 0.05, "bfloat16 has 8 bits"


def test_adapters_by_peft(tmp_path: Path) -> None:
    import peft  # 10 s

    adapted = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=adapted, max_steps=3)
    made.train()
    assert all("lora" in b["name"] for b in RunStore.open(tmp_path / "run").config["blocks"])
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_data_sets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{**x, "input_ids": x["input_ids"].tolist()} for x in texts()])

    def arrange(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collate([{"input_ids": torch.as_tensor(x["input_ids"])} for x in items])

    made, _ = trainer(
        tmp_path / "out", tmp_path / "run", data=data, collator=arrange, record={"ids": data["remark"]}, max_steps=4
    )
    made.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", max_steps=4)
    plain.train()
    same_rows(tmp_path / "run", tmp_path / "plain", 4)
    assert stored(tmp_path / "run").samples == [f"text {i}" for step in order(tmp_path / "plain") for i in step]
    gone, _ = trainer(tmp_path / "out", tmp_path / "gone", data=data, collator=arrange, record={"ids": "remark"})
    with pytest.raises(UsageError, match=r"no id under the key 'remark'.*ids=dataset\['remark'\]"):
        gone.train()


# -- samples with one label, and models of one's own -----------------------------------------------------------------


class Plain(nn.Module):
    """A model that knows nothing of `num_items_in_batch`: its loss is a mean over a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        for i, p in enumerate(self.parameters()):
            p.data.copy_(torch.randn(p.shape, generator=generator(i)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def points() -> list[dict[str, Any]]:
    x = torch.randn(SAMPLES, 4, generator=generator(5), dtype=torch.float64)
    return [{"x": x[i], "labels": i % 3} for i in range(SAMPLES)]


def one_label(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    actual = collate(items)
    return {k: actual[k] for k in ("input_ids", "attention_mask")} | {
        "labels": torch.tensor([int(x["input_ids"][0]) % 3 for x in items])
    }


def test_one_label_for_each_sample(tmp_path: Path) -> None:
    """Such a model takes `num_items_in_batch` and does not use it: its loss is a mean over each micro-batch, and stays undivided."""
    settings: dict[str, Any] = {
        "model": llama(LlamaForSequenceClassification, num_labels=3, pad_token_id=0),
        "collator": one_label,
        "gradient_accumulation_steps": 3,
    }
    made, _ = trainer(
        tmp_path / "out", tmp_path / "run", record={"loss_reduction": "mean"}, eval_strategy="no", **settings
    )
    made.train()
    actual = stored(tmp_path / "run")
    assert actual.weight[:22].tolist() == pytest.approx([1 / 3] * 21 + [1.0])
    assert float(actual.loss.min()) > 0


def test_a_mean_over_each_micro_batch_weighs_the_samples_of_small_ones_more(tmp_path: Path) -> None:
    """8 micro-batches of 3, the last of 1, 3 in an update: the last update has two, of 3 and 1."""
    model = Plain()
    truth, grads = copy.deepcopy(model), []
    made, _ = trainer(
        tmp_path / "out", tmp_path / "run", model=model, data=points(), collator=None, gradient_accumulation_steps=3,
        eval_strategy="no", record={"loss_reduction": "mean"}, max_grad_norm=0.0, max_steps=3,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0),
    )  # fmt: skip
    made.train()
    actual, data = stored(tmp_path / "run"), points()
    assert actual.weight.tolist() == pytest.approx([1 / 9] * 18 + [1 / 6] * 3 + [1 / 2])
    for i in actual.samples:
        truth.zero_grad()
        truth(data[int(i)]["x"][None], torch.tensor([data[int(i)]["labels"]]))["loss"].backward()
        grads.append(torch.cat([p.grad.flatten() for p in truth.parameters() if p.grad is not None]))
    assert_same(actual.rows, torch.stack(grads), terms_of(model, 1))


class Deaf(Plain):
    """A model that takes `num_items_in_batch` and does not say what it does with it."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def test_a_model_that_may_or_may_not_divide_by_the_items_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data": points(), "collator": None, "gradient_accumulation_steps": 3, "eval_strategy": "no", "max_steps": 3,
        "record": {"loss_reduction": "mean"},
    }  # fmt: skip
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=Deaf(), **settings)
    with pytest.raises(
        UnsupportedError, match=r"cannot tell .*\(possible divisors: \[9, 3\]\).*accepts_loss_kwargs = False"
    ):
        made.train()
    said = Deaf()
    said.accepts_loss_kwargs = False  # type: ignore[assignment]
    again, _ = trainer(tmp_path / "out", tmp_path / "again", model=said, **settings)
    again.train()
    assert stored(tmp_path / "again").weight.tolist() == pytest.approx([1 / 9] * 18 + [1 / 6] * 3 + [1 / 2])


def test_a_resumed_epoch_knows_how_many_micro_batches_are_left(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data": points(), "collator": None, "gradient_accumulation_steps": 3, "eval_strategy": "no",
        "record": {"loss_reduction": "mean"}, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    first, recording = trainer(tmp_path / "out", tmp_path / "run", model=Plain(), callbacks=[Stop(2)], **settings)
    with pytest.raises(Interrupted):
        first.train()
    assert recording is not None
    recording.close()
    second, _ = trainer(tmp_path / "out", tmp_path / "run", model=Plain(), **settings)
    second.train(resume_from_checkpoint=True)
    whole, _ = trainer(tmp_path / "other", tmp_path / "whole", model=Plain(), **settings)
    whole.train()
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "whole"), terms_of(whole.model, 6, 3 * SIZE))


# -- interrupted and resumed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "workers", "projection"),
    [pytest.param(3, 0, "full", marks=pytest.mark.slow), (6, 2, "full"), (6, 0, "learned")],
)
def test_interrupted_and_resumed_is_as_if_undisturbed(stop: int, workers: int, projection: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": workers,
        "record": {"projection": projection, "warmup_steps": 5, "rank": 3}, "num_train_epochs": 3,
    }  # fmt: skip
    first, recording = trainer(tmp_path / "out", tmp_path / "run", callbacks=[Stop(stop)], **settings)
    with pytest.raises(Interrupted):
        first.train()
    assert recording is not None
    recording.close()
    assert not RunStore.open(tmp_path / "run").config["closed"]
    second, _ = trainer(tmp_path / "out", tmp_path / "run", **settings)
    second.train(resume_from_checkpoint=True)
    whole, _ = trainer(tmp_path / "other", tmp_path / "whole", **settings)
    whole.train()
    same_training(tmp_path / "run", tmp_path / "whole", 9)


class Checked(Trainer):
    """A Trainer that looks at the run before it saves a checkpoint."""

    held: ClassVar[list[int]] = []

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.held.append(RunStore.open(Path(str(self.args.output_dir)).parent / "run").n_steps())
        super()._save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("saves", [{"save_strategy": "steps", "save_steps": 3}, {"save_strategy": "epoch"}])
def test_the_run_is_on_disk_before_a_checkpoint_is(saves: dict[str, Any], tmp_path: Path) -> None:
    """A process that dies right after the checkpoint was saved can go on from it."""
    Checked.held.clear()
    made, _ = trainer(tmp_path / "out", tmp_path / "run", kind=Checked, max_steps=9, **saves)
    made.train()
    assert Checked.held == {"steps": [3, 6, 9], "epoch": [8, 9]}[saves["save_strategy"]]


def test_the_same_trainer_may_go_on_after_an_error(tmp_path: Path) -> None:
    stop = Stop(5)
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", callbacks=[stop], **settings)
    with pytest.raises(Interrupted):
        made.train()
    stop.step = -1
    made.train(resume_from_checkpoint=True)
    whole, _ = trainer(tmp_path / "other", tmp_path / "whole", **settings)
    whole.train()
    same_training(tmp_path / "run", tmp_path / "whole", 16)


def test_steps_that_a_scaler_skips_are_no_steps_of_the_run(tmp_path: Path) -> None:
    """The Trainer counts them, the run does not; a resumed training finds its place all the same."""

    def run(name: str, stop: int = -1, **more: Any) -> None:
        made, recording = trainer(
            tmp_path / f"{name} out", tmp_path / name, callbacks=[Stop(stop)], max_grad_norm=0.0, save_strategy="steps",
            save_steps=4, max_steps=8, gradient_accumulation_steps=2, model=make().float(),
        )  # fmt: skip
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-117)
        assert recording is not None
        try:
            made.train(**more)
        finally:
            recording.close()

    with pytest.raises(Interrupted):
        run("run", stop=6)
    run("run", resume_from_checkpoint=True)
    run("whole")
    assert backstory.open(tmp_path / "whole").n_steps == 7
    same_training(tmp_path / "run", tmp_path / "whole", 7)
    plain, _ = trainer(
        tmp_path / "out", tmp_path / "plain", gradient_accumulation_steps=2, max_steps=8, max_grad_norm=0.0
    )
    plain.train()
    later = stored(tmp_path / "plain").step >= 1
    assert torch.equal(stored(tmp_path / "whole").weight, stored(tmp_path / "plain").weight[later]), (
        "a loss scale is no weight"
    )


def test_a_first_run_stays_when_training_begins_again(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", max_steps=2)
    made.train()
    again, _ = trainer(tmp_path / "out", tmp_path / "run", max_steps=2)
    with pytest.raises(StoreError, match="already contains a run"):
        again.train()
    assert not again.model._forward_pre_hooks
    assert backstory.open(tmp_path / "run").n_steps == 2


def test_a_checkpoint_without_a_run_is_refused(tmp_path: Path) -> None:
    plain, _ = trainer(tmp_path / "out", None, save_strategy="steps", save_steps=2, max_steps=2)
    plain.train()
    made, _ = trainer(tmp_path / "out", tmp_path / "run", max_steps=4)
    with pytest.raises(UsageError, match=r"at step 2, but .* has no run.*Record from the first step"):
        made.train(resume_from_checkpoint=True)


def test_the_run_ends_with_the_last_model_not_the_best(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }  # the highest loss
    seen: list[str] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(fingerprint(kwargs["model"]))

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", callbacks=[Look()], **saves, **best)
    made.train()
    assert fingerprint(made.model) != seen[-1], "the best model is an earlier one"
    assert RunStore.open(tmp_path / "run").config["fingerprints"]["6"] == seen[-1]


# -- what cannot be right is refused ---------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, key: str | None) -> None:
        self.key = key

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, item in enumerate(texts()):
            yield item if self.key is None else {**item, self.key: f"s{i}"}


def test_an_iterable_data_set_needs_a_column_of_ids(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", data=Stream(None), max_steps=3)
    with pytest.raises(
        UsageError, match=r"has no id under the key 'sample_id', only .*iterable dataset must yield an id"
    ):
        made.train()
    named, _ = trainer(tmp_path / "out", tmp_path / "named", data=Stream("sample_id"), max_steps=3)
    named.train()
    assert stored(tmp_path / "named").samples == [f"s{i}" for i in range(9)]


def test_packed_samples_are_refused(tmp_path: Path) -> None:
    def packed(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        row = torch.cat([x["input_ids"] for x in items])[None]
        return {"input_ids": row, "labels": row.clone()}

    made, _ = trainer(tmp_path / "out", tmp_path / "run", collator=packed)
    with pytest.raises(UnsupportedError, match=r"1 rows of 'input_ids' from 3 samples.*pack before training"):
        made.train()


def test_an_older_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "__version__", "4.57.1")
    with pytest.raises(UnsupportedError, match=r"must be 5.12 or newer, got 4.57.1"):
        trainer(tmp_path / "out", tmp_path / "run")


def test_several_devices_are_refused(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run")
    made.args._n_gpu = 2
    with pytest.raises(UnsupportedError, match="one process on one device"):
        made.callback_handler.on_train_begin(made.args, made.state, made.control)


def test_another_reduction_than_the_trainers_is_refused(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", record={"loss_reduction": "mean"})
    with pytest.raises(UsageError, match="loss_reduction must be 'token-mean' for labels with"):
        made.train()
    with pytest.raises(UsageError, match="must be one of 'mean', 'sum', 'token-mean'"):
        trainer(tmp_path / "out", tmp_path / "other", record={"loss_reduction": "weights"})
    with pytest.raises(UsageError, match="start= is set by the trainer"):
        trainer(tmp_path / "out", tmp_path / "other", record={"start": 3})


class Twice(Trainer):
    """A loss that the Trainer's user multiplies."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class Forgetful(Trainer):
    """A loss that passes on only what it knows."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


class OwnLoss(Trainer):
    """A loss of the logits."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        return F.cross_entropy(model(**inputs).logits[:, :-1].transpose(1, 2), labels)


def test_a_loss_that_is_scaled_on_its_way_has_samples_of_that_weight(tmp_path: Path) -> None:
    made, _ = trainer(
        tmp_path / "out", tmp_path / "run", kind=Twice, gradient_accumulation_steps=2, max_steps=2, eval_strategy="no"
    )
    made.train()
    plain, _ = trainer(
        tmp_path / "out", tmp_path / "plain", gradient_accumulation_steps=2, max_steps=2, eval_strategy="no"
    )
    plain.train()
    a, b = stored(tmp_path / "run"), stored(tmp_path / "plain")
    assert torch.equal(a.weight, 2 * b.weight)
    assert_same(a.rows[:6], b.rows[:6], TERMS, dtype=torch.float32)


def test_ids_that_do_not_reach_the_model_are_missed(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", kind=Forgetful)
    with pytest.raises(UsageError, match=r"no ids reached the model in step 0.*model\(\*\*inputs\)"):
        made.train()


def test_a_loss_of_ones_own_may_not_be_accumulated(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", kind=OwnLoss, gradient_accumulation_steps=2)
    with pytest.raises(
        UnsupportedError, match=r"another loss than the one the model returned.*gradient_accumulation_steps=1"
    ):
        made.train()
    one, _ = trainer(tmp_path / "out", tmp_path / "one", kind=OwnLoss, max_steps=2, eval_strategy="no")
    one.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", max_steps=2)
    plain.train()
    same_rows(tmp_path / "one", tmp_path / "plain", 2)


def test_texts_without_a_loss_are_taken_as_they_are(tmp_path: Path) -> None:
    """A whole micro-batch of them: its loss is 0, and the step is divided by the tokens of the others."""

    def silent(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(items)
        batch["labels"][batch["input_ids"][:, 0] % 2 == 0] = -100
        return batch

    settings: dict[str, Any] = {"collator": silent, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    made, _ = trainer(tmp_path / "out", tmp_path / "run", eval_strategy="no", **settings)
    made.train()
    actual, data = stored(tmp_path / "run"), texts()
    quiet = torch.tensor([int(data[int(i)]["input_ids"][0]) % 2 == 0 for i in actual.samples])
    assert bool(quiet.any())
    assert bool((actual.rows[quiet] == 0).all())
    assert bool((actual.loss[quiet] == 0).all())
    assert bool((actual.rows[~quiet] != 0).any(1).all())


def test_an_auxiliary_loss_is_found(tmp_path: Path) -> None:
    model: Any = make()
    plain = model.loss_function
    model.loss_function = lambda *args, **kwargs: plain(*args, **kwargs) + 1.0
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=model)
    with pytest.raises(UnsupportedError, match=r"seems to contain an auxiliary loss"):
        made.train()


def test_a_model_that_keeps_its_logits_to_itself(tmp_path: Path) -> None:
    """As with fused losses: a language model's loss is known to be divided by the tokens of the whole step."""

    def hide(module: nn.Module, args: Any, outputs: Any) -> Any:
        return {"loss": outputs["loss"]}

    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "no"}
    model = make()
    model.register_forward_hook(hide)
    made, _ = trainer(tmp_path / "out", tmp_path / "run", model=model, **settings)
    made.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", **settings)
    plain.train()
    a, b = stored(tmp_path / "run"), stored(tmp_path / "plain")
    same_rows(tmp_path / "run", tmp_path / "plain", 8)
    assert torch.equal(a.weight, b.weight)
    assert bool(a.loss.isnan().all())


def test_label_smoothing_hides_the_labels(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path / "out", tmp_path / "run", label_smoothing_factor=0.1, gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedError, match="label smoothing"):
        made.train()
    one, _ = trainer(tmp_path / "out", tmp_path / "one", label_smoothing_factor=0.1, max_steps=1, max_grad_norm=0.0)
    one.train()
    plain, _ = trainer(tmp_path / "out", tmp_path / "plain", max_steps=1)
    plain.train()
    assert torch.equal(stored(tmp_path / "one").weight, stored(tmp_path / "plain").weight)
