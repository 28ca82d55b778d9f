"""The configuration of a metaplastic language model: sizes, and one mixer name per layer."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from ..layers import MIXERS
from ..ops.dispatch import BACKENDS

# What PreTrainedConfig itself takes beside its fields; any other unknown key is an error.
_HUGGING_FACE_KEYS = {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}


class MetaplasticConfig(PreTrainedConfig):
    """Sizes and mixers of :class:`MetaplasticForCausalLM`.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks (norm, mixer, residual, and norm, MLP, residual if there is an MLP).
        mixers: one mixer name per layer, or a single name for all (``metaplastic.layers.MIXERS`` lists them).
        mixer_options: mixer name -> keyword arguments of its class, e.g. ``{"palimpsa_d": {"num_heads": 16}}``.
            num_heads defaults to 4, key_size to hidden_size / num_heads, value_size to the same (twice that for
            mamba2 and palimpsa_m); what does not divide has to be given.
        intermediate_size: width of the SwiGLU MLP; None leaves the MLP out.
        norm_eps: of every RMS norm.
        initializer_range: standard deviation of linear and embedding weights (0.02; MQAR: hidden_size^-1/2).
        tie_word_embeddings: one matrix for embedding and output.

    Raises:
        ValueError: an unknown key, mixer or option, or sizes that do not fit; the message names it.
    """

    model_type = "metaplastic"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 4
    mixers: list[str] | tuple[str, ...] | str = "palimpsa_d"
    mixer_options: dict[str, Any] | None = None
    intermediate_size: int | None = None
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        generation = set(GenerationConfig._get_default_generation_params())
        if unknown := sorted(set(kwargs) - _HUGGING_FACE_KEYS - generation):
            raise ValueError(f"unknown configuration key {', '.join(map(repr, unknown))}; known: {', '.join(_FIELDS)}")
        self._check_types()
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in Hugging Face, but fields given by name are checked with the others instead of set afterwards."""
        fields = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        return super().from_dict(config_dict | fields, **kwargs)

    def check(self) -> None:
        """Checks every field and writes ``mixers`` as one name per layer. Models do it again: fields can be assigned.

        Raises:
            ValueError: a mixer or option that there is not, or sizes that do not fit; the message names it.
        """
        self._check_types()
        if isinstance(self.mixers, str):
            self.mixers = [self.mixers] * self.num_hidden_layers
        self.mixers = list(self.mixers)
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(
                f"mixers must name one mixer per layer: num_hidden_layers is {self.num_hidden_layers}, "
                f"got {len(self.mixers)} names"
            )
        self.mixer_options = {name: dict(options) for name, options in (self.mixer_options or {}).items()}
        for name in (*self.mixers, *self.mixer_options):
            if name not in MIXERS:
                raise ValueError(f"unknown mixer {name!r}; known: {', '.join(MIXERS)}")
        for name, options in self.mixer_options.items():
            known = mixer_option_names(name)
            if unknown := sorted(set(options) - set(known)):
                raise ValueError(
                    f"unknown option {', '.join(map(repr, unknown))} of mixer {name!r}; known: {', '.join(known)}"
                )
            backends = ("auto", *BACKENDS.get(MIXERS[name].operator, ()))
            if (backend := options.get("backend", "auto")) not in backends:
                raise ValueError(
                    f"backend of mixer {name!r} must be one of {', '.join(map(repr, backends))}, got {backend!r}"
                )
            if name not in self.mixers:
                used = ", ".join(map(repr, dict.fromkeys(self.mixers)))
                raise ValueError(f"mixer_options names {name!r}, which no layer is: mixers are {used}")
        for name in dict.fromkeys(self.mixers):
            self.fill(name, self.mixer_options.get(name, {}))  # sizes that do not fit are found here

    def _check_types(self) -> None:
        """Values from a shell or a JSON file come as anything: every field is checked before it is used."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"):
            value = getattr(self, name)
            if name == "intermediate_size" and value is None:
                continue
            if not _is_integer(value) or value < 1:
                none = ", or None for no MLP" if name == "intermediate_size" else ""
                raise ValueError(f"{name} must be an integer >= 1{none}, got {value!r}")
        for name, words, fits in (
            ("norm_eps", "a number > 0", lambda x: _is_number(x) and 0 < x < float("inf")),
            ("initializer_range", "a number >= 0", lambda x: _is_number(x) and 0 <= x < float("inf")),
            ("tie_word_embeddings", "True or False", lambda x: isinstance(x, bool)),
            ("use_cache", "True or False", lambda x: isinstance(x, bool)),
            ("bos_token_id", "an integer or None", lambda x: x is None or _is_integer(x)),
            ("pad_token_id", "an integer or None", lambda x: x is None or _is_integer(x)),
            ("eos_token_id", "an integer, a list of integers or None", _are_tokens),
            ("mixers", "a mixer name, or a list of one name per layer", _are_names),
            ("mixer_options", "a dictionary: mixer name -> dictionary of its options, or None", _are_options),
        ):
            if not fits(value := getattr(self, name)):
                raise ValueError(f"{name} must be {words}, got {value!r}")

    def mixer_arguments(self, layer_idx: int) -> dict[str, Any]:
        """The keyword arguments of layer ``layer_idx``'s mixer, defaults filled in."""
        name = self.mixers[layer_idx]
        return {"hidden_size": self.hidden_size} | self.fill(name, (self.mixer_options or {}).get(name, {}))

    def fill(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` of mixer ``name``, with those that follow from the model's sizes."""
        options = dict(options)
        heads = options.setdefault("num_heads", 4)
        if not _is_integer(heads) or heads < 1:
            raise ValueError(f"num_heads of mixer {name!r} must be an integer >= 1, got {heads!r}")
        for size, times in (("key_size", 1), ("value_size", MIXERS[name].value_expansion)):
            width = times * self.hidden_size
            if size not in options and width % heads:
                raise ValueError(
                    f"num_heads of mixer {name!r} must divide hidden_size = {self.hidden_size} where key_size and "
                    f"value_size are not both given, got {heads}: give them, or another num_heads"
                )
            options.setdefault(size, width // heads)
        if "norm_eps" in mixer_option_names(name):
            options.setdefault("norm_eps", self.norm_eps)
        return options

    @property
    def layer_types(self) -> list[str]:
        """What Hugging Face's caches need to know of each layer; our own names are in ``mixers``."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def number_of_conv_states(self) -> int:
        """How many recurrent states a cache layer must hold (Hugging Face's name for it)."""
        return max(len(MIXERS[name].memory_type._fields) for name in self.mixers)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _are_tokens(x: Any) -> bool:
    return x is None or _is_integer(x) or (isinstance(x, (list, tuple)) and all(map(_is_integer, x)))


def _are_names(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, (list, tuple)) and all(isinstance(name, str) for name in x))


def _are_options(x: Any) -> bool:
    return x is None or (isinstance(x, Mapping) and all(isinstance(options, Mapping) for options in x.values()))


def mixer_option_names(name: str) -> list[str]:
    """The options of a mixer: the arguments of its constructor, its bases' that it passes on too, but hidden_size."""
    return list(mixer_defaults(name))


def mixer_defaults(name: str) -> dict[str, Any]:
    """The options of a mixer with their defaults (``inspect.Parameter.empty`` where the configuration fills it in)."""
    parts: list[dict[str, Any]] = []
    for cls in MIXERS[name].__mro__:
        if "__init__" in vars(cls):
            given = inspect.signature(cls.__init__).parameters.values()
            named = [p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            parts.append({p.name: p.default for p in named if p.name not in ("self", "hidden_size")})
            if len(named) == len(given):  # nothing is passed on to the next class
                break
    return {n: default for part in reversed(parts) for n, default in part.items()}


_FIELDS = list(MetaplasticConfig.__annotations__)
