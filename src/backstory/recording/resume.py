"""Where a recording begins: a new run, or an existing one truncated to the step that training resumes from."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..capture.fingerprint import fingerprint
from ..capture.modules import Blocks
from ..capture.optimizers import dropped
from ..errors import MismatchError, StoreError, UsageError
from ..maths.projection import Shape
from ..store import RunStore
from ..store.bases import RAW, load_bases
from .adam import Adaptive
from .settings import Settings, provenance
from .warmup import project_spooled, settle_layout


def open_store(
    path: Path,
    model: nn.Module,
    blocks: Blocks,
    optimizer: Optimizer,
    adaptive: Adaptive,
    settings: Settings,
    config: Mapping[str, Any],
    *,
    resume: bool,
    start: int | None,
) -> RunStore:
    """The run to record into: a new one with this `config`, or an old one brought back to step `start`."""
    table = [{"name": b.name, "group": b.group, "shape": list(b.shape)} for b in blocks.blocks]
    if not resume:
        if start:
            raise UsageError(f"start={start} needs resume=True. A new run begins at step 0.")
        with suppress(StoreError):  # a run that is damaged, or that somebody writes, is refused below
            _replace_empty(path)
        more = {
            "blocks": table,
            "left_out": blocks.left_out,
            **({"elsewhere": blocks.elsewhere} if blocks.elsewhere else {}),
            "optimizer": {
                "class": type(optimizer).__name__,
                "modelled_as": settings.optimizer_model,
                "coordinates": adaptive.coordinates,
                **({"dropped": dropped(optimizer)} if settings.optimizer_model == "sgd" else {}),
            },
            "provenance": provenance(str(blocks.blocks[0].parameter.device)),
            **config,
        }
        return RunStore.create(
            path,
            layers=[(b.name, b.shape.dims) for b in blocks.blocks],
            encoding=settings.encoding,
            n_groups=len(optimizer.param_groups),
            config=more,
            curvature_rows=0 if settings.windows else settings.form.rows,
            split=settings.form.split and not settings.windows,
            windows=settings.windows,
            diagonal=adaptive.diagonal,
        )
    store = RunStore.open(path, write=True)
    try:
        _go_on(store, model, table, optimizer, adaptive, config["settings"], start, settings.is_open)
    except BaseException:
        store.close(compact=False)
        raise
    return store


def _replace_empty(path: Path) -> None:
    """Make room where an attempt that failed in its first step left a run that holds nothing."""
    if RunStore.open(path).empty:
        with RunStore.open(path, write=True) as store:
            store.discard()


def _go_on(
    store: RunStore,
    model: nn.Module,
    table: list[dict[str, Any]],
    optimizer: Optimizer,
    adaptive: Adaptive,
    settings: Mapping[str, Any],
    start: int | None,
    decided: bool,
) -> None:
    """Bring a run that is opened again to step `start`."""
    if store.config.get("compressed"):
        raise UsageError("a compressed run cannot be recorded into. Continue the run that it was compressed from.")
    _check_same(store, table, settings, decided=decided)
    _check_optimizer(store, optimizer, adaptive)
    settle_layout(store)
    layout = [(b["name"], Shape(*b["shape"])) for b in store.config["blocks"]]
    bases = load_bases(store, (name for name, _ in layout))
    if bases is not None and store.spool.steps():
        store.append(list(project_spooled(store, layout, bases)))
        store.spool.clear()
    n = store.n_steps() or len(store.spool.steps())
    if start is None:
        raise UsageError(
            f"resume=True needs start=, the step that your own checkpoint continues from. The run has {n} steps: "
            f"start={n} appends to it, and a smaller start replaces the later steps."
        )
    if start < 0:
        raise UsageError(f"start must be between 0 and {n}, got {start}.")
    if start > n:
        raise StoreError(
            f"the run has steps 0 to {n - 1}, so it cannot continue from step {start}: steps {n} to {start - 1} would "
            f"be missing. Resume training from a checkpoint at step {n} or earlier."
        )
    known = store.config.get("fingerprints", {})
    if known.get(str(start)) not in (None, fingerprint(model)):
        raise MismatchError(
            f"the model's weights are not those of step {start}, from which recording should continue. Load your "
            "checkpoint of that step into the model before recording. Nothing was changed."
        )
    if start <= store.n_steps():
        store.truncate(start)
    else:  # still in the warm-up: there is no table to cut
        store.spool.clear(start)
        store.drop_checkpoints_after(start)
        store.batches.truncate(start)
    joins = [t for t in store.config.get("unverified_joins", []) if t < start]
    joins += [] if str(start) in known else [start]
    earlier = {k: v for k, v in known.items() if int(k) <= start}
    about = dict(store.config["optimizer"])
    if "dropped" in about:  # and what its model leaves out from here on
        about["dropped"] = list(dict.fromkeys([*about["dropped"], *dropped(optimizer)]))
    store.update_config(closed=False, fingerprints=earlier, unverified_joins=joins, optimizer=about)


def _check_same(store: RunStore, table: list[dict[str, Any]], now: Mapping[str, Any], *, decided: bool = False) -> None:
    """Raise where layers or settings are others; a curvature that a first step has `decided` on is the run's."""
    old, new = ({b["name"]: (b["group"], b["shape"][:2]) for b in x} for x in (store.config["blocks"], table))
    if list(old.items()) != list(new.items()):
        differing = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
        raise MismatchError(
            f"the model or its optimizer groups differ from the run in {', '.join(differing[:5])}. Resume with the "
            "same model and settings, or record into a new folder."
        )
    before = store.config["settings"]
    ours = {"curvature"} if decided and "outputs" in store.config else set()
    changed = sorted(k for k in now if not k.startswith("warmup") and k not in ours and before.get(k) != now[k])
    if changed:
        pairs = ", ".join(f"{k}: {before.get(k)!r} in the run, {now[k]!r} now" for k in changed)
        raise MismatchError(f"settings changed ({pairs}). Resume with the run's settings, or record into a new folder.")


def _check_optimizer(store: RunStore, optimizer: Optimizer, adaptive: Adaptive) -> None:
    """Rows of another optimizer would be in other coordinates."""
    before, now = store.config["optimizer"], type(optimizer).__name__
    if before["class"] != now or before.get("coordinates", RAW) != adaptive.coordinates:
        raise MismatchError(
            f"the run was recorded with {before['class']}, but the optimizer is {now}. Resume with the run's "
            "optimizer, or record into a new folder."
        )
