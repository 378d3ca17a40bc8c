"""Recipes that callbacks write: answered in a new process, as a recipe written by hand answers."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import modules, rebuilt
from tests.integrations.rebuilt import Attached, Centred, Classifier, Sampled, bert, by_hand, gpt, net_by_hand, trainer
from tests.support.loops import Interrupted
from torch import Tensor, nn
from transformers import TrainerCallback
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.errors import MismatchError
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse
from backstory.integrations.huggingface import BackstoryCallback
from backstory.integrations.written import class_paths
from backstory.replay.recipe import WRITTEN
from backstory.store import RunStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
ROOT = Path(__file__).parents[2]
ANSWER = """
import json, sys
from tests.integrations.test_written import answer
for run in sys.argv[1:]:
    print("ANSWER" + json.dumps(answer(run)))
"""


def answer(run: str) -> dict[str, Any]:
    """`backstory exact RUN --queries q --trust-recipe --json`."""
    done = CliRunner().invoke(app, ["exact", run, "--queries", "q", "--trust-recipe", "--json"])
    return {"code": done.exit_code, "out": done.stdout, "error": repr(done.exception)}


def answered(*runs: Path) -> list[dict[str, Any]]:
    """The same for each run, in a process that has not seen the training."""
    done = subprocess.run([sys.executable, "-c", ANSWER, *map(str, runs)], capture_output=True, text=True, cwd=ROOT)
    lines = [line.removeprefix("ANSWER") for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(lines) == len(runs), done.stderr
    return [json.loads(line) for line in lines]


def same_scores(run: Path, answer: dict[str, Any], recipe: Any) -> None:
    """The stored scores are those of a recipe written by hand, in float64, up to what float32 rounds."""
    assert answer["code"] == 0, answer
    assert json.loads(answer["out"].strip().splitlines()[-1])["method"] == "exact unrolling"
    store = RunStore.open(run)
    (name,) = [n for n in store.tensor_names() if n.startswith("exact-")]
    actual = store.load_tensors(name)["scores"]
    expected = reverse(recipe, QuerySet("q", mean=True)).scores[0]
    assert actual.shape == expected.shape
    assert float(expected.abs().max()) > 1e-4, "there is something to compare"
    assert float((actual - expected).norm() / expected.norm()) < 2e-3


class Stop(TrainerCallback):
    """Raises in the middle of an update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise Interrupted


def closed(made: Any) -> None:
    """What a script does after training raised."""
    next(c for c in made.callback_handler.callbacks if isinstance(c, BackstoryCallback)).close()


def fit(folder: Path, run: Path, module: Any, **more: Any) -> None:
    record = {
        "projection": "learned",
        "encoding": "float32",
        "rank": 2,
        "queries": {"q": modules.points()[: modules.SIZE]},
    }
    made = modules.trainer(folder, run, record=record | more.pop("record", {}), max_epochs=1, **more)
    made.fit(module, modules.loader())


