"""Lightning's Trainer with one callback against a loop written by hand: the same rows, up to rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tests.integrations.modules import (
    EPOCHS,
    FULL,
    SAMPLES,
    SIZE,
    Item,
    Net,
    Shuffled,
    Validated,
    by_hand,
    loader,
    net,
    points,
    trainer,
)
from tests.support.loops import Interrupted, same_numbers, same_weights, stored, terms_of
from tests.support.oracles import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import backstory
from backstory.errors import StoreError, UnsupportedError, UsageError
from backstory.integrations.lightning import BackstoryCallback
from backstory.store import RunStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
]
TERMS = terms_of(net(), 8 * EPOCHS, SIZE)


class Stop(Callback):  # type: ignore[misc]
    """Raises in the middle of an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            raise Interrupted


def held_out() -> DataLoader[Any]:
    return DataLoader(points()[:4], batch_size=2)


# -- the same rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_rows_are_those_of_a_loop_by_hand(parts: int, optimizer: Any, tmp_path: Path) -> None:
    """With clipping, a schedule, validation in between, another order in each epoch, and epochs that end inside of an update."""
    module = Validated(optimizer)
    trainer(tmp_path, tmp_path / "run", accumulate_grad_batches=parts).fit(module, loader(), held_out())
    model = by_hand(tmp_path / "hand", accumulate=parts, optimizer=optimizer)
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "hand"), TERMS)
    same_weights(module.state_dict(), model.state_dict(), TERMS)
    assert len(stored(tmp_path / "run").table.step) == {1: 8, 3: 3}[parts] * EPOCHS
    assert RunStore.open(tmp_path / "run").config["closed"]


def test_workers_and_strings_as_ids(tmp_path: Path) -> None:
    names = [f"point {i}" for i in range(SAMPLES)]
    fit = trainer(tmp_path, tmp_path / "run", record={"ids": names})
    fit.fit(Net(), loader(num_workers=2))
    by_hand(tmp_path / "hand")
    a, b = stored(tmp_path / "run"), stored(tmp_path / "hand")
    assert_same(a.rows, b.rows, TERMS)
    assert a.samples == [f"point {i}" for i in b.samples]


def test_loaders_of_a_module_and_of_a_data_module(tmp_path: Path) -> None:
    class Data(LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    class Own(Net):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    trainer(tmp_path, tmp_path / "data").fit(Net(), datamodule=Data())
    trainer(tmp_path, tmp_path / "own").fit(Own())
    same_numbers(stored(tmp_path / "data"), stored(tmp_path / "own"), TERMS)


def test_recording_changes_nothing_about_training(tmp_path: Path) -> None:
    def trained(run: Path | None) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(4)
        module = Net()
        batches: DataLoader[Any] = DataLoader(points(), batch_size=SIZE, shuffle=True)
        before = (batches.dataset, batches.collate_fn, type(batches))
        fit = trainer(tmp_path, run)
        fit.fit(module, batches)
        assert (batches.dataset, batches.collate_fn, type(batches)) == before, "the user's loader is as it was"
        return module.state_dict(), fit.optimizers[0]

    actual, optimizer = trained(tmp_path / "run")
    same_weights(actual, trained(None)[0], TERMS)
    assert not optimizer._optimizer_step_pre_hooks
    assert "integrations" not in optimizer.step.__code__.co_filename


def test_batches_are_what_they_were(tmp_path: Path) -> None:
    """A dict stays a dict, and the key of ids in it is the module's own to use."""
    seen: list[Any] = []

    class Dicts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch)
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

    data = [{"x": x, "y": y, "uid": f"u{i}"} for i, (x, y) in enumerate(points())]
    trainer(tmp_path, tmp_path / "run", record={"ids": "uid"}, max_epochs=1).fit(Dicts(), loader(data))
    assert set(seen[0]) == {"x", "y", "uid"}
    assert stored(tmp_path / "run").samples == [name for batch in seen for name in batch["uid"]]


def test_token_means_take_a_function_of_the_batch(tmp_path: Path) -> None:
    """A loss over the last dimension's entries as if they were tokens: the first 1, 2 or 3 of a sample count."""

    def tokens(batch: Item) -> Tensor:
        return batch[1] + 1

    class Tokens(Net):
        def training_step(self, batch: Item, batch_idx: int) -> Tensor:
            mask = torch.arange(3) <= batch[1][:, None]
            loss: Tensor = (self.net(batch[0]).square() * mask).sum() / mask.sum()
            return loss

    chosen = {"loss_reduction": "token-mean", "tokens": tokens}
    fit = trainer(tmp_path, tmp_path / "run", record=chosen, accumulate_grad_batches=2, max_epochs=1)
    fit.fit(Tokens(), loader())
    actual = stored(tmp_path / "run")
    counted = torch.tensor([int(i) % 3 + 1 for i in actual.samples])
    sums = [counted[i : i + SIZE].sum() for i in range(0, SAMPLES, SIZE) for _ in range(min(SIZE, SAMPLES - i))]
    assert actual.weight.tolist() == pytest.approx([1 / (2 * float(s)) for s in sums])
    with pytest.raises(UsageError, match="needs tokens=, a function of the batch"):
        BackstoryCallback(tmp_path / "other", loss_reduction="token-mean")


