"""Looking at memory: recomputed from ``mixer.gates``, never by flags inside the layers. See ``docs/inspection.md``."""

from .limit import mamba2_limit
from .page import CAPTION, LEGEND, SUMMARY, as_dict, figure, inspect_text, summary_row
from .replay import LayerMemory, Spread, Watch, watch

__all__ = [
    "CAPTION",
    "LEGEND",
    "SUMMARY",
    "LayerMemory",
    "Spread",
    "Watch",
    "as_dict",
    "figure",
    "inspect_text",
    "mamba2_limit",
    "summary_row",
    "watch",
]
