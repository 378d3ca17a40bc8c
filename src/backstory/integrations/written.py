"""The recipe that a trainer's callback writes into a run, read back: no function of the user's is needed.

`recipe.json` names the model's class and its configuration, the optimizer's, and how the loss of a sample is taken; start weights,
batches, weights of the samples and learning rates are the run's own. `backstory.integrations.writing` writes it.
Reading imports the classes that the run names, so that commands ask before they do (`cli/recipes.py`).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..capture.model_state import load_weights
from ..errors import MismatchError, UsageError
from ..replay.queries import part, size
from ..replay.recipe import Recipe
from ..store import RunStore
from ..store.batches import MicroBatches
from .losses import scored

Loss = Callable[[nn.Module, Any], Tensor]


def recipe(run: str) -> Recipe:
    """The training that the callback recorded into the folder `run`."""
    store = RunStore.open(run)
    about = store.recipe()
    if about is None:
        raise UsageError(
            f"{run} has no recipe.json, so its trainer's callback wrote no recipe. Write a function that returns a "
            "backstory.Recipe, and pass --recipe package.module:function."
        )
    model = build_model(about)
    if 0 in store.checkpoints():
        load_weights(model, store.load_checkpoint(0))
    optimizer = build_optimizer(model, about["optimizer"])
    steps = Steps(store, about["no_replay"])
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=partial(all_losses, loss_of(about["loss"])),
        batches=steps,
        loss_reduction="weights",
        weights=steps.weights,
        clip_norm=about["clip_norm"],
        schedule=RecordedRates(optimizer, store.steps().groups["rate"]) if about["optimizer"] else None,
    )


# -- the model and its optimizer ---------------------------------------------------------------------------------------


def class_paths(about: Mapping[str, Any]) -> list[str]:
    """The classes that a written recipe imports, as `package.module:Class`."""
    model = about.get("model") or {}
    places = [model, model.get("config"), model.get("adapter"), about.get("optimizer")]
    return [str(place.get("class")) for place in places if place]


def load_class(path: str, kind: type) -> Any:
    """Import `package.module:Class`, a subclass of `kind`."""
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for piece in name.split("."):
            value = getattr(value, piece)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the run was trained with {path!r}, which cannot be imported ({error}). Install its package, or run from "
            "a place where it can be imported."
        ) from error
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise UsageError(f"{path!r} must be a subclass of {kind.__name__}, got {value!r}. The run's recipe is damaged.")
    return value


def build_model(about: Mapping[str, Any]) -> nn.Module:
    """The model as its class makes it, with the run's types of numbers, frozen parameters and modes."""
    made = about["model"]
    kind = load_class(made["class"], nn.Module)
    model: nn.Module = _from_config(kind, made) if "config" in made else kind(**made["arguments"])
    _cast(model, about["dtypes"])
    frozen, still = set(about["frozen"]), set(about["eval"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for name, module in model.named_modules():
        module.training = name not in still
    _without_trainer(model)
    return model


def _from_config(kind: Any, made: Mapping[str, Any]) -> nn.Module:
    """A model of transformers, and the adapter of peft on it, if there is one."""
    from transformers import PreTrainedConfig

    config = load_class(made["config"]["class"], PreTrainedConfig).from_dict(dict(made["config"]["values"]))
    config._attn_implementation = made["config"]["attention"]
    model: nn.Module = kind(config)
    if "adapter" not in made:
        return model
    import peft

    adapter = load_class(made["adapter"]["class"], peft.PeftConfig)
    adapted: nn.Module = peft.get_peft_model(model, adapter(**made["adapter"]["values"]))
    return adapted


def _cast(model: nn.Module, dtypes: Mapping[str, Sequence[str]]) -> None:
    """Give parameters and buffers the types that they had."""
    known = {name: getattr(torch, dtype) for dtype, names in dtypes.items() for name in names}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name in known:
            value.data = value.data.to(known[name])


def _without_trainer(model: nn.Module) -> None:
    """Let what a Lightning module logs go nowhere: without a Trainer it would warn at each call."""
    for module in model.modules():
        if callable(getattr(module, "training_step", None)):
            for name in ("log", "log_dict"):
                object.__setattr__(module, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """As if logged."""


def build_optimizer(model: nn.Module, about: Mapping[str, Any] | None) -> Optimizer:
    """The optimizer with its parameter groups; one that stands still where the run names none."""
    if about is None:
        return SGD(model.parameters(), lr=0.0)
    known = dict(model.named_parameters())
    groups = [{**_with_tuples(group), "params": [known[name] for name in group["params"]]} for group in about["groups"]]
    optimizer: Optimizer = load_class(about["class"], Optimizer)(groups)
    return optimizer


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


class RecordedRates:
    """The learning rates that the run recorded, in the place of the schedule that made them."""

    def __init__(self, optimizer: Optimizer, rates: NDArray[np.float64]) -> None:
        self._optimizer, self._rates, self._at = optimizer, rates.tolist(), 0
        self._set()

    def step(self) -> None:
        """An update was made."""
        self._at += 1
        self._set()

    def _set(self) -> None:
        if self._at < len(self._rates):
            for group, rate in zip(self._optimizer.param_groups, self._rates[self._at], strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back there."""
        self._at = int(state["at"])
        self._set()


# -- the loss ----------------------------------------------------------------------------------------------------------


def loss_of(about: Mapping[str, Any]) -> Loss:
    """The loss of each sample of a micro-batch."""
    if about["kind"] == "cross-entropy":
        return CrossEntropy(about["shifted"], about["labels"])
    return {"sample_losses": own_losses, "training_step": single_losses}[about["kind"]]


def all_losses(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """(B,) over the micro-batches of a step, or of any other batch."""
    if isinstance(batch, MicroBatches):
        return torch.cat([loss(model, one) for one in batch])
    return loss(model, batch)


@dataclass(frozen=True)
class CrossEntropy:
    """−log p of a sample's labels, summed over its tokens, as `integrations.losses` takes it when recording."""

    shifted: bool  # logits are compared with the next label
    labels: bool  # whether the model needs the labels to make logits

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """(B,) for a dict of the model's inputs, `labels` among them."""
        if not isinstance(batch, Mapping):
            raise UsageError(
                "a query of this run must be a dict of the model's inputs with 'labels', as the trainer's batches are, "
                f"got {type(batch).__name__}."
            )
        inputs = dict(batch) if self.labels else {k: v for k, v in batch.items() if k not in ("labels", "shift_labels")}
        labelled = scored(dict(batch), model(**inputs), self.shifted)
        if labelled is None:
            raise UsageError(
                f"the batch has {sorted(batch)}, but labels that fit the model's logits are needed. Pass the model's "
                "inputs with 'labels', as the trainer's batches are."
            )
        return labelled.each()


def own_losses(model: nn.Module, batch: Any) -> Tensor:
    """What the module's own `sample_losses` gives."""
    module: Any = model
    losses: Tensor = module.sample_losses(batch)
    if not isinstance(losses, Tensor) or losses.shape != (size(batch),):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(f"sample_losses must return one loss per sample, ({size(batch)},), got {shape}.")
    return losses


def single_losses(model: nn.Module, batch: Any) -> Tensor:
    """`training_step` on each sample alone."""
    return torch.stack([_single(model, part(batch, i, i + 1)) for i in range(size(batch))])


def _single(model: nn.Module, batch: Any) -> Tensor:
    module: Any = model
    parameters = inspect.signature(module.training_step).parameters
    output = module.training_step(batch, 0) if len(parameters) > 1 else module.training_step(batch)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss.reshape(())


# -- the steps ---------------------------------------------------------------------------------------------------------


class Steps(Sequence[tuple[list[int | str], Any]]):
    """The ids and the batch of each step; a batch is read when it is wanted."""

    def __init__(self, store: RunStore, obstacle: str | None) -> None:
        self._store, self._obstacle = store, obstacle

    def __len__(self) -> int:
        steps, stored = self._store.n_steps(), len(self._store.batches)
        if self._obstacle is None and stored < steps:
            self._obstacle = "they were erased" if not stored else f"only those of {stored} of {steps} steps are there"
        if self._obstacle is not None:
            raise MismatchError(
                f"{self._store.path} cannot be replayed, because it stores no batches: {self._obstacle}. Queries of the "
                "recording work. For exact results write a function that returns a backstory.Recipe, and pass "
                "--recipe package.module:function."
            )
        return steps

    def __getitem__(self, step: Any) -> Any:
        if not 0 <= step < len(self):
            raise IndexError(step)
        parts = self._store.batches.read(step)
        return self._columns[0][step], parts[0] if len(parts) == 1 else parts

    def weights(self, step: int) -> Tensor:
        """The weight of each sample in the loss of a step, (B,)."""
        return self._columns[1][step]

    @cached_property
    def _columns(self) -> tuple[list[list[int | str]], list[Tensor]]:
        """Ids and weights of all steps."""
        sizes: list[int] = self._store.steps().rows.tolist()
        block = self._store.read(0, sum(sizes), rows=False, samples=True)
        whole, ends = self._store.config.get("ids") == "int", np.cumsum([0, *sizes])
        names: list[int | str] = [int(name) if whole else name for name in block.samples or ()]
        return [names[a:b] for a, b in pairwise(ends)], list(block.weight.split(sizes))
