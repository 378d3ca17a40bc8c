"""Speed, measured against rivals in the same run. Knows nothing of the command line."""

from .embedding import bench_embed
from .recording import bench_record

__all__ = ["bench_embed", "bench_record"]