# -- answered in a new process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["same", "new process"])
def test_a_new_process_answers_from_what_the_callbacks_wrote(
    anew: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPT-2 with accumulation, which was killed and went on, a BERT classifier, and a Lightning module."""
    runs = [tmp_path / name for name in ("gpt", "bert", "net")]
    first = trainer(
        gpt(), "gpt", runs[0], accumulate=2, num_train_epochs=4, save_strategy="steps", save_steps=3, callbacks=[Stop()]
    )
    with pytest.raises(Interrupted):
        first.train()
    closed(first)
    again = trainer(gpt(), "gpt", runs[0], accumulate=2, num_train_epochs=4, save_strategy="steps", save_steps=3)
    again.train(resume_from_checkpoint=str(runs[0]) + "-out/checkpoint-3")
    trainer(bert(), "bert", runs[1]).train()
    fit(tmp_path, runs[2], Classifier(4))
    assert "Backstory" not in caplog.text, "there is nothing to say"
    moved = tmp_path / "elsewhere"
    runs[2].rename(moved)
    answers = answered(runs[0], runs[1], moved) if anew else [answer(str(x)) for x in (runs[0], runs[1], moved)]
    same_scores(runs[0], answers[0], by_hand("gpt", gpt, runs[0]))
    same_scores(runs[1], answers[1], by_hand("bert", bert, runs[1]))
    same_scores(moved, answers[2], net_by_hand(moved, modules.points(), modules.MAX_NORM))


@pytest.mark.slow
def test_each_command_has_a_process_of_its_own(tmp_path: Path) -> None:
    trainer(bert(), "bert", tmp_path / "run").train()
    for command in (["exact"], ["query"], ["timeline"]):
        typed = [*command, str(tmp_path / "run"), "--queries", "q", "--trust-recipe", "--json"]
        code = f"import sys; sys.argv = ['backstory', *{typed!r}]; from backstory.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.strip().splitlines()[-1])
    same_scores(
        tmp_path / "run", {"code": 0, "out": '{"method": "exact unrolling"}'}, by_hand("bert", bert, tmp_path / "run")
    )


@pytest.mark.slow
def test_dropout_is_replayed(tmp_path: Path) -> None:
    trainer(gpt(0.1), "gpt", tmp_path / "run").train()
    result = backstory.open(tmp_path / "run").exact(["q"], WRITTEN)
    assert result.scores.isfinite().all()


@pytest.mark.slow
def test_adapters_of_peft_are_written(tmp_path: Path) -> None:
    import peft

    def adapted() -> nn.Module:
        chosen = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        torch.manual_seed(1)
        return peft.get_peft_model(gpt(), chosen)

    trainer(adapted(), "gpt", tmp_path / "run").train()
    assert class_paths(RunStore.open(tmp_path / "run").recipe() or {})[2] == "peft.tuners.lora.config:LoraConfig"
    result = backstory.open(tmp_path / "run").exact(["q"], WRITTEN)
    expected = reverse(by_hand("gpt", adapted, tmp_path / "run"), QuerySet("q", mean=True)).scores
    assert float((result.scores - expected).norm() / expected.norm()) < 2e-3


# -- what is written, and what is not --------------------------------------------------------------------------------


def test_the_losses_of_the_recipe_are_those_that_were_recorded(tmp_path: Path) -> None:
    trainer(gpt(), "gpt", tmp_path / "run", max_steps=1).train()
    store = RunStore.open(tmp_path / "run")
    from backstory.integrations import written

    made = written.recipe(str(store.path))
    ids, batch = made.batches[0]
    block = store.read(0, len(ids), rows=False)
    assert torch.allclose(made.loss(made.model, batch).double(), block.loss, rtol=1e-5)
    assert torch.equal(made.weights(0), block.weight)  # type: ignore[misc]
    assert (batch["input_ids"].dtype, made.clip_norm) == (torch.int64, rebuilt.MAX_NORM)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "backstory" and r.levelno == logging.WARNING]


def test_a_class_of_the_script_is_reported_when_training_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Classifier):
        """Defined inside a function."""

    fit(tmp_path, tmp_path / "inside", Own(4))
    monkeypatch.setattr(Classifier, "__module__", "__main__")
    fit(tmp_path, tmp_path / "main", Classifier(4))
    said = reasons(caplog)
    assert len(said) == 2, "once each"
    assert "Own is defined inside a function" in said[0]
    assert "Classifier is defined in the script itself (__main__)" in said[1]
    assert all('recipe="package.module:function"' in message for message in said)
    for name in ("inside", "main"):
        store = RunStore.open(tmp_path / name)
        assert store.n_steps() == 8
        assert store.config["recipe"] is None
        assert "is defined in" in store.config["no_recipe"]
        assert store.query_sets() == ["q"]
        assert not (store.path / "batches.lance").exists()


def test_what_a_module_does_to_its_samples_together_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What depends on the other samples of a batch is not the loss of single ones; a method of its own takes it as training did."""
    fit(tmp_path, tmp_path / "alone", Centred(4))
    fit(tmp_path, tmp_path / "trainer", Attached(4))
    fit(tmp_path, tmp_path / "wrong", Classifier(4), record={"loss_reduction": "sum"})
    first, second, third = reasons(caplog)
    assert "write the method sample_losses(self, batch)" in first
    assert "not attached to a `Trainer`" in second
    assert "another loss_reduction" in third
    fit(tmp_path, tmp_path / "method", Sampled(4, dropout=0.5))
    assert len(reasons(caplog)) == 3
    assert RunStore.open(tmp_path / "method").config["recipe"] == WRITTEN


def test_looking_at_single_samples_changes_nothing_about_training(tmp_path: Path) -> None:
    weights: list[dict[str, Tensor]] = []
    for recipe in (True, False):
        module = Classifier(4, dropout=0.5)
        torch.manual_seed(3)
        fit(tmp_path, tmp_path / f"run-{recipe}", module, record={"recipe": recipe})
        weights.append(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))
    assert RunStore.open(tmp_path / "run-False").config["recipe"] is None
    assert "no_recipe" not in RunStore.open(tmp_path / "run-False").config


def test_arguments_that_are_not_known_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, tmp_path / "run", modules.Net(), record={"encoding": "float64"})
    assert "'optimizer' is not known: call self.save_hyperparameters()" in reasons(caplog)[0]


def test_batches_beyond_the_limit_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, tmp_path / "run", Classifier(4), record={"batch_bytes": 1000})
    (said,) = reasons(caplog)
    assert "batches of this training are not stored: they take about" in said
    assert "raise batch_bytes=" in said
    run = backstory.open(tmp_path / "run")
    assert run.config["recipe"] == WRITTEN, "model and loss are there"
    with pytest.raises(MismatchError, match=r"stores no batches: they take about .* --recipe package\.module:function"):
        run.exact(["q"], WRITTEN)


def test_another_loss_than_the_models_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(gpt(), "gpt", tmp_path / "run", max_steps=1, label_smoothing_factor=0.1)
    made.train()
    assert "differentiates another loss" in reasons(caplog)[0] or "not a cross-entropy" in reasons(caplog)[0]
    assert RunStore.open(tmp_path / "run").config["recipe"] is None


def test_a_changed_model_mixed_precision_and_a_recipe_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = gpt()
    model.transformer.drop.p = 0.25
    trainer(model, "gpt", tmp_path / "changed", max_steps=1).train()
    trainer(gpt(), "gpt", tmp_path / "half", max_steps=1, bf16=True).train()
    trainer(gpt(), "gpt", tmp_path / "own", max_steps=1, record={"recipe": "mine.training:recipe"}).train()
    changed, half = reasons(caplog)
    assert "it has been changed since ((drop): Dropout(p=0.25" in changed.replace("  ", "")
    assert "mixed precision" in half
    assert RunStore.open(tmp_path / "half").config["recipe"] == WRITTEN
    assert RunStore.open(tmp_path / "own").config["recipe"] == "mine.training:recipe"
