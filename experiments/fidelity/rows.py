"""The rows of the fidelity table: names, what each of them models, and which function computes it."""

from backstory.baselines.ekfac import ekfac
from backstory.baselines.similarity import gradient_cosine, gradient_dot
from experiments.data.images import OPTIMIZERS
from experiments.fidelity.methods import (
    CLASSES,
    full,
    full_corrected,
    influence,
    influence_at,
    no_propagation,
    post_hoc,
    recorded,
    representation,
    tracin_checkpoints,
    trak_scores,
)
from experiments.fidelity.problem import Method

PAPERS_DAMPING = 1e-3


def methods(optimizer: str) -> list[Method]:
    """All rows for a run of this optimizer, the paper's own method first."""
    return [*_full_rows(optimizer), *_recorded_rows(optimizer), *_post_hoc_rows(optimizer)]


def proxy(optimizer: str) -> str:
    """What a plain SGD step of the same rate is: the step itself, or a proxy."""
    return "sgd" if optimizer == "sgd" else "sgd proxy"


def _full_rows(optimizer: str) -> list[Method]:
    as_what = {"aware": optimizer, "factored": f"{optimizer}, factored", "proxy": proxy(optimizer)}

    def row(name: str, curvature: str, form: str, model: str = "aware") -> Method:
        runs = ("adamw",) if model == "factored" else OPTIMIZERS
        shown = f"{as_what[model]}, {form}"
        return Method(name, "full", curvature, shown, lambda p: full(p, curvature, form, model), optimizers=runs)

    return [
        row("paper", "empirical", "literal", "proxy"),
        row("full-empirical-implicit", "empirical", "implicit"),
        row("full-empirical-auto", "empirical", "auto"),
        row("full-empirical-factored", "empirical", "auto", "factored"),
        row("full-exact", "exact", "literal"),
        row("full-exact-factored", "exact", "literal", "factored"),
        Method("full-exact-corrected", "full", "exact", "sgd, literal, corrected", full_corrected, optimizers=("sgd",)),
    ]


def _recorded_rows(optimizer: str) -> list[Method]:
    as_what = "adamw, factored" if optimizer == "adamw" else optimizer

    def row(name: str, projection: str, rank: int, curvature: str, kind: str = "joint") -> Method:
        where = f"{projection} {rank}×{rank}" + (f", {kind}" if kind in ("per layer", "epoch") else "")
        shown = "exact" if curvature == exact else curvature
        how = f"{as_what}, auto, corrected" if kind == "corrected" else f"{as_what}, auto"
        return Method(name, where, shown, how, lambda p: recorded(p, projection, rank, curvature, kind))

    exact = f"exact:{CLASSES}"
    return [
        row("learned-16-empirical", "learned", 16, "empirical"),
        row("learned-16-sampled-1", "learned", 16, "sampled:1"),
        row("learned-16-sampled-4", "learned", 16, "sampled:4"),
        row("learned-16-exact", "learned", 16, exact),
        row("learned-16-sampled-4-epoch", "learned", 16, "sampled:4", "epoch"),
        row("learned-16-exact-epoch", "learned", 16, exact, "epoch"),
        row("learned-16-exact-corrected", "learned", 16, exact, "corrected"),
        row("learned-16-empirical-per-layer", "learned", 16, "empirical", "per layer"),
        row("learned-16-exact-per-layer", "learned", 16, exact, "per layer"),
        row("random-16-empirical", "random", 16, "empirical"),
        row("random-16-exact", "random", 16, exact),
        row("random-32-empirical", "random", 32, "empirical"),
        row("random-32-exact", "random", 32, exact),
    ]


def _post_hoc_rows(optimizer: str) -> list[Method]:
    none, steps = "none", proxy(optimizer)
    return [
        Method("no-propagation", "full", none, steps, no_propagation),
        Method("tracin", "full", none, steps, tracin_checkpoints),
        Method("gradient-dot", "full", none, none, lambda p: post_hoc(p, gradient_dot)),
        Method("gradient-cosine", "full", none, none, lambda p: post_hoc(p, gradient_cosine)),
        Method("influence-1e-3", "random 64×64", "empirical", none, lambda p: influence_at(p, PAPERS_DAMPING, rank=64)),
        Method("influence-swept", "random 64×64", "empirical", none, lambda p: influence(p, rank=64)),
        Method("influence-full-swept", "full", "empirical", none, influence, default=False),
        Method("influence-ggn-swept", "random 32×32", "exact", none, lambda p: influence(p, hessian="ggn", rank=32)),
        Method("trak", "random 32×32", "empirical", none, lambda p: trak_scores(p, "margin")),
        Method("trak-loss", "random 32×32", "empirical", none, lambda p: trak_scores(p, "loss")),
        Method("representation", "last layer's input", none, none, representation),
        Method(
            "ekfac", "full", "exact", none, lambda p: post_hoc(p, ekfac, damping=None, hessian="ggn"), "kronfluence"
        ),
    ]
