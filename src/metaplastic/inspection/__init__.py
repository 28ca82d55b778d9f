"""Looking at memory: recomputed from ``mixer.gates``, never by flags inside the layers. See ``docs/inspection.md``."""

from .kinds import Spread
from .page import CAPTION, SUMMARY, as_dict, figure, inspect_text, legend, summary_row
from .replay import LayerMemory, Watch, watch
from .run import memories

__all__ = [
    "CAPTION",
    "SUMMARY",
    "LayerMemory",
    "Spread",
    "Watch",
    "as_dict",
    "figure",
    "inspect_text",
    "legend",
    "memories",
    "summary_row",
    "watch",
]
