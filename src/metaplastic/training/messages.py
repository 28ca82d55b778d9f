"""What a run says to whoever called it from Python is what the command says: lines on stderr, or a bar."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

logger = logging.getLogger("metaplastic")


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Lines of ``metaplastic`` on stderr, unless somebody has set up logging; without Hugging Face's bars of files."""
    level, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    handler = None if logger.hasHandlers() else logging.StreamHandler(sys.stderr)
    if handler is not None:
        logger.addHandler(handler)
        if level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    if bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        if handler is not None:
            logger.removeHandler(handler)
            if level == logging.NOTSET and logger.level == logging.INFO:
                logger.setLevel(level)
