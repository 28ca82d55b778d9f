"""Measuring: recall, speed, this machine's backends, and reports that a person looks at."""

from .recall import recall
from .report import Report

__all__ = ["Report", "recall"]
