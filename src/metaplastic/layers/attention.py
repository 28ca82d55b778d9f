r"""Softmax attention with rotary positions: the layer whose memory is not fixed, beside those whose memory is.

    q = Rot(n) W_q x, k = Rot(n) W_k x                                  [H, K], [G, K]
    v = W_v x                                                           [G, V]
    o_t = sum_s softmax_s(K^-1/2 q_t . k_s) v_s,   s the real tokens up to t (with a window W: the last W of them)
    y = W_o o

``n`` counts the real tokens of a sequence, so that padding, wherever it stands, changes nothing (``rotary.py``).
The state holds every key and value read so far, with a window those that the next token can see.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops.contract import check_finite, read_offsets
from .mixer import MixerState, enter
from .options import check_positive, check_sizes
from .rotary import rotated

_LARGE = 1 << 24  # booleans in a mask


class AttentionState(NamedTuple):
    """What was read: S slots a sequence, in order; those of padding have position -1."""

    keys: Tensor  # [B, S, G, K], rotated
    values: Tensor  # [B, S, G, V]
    positions: Tensor  # [B, S], int64


class Attention(nn.Module):
    """Multi-head softmax attention.

    Args:
        hidden_size: width D of the activations.
        num_heads: query heads H.
        key_size, value_size: K and V of one head.
        num_key_heads: heads G of k and v; divides num_heads, each is read by H / G query heads. None: num_heads.
        window: how many tokens each sees, itself included; None: all.
        rotary_base: of the rotary angles; None: no positions.

    The state grows by one slot per token (padding included) up to window - 1; continuing copies it. That of packed
    sequences has as many slots for each as the longest needs: leave it out (``keep_state``) in training. A call without
    state, mask, window and packing runs PyTorch's causal kernels. Any other reads a mask of ``T (S + T)`` booleans
    (packed sequences: of all tokens), made block by block where it would be large, whole under torch.compile.
    """

    operator = None  # PyTorch's own, not one of ``metaplastic.ops``
    memory_type = AttentionState
    growing_state = True  # one slot a token
    state_options = ("window", "rotary_base")  # what a state means depends on these
    no_weight_decay: tuple[str, ...] = ()
    value_expansion = 1

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        num_key_heads: int | None = None,
        window: int | None = None,
        rotary_base: float | None = 10000.0,
    ):
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, key_size=key_size, value_size=value_size)
        check_sizes(num_key_heads=num_key_heads, window=1 if window is None else window)
        check_positive(rotary_base=1.0 if rotary_base is None else rotary_base)
        if num_heads % num_key_heads:
            raise ValueError(f"num_key_heads must divide num_heads = {num_heads}, got {num_key_heads}")
        self.hidden_size, self.num_heads, self.key_size, self.value_size = hidden_size, num_heads, key_size, value_size
        self.num_key_heads, self.window, self.rotary_base = num_key_heads, window, rotary_base
        self.q_proj = nn.Linear(hidden_size, num_heads * key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_heads * key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_heads * value_size, bias=False)
        self.o_proj = nn.Linear(num_heads * value_size, hidden_size, bias=False)

    @staticmethod
    def slots(tokens: int, *, window: int | None, **_: Any) -> int:
        """How many a state has that has read so many tokens, padding included."""
        return tokens if window is None else min(window - 1, tokens)

    def init_state(self, batch: int) -> MixerState:
        """The state before the first token, for ``batch`` sequences."""
        empty = self.o_proj.weight.new_zeros(batch, 0, self.num_key_heads, self.key_size)
        positions = empty.new_zeros(batch, 0, dtype=torch.int64)
        values = empty.new_zeros(batch, 0, self.num_key_heads, self.value_size)
        return MixerState(empty.new_zeros(batch, 0, 0), AttentionState(empty, values, positions))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: MixerState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "..."] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], MixerState | None]:
        """As :meth:`metaplastic.layers.mixer.Mixer.forward`."""
        x, keep = enter(self, x, state, mask, cu_seqlens)
        q, k, v = (
            proj(x).unflatten(-1, (heads, -1))
            for proj, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_key_heads),
                (self.v_proj, self.num_key_heads),
            )
        )
        for name, z in (("q", q), ("k", k), ("v", v)):  # 0 times infinity in a sum over tokens would reach them all
            check_finite(type(self).__name__, f"{name}, projected from x,", z)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        past = None if state is None else self._checked(state.memory, rows, k)
        place = _places(x, past, keep, cu_seqlens)
        if self.rotary_base is not None:
            q, k = rotated((q, k), place.position, self.rotary_base)
        here = AttentionState(k, v, place.position if keep is None else place.position.masked_fill(~keep, -1))
        seen = here if past is None else _join(past, here, packed=cu_seqlens is not None)
        # A compiled layer does not ask how long its input is: it would be compiled anew.
        within = self.window is None or (not torch.compiler.is_compiling() and x.shape[1] <= self.window)
        if past is None and keep is None and within:
            o = self._attend(q, seen, None)
        else:
            o = self._masked(q, place, seen, past, keep, cu_seqlens)
        y = self.o_proj(o.flatten(2))
        y = y if keep is None else y.masked_fill(~keep[..., None], 0)
        if not keep_state:
            return y, None
        kept = self._kept(seen, keep) if cu_seqlens is None else self._kept_packed(past, here, cu_seqlens)
        return y, MixerState(x.new_zeros(rows, 0, 0), kept)

    def _attend(self, q: Tensor, seen: AttentionState, allowed: Tensor | None) -> Tensor:
        """``[B, T, H, V]``; ``allowed [B or 1, T, slots]`` bool, None: causal, the slots being the tokens."""
        size = max(self.key_size, self.value_size)  # PyTorch's kernels of linear memory want K = V: zeros do no harm
        q, k, v = (F.pad(z, (0, size - z.shape[-1])).transpose(1, 2) for z in (q, seen.keys, seen.values))
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if allowed is None else allowed[:, None],
            is_causal=allowed is None,
            scale=self.key_size**-0.5,
            enable_gqa=self.num_heads != self.num_key_heads,
        )
        return o[..., : self.value_size].transpose(1, 2)

    def _masked(
        self, q: Tensor, place: "_Places", seen: AttentionState, past: AttentionState | None, keep, cu_seqlens
    ) -> Tensor:
        """Block by block of the queries, over the slots that they can see."""
        length, slots = q.shape[1], seen.positions.shape[1]
        now, then, at = place.position, seen.positions, torch.arange(slots, device=q.device)
        of, sequence = place.sequence, place.sequence
        if cu_seqlens is not None and past is not None:
            row = torch.arange(len(past.positions), device=of.device)
            sequence = torch.cat([row.repeat_interleave(past.positions.shape[1]), of])
        block = length
        if not torch.compiler.is_compiling() and length * slots > _LARGE:
            block = max(64, _LARGE // slots)
        reach = slots if self.window is None else self.window
        in_order = past is None and (keep is None or cu_seqlens is not None)
        begins = [0]  # of packed sequences: nothing before the one that a block begins in is seen
        if cu_seqlens is not None and in_order and cu_seqlens.device.type == "cpu" and block < length:
            begins = cu_seqlens.tolist()
        found = []
        for a in range(0, length, block) if block < length else [0]:
            b = a + block if block < length else length
            high = slots - length + min(b, length)
            low = max(a + 1 - reach, *(begin for begin in begins if begin <= a)) if in_order else 0
            n, t = now[:, a:b, None], then[:, None, low:high]
            allowed = (t >= 0) & (t <= n)
            if self.window is not None:
                allowed = allowed & (n - t < reach)
            if cu_seqlens is not None:
                allowed = allowed & (of[a:b, None] == sequence[low:high])
            # Every token sees itself, padding too: softmax over nothing is undefined.
            allowed = allowed | (at[low:high] == at[slots - length :][a:b, None])
            found.append(self._attend(q[:, a:b], AttentionState(*(z[:, low:high] for z in seen)), allowed))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _kept(self, seen: AttentionState, keep: Tensor | None) -> AttentionState:
        """What later tokens can see: everything, or with a window the last real slots, behind those of padding."""
        if seen.positions.shape[0] != seen.keys.shape[0]:  # one row of positions served all
            seen = seen._replace(positions=seen.positions.expand(seen.keys.shape[0], -1).clone())
        if self.window is None:
            return seen
        count = torch.sym_min(self.window - 1, seen.positions.shape[1])
        last = torch.arange(count, device=seen.keys.device) + (seen.positions.shape[1] - count)
        if keep is None:
            return AttentionState(*(z.index_select(1, last) for z in seen))
        order = torch.argsort(seen.positions >= 0, dim=1, stable=True).index_select(1, last)
        wide = order[..., None, None]
        keys, values = (z.gather(1, wide.expand(-1, -1, *z.shape[2:])) for z in seen[:2])
        return AttentionState(keys, values, seen.positions.gather(1, order))

    def _kept_packed(self, past: AttentionState | None, here: AttentionState, cu_seqlens: Tensor) -> AttentionState:
        """The state of every sequence, its slots at the right end of as many as the longest needs."""
        offsets = cu_seqlens.to(here.keys.device, torch.int64, non_blocking=True)
        lengths, before = offsets.diff(), 0 if past is None else past.positions.shape[1]
        longest = here.positions.shape[1]
        if not torch.compiler.is_compiling() and len(lengths):
            host = read_offsets(type(self).__name__, cu_seqlens, longest)
            longest = int(host.diff().max())  # pyright: ignore[reportOptionalMemberAccess]
        count = before + longest
        count = count if self.window is None else torch.sym_min(self.window - 1, count)
        slot = (before + lengths)[:, None] - count + torch.arange(count, device=offsets.device)  # of past, then of here
        token = (offsets[:-1, None] + slot - before).clamp(0, max(here.positions.shape[1] - 1, 0))
        old, new = (slot >= 0) & (slot < before), slot >= before
        found = []
        for i, z in enumerate(here):
            outside = -1 if z is here.positions else 0
            wide = (..., *[None] * (z.dim() - 2))
            part = z[0][token] if z.shape[1] else z.new_zeros(*token.shape, *z.shape[2:])
            part = part.masked_fill(~new[wide], outside)
            if past is not None and before:
                index = slot.clamp(0, before - 1)[wide].expand(-1, -1, *z.shape[2:])
                part = part.where(~old[wide], past[i].gather(1, index))
            found.append(part)
        return AttentionState(*found)

    def _checked(self, past: AttentionState, rows: int, k: Tensor) -> AttentionState:
        """The state in the dtype of these activations, if it is one of this layer's."""
        if not isinstance(past, AttentionState):
            raise TypeError(f"state.memory must be an AttentionState, got {type(past).__name__}")
        slots = past.positions.shape[1] if past.positions.dim() == 2 else -1
        heads = self.num_key_heads
        shapes = ((rows, slots, heads, self.key_size), (rows, slots, heads, self.value_size), (rows, slots))
        for name, z, shape in zip(past._fields, past, shapes, strict=True):
            if z.dtype != torch.int64 if name == "positions" else not z.is_floating_point():
                kind = "int64" if name == "positions" else "floating point"
                raise TypeError(f"state.memory.{name} must be {kind}, got {z.dtype}")
            if tuple(z.shape) != shape:
                expected = str(list(shape)).replace("-1", "S")
                raise ValueError(f"state.memory.{name}: the state must be {expected}, got {list(z.shape)}")
        return AttentionState(past.keys.to(k.dtype), past.values.to(k.dtype), past.positions)


