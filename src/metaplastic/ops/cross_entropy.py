"""Cross-entropy of an output layer without its logits: libraries that make them chunk by chunk, gradient included.

    summed_cross_entropy(x, W, target) = sum_n -log softmax(W x_n)[target_n]        over n with target_n != -100

    x       [N, D]      activations; dtype and device of W
    W       [V, D]      float
    target  [N]         int64, -100 where nothing is predicted
    returns a scalar, float32 (float64 for float64)

``fla`` (flash-linear-attention, Triton) runs on CUDA and is preferred there. ``torch`` is PyTorch's own chunked form,
from 2.13 on, on any device: not in bfloat16, where it adds up and hands back the loss itself in bfloat16, three digits
of it, and rounds the factor of every gradient alike. Both compute the gradient in the forward pass, fla even where none
is asked for, and spend it: it can be had once. ``fla`` leaves the graph of torch.compile, ``torch`` is one node in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import _installed

IGNORED = -100
BACKENDS = ("fla", "torch")  # in order of preference


def reason_against(backend: str, device: str, dtype: torch.dtype) -> str | None:
    """Why ``backend`` cannot run here, or None if it can."""
    if backend == "fla":
        if device != "cuda":
            return f"runs on cuda tensors, not on {device}"
        return None if _installed("fla") else "needs the package fla, which is not installed"
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"needs PyTorch 2.13, and this is {torch.__version__}"
    return "returns the loss itself in bfloat16" if dtype == torch.bfloat16 else None


def choose(device: str, dtype: torch.dtype) -> str | None:
    """The first backend that runs with this device and dtype; None: there is none."""
    return next((name for name in BACKENDS if reason_against(name, device, dtype) is None), None)


# torch.compile takes the answers as they are, see ``dispatch``.
reason_against._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
choose._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def summed_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, backend: str) -> Tensor:
    """See the module's docstring; ``backend`` is one that runs here."""
    if (reason := reason_against(backend, x.device.type, x.dtype)) is not None:
        raise RuntimeError(f"ops.cross_entropy: backend {backend!r} {reason}")
    if backend == "torch":
        # Compiled code cannot notice that the gradient has been spent, and would return a wrong one.
        options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling())
        loss = F.linear_cross_entropy(x, weight, target, reduction="sum", ignore_index=IGNORED, options=options)
        return loss if loss.dtype == torch.float64 else loss.float()
    from fla.modules.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        fused_linear_cross_entropy_loss,
    )

    # The weight's gradient is added up over at most eight chunks; in float32 its products would not be in 16 bits,
    # several times slower than those of the plain loss, which rounds that gradient too.
    options = {"reduction": "sum", "ignore_index": IGNORED, "accumulate_grad_in_fp32": False}
    return fused_linear_cross_entropy_loss(x, target, weight, **options)
