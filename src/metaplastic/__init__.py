"""Sequence layers whose fixed-size memory knows how sure it is of what it holds.

>>> import torch, metaplastic
>>> layer = metaplastic.layers.PalimpsaD(hidden_size=64, num_heads=4, key_size=16, value_size=16)
>>> y, state = layer(torch.randn(2, 10, 64))          # a whole sequence
>>> z, state = layer(torch.randn(2, 1, 64), state)    # one more token, constant memory
>>> y.shape, z.shape
(torch.Size([2, 10, 64]), torch.Size([2, 1, 64]))

``metaplastic.rules`` is the mathematics, ``metaplastic.ops`` the fast operators, ``metaplastic.layers`` the modules.
``import metaplastic.models`` brings the language model and registers it with Hugging Face's Auto classes.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import layers, ops, rules
    from .ops import MemoryRead, backends, debug_checks

__version__ = "0.1.0"

__all__ = ["MemoryRead", "__version__", "backends", "debug_checks", "layers", "ops", "rules"]


def __getattr__(name: str) -> Any:
    """Imported when first used, so that the command line answers before PyTorch is loaded."""
    if name in ("layers", "ops", "rules"):
        return importlib.import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(importlib.import_module(".ops", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
