r"""EK-FAC influence by the package `kronfluence`: the influence function with a Kronecker-factored curvature.

    IF(z, q) = 1/N ∇ℓ(θ, q)ᵀ (H̃ + λI)⁻¹ ∇ℓ(θ, z),      H̃ = (Q_A ⊗ Q_S) Λ (Q_A ⊗ Q_S)ᵀ for each layer

with the eigenvectors of the inputs' and the output gradients' second moments, and Λ the second moments of gradients in
that basis. Positive: the sample helped. Second moments are those of the true gradients (`fisher`), or of draws whose
second moment is the Gauss–Newton matrix (`ggn`). `damping=None` is the package's rule: 0.1 × each layer's mean Λ.

Assumes: a trained minimum, layers independent; nn.Linear and nn.Conv2d only: the result names what is left out.
Grosse et al., Studying Large Language Model Generalization with Influence Functions, 2023.
"""

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..capture.model_state import in_mode
from ..errors import CoverageError, UnsupportedError, UsageError, check_one_of
from ..replay.queries import part, size
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .curvature import output_factors, output_loss
from .gradients import Training, as_influence, survey

HESSIANS = ("fisher", "ggn")
LAYERS = (nn.Linear, nn.Conv2d)


class _Samples(Dataset[Any]):
    """Batches of one; a list would be written out in full, several times, for the package's log."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]


def ekfac(
    recipe: Recipe,
    queries: Any,
    *,
    loss: LossFn | None = None,
    damping: float | None = 1e-3,
    hessian: str = "fisher",
    batch_size: int = 256,
    seed: int = 0,
) -> Influence:
    """EK-FAC influence at the weights of `recipe.model`, on the CPU; batches are tensors, or tuples or dicts of them."""
    package = _package()
    check_one_of("hessian", hessian, HESSIANS)
    model = copy.deepcopy(recipe.model).cpu()
    model = model if list(model.children()) else nn.Sequential(model)  # the package replaces layers inside a model
    tracked, left_out = _tracked(model)
    training, wide = survey(recipe), any(p.dtype == torch.float64 for p in recipe.model.parameters())
    dtype = torch.float64 if wide else torch.float32
    with TemporaryDirectory() as folder, quiet():
        task = _task(package, recipe.loss, loss or recipe.loss, copy.deepcopy(model), tracked, seed)
        prepared = package.prepare_model(model, task)
        analyzer = package.Analyzer("backstory", prepared, task, cpu=True, disable_tqdm=True, output_dir=folder)
        analyzer.set_dataloader_kwargs(package.utils.dataset.DataLoaderKwargs(collate_fn=_join))
        samples = _Samples(_split(recipe, training))
        _fit(package, analyzer, samples, hessian, batch_size, dtype)
        singles = _queries(recipe, queries, loss)
        scores = _scores(package, analyzer, samples, singles, damping, batch_size, dtype)
    caveats = _caveats(damping, hessian, left_out)
    return as_influence(recipe, training, scores / len(training), "EK-FAC (kronfluence)", caveats)


def _package() -> Any:
    try:
        return importlib.import_module("kronfluence")
    except ImportError as error:
        raise UnsupportedError(
            f"this method needs 'kronfluence', which cannot be imported ({error}). Install it with: pip install "
            "'.[baselines]' in the checkout"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, no warnings about the package's own use of torch, and the root logger as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _tracked(model: nn.Module) -> tuple[list[str], list[str]]:
    """`(layers that EK-FAC covers, trained parameters that it does not)`."""
    layers = {n: m for n, m in model.named_modules() if type(m) in LAYERS and m.weight.requires_grad}
    if not layers:
        raise CoverageError("the model has no trained nn.Linear or nn.Conv2d, and EK-FAC covers only these.")
    covered = {id(p) for m in layers.values() for p in m.parameters()}
    return list(layers), [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]


def _task(package: Any, loss: LossFn, query_loss: LossFn, plain: nn.Module, tracked: list[str], seed: int) -> Any:
    """The package's task; `plain` is the model without its hooks."""
    generator = torch.Generator().manual_seed(seed)

    def train(self: Any, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        if not sample:
            return loss(model, batch).sum()
        U = output_factors(plain, loss, batch)  # (B, C, C)
        draw = torch.randn(U.shape[0], U.shape[2], 1, generator=generator).to(U)
        return output_loss(loss, (U @ draw)[:, :, 0])(model, batch).sum()

    members: dict[str, Any] = {
        "compute_train_loss": train,
        "compute_measurement": lambda self, batch, model: query_loss(model, batch).sum(),
        "get_influence_tracked_modules": lambda self: tracked,
    }
    return type("BackstoryTask", (package.Task,), members)()


def _fit(package: Any, analyzer: Any, samples: _Samples, hessian: str, batch_size: int, dtype: torch.dtype) -> None:
    kinds = ("activation_covariance", "gradient_covariance", "per_sample_gradient", "lambda")
    settings = package.FactorArguments(
        strategy="ekfac",
        use_empirical_fisher=hessian == "fisher",
        covariance_max_examples=None,
        lambda_max_examples=None,
        **{f"{k}_dtype": dtype for k in kinds},
    )
    analyzer.fit_all_factors("factors", samples, per_device_batch_size=batch_size, factor_args=settings)


def _scores(
    package: Any,
    analyzer: Any,
    samples: _Samples,
    singles: tuple[_Samples, bool],
    damping: float | None,
    batch_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """∇ℓ(q)ᵀ (H̃ + λI)⁻¹ ∇ℓ(z), (Q, N)."""
    queries, one = singles
    settings = package.ScoreArguments(
        damping_factor=damping,
        aggregate_query_gradients=one,
        **{f"{k}_dtype": dtype for k in ("per_sample_gradient", "precondition", "score")},
    )
    analyzer.compute_pairwise_scores(
        "scores",
        "factors",
        query_dataset=queries,
        train_dataset=samples,
        per_device_query_batch_size=len(queries) if one else min(batch_size, len(queries)),
        per_device_train_batch_size=batch_size,
        score_args=settings,
    )
    scores: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return scores.double()


def _queries(recipe: Recipe, queries: Any, loss: LossFn | None) -> tuple[_Samples, bool]:
    """`(the queries one by one, whether the loss is one number for all of them)`."""
    with in_mode(recipe.model), torch.no_grad():
        losses = (loss or recipe.loss)(recipe.model, queries)
    n = size(queries)
    if losses.dim() and len(losses) != n:
        raise UsageError(
            f"the loss must return one value per query, or a scalar for all, got {len(losses)} losses for {n} queries."
        )
    return _Samples(_singles(queries, range(n), n)), losses.dim() == 0


def _caveats(damping: float | None, hessian: str, left_out: list[str]) -> tuple[str, ...]:
    scale = "0.1 × each layer's mean" if damping is None else f"{damping:g}"
    return (
        "units of the query's loss, for removing the sample and retraining to convergence",
        f"kronfluence {version('kronfluence')}: EK-FAC of the {hessian}, damping {scale}, layers treated as independent",
        "assumes training converged to a minimum; ignores order and time",
        *([f"left out: {', '.join(left_out)}"] if left_out else []),
    )


def _split(recipe: Recipe, training: Training) -> list[Any]:
    """Each sample as a batch of one, in the order of the columns."""
    out: list[Any] = []
    for step, keep in training.visits:
        ids, batch = recipe.batches[step]
        out += _singles(batch, keep, len(ids))
    return out


def _singles(batch: Any, keep: Sequence[int], n: int) -> list[Any]:
    """Samples `keep` of a batch of n, each as a batch of one."""
    for x in _leaves(batch):
        if not isinstance(x, Tensor) or not x.dim() or len(x) != n:
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                "every part of a batch must be a tensor whose first dimension is the batch, so that it can be split "
                f"by sample, got {what} in a batch of {n} samples."
            )
    return [part(batch, i, i + 1) for i in keep]


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping | tuple | list):
        for x in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(x)
    else:
        yield batch


def _join(batches: Sequence[Any]) -> Any:
    """One batch of several."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {k: _join([b[k] for b in batches]) for k in first}
    return tuple(_join([b[i] for b in batches]) for i in range(len(first)))
