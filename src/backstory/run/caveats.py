"""What every result from a recording must say of it."""

from collections.abc import Mapping
from typing import Any

from ..capture.modules import taken_as_frozen
from ..results.recording_report import mixing
from ..store import RunStore
from .recording_report import without


def caveats_of(store: RunStore, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Caveats of a run: what was lost, assumed, not verified, compressed or left out."""
    out = [*store.messages, *config.get("from_checkpoints", {}).get("assumed", ())]
    if dropped := without(config["optimizer"]):
        name = config["optimizer"]["class"]
        cost = "weaker results" if name == "SGD" else "poor agreement with retraining"
        out.append(f"{name}'s steps are treated as plain SGD (the paper's proxy), without {dropped}: expect {cost}")
    if mixed := mixing(config.get("mixing")):
        out.append(mixed)
    if joins := config.get("unverified_joins"):
        where = ", ".join(map(str, joins))
        out.append(
            f"recording was resumed at step {where} without verifying the weights: the run has no fingerprint of them"
        )
    if compressed := config.get("compressed"):
        count, energy = len(compressed["windows"]), compressed["energy"]
        out.append(f"compressed: the {count} windows of curvature retain {energy:.1%} of its trace")
    if missed := config.get("missed"):
        out.append(
            f"gradients stand in for {config['settings']['curvature']} curvature in steps where the model was not called once per "
            f"micro-batch ({missed})"
        )
    if shared := config.get("shared_statistics"):
        out.append(
            f"samples of a batch shared statistics in training ({len(shared)} BatchNorm layers, such as {shared[0]}): a sample's gradient "
            "is what went through its own activations, and leaving a sample out leaves its share of the statistics in place"
        )
    if changed := config.get("changed"):
        out.append(
            f"weights were changed {changed} times between two updates by something else than the recorded optimizer (by hand, by another "
            "optimizer): what this does to the influence of earlier samples is not followed"
        )
    if config.get("left_out"):
        share = float(store.steps().trained.mean()) if store.n_steps() else 1.0
        count = len(config["left_out"])
        out.append(
            f"{count} parameters are not recorded; the recorded ones cover {share:.1%} of the gradient (squared norm)"
        )
    if elsewhere := config.get("elsewhere"):
        out.append(taken_as_frozen(elsewhere))
    return tuple(out)
