"""Write a recipe of what a trainer trains into the run, so that `backstory.integrations.written` can train it again.

Written are: the model's class and its configuration, the optimizer's class and its parameter groups, the clipping norm, how the
loss of a sample is taken (`recipe.json`), the start weights, and the batch of each step. There is no pickle: what would need one
is said when training begins, and recording goes on without. The recipe is named in the run once its first step is recorded.

Two things may stand in the way. An obstacle to the recipe (a class that no other process can import, a loss that is not known)
leaves the run without one. An obstacle to the replay (batches too large, mixed precision) leaves out the batches: model and loss
are there for queries, and exact results are not.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.fingerprint import canonical
from ..capture.fingerprint import weights as weights_of
from ..errors import UsageError
from ..recording.recorder import Recorder
from ..replay import update
from ..replay.recipe import WRITTEN
from ..replay.tape import own_randomness
from ..store.batches import Packer, unpack
from . import written

BATCH_BYTES = 2_000_000_000  # that batches may take in a run
FUNCTION = 'recipe="package.module:function", a function that returns a backstory.Recipe'
logger = logging.getLogger("backstory")


class NotWritable(Exception):
    """Why something cannot be written."""


class RecipeWriter:
    """Writes the recipe of one training into the run that is being recorded."""

    def __init__(self, wanted: bool, batch_bytes: int = BATCH_BYTES, queries: Mapping[str, Any] | None = None) -> None:
        self._wanted, self._limit, self._queries = wanted, batch_bytes, dict(queries or {})
        self._recorder: Recorder | None = None
        self._about: dict[str, Any] | None = None  # what recipe.json will say; None: there is no recipe
        self._settled = False  # the run names its recipe
        self._packer: Packer | None = None  # of the step under way
        self._steps: int | None = None  # as planned
        self._written = 0  # bytes of batches

    # -- training begins -------------------------------------------------------------------------------------------

    def begin(
        self,
        recorder: Recorder,
        describe: Callable[[], dict[str, Any]],
        collate: Callable[[Any], Any],
        steps: int | None,
    ) -> None:
        """Training begins or goes on; `describe` gives what recipe.json is to say, or raises NotWritable."""
        self.end()
        self._recorder, self._steps, self._written = recorder, steps, 0
        with own_randomness():
            self._queries = {name: as_batch(queries, collate) for name, queries in self._queries.items()}
        config = recorder.store.config
        self._settled = config.get("recipe") is not None or "no_recipe" in config
        if self._wanted and config.get("recipe") == WRITTEN:  # training goes on
            self._about = recorder.store.recipe()
        elif self._wanted and not self._settled:
            self._describe(recorder, describe)

    def _describe(self, recorder: Recorder, describe: Callable[[], dict[str, Any]]) -> None:
        try:
            with own_randomness():
                self._about = describe()
        except NotWritable as reason:
            self.refuse(str(reason))
            return
        if self._about["no_replay"] is not None:
            self.refuse_replay(self._about["no_replay"])
        elif 0 not in recorder.store.checkpoints():
            recorder.store.save_checkpoint(0, weights_of(recorder.model))

    @property
    def about(self) -> dict[str, Any]:
        """What recipe.json says."""
        assert self._about is not None
        return self._about

    @property
    def active(self) -> bool:
        """Whether a recipe is being written."""
        return self._about is not None

    @property
    def replays(self) -> bool:
        """Whether batches are being written."""
        return self._about is not None and self._about["no_replay"] is None

    @property
    def first(self) -> bool:
        """Whether the first step is under way."""
        return self.active and not self._settled

    # -- one step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """An update begins."""
        self._packer = Packer()

    def add(self, batch: Any) -> None:
        """A micro-batch, before the model sees it."""
        if not self.replays or self._packer is None:
            return
        try:
            self._packer.add(batch)
        except UsageError as error:
            self.refuse_replay(str(error).removesuffix("."))

    def last(self) -> Any:
        """The micro-batch that was added last, as a replay will read it."""
        assert self._packer is not None
        return unpack(self._packer.pack())[-1]

    def end_step(self, step: int) -> None:
        """The update was made: its batch goes to the writer, before the step itself does."""
        packer, self._packer = self._packer, None
        if not self.replays or packer is None or self._recorder is None:
            return
        batch = packer.pack()
        self._written += len(batch)
        planned = len(batch) * (self._steps or 0) if self.first else self._written
        if planned > self._limit:
            what = f"take about {planned:,} bytes in all" if self.first else f"take {planned:,} bytes by now"
            self.refuse_replay(
                f"they {what}, more than batch_bytes={self._limit:,}. To store them all the same, raise batch_bytes="
            )
        else:
            self._recorder.store.batches.put(step, batch)

    def settle(self) -> None:
        """After a recorded step: the run names its recipe, and has the query sets."""
        if self._recorder is None:
            return
        store = self._recorder.store
        for name in [name for name in self._queries if name not in store.query_sets()]:
            store.put_queries(name, self._queries[name])
        if self._about is not None and not self._settled:
            store.put_recipe(self._about)
            store.update_config(recipe=WRITTEN, recipe_args={})
        self._settled = True

    def end(self) -> None:
        """The recording is over."""
        self._recorder = self._about = self._packer = None

    # -- what cannot be written ------------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """There will be no recipe; says so once, now and where one is wanted."""
        self._about, self._packer = None, None
        self._say(
            f"no recipe is written, because {reason}. The run is recorded all the same; to query it in another process, pass {FUNCTION}"
        )
        assert self._recorder is not None
        self._recorder.store.batches.drop()
        self._recorder.store.update_config(recipe=None, recipe_args={}, no_recipe=reason)

    def refuse_replay(self, reason: str) -> None:
        """There will be no batches; says so once, now and where they are wanted."""
        assert self._about is not None
        assert self._recorder is not None
        self._about["no_replay"] = reason
        self._say(
            f"the batches of this training are not stored: {reason}. The run is recorded and can be queried all the same; for exact results, pass {FUNCTION}"
        )
        self._recorder.store.batches.drop()
        if self._settled:
            self._recorder.store.put_recipe(self._about)

    def _say(self, what: str) -> None:
        assert self._recorder is not None
        logger.warning("Backstory (%s): %s.", self._recorder.store.path, what)


def as_batch(queries: Any, collate: Callable[[Any], Any]) -> Any:
    """A query set as a batch of tensors: as it is, or the items of a data set put together as the trainer does."""
    given = (
        [*queries.values()] if isinstance(queries, Mapping) else [*queries] if isinstance(queries, tuple) else [queries]
    )
    if all(isinstance(x, Tensor) for x in given):
        return queries
    made = collate([queries[i] for i in range(len(queries))])
    values = made.values() if isinstance(made, Mapping) else [made] if isinstance(made, Tensor) else made
    if not all(isinstance(x, Tensor) for x in values):
        raise UsageError("a query set must be a batch of tensors, or a data set whose items the collator makes one of.")
    return dict(made) if isinstance(made, Mapping) else made


# -- what recipe.json says ---------------------------------------------------------------------------------------------


def class_path(kind: type, what: str) -> str:
    """`package.module:Class`, by which another process can import it."""
    name = kind.__qualname__
    if kind.__module__ == "__main__":
        raise NotWritable(
            f"{what} {name} is defined in the script itself (__main__), where no other process can import it: move it to a module"
        )
    if "<locals>" in name:
        raise NotWritable(
            f"{what} {name} is defined inside a function, where no other process can import it: move it to the top of a module"
        )
    path = f"{kind.__module__}:{name}"
    try:
        same = written.load_class(path, kind) is kind
    except UsageError:
        same = False
    if not same:
        raise NotWritable(f"{what} {name} cannot be imported as {path}")
    return path


def as_json(values: Any, what: str) -> Any:
    """The values, as JSON gives them back."""
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise NotWritable(f"{what} cannot be written as JSON ({error})") from error


def describe(model: nn.Module, optimizer: Optimizer, made: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
    """What recipe.json says: `made` is how the model is built, `loss` how the loss of a sample is taken."""
    obstacle, groups = None, None
    try:
        groups = optimizer_of(model, optimizer)
    except NotWritable as reason:
        obstacle = str(reason)
    return {
        "model": made,
        "dtypes": _dtypes(model),
        "frozen": [canonical(n) for n, p in model.named_parameters() if not p.requires_grad],
        "eval": [],
        "optimizer": groups,
        "clip_norm": None,
        "loss": loss,
        "no_replay": obstacle,
    }


def _dtypes(model: nn.Module) -> dict[str, list[str]]:
    """Type -> the parameters and buffers that have it."""
    out: dict[str, list[str]] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point():
            out.setdefault(str(value.dtype).removeprefix("torch."), []).append(canonical(name))
    return {dtype: names for dtype, names in out.items() if dtype != str(torch.float32).removeprefix("torch.")}


def optimizer_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class and its parameter groups, with parameters by name."""
    if (obstacle := update.obstacle(optimizer)) is not None:
        raise NotWritable(obstacle)
    names = {id(p): canonical(name) for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in names for p in parameters):
        raise NotWritable("the optimizer has parameters that are not the model's")
    if any(optimizer.state.get(p) for p in parameters):
        raise NotWritable("the optimizer brings a state from an earlier training")
    groups = [_group(group, names) for group in optimizer.param_groups]
    return {"class": class_path(type(optimizer), "the optimizer"), "groups": groups}


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    numbers = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "initial_lr")
    }
    return {"params": [names[id(p)] for p in group["params"]], **as_json(numbers, "the optimizer's settings")}


def check_rebuilt(model: nn.Module, rebuilt: nn.Module, how: str) -> None:
    """Raise NotWritable where `rebuilt` has other parameters or other modules than the model."""
    a, b = ({canonical(k): tuple(v.shape) for k, v in x.state_dict().items()} for x in (model, rebuilt))
    if differing := sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)):
        raise NotWritable(f"{how} gives other parameters than the model has ({', '.join(differing[:3])})")
    lines = zip(_modules(model), _modules(rebuilt), strict=False)
    if changed := next((x for x, y in lines if x != y), None):
        raise NotWritable(f"{how} gives another model: it has been changed since ({changed})")


def _modules(model: nn.Module) -> Sequence[str]:
    return repr(model).replace("OptimizedModule", type(model).__name__).splitlines()
