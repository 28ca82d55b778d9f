"""The language model: embedding, blocks of (norm, mixer) and optionally (norm, SwiGLU MLP), norm, output.

Everything recurrent is in the mixers; this file only wires them to Hugging Face's conventions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput
from transformers.utils import can_return_tuple

from ..layers import MIXERS
from ..layers.mixer import MixerState
from ..ops.contract import check_mask, check_packing, inside_sequences
from . import cache as states
from . import loss as losses
from . import packing
from .arguments import check_inputs, check_targets
from .configuration import MetaplasticConfig
from .generation import RecurrentGenerationMixin, one_cache
from .pretrained import MetaplasticPreTrainedModel


@dataclass
class MetaplasticOutput(ModelOutput):
    """``last_hidden_state [B, T, D]``, ``cache``, ``hidden_states`` (embedding and each block, if asked for)."""

    last_hidden_state: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class MetaplasticCausalLMOutput(ModelOutput):
    """``loss``, ``logits [B, T, vocabulary]`` (None beside a fused loss), ``cache``, ``hidden_states``."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SwiGLU(nn.Module):
    """``W_down (SiLU(W_gate x) * W_up x)``."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MetaplasticBlock(GradientCheckpointingLayer):
    def __init__(self, config: MetaplasticConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.mixer_name = layer_idx, config.mixers[layer_idx]
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = MIXERS[self.mixer_name](**config.mixer_arguments(layer_idx))
        self.mlp = None
        if config.intermediate_size is not None:
            self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, MixerState | None]:
        """The new activations and the mixer's new state (None unless ``keep_state``)."""
        normed = self.mixer_norm(x)
        y, state = self.mixer(normed, state, mask=mask, cu_seqlens=cu_seqlens, keep_state=keep_state)
        x = x + y
        x = x if self.mlp is None else x + self.mlp(self.mlp_norm(x))
        return x, state


class MetaplasticModel(MetaplasticPreTrainedModel):
    """Embedding, blocks and final norm, without the output layer."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # of a checkpoint of MetaplasticForCausalLM

    def __init__(self, config: MetaplasticConfig):
        config.check()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MetaplasticBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _mask(self, attention_mask: Tensor | None, x: Tensor, cache: Cache | None) -> Tensor | None:
        """The part of a 2-D mask that covers this call's tokens, as bool; None if it masks nothing."""
        if attention_mask is None:
            return None
        check_mask("attention_mask", attention_mask)
        length = x.shape[1]
        fits = attention_mask.dim() == 2 and attention_mask.shape[0] == x.shape[0]
        if not fits or not (
            attention_mask.shape[1] == length or (cache is not None and attention_mask.shape[1] > length)
        ):
            raise ValueError(
                f"attention_mask must be [B, T] = {list(x.shape[:2])} (longer with a cache: its last T columns count), "
                f"got {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        if mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all()):
            return None
        return mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        **packed: Any,
    ) -> MetaplasticOutput:
        """Activations after the last norm.

        Args:
            input_ids: tokens ``[B, T]``, or ``inputs_embeds [B, T, D]``.
            attention_mask: ``[B, T]``, non-zero at real tokens, padding anywhere; with a cache it may cover the past.
            cache: states of an earlier call; updated and returned. None: a new one if ``use_cache``.
            use_cache: None: as configured, but not in training nor for packed sequences.
            cu_seqlens: ``[N + 1]`` offsets of sequences packed along T (then B = 1 and no cache).
            output_hidden_states: also return the embeddings and the output of each block (the last one after the norm).
                None: as configured.
            past_key_values: the older name of ``cache``.
            packed: other ways to say ``cu_seqlens``, see :mod:`metaplastic.models.packing`.
        """
        check_inputs(input_ids, inputs_embeds, attention_mask, self.config.hidden_size)
        x: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = one_cache(cache, past_key_values)
        cu_seqlens = packing.offsets(cu_seqlens, packed, x, attention_mask)
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (use_cache or cache is not None) and cu_seqlens is not None:
            raise ValueError("cu_seqlens (packed sequences) cannot be used with a cache: pass use_cache=False")
        if attention_mask is not None and cu_seqlens is not None:
            raise ValueError("give attention_mask (padded batch) or cu_seqlens (packed sequences), not both")
        if (use_cache or cache is not None) and checkpointing:
            raise ValueError("gradient checkpointing recomputes blocks and cannot write a cache: pass use_cache=False")
        mask = self._mask(attention_mask, x, cache)
        if use_cache and cache is None:
            cache = states.new_cache(self.config)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        if cu_seqlens is not None:
            check_packing(type(self).__name__, cu_seqlens, x.shape[0])
            x = x.masked_fill(~inside_sequences(cu_seqlens, x.shape[1], x.device)[None, :, None], 0)
        if cache is not None:
            states.enter(cache, self.config, x.shape[0])
        hidden_states = [x] if output_hidden_states else None
        new: list[MixerState] = []
        for i, layer in enumerate(self.layers):
            state = None if cache is None else states.read(cache, i, MIXERS[self.config.mixers[i]].memory_type)
            x, state = layer(x, state, mask=mask, cu_seqlens=cu_seqlens, keep_state=cache is not None)
            if state is not None:
                new.append(state)
            if hidden_states is not None:
                hidden_states.append(x)
        x = self.norm(x)
        if cache is not None:  # all at once and last: a call that raises leaves the cache as it was
            states.commit(cache, new, states.owners(self.config), x.shape[1], x.device)
        return MetaplasticOutput(
            last_hidden_state=x,
            cache=cache,
            hidden_states=None if hidden_states is None else (*hidden_states[:-1], x),
        )


