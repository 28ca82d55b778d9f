"""Who is differentiating: what is written by hand for autograd alone must step aside for the others."""

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which see through PyTorch's operations only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
