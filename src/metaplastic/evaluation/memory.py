"""What a training step keeps in the memory of a device, counted from the modules: ``metaplastic plan``.

Weights, gradients and AdamW's two averages are float32, and its count of steps is one float32 a tensor. Under bf16
autocast every Linear and every short convolution has a bf16 copy of its weight, which waits for the backward pass. What
else waits, of one token and layer, is counted term by term below, as eager PyTorch keeps it on a CPU (a test compares
it); on a GPU fused RMS norms keep one float32 number of the width less, a fused SiLU of the short convolution one bf16
number of its channels less, and compiled blocks less than that. Not counted: what a kernel needs while it runs.

With checkpointing "full" the input of every block waits, with "selective" also what its matrix products and its memory
return (models/checkpointing.py); one block at a time is computed again.
"""

import math
from typing import Any

from torch import nn

from ..layers import Attention, BayesianLayer, GatedDeltaNet, Mamba2, ShortConvolution
from ..layers.backbone import DeltaNetBackbone
from ..layers.evidence import Evidence

FLOAT, HALF = 4, 2  # bytes: float32, and what autocast computes in
CHUNK = 64  # tokens between the states that the delta rule and the filter keep for the backward pass
_OUTPUTS = ("o_proj", "out_proj", "beta_up")  # Linears that do not read the block's normalised input


def weight_copies(module: nn.Module) -> int:
    """Bytes of the bf16 copies that autocast makes of a module's weights."""
    cast = [m for m in module.modules() if isinstance(m, (nn.Linear, ShortConvolution))]
    return sum(HALF * p.numel() for m in cast for p in m.parameters())


def optimizer_bytes(module: nn.Module) -> int:
    """Of AdamW: two averages of every parameter, and a number of steps for every tensor."""
    return sum(FLOAT * (2 * p.numel() + 1) for p in module.parameters())


def block_bytes(block: Any, length: int) -> float:
    """Bytes that wait for the backward pass, of one token of a row of ``length`` in one block."""
    total = _norm(block.mixer_norm) + _mixer(block.mixer, length)
    if block.mlp is not None:
        width = block.mlp.up_proj.out_features
        total += _norm(block.mlp_norm) + 2 * HALF * block.mlp.up_proj.in_features + 4 * HALF * width
    return total


def kept_by_checkpointing(block: Any, kind: str, length: int) -> float:
    """The same where the block is computed again: its input; "selective" also what products and memories return."""
    mixer = block.mixer
    total = FLOAT * mixer.hidden_size
    if kind == "selective":
        total += HALF * sum(m.out_features for m in block.modules() if isinstance(m, nn.Linear))
        total += HALF * mixer.num_heads * mixer.value_size + FLOAT * state_elements(mixer) / length
        total += FLOAT * mixer.num_heads if isinstance(mixer, Attention) else _states(mixer, length)
    return total


def state_elements(mixer: Any) -> int:
    """Numbers of one sequence's memory; 0 where it grows by every token."""
    if mixer.growing_state:
        return 0
    fields = 2 if isinstance(mixer, Evidence) else 1
    elements = fields * mixer.num_heads * mixer.key_size * mixer.value_size
    if isinstance(mixer, BayesianLayer):
        elements += mixer.num_heads * (mixer.noise_groups or 1) * mixer.key_size**2
    return elements


def head_bytes(model: Any) -> int:
    """Of the last norm, the output layer and the loss over whole logits."""
    return _norm(model.model.norm) + HALF * model.config.hidden_size + FLOAT * model.config.vocab_size + 8


def logits_bytes(model: Any) -> int:
    """Of whole logits beyond that while the loss is computed: in bf16, and in float32 before the softmax."""
    return (HALF + FLOAT) * model.config.vocab_size


def _norm(norm: nn.RMSNorm) -> int:
    """Its input, which is float32, the same divided by its size, and that size."""
    return 2 * FLOAT * math.prod(norm.normalized_shape) + FLOAT


def _mixer(mixer: Any, length: int) -> float:
    linears = [name for name, m in mixer.named_children() if isinstance(m, nn.Linear) and name not in _OUTPUTS]
    total = HALF * mixer.hidden_size * len(linears)  # each casts its input anew
    if isinstance(mixer, Attention):
        return total + _attention(mixer)
    keys, values = mixer.num_heads * mixer.key_size, mixer.num_heads * mixer.value_size
    total += 2 * HALF * keys  # q and k as the operator gets them
    if isinstance(mixer, Mamba2):
        total += _mamba(mixer, values)
    elif isinstance(mixer, DeltaNetBackbone):
        total += _delta_net(mixer, values)
    else:
        raise ValueError(f"no count of what a {type(mixer).__name__} keeps for its backward pass")
    if isinstance(mixer, Evidence):  # down projection, sigmoid, that times the scaled strength, one per head
        strength = FLOAT if isinstance(mixer, Mamba2) else HALF
        total += HALF * mixer.beta_down.out_features + 2 * HALF * values + strength * mixer.num_heads
    return total + _states(mixer, length)


def _states(mixer: Any, length: int) -> float:
    """What the delta rule and the filter return for their backward pass, of one token."""
    chunks = math.ceil(length / CHUNK) / length
    if isinstance(mixer, GatedDeltaNet):  # the entry state of every chunk, and the writes
        return FLOAT * (state_elements(mixer) * chunks + mixer.num_heads * mixer.value_size)
    if isinstance(mixer, BayesianLayer):  # the entry state, and the inverse factor
        return FLOAT * chunks * (state_elements(mixer) + mixer.num_heads * (mixer.noise_groups or 1) * CHUNK**2)
    return 0.0


def _delta_net(mixer: Any, values: int) -> int:
    channels = 2 * mixer.num_key_heads * mixer.key_size + values
    total = 3 * HALF * channels  # into the convolution, out of it, through SiLU
    total += 2 * FLOAT * mixer.num_heads  # the sizes of q and k
    total += 3 * FLOAT * values + FLOAT * mixer.num_heads  # the read-out in float32, normalised, times its weight
    total += 3 * HALF * values  # the gate, its SiLU, the product with it
    if isinstance(mixer, (BayesianLayer, GatedDeltaNet)):
        return total + 6 * FLOAT * mixer.num_heads  # decays and noises, or strengths, before and after their functions
    return total + HALF * values + (3 * FLOAT + HALF) * mixer.num_heads  # the write; decays and the strength


def _mamba(mixer: Any, values: int) -> int:
    channels = values + 2 * mixer.num_groups * mixer.key_size
    total = 2 * HALF * channels  # into the convolution and out of it
    if mixer.num_groups < mixer.num_heads:
        total += 2 * HALF * mixer.num_heads * mixer.key_size  # q and k, repeated before their SiLU
    total += 2 * HALF * values  # the values and the write
    total += 4 * FLOAT * mixer.num_heads  # steps before and after softplus and clamp, decays
    return total + 5 * FLOAT * values + HALF * values + FLOAT * mixer.norm.groups  # the gated norm, in float32 inside


def _attention(mixer: Any) -> int:
    size = max(mixer.key_size, mixer.value_size)
    heads = 2 * mixer.num_heads + 2 * mixer.num_key_heads  # q and the read-out, k and v
    return HALF * size * heads + FLOAT * mixer.num_heads + 2 * HALF * (mixer.key_size // 2)