def test_half_precision_is_autocast(tmp_path: Path) -> None:
    for name, precision in (("run", "bf16-mixed"), ("whole", "32-true")):
        made = trainer(tmp_path, tmp_path / name, max_epochs=1, precision=precision)
        made.fit(Net().float(), loader(single(points())))
    a, b = (stored(tmp_path / x).rows[:SIZE] for x in ("run", "whole"))
    assert not torch.equal(a, b)
    assert float((a - b).norm() / b.norm()) < 0.05, "bfloat16 has 8 bits"


def test_outputs_for_sampled_curvature_are_given_in_the_training_step(tmp_path: Path) -> None:
    record = BackstoryCallback(tmp_path / "run", loss_reduction="mean", curvature="sampled:2", **FULL)

    class Gives(Net):
        def training_step(self, batch: Item, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            record.scope.outputs(logits, "cross-entropy")
            losses = F.cross_entropy(logits, batch[1], reduction="none")
            record.scope.losses(losses)
            return losses.mean()

    trainer(tmp_path, None, callbacks=[record], max_epochs=1).fit(Gives(), loader())
    assert RunStore.open(tmp_path / "run").config["curvature_rows"] == 2
    assert float(stored(tmp_path / "run").loss.min()) > 0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_steps_that_a_scaler_skips_are_no_steps_of_the_run(tmp_path: Path) -> None:
    def fit(run: str, stop: int = -1, path: Path | None = None) -> Any:
        saves = ModelCheckpoint(tmp_path / f"{run} saved", filename="{epoch}", save_top_k=-1)
        chosen: dict[str, Any] = {
            "precision": "bf16-mixed",
            "enable_checkpointing": True,
            "callbacks": [saves, Stop(stop)],
        }
        made = trainer(tmp_path, tmp_path / run, max_epochs=2, **chosen)
        made.precision_plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-117)
        made.fit(Net().float(), loader(large()), ckpt_path=path, weights_only=False)
        return made

    made = fit("run")
    with pytest.raises(Interrupted):
        fit("halves", stop=12)
    fit("halves", path=tmp_path / "halves saved" / "epoch=0.ckpt")
    same_numbers(stored(tmp_path / "halves"), stored(tmp_path / "run"), 20, torch.bfloat16)
    trainer(tmp_path, tmp_path / "plain", precision="bf16-mixed", max_epochs=2).fit(Net().float(), loader(large()))
    a, b = stored(tmp_path / "run"), stored(tmp_path / "plain")
    skipped = made.global_step - len(a.table.step)
    assert skipped > 0
    assert a.samples == b.samples[skipped * SIZE :]
    assert torch.equal(a.weight, b.weight[skipped * SIZE :])
    first, truth = a.rows[:SIZE], trained_before(skipped)
    assert float((first - truth).norm() / truth.norm()) < 0.05, "the loss scale was not taken out"


def single(data: Any) -> Any:
    """In float32: autocast leaves float64 alone."""
    return [(x.float(), y) for x, y in data]


def large() -> Any:
    return [(10 * x, y) for x, y in single(points())]


