"""Recording: a context manager around the user's own training loop.

    with backstory.record(model, optimizer, "runs/digits", loss_reduction="mean") as rec:
        for ids, x, y in loader:
            with rec.step(ids):
                loss_fn(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad()

Hooks exist only inside the `with`. A step that raises, or that a GradScaler skips, is no step. The recorder owns the run; what
happens in a step is the watcher's. Projecting rows that had to wait for Adam's second moment is most of what recording costs
there, and nothing of it is needed by the training: a thread of the writer does it while the next step trains. A step whose
gradient is not finite, and any step on an accelerator (whose work is queued anyway), has its record made at once.
"""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..capture import OptimizerReader, find_blocks, fingerprint
from ..capture.fingerprint import weights as weights_of
from ..capture.ids import as_text
from ..capture.modules import Block
from ..capture.optimizers import inner_optimizer
from ..capture.precision import own_precision
from ..errors import DiskError, UsageError
from ..maths.encoding import row_bytes, worth_it
from ..maths.projection import Shape
from ..store import RunStore, Writer
from ..store.bases import load_bases, save_scales
from .adam import Adaptive
from .mixing import ADDED, UNSEEN
from .outputs import MOST as MOST_OUTPUTS
from .outputs import Loss
from .projecting import fixed_bases
from .replays import Draws, Stopwatch, checkpoint_bytes, known_draws, random_state, training_state
from .resume import open_store
from .settings import Settings, auto_rank, settings_of
from .step import Ids, StepScope, TakenStep
from .warmup import learn, project_spooled, project_step, save_bases, spool_step, spooled_bytes, warmup_of
from .watcher import StepWatcher


def record(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | Path,
    *,
    loss_reduction: str,
    settings: Settings | None = None,
    preset: str | None = None,
    steps: int | None = None,
    checkpoints: int | None = None,
    max_bytes: int | None = None,
    resume: bool = False,
    start: int | None = None,
    scaler: Any = None,
    clip_norm: float | str | None = None,
    recipe: str | None = None,
    recipe_args: Mapping[str, Any] | None = None,
    **short: Any,
) -> "Recorder":
    """Record the training of `model` by `optimizer` into the folder `path`.

    `loss_reduction` is how the training loss combines the samples' losses: "mean", "sum", "token-mean" (the sum over all
    tokens divided by their number in the step) or "weights" (given per batch).
    `preset` is "fast", "default" or "best": how much recording may cost. `settings` is a `backstory.Settings`; its fields can also be
    passed by name: `record(…, projection="random", rank=8)`.
    `steps` is the planned number of steps. With it, recording refuses a run that would exceed the disk or `max_bytes` before it
    writes anything. The weights at the end are stored in the run if they fit; `checkpoints=K` stores those at the start and at K steps in
    between too, and needs `steps`. To continue after an interruption, pass `resume=True` and `start=t`, the step that your own
    checkpoint continues from; recorded steps from t on are replaced.
    """
    optimizer = inner_optimizer(optimizer)
    chosen = settings_of(settings, short, preset).resolved(loss_reduction)
    if checkpoints is not None and not steps:
        raise UsageError("checkpoints=K needs steps=, the planned number of steps, to place the K checkpoints.")
    if recipe is not None and recipe.count(":") != 1:
        raise UsageError(f"recipe must be an import path 'package.module:function', got {recipe!r}.")
    blocks = find_blocks(
        model,
        optimizer,
        rank=chosen.widths(),
        layers=chosen.layers,
        uncovered=chosen.uncovered,
        most=chosen.bound,
    )
    reader = OptimizerReader(model, optimizer, model_as=chosen.optimizer_model, scaler=scaler, clip_norm=clip_norm)
    adaptive = Adaptive(reader, blocks.blocks, chosen.projection)
    extra = {
        "settings": {"loss_reduction": loss_reduction, **chosen.as_config()},
        "recipe": recipe,
        "recipe_args": dict(recipe_args or {}),
    }
    store = open_store(Path(path), model, blocks, optimizer, adaptive, chosen, extra, resume=resume, start=start)
    watcher = StepWatcher(model, blocks, reader, adaptive, chosen, loss_reduction)
    return Recorder(model, watcher, store, chosen, steps=steps, checkpoints=checkpoints, max_bytes=max_bytes)


