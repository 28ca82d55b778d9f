"""How large a model is and what a token costs: parameters, state bytes, floating point operations (FLOPs).

A multiplication, addition or division is one FLOP. Counted per token, from the shapes of the real modules:

    matrix products    2 per weight of every Linear, the output layer included
    convolutions       2 per weight of every short convolution
    memory rule        per element of every field of the memory, as in ``MEMORY_FLOPS``
    attention          per token that is seen, 2 K + 2 V of every query head

Left out, as is usual: norms, activations, gates and embedding look-ups, all linear in the width. Training is taken as
three times forward (two products for the gradients of each product); recomputing states or checkpointed blocks comes
on top. A decode step costs what a token of a longer input does, whatever came before, where no layer is attention: its
state and its work grow with the tokens seen, and are counted on their own.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from ..layers import MIXERS, ShortConvolution
from ..rules import AdditiveState, DeltaState, GaussianState, PalimpsaState
from .cache import empty_states
from .configuration import MetaplasticConfig, mixer_option_names
from .modeling import MetaplasticForCausalLM

# FLOPs per element of a field, one token: S <- alpha S + v k (3), S q (2); M likewise and M / (J + prior) (1);
# J <- alpha J + beta k^2 (3), J + prior (1); the delta rule's decay (1), residual (2), write (2), read-out (2), and the
# filter's for its mean; P <- alpha^2 P + noise (2), P k (2), P - gain u (2).
MEMORY_FLOPS: dict[type, dict[str, int]] = {
    AdditiveState: {"mean": 5},
    PalimpsaState: {"information": 6, "excess_precision": 4},
    DeltaState: {"mean": 7},
    GaussianState: {"mean": 7, "covariance": 6},
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Parameters by part, state elements of one sequence, and FLOPs of one token forward by kind."""

    embeddings: int  # the output layer too, once if it is tied
    mixers: int
    mlps: int
    norms: int
    convolution_state: int
    memory_state: int
    matrix_products: int
    convolutions: int
    memory_rule: int
    activations_per_token: int  # elements of attention's keys and values, for every token up to a layer's window
    positions_per_token: int  # 8 bytes each
    attention_per_token: int  # FLOPs of one token for every token that it sees

    @property
    def parameters(self) -> int:
        return self.embeddings + self.mixers + self.mlps + self.norms

    @property
    def forward_flops(self) -> int:
        """Of one token in a longer input, or of one decode step of one sequence; without what attention sees."""
        return self.matrix_products + self.convolutions + self.memory_rule

    @property
    def training_flops(self) -> int:
        """Of one token, forward and backward."""
        return 3 * self.forward_flops

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one sequence's states of fixed size in a model of this dtype; the memory is at least float32."""
        return self.convolution_state * dtype.itemsize + self.memory_state * max(4, dtype.itemsize)

    def bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes by which the states of one sequence grow with every token, up to each layer's window."""
        return self.activations_per_token * dtype.itemsize + self.positions_per_token * 8


def size(config: MetaplasticConfig) -> ModelSize:
    """Counts the model of a configuration; no weight is allocated.

    Raises:
        ValueError: a mixer whose memory has no entry in ``MEMORY_FLOPS``.
    """
    with torch.device("meta"):
        model = MetaplasticForCausalLM(config)
    states = empty_states(config)
    rule = 0
    for name, state in zip(config.mixers, states, strict=True):
        if MIXERS[name].growing_state:
            continue
        costs = MEMORY_FLOPS.get(type(state.memory))
        if costs is None:
            known = ", ".join(kind.__name__ for kind in MEMORY_FLOPS)
            raise ValueError(f"MEMORY_FLOPS has {known}, but no {type(state.memory).__name__} (mixer {name!r})")
        rule += sum(costs[field] * x.numel() for field, x in state.memory._asdict().items())
    blocks: Any = model.model.layers
    mixers = sum(_count(block.mixer) for block in blocks)
    mlps = sum(_count(block.mlp) for block in blocks if block.mlp is not None)
    attentions = [block.mixer for block in blocks if block.mixer.growing_state]
    embeddings = _count(nn.ModuleList([model.model.embed_tokens, model.lm_head]))
    return ModelSize(
        embeddings=embeddings,
        mixers=mixers,
        mlps=mlps,
        norms=_count(model) - embeddings - mixers - mlps,
        convolution_state=sum(state.convolution.numel() for state in states),
        memory_state=sum(x.numel() for state in states for x in state.memory),  # attention's is empty at first
        matrix_products=2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
        convolutions=2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, ShortConvolution)),
        memory_rule=rule,
        activations_per_token=sum(m.num_key_heads * (m.key_size + m.value_size) for m in attentions),
        positions_per_token=len(attentions),
        attention_per_token=sum(2 * m.num_heads * (m.key_size + m.value_size) for m in attentions),
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def mixer_options(
    mixer: str, heads: int, key_size: int | None, value_size: int | None, groups: int | None
) -> dict[str, dict[str, int]]:
    """The ``mixer_options`` of a model whose layers are all alike, from the options of a command; None: the default.

    Raises:
        ValueError: ``groups`` of a mixer that has none.
    """
    if groups is not None and mixer in MIXERS and "num_groups" not in mixer_option_names(mixer):
        known = ", ".join(name for name in MIXERS if "num_groups" in mixer_option_names(name))
        raise ValueError(f"groups is for mixers whose heads share keys ({known}), got {groups} with {mixer}")
    options = {"num_heads": heads, "key_size": key_size, "value_size": value_size, "num_groups": groups}
    return {mixer: {name: value for name, value in options.items() if value is not None}}


def from_options(
    *,
    mixer: str,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    key_size: int | None,
    value_size: int | None,
    groups: int | None,
    intermediate_size: int,
    tied: bool,
) -> MetaplasticConfig:
    """The configuration that the options of ``metaplastic size`` describe, named as those of ``metaplastic train``."""
    return MetaplasticConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        mixers=mixer,
        mixer_options=mixer_options(mixer, heads, key_size, value_size, groups),
        intermediate_size=intermediate_size or None,
        tie_word_embeddings=tied,
    )


def describe(config: MetaplasticConfig, dtype: str = "float32") -> list[tuple[str, str]]:
    """The size of a model as names and readable values: what ``metaplastic size`` prints."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found, kind = size(config), DTYPES[dtype]
    return [
        ("parameters", f"{found.parameters:,}"),
        *((f"  {part}", f"{getattr(found, part):,}") for part in ("embeddings", "mixers", "mlps", "norms")),
        (f"weights ({dtype})", _bytes(found.parameters * kind.itemsize)),
        (f"state of a sequence ({dtype} model)", _bytes(found.state_bytes(kind))),
        *([("  attention: per token read", _bytes(found.bytes_per_token(kind)))] if found.positions_per_token else []),
        ("FLOPs per token, forward or decode", f"{found.forward_flops:,}"),
        ("  matrix products", f"{found.matrix_products:,}"),
        ("  convolutions", f"{found.convolutions:,}"),
        ("  memory rule", f"{found.memory_rule:,}"),
        *([("  attention: per token seen", f"{found.attention_per_token:,}")] if found.positions_per_token else []),
        ("FLOPs per token, training", f"{found.training_flops:,}"),
    ]


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:,.1f} {unit}"
