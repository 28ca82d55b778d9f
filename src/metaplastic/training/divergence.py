"""A run whose numbers are no longer finite ends with one line that says so, and saves nothing of it."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback


def _error(step: int, what: str, learning_rate: float) -> ValueError:
    advice = "try a smaller one, a longer warmup or another seed, in another output"
    return ValueError(
        f"learning_rate: got {learning_rate:g}, and the loss has diverged by step {step} ({what}): {advice}"
    )


@contextlib.contextmanager
def named_divergence(step: int, learning_rate: float) -> Iterator[None]:
    """Where operators can read their inputs they refuse what is not finite, by the name of their own argument."""
    try:
        yield
    except ValueError as error:
        if not re.search(r"got a value of (nan|-?inf)$", str(error)):
            raise
        raise _error(step, str(error), learning_rate) from error


def check_weights(weights: Iterable[Tensor], step: int, learning_rate: float) -> None:
    """Raises ValueError where they are not finite: after a last update, which no loss has seen. Waits for the device.

    Of sharded weights every process is to ask.
    """
    norm = get_total_norm([weight.detach() for weight in weights])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(norm.item()):
        raise _error(step, f"the norm of the weights is {norm.item()}", learning_rate)


class Divergence(TrainerCallback):
    """Raises ValueError when what is logged is not finite: at every save there is a log, and it comes before.

    A gradient that is not finite means weights that are not, of the same step, whose loss was computed before.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "grad_norm", "eval_loss"):
            if not math.isfinite(value := (logs or {}).get(name, 0.0)):
                raise _error(state.global_step, f"{name} is {value}", args.learning_rate)