class _Places(NamedTuple):
    position: Tensor  # [B or 1, T]: how many real tokens of its sequence came before (at padding: one less)
    sequence: Tensor  # [T], of packed sequences; N in the tail


def _places(x: Tensor, past: AttentionState | None, keep: Tensor | None, cu_seqlens: Tensor | None) -> _Places:
    token = torch.arange(x.shape[1], device=x.device)
    start = token.new_zeros(1)
    if past is not None and past.positions.shape[1]:  # an empty state has seen nothing that counts
        start = past.positions.amax(1) + 1
    if cu_seqlens is None:
        counted = token if keep is None else keep.cumsum(1) - 1
        return _Places(start[:, None] + counted, token)
    offsets = cu_seqlens.to(x.device, torch.int64, non_blocking=True)
    sequence = torch.searchsorted(offsets, token, right=True) - 1  # the first is 0 (Inductor wants no slice)
    start = F.pad(offsets[:-1] - start, (0, 1))  # the tail is masked
    return _Places((token - start[sequence])[None], sequence)


def _join(past: AttentionState, here: AttentionState, *, packed: bool) -> AttentionState:
    """The slots of the state before those of this call; packed sequences lie in one row."""
    if packed:
        past = AttentionState(*(z.flatten(0, 1)[None] for z in past))
    positions = here.positions.expand(past.positions.shape[0], -1)
    return AttentionState(
        torch.cat([past.keys, here.keys], 1),
        torch.cat([past.values, here.values], 1),
        torch.cat([past.positions, positions], 1),
    )
