"""A small net in Lightning's Trainer, and the same training written by hand."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from tests.support.loops import generator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import backstory
from backstory.integrations.lightning import BackstoryCallback

SAMPLES, SIZE, EPOCHS, MAX_NORM = 22, 3, 3, 0.5
FULL: dict[str, Any] = {"projection": "full", "encoding": "float64"}
Item = tuple[Tensor, Tensor]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def net() -> nn.Sequential:
    """In float64, so that two trainings agree to many digits."""
    made = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for i, p in enumerate(made.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=generator(i)))
    return made


def points(n: int = SAMPLES) -> Any:
    x = torch.randn(n, 5, generator=generator(7)).double()
    return [(x[i], torch.tensor(i % 3)) for i in range(n)]


class Shuffled(Sampler[int]):
    """Another order in each epoch, known by its number, as a training that is to be resumed needs it."""

    def __init__(self, n: int = SAMPLES) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=generator(100 + self.epoch)).tolist())


class Net(LightningModule):  # type: ignore[misc]
    """A classifier with AdamW and a schedule that goes down at every update."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net, self.kind = net(), optimizer

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.05, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.95**t)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Validated(Net):
    """The same with a look at other data now and then."""

    def validation_step(self, batch: Item, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def loader(data: Any = None, **more: Any) -> DataLoader[Any]:
    chosen = points() if data is None else data
    return DataLoader(chosen, batch_size=SIZE, sampler=Shuffled(len(chosen)), **more)


def trainer(
    folder: Path, run: Path | None, *, record: dict[str, Any] | None = None, callbacks: Sequence[Any] = (), **more: Any
) -> Trainer:
    """A Trainer that records into `run`."""
    recording = [] if run is None else [BackstoryCallback(run, **{"loss_reduction": "mean", **FULL, **(record or {})})]
    chosen = {
        "max_epochs": EPOCHS, "gradient_clip_val": MAX_NORM, "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(default_root_dir=folder, callbacks=[*recording, *callbacks], **{**chosen, **more})


def by_hand(run: Path, *, accumulate: int = 1, optimizer: Any = torch.optim.AdamW, **settings: Any) -> nn.Module:
    """The same training without a Trainer; names of parameters are those inside the Lightning module."""
    model = nn.ModuleDict({"net": net()})
    made, data = optimizer(model.parameters(), lr=0.05, weight_decay=0.1), points()
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda t: 0.95**t)
    settings = {"loss_reduction": "weights", **FULL, **settings}
    with backstory.record(model, made, run, **settings) as rec:
        for epoch in range(EPOCHS):
            order = torch.randperm(SAMPLES, generator=generator(100 + epoch)).tolist()
            parts = [order[i : i + SIZE] for i in range(0, SAMPLES, SIZE)]
            for k in range(0, len(parts), accumulate):
                made.zero_grad()
                with rec.step() as s:
                    for part in parts[k : k + accumulate]:
                        s.batch(
                            part, weights=torch.full((len(part),), 1 / (len(part) * accumulate), dtype=torch.float64)
                        )
                        x, y = torch.stack([data[i][0] for i in part]), torch.stack([data[i][1] for i in part])
                        (F.cross_entropy(model["net"](x), y) / accumulate).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                    made.step()
                schedule.step()
    return model
