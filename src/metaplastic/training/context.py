r"""Context parallelism: a sequence too long for one device is cut into contiguous shards, one per process.

The model is as it was: every process calls it with the whole rows, and it computes its shard of them. Processes tell
each other what crosses a border (``training/exchange.py``), once per layer and direction:

* the short convolution's last inputs go to the next shard;
* Palimpsa and the additive rule are affine in their entry state. What a shard adds from nothing is a product of
  matrices, without reading the memory out,

      M = sum_t exp(g_{t+1} + ... + g_T) w_t k_t^T,   J = sum_t exp(g_{t+1} + ... + g_T) beta_t (k_t^2)^T,

  and with its decay exp(sum_t g_t) one exchange gives each shard its entry state, with which it runs once, all side by
  side;
* the delta rule and the Bayesian filter are not: their state is handed from process to process, which wait for it, but
  not for each other's layers: the first goes on to the next layer while the second begins this one.

The loss of a process is its shard's part: those of all processes add up to the loss of the whole, and so do their
gradients. Labels are cut from the whole rows, so the last token of a shard predicts the first of the next.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..layers.mixer import Mixer, enter
from ..models import MetaplasticForCausalLM, packing
from ..models.checkpointing import keep_answers
from ..ops.contract import full_precision, inside_sequences
from .added import added
from .compiled import few_sizes, in_pieces
from .exchange import Line, entry_states, flat, from_before, hand_on, outside, taken, unflat

IGNORED = -100
AFFINE = ("palimpsa", "additive")


class _Border(NamedTuple):
    """Where packed sequences cross the ends of this shard; never read on the host. None: all rows cross both."""

    entering: Tensor  # [N] bool: the sequence that began before this shard and goes on in it
    leaving: Tensor  # [1]: the number of the one that may go on behind it
    start: Tensor  # where that one begins, in tokens of this shard; below 0: before it


class Context:
    """A model's processes and, during a call, its borders."""

    def __init__(self, line: Line):
        self.line = line
        self.border: _Border | None = None


def mixers_to_cut(model: nn.Module) -> list[Any]:
    """The mixers of a model; raises ValueError if one of them cannot be cut."""
    if not isinstance(model, MetaplasticForCausalLM):
        raise TypeError(f"model must be a MetaplasticForCausalLM, got {type(model).__name__}")
    mixers: list[Any] = [block.mixer for block in model.model.layers]  # pyright: ignore
    for i, (name, mixer) in enumerate(zip(model.config.mixers, mixers, strict=True)):
        if not isinstance(mixer, Mixer) or mixer.growing_state:
            raise ValueError(f"context_parallel: layer {i} is {name!r}, expected a memory of fixed size")
    return mixers


def parallelise_context(model: MetaplasticForCausalLM, group: dist.ProcessGroup) -> None:
    """Makes ``model`` compute, of every row it is called with, the shard of this process of ``group``.

    Each process of the group is to call it with the same arguments. ``loss`` is then this shard's part of the loss,
    ``logits`` are this shard's.

    Raises ValueError for a model with a layer that cannot be cut (attention), and in calls for what would need more
    than a shard: caches, padded batches, rows too short to be cut.
    """
    mixers = mixers_to_cut(model)
    context = Context(Line(group))
    keep_answers(model, context, "border")
    widest = 1
    for mixer in mixers:
        mixer.forward = partial(_mix, context, mixer)
        if mixer.conv is not None:
            mixer.conv.register_forward_pre_hook(partial(_halo, context), with_kwargs=True)
            widest = max(widest, mixer.conv.kernel_size - 1)
    names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(partial(_cut, context, widest, names), with_kwargs=True)


def shard(length: int, line: Line) -> slice:
    """This process's tokens of ``length``."""
    return slice(line.rank * length // line.size, (line.rank + 1) * length // line.size)


def _cut(context: Context, widest: int, names: list[str], model: Any, args: tuple, given: dict[str, Any]):
    """Of a call's arguments this shard's, and the borders of its sequences."""
    line = context.line
    given = dict(zip(names, args, strict=False)) | given
    given = {name: value for name, value in given.items() if value is not None}
    mask = given.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask: context parallelism takes whole or packed rows (cu_seqlens), got padding")
    for name in ("cache", "past_key_values", "logits_to_keep"):
        value = given.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise ValueError(f"{name}: context parallelism is for training, expected None")
    if given.get("use_cache"):
        raise ValueError("use_cache: context parallelism is for training, expected False")
    tokens: Tensor = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    length, own = tokens.shape[1], shard(tokens.shape[1], line)
    if length < line.size * widest:
        least = f"expected at least {line.size * widest} ({line.size} shards of {widest})"
        raise ValueError(f"input_ids: got rows of {length} tokens to be cut, {least}")
    packed = {name: given.pop(name) for name in packing.KNOWN if name in given}
    offsets = packing.offsets(given.pop("cu_seqlens", None), packed, tokens, None)
    targets = given.pop("shift_labels", None)
    if (labels := given.pop("labels", None)) is not None:
        if offsets is not None:  # nothing is predicted from another sequence
            starts = torch.zeros(length + 1, dtype=torch.bool, device=labels.device)
            borders = offsets.to(labels.device, torch.int64, non_blocking=True)
            starts = starts.index_fill(0, borders, True)[:length]
            labels = labels.masked_fill(starts | ~inside_sequences(offsets, length, labels.device), IGNORED)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if targets is not None:
        if "num_items_in_batch" not in given:
            given["num_items_in_batch"] = (targets != IGNORED).sum()
        given["shift_labels"] = targets[:, own].contiguous()
    for name in ("input_ids", "inputs_embeds"):
        if name in given:
            given[name] = given[name][:, own]
    context.border = None
    if offsets is not None:
        if in_pieces(model):
            offsets = few_sizes(offsets, tokens.device.type)
        context.border = _border(offsets.to(tokens.device, non_blocking=True), own)
        given["cu_seqlens"] = (offsets - own.start).clamp(0, own.stop - own.start)
    line.settle()
    return (), given | {"use_cache": False}


def _border(offsets: Tensor, own: slice) -> _Border:
    starts, ends = offsets[:-1], offsets[1:]
    leaving = (starts < own.stop).sum().clamp(min=1)[None] - 1
    start = starts[leaving.long()] - own.start
    return _Border((starts < own.start) & (ends > own.start), leaving, start)


def _halo(context: Context, convolution: Any, args: tuple, given: dict[str, Any]):
    """What the convolution looks back on: the last inputs of the shard before."""
    x, border = args[0], context.border
    kept = convolution.kernel_size - 1
    if kept == 0:
        return None
    tail = x[:, x.shape[1] - kept :]
    if border is not None:  # as its state would be: zeros before the sequence begins
        position = torch.arange(x.shape[1] - kept, x.shape[1], device=x.device)
        tail = tail.where((position >= border.start)[None, :, None], 0)
    state = from_before(context.line, tail)
    if border is not None:
        state = state.where(border.entering[:, None, None], 0)
    return (x, state), given


def _mix(
    context: Context, mixer: Any, x: Tensor, state: Any = None, *, mask=None, cu_seqlens=None, keep_state=True
) -> tuple[Tensor, None]:
    """The forward pass of a mixer, its memory beginning as the shard before ends."""
    if state is not None or keep_state:
        raise ValueError("state: context parallelism is for training, expected None and keep_state=False")
    x, keep = enter(mixer, x, None, mask, cu_seqlens)
    gates, values, output_gate, _ = mixer._project(x, None, keep, cu_seqlens)
    affine = mixer.operator in AFFINE
    read = getattr(ops, mixer.operator)(
        **gates._asdict(),
        initial_state=(_exchanged if affine else _handed_on)(context, mixer, gates, cu_seqlens),
        cu_seqlens=cu_seqlens,
        scale=mixer.scale,
        backend=mixer.backend,
    )
    o = read.output
    if not affine:
        border, final = context.border, read.state
        o = hand_on(context.line, o, flat([x if border is None else x.index_select(0, border.leaving) for x in final]))
    o = torch.addcmul(o, mixer.D.to(values.dtype)[:, None], values) if mixer.has_residual else o
    y = mixer._output(o, output_gate)
    return y if keep is None else y.masked_fill(~keep[..., None], 0), None


def _exchanged(context: Context, mixer: Mixer, gates: Any, cu_seqlens: Tensor | None) -> Any:
    """The entry state of an affine memory, from what every shard adds."""
    border, g = context.border, gates.g
    # Sums from behind, not differences of sums: a gate may be -inf. Along the last axis: along another a GPU has one
    # thread a head go through all tokens.
    after = F.pad(g[:, 1:].movedim(1, -1), (0, 1)).flip(-1).cumsum(-1).flip(-1).movedim(-1, 1)
    left, decay = after.exp(), g.sum(1).exp()
    if border is not None:
        inside = torch.arange(g.shape[1], device=g.device) >= border.start
        left = left * inside.view(-1, *[1] * (g.dim() - 2))
        decay = decay * (border.start < 0)
    left, decay = (left, decay[..., None, :]) if g.dim() == 4 else (left[..., None], decay[..., None, None])
    values = (gates.w, gates.beta) if hasattr(gates, "beta") else (gates.v,)
    entry = _told(context.line, g, decay, gates.k, left, values)
    if border is not None:
        entry = [each.where(border.entering[:, None, None, None], 0) for each in entry]
    return mixer.memory_type(*entry)


@outside
def _told(line: Line, g: Tensor, decay: Tensor, k: Tensor, left: Tensor, values: tuple[Tensor, ...]) -> Any:
    """The entry state, from what every shard adds."""
    with full_precision(g.device):
        states = added(k, left, *values)
    return entry_states(line, g, decay, states)


def _handed_on(context: Context, mixer: Mixer, gates: Any, cu_seqlens: Tensor | None) -> Any:
    """The entry state that the process before hands on; None on the first."""
    if context.line.first:
        return None
    border = context.border
    rows = gates.g.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    fresh = mixer.init_state(rows).memory
    like = fresh if border is None else [each[:1] for each in fresh]
    entry = unflat(taken(context.line, gates.g, flat(like).detach()), like)
    if border is not None:
        within = [border.entering.view(-1, *[1] * (each.dim() - 1)) for each in fresh]
        entry = [each.where(inside, new) for each, inside, new in zip(entry, within, fresh, strict=True)]
    return mixer.memory_type(*entry)


def context_group(size: int) -> dist.ProcessGroup:
    """Cuts all processes into groups of ``size`` neighbours and returns this one's. Every process is to call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        raise ValueError(f"context_parallel: got {size} of {world} processes, expected a divisor")
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]  # pyright: ignore
