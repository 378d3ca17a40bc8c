"""The coordinates of a run's gradients: its projection bases and, for Adam's coordinates, P^½ at each checkpoint."""

from collections.abc import Iterable, Sequence

from ..errors import FormatError, UsageError
from ..maths.adam import Scale
from ..maths.projection import Basis
from .run_store import RunStore

PRECONDITIONED, RAW = "preconditioned", "raw"  # coordinates of rows, as the config names them


def load_bases(store: RunStore, names: Iterable[str]) -> list[Basis] | None:
    """The committed bases, or None if there are none yet."""
    if "basis" not in store.tensor_names():
        return None
    tensors = store.load_tensors("basis")
    return [Basis(*(tensors.get(f"{name}/{side}") for side in Basis._fields)) for name in names]


def save_scales(store: RunStore, step: int, names: Sequence[str], scales: Sequence[Scale]) -> None:
    """Store the coordinates of the model before update `step`: a query at that step needs them."""
    tensors = {
        f"{name}/{side}": value.cpu().contiguous()
        for name, scale in zip(names, scales, strict=True)
        for side, value in zip(("left", "right"), scale, strict=True)
        if value is not None
    }
    store.save_tensors(f"scale-{step:08d}", tensors)


def is_preconditioned(store: RunStore) -> bool:
    """Whether the run's rows are in Adam's own coordinates."""
    coordinates = store.config["optimizer"].get("coordinates", RAW)
    if coordinates not in (RAW, PRECONDITIONED):
        raise FormatError(
            f"coordinates in config.json must be {RAW!r} or {PRECONDITIONED!r}, got {coordinates!r}. Record the run again."
        )
    return bool(coordinates == PRECONDITIONED)


def load_scales(store: RunStore, step: int) -> list[Scale] | None:
    """The coordinates at `step`, or None where rows are kept as they are."""
    if not is_preconditioned(store):
        return None
    name = f"scale-{step:08d}"
    if name not in store.tensor_names():
        known = [int(n.removeprefix("scale-")) for n in store.tensor_names() if n.startswith("scale-")]
        raise UsageError(
            f"the run stores gradients in the coordinates of {store.config['optimizer']['class']}, and has those of steps "
            f"{sorted(known)} but not of step {step}. Query one of those steps, or record with steps=…, checkpoints=K."
        )
    tensors = store.load_tensors(name)
    return [Scale(tensors[f"{b['name']}/left"], tensors.get(f"{b['name']}/right")) for b in store.config["blocks"]]
