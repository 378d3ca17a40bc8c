"""What every test needs: `tests.oracles` importable from anywhere, and one thread, so that sums repeat."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)