class Recorder:
    """The context manager that `record` returns."""

    def __init__(
        self,
        model: nn.Module,
        watcher: StepWatcher,
        store: RunStore,
        settings: Settings,
        *,
        steps: int | None,
        checkpoints: int | None,
        max_bytes: int | None,
    ) -> None:
        self.model, self.watcher, self.store, self.settings = model, watcher, store, settings
        self.skipped = 0  # steps that a GradScaler skipped
        self.sees: bool | None = None  # for a trial: whether steps give rows for the curvature of their window
        watcher.reshape([Shape(*b["shape"]) for b in store.config["blocks"]])
        self._boundaries = _boundaries(steps, checkpoints)
        self._at = store.n_steps() or len(store.spool.steps())  # the next step's number
        self._steps, self._grid = steps, store.grid
        self._cut = store.windows.cut_at(self._at)  # gives rows, where none of its window's would
        if self._grid is not None and settings.is_open:
            seen = store.config["outputs"]
            watcher.know(None if seen is None else Loss(**seen))
        self._bases = load_bases(store, (b.name for b in watcher.blocks)) or fixed_bases(
            settings.projection, watcher.layout, settings.seed
        )
        self._warmup = warmup_of(store) if "basis" in store.tensor_names() else 0  # steps behind the bases
        self._spooled_bytes = spooled_bytes(store)
        self._writer = Writer(store)
        watcher.later = self._writer.put_ahead if watcher.on_cpu else _at_once
        self._failure: BaseException | None = None  # of the writer, that was raised
        self._drop_final()
        self._known_weights: int | None = None  # what they were after the last step
        self._budget = Budget(store, self._at, steps, max_bytes)
        self._draws, self._watch = Draws(known_draws(store, self._at)), Stopwatch(watcher.on_cpu)
        self._factored = [b for b, stored in enumerate(store.blocks) if not isinstance(stored, int)]
        self._sound = True  # the model is where the last recorded step left it
        self._open = False

    @property
    def blocks(self) -> list[Block]:
        """The recorded parameters."""
        return self.watcher.blocks

    # -- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        if self._bases is not None and "basis" not in self.store.tensor_names():
            save_bases(self.store, self.watcher.layout, self._bases)
        if self._bases is None:
            self._end_warmup_if_enough()  # a death may have come between the last spooled step and the basis
        else:
            self.watcher.project_with(self._bases)
        self.watcher.attach()
        self._open = True
        if self._at == 0:
            self._draws = Draws(None)
            self._checkpoint(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.watcher.detach()
        self._open = False
        try:
            self._finish(failed=kind is not None)
        except BaseException as failure:
            if error is None and failure is not self._failure:
                raise  # else the user's own error matters more, or this one was raised before; what was committed is safe

    @contextmanager
    def step(
        self, ids: Ids | None = None, weights: Any = None, tokens: Any = None, groups: Any = None
    ) -> Iterator[StepScope]:
        """One optimizer update: forward, backward and `optimizer.step()` go inside. The arguments are those of `s.batch`."""
        self._check_ready()
        self._watch.begin()
        scope = self.watcher.begin(
            self._at, self.store.config.get("ids"), whole=self._warming_up, seen=self._is_seen(self._at)
        )
        scope.random = self._draws.before()
        look = nullcontext() if "mixing" in self.store.config else self.watcher.looking()
        try:
            if ids is not None:
                scope.batch(ids, weights, tokens, groups)
            with look:
                yield scope
            scope.seconds, scope.generators = self._watch.stop(), self._draws.after()
            with own_precision(self.watcher.device):
                self._end(scope)
        except BaseException:
            self._sound = self._sound and not self.watcher.moved
            self.watcher.drop()
            raise
        finally:
            self.watcher.forget()
            self._watch.over()

    def _is_seen(self, step: int) -> bool:
        """Whether a step gives rows for curvature: all do while windows are not settled, but for a first step that tells the loss."""
        if self._grid is None:
            return True
        if self.sees is not None:
            return self.sees
        if (
            self.watcher.loss is not None and step < 2
        ):  # where one step is all that a window needs, the second in place of the first
            return step == 1 and (self._grid.seen == 1 or self._grid.is_seen(1))
        return self._grid.is_seen(step) or step == self._cut

    def hold_windows(self) -> None:
        """For a trial: windows do not end by themselves from here on; the one under way is closed."""
        self.flush()
        if self._grid is not None:
            self.store.windows.settle(self._at, end=True)
            self._grid = self._grid._replace(first=sys.maxsize, growing=False)
            self.store.keep_windows(self._grid)

    @property
    def _warming_up(self) -> bool:
        return self._bases is None or self._at < self._warmup

    def describe(
        self,
        ids: Ids,
        *,
        text: Sequence[str] | None = None,
        image: Sequence[bytes] | None = None,
        label: Sequence[Any] | None = None,
        source: Sequence[str] | None = None,
    ) -> None:
        """Store content of these samples to show with results (images as PNG bytes). Nothing is stored unless passed here."""
        names = label if label is None or isinstance(label, str) else [None if x is None else str(x) for x in label]
        self.store.put_samples(as_text(ids)[0], text=text, image=image, label=names, source=source)

    def flush(self) -> None:
        """Wait until everything recorded so far is on disk (warm-up steps always are)."""
        self._with_writer(self._writer.flush)

    # -- one step ------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if not self._open:
            raise UsageError("rec.step() was called outside `with backstory.record(...)`.")
        if self.watcher.watching:
            raise UsageError("rec.step() was entered inside another rec.step(). Steps cannot be nested.")
        if not self._sound:
            raise UsageError(
                "an update was not recorded, because its step raised an error afterwards, so the model no longer "
                f"matches the run, which ends at step {self._at}. Load your checkpoint of step {self._at} or earlier, "
                "and continue with resume=True, start=."
            )
        self._with_writer(self._writer.check)

    def _end(self, scope: StepScope) -> None:
        taken = self.watcher.end()
        if taken is None:
            if self.watcher.reader.scaler is None:
                raise UsageError(
                    f"optimizer.step() was not called inside rec.step() (step {scope.number}). Move it inside. If a "
                    "GradScaler skips steps, pass scaler= to backstory.record()."
                )
            self.skipped += 1
            self.watcher.drop()
            return
        self._settle_factors(taken)
        self._settle_windows(taken)
        self._budget.spend(self._at, len(scope.ids), *self._bytes_beside(scope))
        if self._warming_up:
            self._keep_for_warmup(taken)
        else:
            self._with_writer(lambda: self._hand_over(taken))
        if self.store.config.get("ids") is None:
            self.store.update_config(ids=scope.id_kind)
        if self.watcher.shared_statistics and not self.store.config.get("shared_statistics"):
            self.store.update_config(shared_statistics=sorted(self.watcher.shared_statistics))
        if "mixing" not in self.store.config:
            self.store.update_config(mixing=self.watcher.mixing or dict.fromkeys(("loss", "layers"), UNSEEN))
            if self.watcher.added:
                warnings.warn(ADDED, stacklevel=4)
        self._at += 1
        self._draws.keep(scope.generators)
        self._watch.keep(scope.seconds)
        self.know_weights()
        if self._at in self._boundaries:
            self._with_writer(self._writer.wait_made)  # a checkpoint of a step that is not recorded would be of no use
            self._checkpoint(self._at)

    def _settle_factors(self, taken: TakenStep) -> None:
        """Before the first row: a matrix that each sample passed once, at one position, has rows that are outer products."""
        if self.settings.projection == "learned":
            return
        if self._at == 0:
            pairs = zip(self.blocks, self.watcher.single, strict=True)
            self.store.keep_factors([stored_as(block.shape, single) for block, single in pairs])
            self._factored = [b for b, stored in enumerate(self.store.blocks) if not isinstance(stored, int)]
        positions = taken.scope.gradients.positions() if self._factored else {}
        if many := [b for b in self._factored if positions.get(b, 1) > 1]:
            raise UsageError(
                f"in step {self._at} a sample passes the layer of {self.blocks[many[0]].name!r} {positions[many[0]]} "
                "times (calls and positions), but in the first step only once, so its gradients are stored as two "
                "factors. Earlier steps are safe. Record with projection='learned', which stores them in full."
            )

    def _settle_windows(self, taken: TakenStep) -> None:
        """By the first step, which tells how many samples there are in one."""
        if not self.settings.windows or self._grid is not None:
            return
        loss, form, chosen = self.watcher.loss, self.watcher.form, self.settings
        if loss is None and chosen.must_show:
            raise UsageError(
                f"curvature={str(chosen.curvature)!r} needs a loss that is the cross-entropy or BCE of the model's outputs, at most "
                f"{MOST_OUTPUTS} of a sample, and the first step does not show one. Nothing was recorded. Use curvature='auto', or "
                "'sampled:D' or 'exact:N' with s.outputs()."
            )
        if chosen.is_open:
            self.settings = replace(self.settings, curvature=form)
            about = {**self.store.config["settings"], "curvature": str(form)}
            self.store.update_config(settings=about, outputs=None if loss is None else loss._asdict())
        self._grid = form.grid(len(taken.scope.ids), self._steps, rank=chosen.window_rank, share=chosen.window_rows)
        self.store.keep_windows(self._grid, own=form.own)

    def _hand_over(self, taken: TakenStep) -> None:
        assert self.watcher.bases is not None
        make = partial(taken.record, self.watcher.bases)
        if taken.finite and self.watcher.on_cpu:
            self._writer.put_later(self._at, make)
        else:
            self._writer.wait_made()
            self._writer.put(make())

    def _with_writer(self, work: Callable[[], None]) -> None:
        """Where a step turns out not to be recordable after its update, the run ends before it."""
        try:
            work()
        except BaseException as error:
            self._failure, self._sound = error, False
            if self._writer.ends_at is not None:
                self._at = self._writer.ends_at
            raise

    # -- warm-up, checkpoints, the end ---------------------------------------------------------------------------

    def _keep_for_warmup(self, taken: TakenStep) -> None:
        step, facts, parts = taken.scope.number, taken.facts(), taken.take_parts()
        if self._bases is not None:
            self._writer.put(project_step(step, parts.items(), facts, self.watcher.layout, self._bases))
            return
        self._spooled_bytes = spool_step(self.store, step, parts, facts, self._spooled_bytes)
        self._end_warmup_if_enough()

    def _end_warmup_if_enough(self) -> None:
        enough = len(self.store.spool.steps()) >= self.settings.warmup_steps
        if enough or self._spooled_bytes >= self.settings.warmup_bytes:
            self._end_warmup()

    @own_precision()
    def _end_warmup(self) -> None:
        self._bases, shapes = learn(self.store, self.watcher.layout, self.settings.seed)
        self._warmup = len(self.store.spool.steps())
        self.watcher.reshape(shapes)
        save_bases(self.store, self.watcher.layout, self._bases, self._warmup)
        for spooled in project_spooled(self.store, self.watcher.layout, self._bases):
            self._writer.put(spooled)
        self._writer.flush()
        self.store.spool.clear()
        self.watcher.project_with(self._bases)

    def _bytes_beside(self, scope: StepScope) -> tuple[int, int]:
        """What a step takes beside its rows, and the checkpoints that are planned after it."""
        own, after = len(scope.random or b""), [t for t in self._boundaries if t > scope.number]
        each = checkpoint_bytes(self.model, self.watcher.reader.optimizer) if after else 0
        now, later = self._window_bytes(scope)
        return own + each * (scope.number + 1 in after) + now, own + each * len(after) + later

    def _window_bytes(self, scope: StepScope) -> tuple[int, int]:
        """What the window keeps that ends with a step, and those that are planned to end with it or later."""
        if self._grid is None:
            return 0, 0
        lo, hi = self._grid.window(scope.number)
        each, p = len(scope.ids) * max(1, self.watcher.form.rows), self.store.width
        vector = row_bytes(self.store.dims, self.store.config["encoding"])
        now = self._grid.rows(lo, hi, each, p) if scope.number + 1 == hi else 0
        later = self._grid.rows(lo, self._steps, each, p) if self._steps is not None and lo < self._steps else 0
        return round(now * vector), round(later * vector)

    def _checkpoint(self, step: int) -> None:
        if self._boundaries:
            state = training_state(self.model, self.watcher.reader.optimizer, self._draws.states)
            if state is not None:
                self.store.save_state(step, state)
            self.store.save_checkpoint(step, weights_of(self.model))
        elif step == 0:  # what the first batch is fetched with
            self.store.save_state(0, random_state(self._draws.states))
        known = dict(self.store.config.get("fingerprints", {}))
        if self.watcher.adaptive.scales is not None:
            save_scales(self.store, step, [b.name for b in self.blocks], self.watcher.adaptive.scales)
        self.store.update_config(fingerprints={**known, str(step): fingerprint(self.model)})

    def _store_final(self, failed: bool) -> None:
        """The final weights, to query the run in another process; without room for them the run is complete all the same."""
        if failed or self._at in self.store.checkpoints():
            return
        size = sum(x.nbytes for x in self.model.state_dict().values())
        try:
            if not self._budget.has_room(size):
                raise DiskError(f"they take {size:,} bytes, which max_bytes= does not allow")
            self.store.save_checkpoint(self._at, weights_of(self.model))
            self.store.update_config(final_weights=self._at)
        except DiskError as error:
            self._leave_weights_out(str(error).removesuffix("."))

    def _leave_weights_out(self, why: str) -> None:
        """Say why the final weights are not in the run, now and where they are wanted."""
        self.store.update_config(no_final_weights=f"not stored: {why}")
        warnings.warn(f"the run is complete, but its final weights are not stored: {why}.", stacklevel=2)

    def _drop_final(self) -> None:
        """On going on: weights that only the end of the part before put there are no checkpoint."""
        last = self.store.config.get("final_weights")
        if last in self.store.checkpoints():
            self.store.delete_tensors(f"checkpoint-{last:08d}")
            self.store.delete_tensors(f"state-{last:08d}")
        self.store.update_config(final_weights=None, no_final_weights=None)

    def know_weights(self) -> None:
        """The model as it is now is what the last step left."""
        self._known_weights = self._versions()

    def _versions(self) -> int:
        """A number that changes when a weight does."""
        return sum(p._version for p in self.model.parameters())

    def _finish(self, failed: bool) -> None:
        try:
            if self._bases is None and self.store.spool.steps() and not failed:  # else they wait, to be resumed
                self._end_warmup()
            self._writer.close()
            self.store.windows.settle(self.store.n_steps(), end=not failed)
            if self._sound and self._at == self.store.n_steps():
                if self._known_weights not in (None, self._versions()):
                    self._leave_weights_out("the model was changed after the last step")
                else:
                    self._checkpoint(self._at)
                    self._store_final(failed)
            timed = {} if self._watch.median is None else {"training": {"seconds_per_step": self._watch.median}}
            counted = {"missed": self.watcher.missed, "changed": self.watcher.weights.changes}
            known = {name: self.store.config.get(name, 0) + more for name, more in counted.items() if more}
            self.store.update_config(skipped=self.skipped, closed=not failed, **timed, **known)
        finally:
            self._writer.close()
            self.store.close()


def stored_as(shape: Shape, single: bool) -> tuple[int, int] | None:
    """The sides (m, n) of rows of `shape` that are stored as two factors: where they are outer products, and m + n < m n."""
    return (shape.r_out, shape.r_in) if single and shape.d_in and worth_it(shape.r_out, shape.r_in) else None


def _boundaries(steps: int | None, checkpoints: int | None) -> set[int]:
    if checkpoints is None or not steps:
        return set()
    return {0, steps} | {round(steps * k / (checkpoints + 1)) for k in range(1, checkpoints + 1)}


def _at_once(step: int, work: Callable[[], None], nbytes: int) -> None:
    """On an accelerator work is queued anyway."""
    work()


class Budget:
    """Counts what is recorded against the disk and `max_bytes`: a plan that would not fit is refused before its first row.

    Rows whose width the warm-up chooses (rank="auto:…") are counted once it has.
    """

    def __init__(self, store: RunStore, began: int, planned: int | None, max_bytes: int | None) -> None:
        self._store, self._began, self._planned, self._max_bytes = store, began, planned, max_bytes
        self._spent = store.size_bytes()
        self._waiting = 0  # rows that are not counted yet
        self._known = auto_rank(store.config["settings"]["rank"]) is None  # how wide a row is
        self._checked = False

    def spend(self, step: int, batch: int, own: int = 0, later: int = 0) -> None:
        """Before the rows of `step` are kept: would the planned run fit, and is there room for these?

        `own` bytes lie beside its rows, `later` in it and in the checkpoints that are planned after it.
        """
        self._waiting += batch
        self._spent += own
        self._known = self._known or "basis" in self._store.tensor_names()
        if not self._known:
            return
        self._spent += self._waiting * self._store.bytes_per_row
        self._waiting = 0
        if self._max_bytes is not None and self._spent > self._max_bytes:
            raise DiskError(
                f"recording stopped before step {step}: the run would exceed max_bytes={self._max_bytes:,}. The "
                f"{step} earlier steps are safe. Raise max_bytes, lower rank=, or choose a smaller encoding=."
            )
        if not self._checked and self._planned:
            self._check_plan(step, batch, self._planned, later)
        self._checked = True

    def has_room(self, extra: int) -> bool:
        """Whether the run stays within `max_bytes` with so many bytes more."""
        return self._max_bytes is None or self._store.size_bytes() + extra <= self._max_bytes

    def _check_plan(self, step: int, batch: int, planned: int, later: int) -> None:
        need = batch * self._store.bytes_per_row * max(0, planned - step) + later
        free = shutil.disk_usage(self._store.path).free
        limit = free if self._max_bytes is None else min(free, self._max_bytes)
        if need > limit:
            raise DiskError(
                f"{planned:,} steps of {batch} samples need about {need:,} bytes ({self._store.bytes_per_row:,} per "
                f"occurrence), but only {limit:,} are available. "
                + ("Nothing was recorded. " if step == self._began else f"The {step} earlier steps are safe. ")
                + "Lower rank=, choose encoding='int8', or free some space."
            )
