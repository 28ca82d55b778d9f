"""Mixers: ``torch.nn`` modules that turn activations into a rule's inputs, run the operator and read the memory out.

Every mixer follows one protocol: ``mixer(x, state=None, *, mask=None, cu_seqlens=None, keep_state=True) -> (y, state)``
and ``mixer.init_state(batch)``; those with a memory rule (all but attention) have ``mixer.gates(x, state=None, ...)``,
the inputs of that rule. States are values.
``MIXERS`` names them for configurations.
"""

from .attention import Attention
from .bayesian import BayesianLayer
from .convolution import ShortConvolution
from .gated_deltanet import GatedDeltaNet
from .mamba2 import Mamba2
from .palimpsa_d import PalimpsaD, PalimpsaDAdditive
from .palimpsa_m import PalimpsaM

MIXERS = {
    "palimpsa_d": PalimpsaD,
    "palimpsa_d_additive": PalimpsaDAdditive,
    "palimpsa_m": PalimpsaM,
    "mamba2": Mamba2,
    "bayesian": BayesianLayer,
    "gated_deltanet": GatedDeltaNet,
    "attention": Attention,
}

__all__ = [
    "MIXERS",
    "Attention",
    "BayesianLayer",
    "GatedDeltaNet",
    "Mamba2",
    "PalimpsaD",
    "PalimpsaDAdditive",
    "PalimpsaM",
    "ShortConvolution",
]
