"""How large a model is and what a token costs: parameters, state bytes, floating point operations (FLOPs).

A multiplication, addition or division is one FLOP. Counted per token, from the shapes of the real modules:

    matrix products    2 per weight of every Linear, the output layer included
    convolutions       2 per weight of every short convolution
    memory rule        per element of every field of the memory, as in ``MEMORY_FLOPS``
    attention          per token seen, the one that is read included, 2 K + 2 V of every query head

Left out, as is usual: norms, activations, gates and embedding look-ups, all linear in the width. Training is taken as
three times forward (two products for the gradients of each product); recomputing states or checkpointed blocks comes
on top. A decode step costs what a token of a longer input does, whatever came before, where no layer is attention: its
state and its work grow with the tokens seen, and are counted on their own.
"""

import dataclasses
from collections.abc import Callable, Sequence
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
    activations_per_token: int  # elements of attention's keys and values, for every token seen
    positions_per_token: int  # 8 bytes each
    attention_per_token: int  # FLOPs of one token for every token that it sees
    window: int | None  # how many tokens attention sees at most, the one that is read included; None: all

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

    def memory_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one sequence's memories of fixed size in a model of this dtype; they are at least float32."""
        return self.memory_state * max(4, dtype.itemsize)

    def convolution_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that one sequence's short convolutions keep."""
        return self.convolution_state * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes by which the states of one sequence grow with every token seen, up to one less than the window."""
        return self.activations_per_token * dtype.itemsize + self.positions_per_token * 8

    def state_bytes(self, dtype: torch.dtype = torch.float32, tokens: int = 0) -> int:
        """Bytes of one sequence's states after so many tokens; without attention the same after any number."""
        kept = tokens if self.window is None else min(tokens, self.window - 1)
        return self.memory_bytes(dtype) + self.convolution_bytes(dtype) + kept * self.bytes_per_token(dtype)


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
        window=next((m.window for m in attentions), None),  # a configuration has one for all of them
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layer_mixers(mixer: str, layers: int) -> list[str]:
    """One name per layer of what a command says: a name for all, or several with commas, repeated up the layers.

    Raises:
        ValueError: an unknown name, or a number of layers that is no multiple of that of the names.
    """
    names = [name.strip() for name in mixer.split(",")]
    for name in names:
        if name not in MIXERS:
            raise ValueError(f"mixer: unknown mixer {name!r}; known: {', '.join(MIXERS)}")
    if layers % len(names):
        raise ValueError(
            f"mixer: {len(names)} names ({mixer}), expected a number that divides that of the layers, {layers}"
        )
    return names * (layers // len(names))


def mixer_options(
    mixers: Sequence[str], heads: int, key_size: int | None, value_size: int | None, groups: int | None
) -> dict[str, dict[str, int]]:
    """The ``mixer_options`` of a model from the options of a command, for every mixer that has them; None: the default.

    Raises:
        ValueError: ``groups`` where no mixer has any.
    """
    grouped = [name for name in MIXERS if "num_groups" in mixer_option_names(name)]
    if groups is not None and not set(grouped) & set(mixers):
        of = f"mixers whose heads share keys ({', '.join(grouped)})"
        raise ValueError(f"groups is for {of}, got {groups} with {', '.join(dict.fromkeys(mixers))}")
    options = {"num_heads": heads, "key_size": key_size, "value_size": value_size, "num_groups": groups}
    given = {name: value for name, value in options.items() if value is not None}
    return {
        mixer: {name: value for name, value in given.items() if name != "num_groups" or mixer in grouped}
        for mixer in dict.fromkeys(mixers)
    }


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
    mixers = layer_mixers(mixer, layers)
    return MetaplasticConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        mixers=mixers,
        mixer_options=mixer_options(mixers, heads, key_size, value_size, groups),
        intermediate_size=intermediate_size or None,
        tie_word_embeddings=tied,
    )


def describe(config: MetaplasticConfig, dtype: str = "float32") -> list[tuple[str, str]]:
    """The size of a model as names and readable values: what ``metaplastic size`` prints."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found, kind = size(config), DTYPES[dtype]
    kept = None if found.window is None else found.window - 1  # the next token sees itself too
    return [
        ("parameters", f"{found.parameters:,}"),
        *((f"  {part}", f"{getattr(found, part):,}") for part in ("embeddings", "mixers", "mlps", "norms")),
        (f"weights ({dtype})", _bytes(found.parameters * kind.itemsize)),
        (
            f"state of a sequence ({dtype} model)",
            _growing(found.state_bytes(kind), found.bytes_per_token(kind), kept, _bytes),
        ),
        *([("  memory", _bytes(found.memory_bytes(kind)))] if found.memory_state else []),
        *([("  convolution", _bytes(found.convolution_bytes(kind)))] if found.convolution_state else []),
        ("FLOPs per token, forward or decode", _growing(found.forward_flops, found.attention_per_token, found.window)),
        ("  matrix products", f"{found.matrix_products:,}"),
        ("  convolutions", f"{found.convolutions:,}"),
        ("  memory rule", f"{found.memory_rule:,}"),
        ("FLOPs per token, training", _growing(found.training_flops, 3 * found.attention_per_token, found.window)),
    ]


def _growing(fixed: int, each: int, most: int | None, words: Callable[[int], str] = "{:,}".format) -> str:
    """A number that grows by ``each`` with every token seen, of ``most`` of them (None: of all)."""
    told = [words(fixed)] if fixed else []
    if each:
        told.append(f"grows by {words(each)} per token seen")
        if most is not None:
            told.append(f"up to {most:,} tokens: {words(fixed + most * each)}")
    return ", ".join(told) or words(0)


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:,.1f} {unit}"
