"""A question about a run in the run's own coordinates, asked of the model that the run knows."""

from typing import Any

from torch import Tensor, nn

from ..capture import canonical, fingerprint
from ..capture.modules import Block, Blocks
from ..errors import MismatchError, StoreError
from ..maths.layers import Rule, rule_for
from ..maths.projection import Basis, Shape, shape_of
from ..store import RunStore
from ..store.bases import load_bases, load_scales
from .gradients import LossFn, query_rows


def question(
    store: RunStore,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    step: int,
    *,
    mode: str = "eval",
    unverified: bool = False,
) -> tuple[Tensor, list[str]]:
    """`(query gradients (Q, dims), what the answer must say of them)`; a model that is not the one of `step` is refused."""
    blocks, bases = blocks_of(store, model), bases_of(store)
    notes = [*check_model(store, model, step, unverified), f"the model was asked in {mode} mode"]
    return query_rows(model, loss_fn, batch, blocks, bases, load_scales(store, step), mode=mode), notes


def checkpoints(store: RunStore) -> list[int]:
    """Steps whose weights are stored in the run."""
    heads = [n.removeprefix("checkpoint-") for n in store.tensor_names() if n.startswith("checkpoint-")]
    return sorted(int(x) for x in heads)


def check_model(store: RunStore, model: nn.Module, step: int, unverified: bool = False) -> list[str]:
    """Refuse a model that is not the one of `step`; what could not be checked must be allowed, and is said."""
    fingerprints = store.read_config().get("fingerprints", {})
    known = fingerprints.get(str(step))
    if known is None and not unverified:
        steps = ", ".join(sorted(fingerprints, key=int))
        raise MismatchError(
            f"the run knows the weights of steps {steps}, not those of step {step}, so it cannot tell whether this is "
            "the right model. Ask at one of those steps, record with steps=…, checkpoints=K, or, if you are sure of the model, "
            "pass unverified=True."
        )
    if known is None:
        return [f"the model could not be verified: the run has no fingerprint of step {step}"]
    if (found := fingerprint(model)) != known:
        stored = f" or load it with run.load_weights(model, {step})" if step in checkpoints(store) else ""
        raise MismatchError(
            f"the model is not the one of step {step} (fingerprint {found}, expected {known}). "
            f"Pass the trained model unchanged and in its own precision{stored}."
        )
    return []


def blocks_of(store: RunStore, model: nn.Module) -> Blocks:
    """The recorded parameters, found in `model` by name."""
    parameters = {canonical(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    blocks = []
    for b in store.config["blocks"]:
        recorded = Shape(*b["shape"])
        if b["name"] not in parameters:
            raise MismatchError(f"the model has no parameter {b['name']!r}; build the model that was recorded.")
        shape = parameters[b["name"]].shape
        if shape_of(shape, None)[:2] != recorded[:2]:
            raise MismatchError(
                f"the model's {b['name']!r} has shape {tuple(shape)}, which is not that of the recorded model "
                f"({recorded.d_out} × {recorded.d_in or 1}); build the model that was recorded."
            )
        blocks.append(Block(b["name"], parameters[b["name"]], b["group"], recorded))
    return Blocks(blocks, _owners(model, blocks), [])


def _owners(model: nn.Module, blocks: list[Block]) -> dict[nn.Module, tuple[Rule, dict[str, int]]]:
    number = {id(b.parameter): i for i, b in enumerate(blocks)}
    owners: dict[nn.Module, tuple[Rule, dict[str, int]]] = {}
    for module in model.modules():
        held = {local: number[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in number}
        rule = rule_for(module)
        if held and rule is not None:
            owners[module] = (rule, held)
    return owners


def bases_of(store: RunStore) -> list[Basis]:
    """The run's projection."""
    bases = load_bases(store, (b["name"] for b in store.config["blocks"]))
    if bases is None:
        raise StoreError("the run has no basis yet: its recording stopped during warm-up. Resume it.")
    return bases
