"""Small mixers of every kind and shape for the tests of this folder, and how to take them apart."""

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
BACKENDS = {op: tuple(entries) for op, entries in dispatch.BACKENDS.items()}
CELLS = [(kind, backend) for kind, (name, _) in KINDS.items() for backend in BACKENDS[MIXERS[name].operator]]


def make(kind, backend="auto", dtype=torch.float64, **options):
    torch.manual_seed(0)
    name, given = KINDS.get(kind, (kind, {}))
    sizes = {"hidden_size": WIDTH, "num_heads": 4, "key_size": 3, "value_size": 5}
    return MIXERS[name](**(sizes | given | options), backend=backend).to(dtype)


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
