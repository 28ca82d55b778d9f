"""Which activations of a block wait for the backward pass, and which are computed again.

none        all of them wait
full        the input of each block: the whole block runs again
selective   that, and what is dear to compute; the rest of the block runs again

The gradients are those of ``none``, bit for bit on a CPU. A block that was computed again has spent what was kept:
under ``selective`` one backward pass is all there is (no ``retain_graph``).

What a block asks of other processes need not be asked again (``keep_answers``): with :func:`once` around it, the second
run takes what the first one got. So processes that share a sequence do not wait for one another there. What was noted
for a call of the model is noted again while one of its blocks is computed again, whatever call has come between.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .pretrained import MetaplasticPreTrainedModel

KINDS = ("none", "full", "selective")
Answer = TypeVar("Answer")

_CHEAP = ("short_convolution", "rotary_turns")  # of our operators
# Dear for its bytes: an element of a matrix product of width D costs 2 D FLOPs, some 1,000 a byte where a GPU does 150
# in the time in which it moves one; a memory's read-out costs several times that (10 K FLOPs beside the matrix units).
# Everything else (convolutions, gates, norms) is read and written at the speed of memory. With both, Palimpsa-D of 170M
# keeps 31% of the bytes of "none" (full: 8%; the memory alone: 10%, with every matrix product once more), so a pass
# that repeats no product and no memory, for a third of the bytes, is what lies between. Products of batches are not
# kept: in masked attention they are the scores of all pairs of tokens.
_DEAR = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def checkpoint_activations(model: MetaplasticPreTrainedModel, kind: str) -> None:
    """Makes training keep activations as ``kind`` says (see above); decides nothing but time and space."""
    if kind not in KINDS:
        raise ValueError(f"checkpointing must be one of {', '.join(KINDS)}, got {kind!r}")
    model.checkpointing = kind
    if kind == "none":
        model.activation_checkpointing_disable()
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    if model.noted_in is not None:
        how["context_fn"] = functools.partial(_kept, how.get("context_fn"), *model.noted_in)
    model.activation_checkpointing_enable(how)


def keep_answers(model: MetaplasticPreTrainedModel, notes: Any, name: str) -> None:
    """Makes :func:`once` in the blocks of ``model`` do what it says where activations are computed again.

    ``notes.name`` is what a call of the model is noted in.
    """
    model.noted_in = notes, name
    if model.checkpointing is not None:
        checkpoint_activations(model, model.checkpointing)


class _Run:
    """Around one of the runs of a block: the first notes the answers, every later one reads them from the beginning."""

    def __init__(
        self, answers: list[Any], first: bool, around: contextlib.AbstractContextManager, notes: Any, name: str
    ):
        self.answers, self.first, self.around, self.read = answers, first, around, 0
        self.notes, self.name, self.noted = notes, name, getattr(notes, name)  # made while the block's call is the last

    def __enter__(self) -> None:
        self.read, self._token = 0, _run.set(self)
        self.of_another = getattr(self.notes, self.name)
        setattr(self.notes, self.name, self.noted)
        self.around.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        setattr(self.notes, self.name, self.of_another)
        _run.reset(self._token)
        return self.around.__exit__(*error)


_run: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run of a block", default=None)


def once(ask: Callable[[], Answer]) -> Answer:
    """``ask()``, tensors or tuples of them; what the first run got where a block is computed again."""
    run = _run.get()
    if run is None:
        return ask()
    if run.first:
        answer = ask()
        run.answers.append(_apart(answer))  # a function's output becomes a part of the graph of that run
        return answer
    run.read += 1
    return _apart(run.answers[run.read - 1])


def _apart(answer: Any) -> Any:
    if isinstance(answer, tuple):
        return tuple(_apart(each) for each in answer)
    return answer.detach() if isinstance(answer, Tensor) else answer


def _kept(contexts: Callable[[], tuple[Any, Any]] | None, notes: Any, name: str) -> tuple[_Run, _Run]:
    """What goes around the two runs of a block, and around what is to be there besides."""
    first, again = contexts() if contexts else (contextlib.nullcontext(), contextlib.nullcontext())
    answers: list[Any] = []
    return _Run(answers, True, first, notes, name), _Run(answers, False, again, notes, name)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = getattr(op, "namespace", "") == "metaplastic" and not any(name in str(op) for name in _CHEAP)
    dear = op in _DEAR or ours
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
