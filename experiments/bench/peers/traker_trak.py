"""TRAK by its authors: margins of the trained classifier, dense random projection; on a CPU by its BasicProjector.

The projection matrix is drawn anew for each batch, so batches are as large as memory allows.
"""

from importlib import import_module
from pathlib import Path

import torch

from experiments.bench.peers.harness import DIMS, Bench, run, size_of

AT_ONCE = 1000


def measure(bench: Bench) -> None:
    """Train, featurize, score."""
    package, projectors = import_module("trak"), import_module("trak.projectors")
    model = bench.trained().eval()
    work, dims, full = bench.work, DIMS * DIMS, sum(p.numel() for p in model.parameters())
    projector = projectors.BasicProjector(
        full, dims, 0, projectors.ProjectionType.normal, "cpu", dtype=torch.float32, block_size=128
    )
    rival = package.TRAKer(
        model=model, task="image_classification", train_set_size=work.samples, save_dir="trak", device="cpu",
        projector=projector, use_half_precision=False,
    )  # fmt: skip
    weights = model.state_dict()

    def index() -> None:
        rival.load_checkpoint(weights, model_id=0)
        for x, y in zip(bench.x.split(AT_ONCE), bench.y.split(AT_ONCE), strict=True):
            rival.featurize(batch=(x, y), num_samples=len(x))
        rival.finalize_features()

    def ask() -> object:
        rival.start_scoring_checkpoint("bench", weights, model_id=0, num_targets=work.n_queries)
        rival.score(batch=bench.queries, num_samples=work.n_queries)
        return rival.finalize_scores("bench")

    bench.time("index", index)
    scores = torch.as_tensor(bench.time("query", ask))
    assert scores.shape == (work.samples, work.n_queries), scores.shape
    bench.facts.update(
        configuration=f"dense random projection to {dims} in all, margins, no time", dims=dims,
        store_bytes=size_of(Path("trak")), kept="on disk", finite=bool(torch.isfinite(scores).all()),
    )  # fmt: skip


if __name__ == "__main__":
    run("traker", measure)
