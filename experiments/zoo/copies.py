r"""∂L/∂W⁽ᶻ⁾ where each sample z has a copy of the weights of its own: the truth where samples mix inside the model.

Each layer with parameters is called with its whole input and, for each sample, with a copy of its weights; only that sample's part of the
output is kept. Samples meet in what the layers then do with one another's activations (the statistics of BatchNorm), and in nothing else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def own_copies(
    model: nn.Module, inputs: dict[str, Tensor], losses: Callable[[Any, dict[str, Tensor]], Tensor]
) -> Tensor:
    """Rows of all parameters, (B, Σ dims): the gradient of the sum of the losses."""
    size = len(next(iter(inputs.values())))
    copies = {n: [p.detach().clone().requires_grad_() for _ in range(size)] for n, p in model.named_parameters()}
    for path, module in model.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if own:
            _replace(module, {n: copies[f"{path}.{n}" if path else n] for n in own}, size)
    total = losses(model(**inputs), inputs).sum()
    flat = [copies[n][z] for z in range(size) for n in copies]
    grads = torch.autograd.grad(total, flat, allow_unused=True)
    columns = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, flat, strict=True)]
    each = len(copies)
    return torch.stack([torch.cat(columns[z * each : (z + 1) * each]) for z in range(size)])


def _replace(module: nn.Module, copies: dict[str, list[Tensor]], size: int) -> None:
    """Let the module take sample z's output from a call with the weights of z, on the whole batch."""
    plain, inside = module.forward, False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(*args, **kwargs)
        inside = True
        try:
            buffers = {n: b.clone() for n, b in module.named_buffers()}
            outs = [
                functional_call(module, {**buffers, **{n: w[z] for n, w in copies.items()}}, args, kwargs)[z : z + 1]
                for z in range(size)
            ]
        finally:
            inside = False
        return torch.cat(outs)

    module.forward = forward