class MetaplasticForCausalLM(MetaplasticPreTrainedModel, RecurrentGenerationMixin):
    """The language model: :class:`MetaplasticModel` and the output layer.

    ``loss_form``: how the loss is computed, "plain", "fused" or "auto" (:mod:`metaplastic.models.loss`); not saved.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True
    loss_form: str = "plain"

    def __init__(self, config: MetaplasticConfig):
        super().__init__(config)
        self.model = MetaplasticModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> MetaplasticCausalLMOutput:
        """Next-token logits, and the loss if labels are given (one that is fused leaves no logits).

        Args:
            input_ids: tokens ``[B, T]``, or ``inputs_embeds [B, T, D]``.
            attention_mask: ``[B, T]``, non-zero at real tokens, padding anywhere; with a cache it may cover the past.
            cache: states of an earlier call; updated and returned.
            labels: ``[B, T]``, -100 where nothing is to be predicted; token t predicts ``labels[t + 1]``, and nothing
                across the border of two packed sequences.
            num_items_in_batch: divide the summed loss by this instead of this batch's number of labels.
            cu_seqlens: ``[N + 1]`` offsets of sequences packed along T (then B = 1 and no cache).
            logits_to_keep: only the last so many positions (0: all, as labels need), or an index tensor.
            use_cache, output_hidden_states, past_key_values: as in :class:`MetaplasticModel`.
            others: ``shift_labels [B, T]`` instead of labels, already shifted (token t predicts ``shift_labels[t]``;
                a name that Hugging Face's Trainer must not see in the signature, or it asks every batch for it), and
                other ways to say ``cu_seqlens``, see :mod:`metaplastic.models.packing`.
        """
        shift_labels = others.pop("shift_labels", None)
        check_inputs(input_ids, inputs_embeds, attention_mask, self.config.hidden_size)
        tokens: Any = inputs_embeds if input_ids is None else input_ids
        check_targets(labels, shift_labels, logits_to_keep, tokens)
        cu_seqlens = packing.offsets(cu_seqlens, others, tokens, attention_mask)
        outputs = self.model(
            input_ids,
            attention_mask,
            one_cache(cache, past_key_values),
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
            return_dict=True,
        )
        x, asked = outputs.last_hidden_state, labels is not None or shift_labels is not None
        fused = losses.chosen(self.loss_form, self.lm_head, x) if asked else None
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, keep]) if fused is None else None
        loss = None
        if labels is not None and cu_seqlens is not None:  # nothing is predicted from another sequence
            length = labels.shape[-1]
            starts = torch.zeros(length + 1, dtype=torch.bool, device=labels.device)
            borders = cu_seqlens.to(labels.device, torch.int64, non_blocking=True)
            starts = starts.index_fill(0, borders, True)[:length]
            labels = labels.masked_fill(starts | ~inside_sequences(cu_seqlens, length, labels.device), -100)
        if fused is not None:
            loss = losses.fused(x, self.lm_head, labels, shift_labels, num_items_in_batch, fused)
        elif asked:
            loss = self.loss_function(
                logits=logits,
                labels=None if labels is None else labels.long(),
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=None if shift_labels is None else shift_labels.long(),
            )
        return MetaplasticCausalLMOutput(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )
