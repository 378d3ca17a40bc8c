"""Stored sides and cores as the matrices that they stand for."""

import torch
from torch import Tensor


def as_matrix(side: Tensor | None, d: int) -> Tensor:
    """(d, r): the identity for None, one column of it for each of chosen coordinates, else the matrix itself."""
    eye = torch.eye(d, dtype=torch.float64)
    if side is None:
        return eye
    return side.double() if side.is_floating_point() else eye[:, side]
