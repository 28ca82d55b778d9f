"""Mixers: ``torch.nn`` modules that turn activations into a rule's inputs, run the operator and read the memory out.

Every mixer follows one protocol: ``mixer(x, state=None, *, mask=None, cu_seqlens=None) -> (y, state)``,
``mixer.gates(x, state=None, ...)`` (the inputs of its rule) and ``mixer.init_state(batch)``. States are values.
``MIXERS`` names them for configurations.
"""

from .convolution import ShortConvolution
from .palimpsa_d import PalimpsaD, PalimpsaDAdditive

MIXERS = {"palimpsa_d": PalimpsaD, "palimpsa_d_additive": PalimpsaDAdditive}

__all__ = ["MIXERS", "PalimpsaD", "PalimpsaDAdditive", "ShortConvolution"]