def trained_before(step: int) -> Tensor:
    """Rows of the samples of a step, for the model as it was at the beginning."""
    model, data = nn.ModuleDict({"net": net().float()}), large()
    ids = list(Shuffled())[step * SIZE : (step + 1) * SIZE]
    rows = []
    for i in ids:
        model.zero_grad()
        F.cross_entropy(model["net"](data[i][0][None]), data[i][1][None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(rows).double()


# -- interrupted and resumed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "projection"), [(1, "full"), (3, "full"), (1, "learned")])
def test_interrupted_and_resumed_is_as_if_undisturbed(parts: int, projection: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": parts, "enable_checkpointing": True}
    chosen: dict[str, Any] = {"projection": projection, "rank": 2, "warmup_steps": 5}

    def fit(run: str, *more: Any, path: Path | None = None) -> None:
        saves = ModelCheckpoint(tmp_path / f"{run} saved", filename="{epoch}", save_top_k=-1)
        made = trainer(tmp_path, tmp_path / run, record=chosen, callbacks=[saves, *more], **settings)
        made.fit(Net(), loader(), ckpt_path=path, weights_only=False)

    with pytest.raises(Interrupted):
        fit("run", Stop({1: 19, 3: 7}[parts]))
    assert not RunStore.open(tmp_path / "run").config["closed"]
    fit("run", path=tmp_path / "run saved" / "epoch=1.ckpt")
    fit("whole")
    terms, dtype = (TERMS, torch.float64) if projection == "full" else (2 * 30, torch.float32)  # a core is float32
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "whole"), terms, dtype)


def test_a_loader_that_can_resume_may_stop_inside_of_an_epoch(tmp_path: Path) -> None:
    """Lightning skips no batches by itself: it asks the loader to remember how far it was."""

    def fit(run: str, *more: Any, path: Path | None = None) -> None:
        saves = ModelCheckpoint(tmp_path / f"{run} saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        made = trainer(
            tmp_path, tmp_path / run, callbacks=[saves, *more], enable_checkpointing=True, accumulate_grad_batches=2
        )
        made.fit(Net(), Resumable(points(), batch_size=SIZE, sampler=Shuffled()), ckpt_path=path, weights_only=False)

    with pytest.raises(Interrupted):
        fit("run", Stop(7))
    fit("run", path=tmp_path / "run saved" / "step=6.ckpt")
    fit("whole")
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "whole"), TERMS)


class Resumable(DataLoader[Any]):
    """A loader that knows how many batches of its pass it has given."""

    given = skip = 0

    def __iter__(self) -> Any:
        skip, self.skip, self.given = self.skip, 0, 0
        for batch in super().__iter__():
            self.given += 1
            if self.given > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


class Looks(Callback):  # type: ignore[misc]
    """Looks at the run when a checkpoint is about to be written."""

    def __init__(self, run: Path) -> None:
        self.run, self.held = run, list[int]()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.held.append(RunStore.open(self.run).n_steps())


def test_the_run_is_on_disk_before_a_checkpoint_is(tmp_path: Path) -> None:
    looks, saves = Looks(tmp_path / "run"), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    made = trainer(tmp_path, tmp_path / "run", callbacks=[looks, saves], enable_checkpointing=True, max_epochs=2)
    made.fit(Net(), loader())
    assert looks.held == [5, 10, 15]


def test_a_checkpoint_without_a_run_is_refused(tmp_path: Path) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "saved", filename="last")

    trainer(tmp_path, None, callbacks=[saves()], enable_checkpointing=True, max_epochs=1).fit(Net(), loader())
    made = trainer(tmp_path, tmp_path / "run", callbacks=[saves()], enable_checkpointing=True)
    with pytest.raises(UsageError, match=r"at step 8, but .* has no run"):
        made.fit(Net(), loader(), ckpt_path=tmp_path / "saved" / "last.ckpt", weights_only=False)


def test_a_first_run_stays_when_training_begins_again(tmp_path: Path) -> None:
    trainer(tmp_path, tmp_path / "run", max_epochs=1).fit(Net(), loader())
    module = Net()
    with pytest.raises(StoreError, match="already contains a run"):
        trainer(tmp_path, tmp_path / "run", max_epochs=1).fit(module, loader())
    assert backstory.open(tmp_path / "run").n_steps == 8


# -- what cannot be right is refused ---------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Item]:
        yield from points()


class NamedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, (x, y) in enumerate(points()):
            yield {"x": x, "y": y, "sample_id": f"s{i}"}


def test_a_stream_with_ids_is_fetched_one_batch_ahead(tmp_path: Path) -> None:
    class Dicts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    trainer(tmp_path, tmp_path / "run", max_epochs=2).fit(Dicts(), DataLoader(NamedStream(), batch_size=SIZE))
    trainer(tmp_path, tmp_path / "list", max_epochs=2).fit(Net(), DataLoader(points(), batch_size=SIZE))
    a, b = stored(tmp_path / "run"), stored(tmp_path / "list")
    assert_same(a.rows, b.rows, TERMS)
    assert a.samples == [f"s{i}" for i in b.samples]


def test_data_whose_samples_have_no_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no id under the key 'sample_id', only tuple"):
        trainer(tmp_path, tmp_path / "run").fit(Net(), DataLoader(Stream(), batch_size=SIZE))
    with pytest.raises(UnsupportedError, match="from a single torch DataLoader, got list"):
        trainer(tmp_path, tmp_path / "run").fit(Net(), [loader(), loader()])


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match=r"automatic_optimization=False.*loop yourself"):
        trainer(tmp_path, tmp_path / "run", gradient_clip_val=None).fit(module, loader())


def test_several_processes_are_refused(tmp_path: Path) -> None:
    class Two:
        world_size = 2

    with pytest.raises(UnsupportedError, match=r"2 processes.*devices=1"):
        BackstoryCallback(tmp_path / "run", loss_reduction="mean").on_fit_start(Two(), Net())
