"""Small mixers of every kind and shape for the tests of this folder, and how to take them apart."""

import itertools

import pytest
import torch

from metaplastic.layers import MIXERS
from metaplastic.layers.mixer import MixerState
from metaplastic.ops import dispatch

WIDTH = 12
KINDS = {
    "palimpsa_d": ("palimpsa_d", {}),
    "palimpsa_d, shared keys, trained prior": ("palimpsa_d", {"num_key_heads": 2, "train_prior": True, "prior": 0.3}),
    "palimpsa_d_additive": ("palimpsa_d_additive", {}),
    "palimpsa_m": ("palimpsa_m", {}),
    "palimpsa_m, groups, biases": (
        "palimpsa_m", {"num_groups": 2, "norm_groups": 1, "bias": True, "key_size": 5, "value_size": 3, "prior": 2.0}
    ),
    "mamba2, groups": ("mamba2", {"num_groups": 4}),
    "mamba2, biases, wide convolution": ("mamba2", {"bias": True, "conv_size": 6, "dt_limit": (0.01, 0.05)}),
    "gated_deltanet": ("gated_deltanet", {"num_key_heads": 2, "negative_eigenvalues": True}),
    "bayesian": ("bayesian", {}),
    "bayesian, per key, noise groups": ("bayesian", {"decay": "key", "noise_groups": 5, "process_noise": "free"}),
    "bayesian, rotations, no convolution": (
        "bayesian", {"rotation": True, "decay": "key", "conv_size": None, "key_size": 4}
    ),
}  # fmt: skip


def cells(device):
    """Every kind with each of the backends made for a type of device."""
    operators = [(kind, MIXERS[name].operator) for kind, (name, _) in KINDS.items()]
    return [(kind, backend) for kind, op in operators for backend in dispatch.on_device(op, device)]


CELLS = cells("cpu")


def make(kind, backend="auto", dtype=torch.float64, **options):
    torch.manual_seed(0)
    name, given = KINDS.get(kind, (kind, {}))
    sizes = {"hidden_size": WIDTH, "num_heads": 4, "key_size": 3, "value_size": 5}
    chosen = {"backend": backend} if MIXERS[name].operator else {}
    return MIXERS[name](**(sizes | given | options), **chosen).to(dtype)


def inputs(batch=2, length=11, seed=0, dtype=torch.float64):
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype)


def flat(state):
    return [state.convolution, *state.memory]


def rebuilt(state, change):
    """The state with ``change`` made to each of its tensors."""
    return MixerState(change(state.convolution), type(state.memory)(*(change(s) for s in state.memory)))


def trained(layer):
    return [p for p in layer.parameters() if p.requires_grad]


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)


# The layer's own rounding, with weights and inputs that are exact in that dtype: relative to the largest element, and
# in norm for the gradients in 16 bits, which a normalisation of almost nothing magnifies element by element.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 1e-2}


PADDINGS = ("none", "left", "right", "interior")


def sampled(subjects):
    """Of (*subject, dtype, padding, continued): in float64 all, in every other dtype two of each subject, one from a
    state and one not, whose paddings take turns from subject to subject and dtype to dtype. The rest is slow, and for
    the backend "reference", which is the oracle too, so it is in float64."""
    turn, found = {}, []
    for subject, (place, dtype) in itertools.product(subjects, enumerate(TOLERANCE)):
        turn[subject] = turn.get(subject, len(turn))
        chosen = {continued: PADDINGS[(turn[subject] + place + 2 * continued) % 4] for continued in (False, True)}
        for padding, continued in itertools.product(PADDINGS, (False, True)):
            quick = (dtype == torch.float64 and "reference" not in subject) or padding == chosen[continued]
            name = (*subject, str(dtype).removeprefix("torch."), padding, "continued" if continued else "fresh")
            marks = () if quick else (pytest.mark.slow,)
            found.append(pytest.param(*subject, dtype, padding, continued, marks=marks, id="-".join(name)))
    return found


def masks(padding, batch, length):
    """[B, T] bool; the last row of a padded batch is nothing but padding."""
    keep = torch.ones(batch, length, dtype=torch.bool)
    if padding == "none":
        return keep
    third = length // 3
    for row in range(batch - 1):
        if padding == "left":
            keep[row, : third * row] = False
        elif padding == "right":
            keep[row, length - third * row :] = False
        else:
            keep[row, row::3] = False
    keep[batch - 1] = False
    return keep


def cut(length, split):
    if split == "whole":
        return [length]
    if split == "tokens":
        return [1] * length or [0]
    pieces = [2, 1, 0, 3]  # shorter than the convolution, and empty
    return [*pieces, length - sum(pieces)] if length > sum(pieces) else [length, 0]


def close(found, expected, dtype, what, least=1e-3):
    scale = max(expected.abs().max().item(), least) if expected.numel() else 1.0
    error = (found.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= TOLERANCE[dtype] * scale, f"{what}: {error:.2e} of {scale:.2e}"
