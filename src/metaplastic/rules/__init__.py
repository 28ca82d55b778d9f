"""Update rules: the mathematics of each memory, in plain PyTorch and readable beside the papers.

Every rule file has the same five names: ``State`` (a NamedTuple), ``init_state``, ``step`` (one token),
``readout`` (mean and variance of what the memory answers) and ``scan`` (a whole sequence, token by token).
Rules run in the dtype of their inputs, float64 included; autograd differentiates them. They are the reference
against which every fast implementation in :mod:`metaplastic.ops` is tested.

``design`` is the general case, any linear-Gaussian memory and its filter; ``approximations`` what cheaper rules keep of
a belief; the subpackage ``special_cases`` declares each rule as a design model (docs/design_models.md).
"""

from . import additive, approximations, bayesian, delta, design, gaussian, longhorn, mean_field, mesa, palimpsa
from .additive import AdditiveState
from .bayesian import GaussianState
from .delta import DeltaState
from .gaussian import FullGaussianState
from .mean_field import MeanFieldState
from .mesa import MesaState
from .palimpsa import PalimpsaState

__all__ = [
    "AdditiveState",
    "DeltaState",
    "FullGaussianState",
    "GaussianState",
    "MeanFieldState",
    "MesaState",
    "PalimpsaState",
    "additive",
    "approximations",
    "bayesian",
    "delta",
    "design",
    "gaussian",
    "longhorn",
    "mean_field",
    "mesa",
    "palimpsa",
]
