r"""Palimpsa-M: the metaplastic layer on the Mamba2 backbone (arXiv 2602.09075, App. A.1).

    beta = sigmoid(W_b2 W_b1 x) softplus(b_scale) dt                                      [H, V]  evidence
    o    = palimpsa(q, k, w, beta, g, prior; scale = 1) + D u

with everything else as in ``layers/mamba2.py``: without evidence (beta = 0, prior 1) it is exactly Mamba2, whose
weights load into it. The write is w = u dt, not k dt: here k enters squared.
"""

from .evidence import Evidence
from .mamba2 import Mamba2


class PalimpsaM(Evidence, Mamba2):
    """Palimpsa-M: Mamba2 whose every memory element carries a precision.

    Args: those of :class:`~metaplastic.layers.mamba2.Mamba2` and of :class:`~metaplastic.layers.evidence.Evidence`.
    The published models have as many groups as heads and one output norm over the whole width (``norm_groups=1``).
    """
