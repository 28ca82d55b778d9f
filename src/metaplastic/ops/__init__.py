"""Fast operators: the same contract as ``rules.*.scan``, several implementations, one dispatcher.

>>> read = ops.palimpsa(q, k, w, beta, g, prior)                # doctest: +SKIP
>>> read.output, read.state                                     # doctest: +SKIP
"""

from .additive import additive
from .bayesian import bayesian
from .contract import MemoryRead, debug_checks
from .delta import delta
from .dispatch import backends
from .palimpsa import palimpsa

__all__ = ["MemoryRead", "additive", "backends", "bayesian", "debug_checks", "delta", "palimpsa"]
