"""Measuring: recall, speed, this machine's backends, and reports that a person looks at."""

from ..report import Report
from .recall import recall, steps_until

__all__ = ["Report", "recall", "steps_until"]
