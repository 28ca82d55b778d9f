"""Weights of a model: how they are drawn, loaded and saved, each the strict way."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ..layers import MIXERS
from .configuration import MetaplasticConfig


class MetaplasticPreTrainedModel(PreTrainedModel):
    config: MetaplasticConfig
    config_class = MetaplasticConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MetaplasticBlock"]
    _can_compile_fullgraph = True
    _is_stateful = True
    checkpointing: str | None = None  # see checkpointing.py
    noted_in: tuple[Any, str] | None = None

    def post_init(self) -> None:
        super().post_init()
        self.register_load_state_dict_post_hook(_forget_tied)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Hugging Face calls this on modules with anything left to initialise, after loading; loaded tensors stay."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # The evidence projection starts at +-rank^-1/2, as published; everything else at initializer_range.
            if (bound := getattr(module, "uniform_range", None)) is not None:
                init.uniform_(module.weight, -bound, bound)
            else:
                init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                init.zeros_(bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
            loaded = {n: p.clone() for n, p in own.items() if getattr(p, "_is_hf_initialized", False)}
            reset()
            for name, value in loaded.items():
                own[name].copy_(value)

    @classmethod
    def from_pretrained(cls, path, *args, strict: bool = True, output_loading_info: bool = False, **kwargs):
        """As in Hugging Face, but missing or unexpected weights are an error unless ``strict=False``."""
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        problems = {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys") if info[name]}
        if strict and problems:
            found = "; ".join(
                f"{len(keys)} {name.replace('_', ' ')}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
                for name, keys in problems.items()
            )
            raise ValueError(
                f"the checkpoint {str(path)!r} does not fit {cls.__name__}: {found} (strict=False loads it)"
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs) -> None:
        """As in Hugging Face, but a model whose layers are not those of its configuration is an error.

        It would load as another function, silently where the weights have the same names.
        """
        check_mixers(self)
        super().save_pretrained(*args, **kwargs)


def _forget_tied(model: Any, found: Any) -> None:
    """After ``load_state_dict``: a tied weight is saved under one of its names, and is not missing under the other.

    The names in ``found`` begin with where the model is within the module that is loaded.
    """
    missing: list[str] = found.missing_keys
    own = dict(model.named_parameters(remove_duplicate=False))  # adapters give some another name
    for name, source in model.all_tied_weights_keys.items():
        if name not in own or own[name] is not own.get(source):
            continue
        for key in [key for key in missing if key.endswith(name)]:
            if key.removesuffix(name) + source not in missing:
                missing.remove(key)


def check_mixers(model: PreTrainedModel) -> None:
    """Raises ValueError where a layer of ``model`` is not the mixer that its configuration names."""
    for i, (name, block) in enumerate(zip(model.config.mixers, blocks(model), strict=True)):
        known = {c: n for n, c in MIXERS.items()}
        # The most derived of ours: sharding wraps a module by a subclass of its class.
        found = next((known[c] for c in type(block.mixer).__mro__ if c in known), type(block.mixer).__name__)
        if found != name:
            raise ValueError(
                f"layer {i} is {found!r}, but config.mixers says {name!r}: convert layers by "
                "metaplastic.models.metaplastic_form, which changes both"
            )


def blocks(model: PreTrainedModel) -> Any:
    """The blocks of a model with or without an output layer."""
    return model.base_model.layers
