"""From a trained ablation to its metaplastic form, for whole models: Mamba2's weights load into Palimpsa-M.

The mathematics and the conversion of one layer are in :mod:`metaplastic.layers.plasticity`; here the configuration goes
along, so that the model is saved as what it computes.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..layers import MIXERS
from ..layers import plasticity as dials
from ..layers.evidence import Evidence
from ..rules import AdditiveState
from .configuration import MetaplasticConfig, mixer_defaults
from .pretrained import MetaplasticPreTrainedModel, blocks, check_mixers

Model = TypeVar("Model", bound=MetaplasticPreTrainedModel)

# Ablation -> its metaplastic form: mamba2 -> palimpsa_m, palimpsa_d_additive -> palimpsa_d.
FORMS = {
    name: form
    for name, ablation in MIXERS.items()
    for form, mixer in MIXERS.items()
    if ablation.memory_type is AdditiveState and issubclass(mixer, ablation) and issubclass(mixer, Evidence)
}


def metaplastic_form(
    model: Model, *, plasticity: float | Tensor | None = None, layers: Sequence[int] | None = None, **options: Any
) -> Model:
    """A model with the weights of ``model`` whose ablation layers are replaced by their metaplastic form.

    ``mamba2`` becomes ``palimpsa_m``, ``palimpsa_d_additive`` becomes ``palimpsa_d``; every option of a replaced layer
    is kept. The configuration says so, hence the result saves, loads and generates as any model. The projections that
    only the new layers have are drawn from PyTorch's generator as in a new model.

    Args:
        model: the trained model; it is left as it is and shares nothing with the result.
        plasticity: the dial of every new layer, a number or a tensor ``[H]``. 0 computes the same function as ``model``
            and cannot be trained away from it; None draws it as published for fine-tuning.
        layers: indices of the layers to replace. None: all ablations.
        options: of the metaplastic class alone, such as ``beta_rank`` or ``train_prior``. The prior starts at 1.

    Raises:
        TypeError, ValueError: a model without an ablation, a layer that is none, or options that disagree with those
            of other layers of the same mixer (a configuration has one set of options per mixer).
    """
    if not isinstance(model, MetaplasticPreTrainedModel):
        raise TypeError(f"model must be a metaplastic language model, got {type(model).__name__}")
    check_mixers(model)
    chosen = _choose(model.config, layers)
    new = copy.deepcopy(model)
    _rename(new.config, chosen, options)
    for i, block in enumerate(blocks(new)):
        if i in chosen:
            block.mixer_name = new.config.mixers[i]
            mixer: Any = dials.metaplastic_form(block.mixer, plasticity=plasticity, **options)
            for linear in (mixer.beta_down, mixer.beta_up):
                new._init_weights(linear)
            block.mixer = mixer
    return new


def _choose(config: MetaplasticConfig, layers: Sequence[int] | None) -> set[int]:
    found = [i for i, name in enumerate(config.mixers) if name in FORMS]
    if not found:
        raise ValueError(f"model must have a layer that is an ablation ({', '.join(FORMS)}), got {config.mixers}")
    if layers is None:
        return set(found)
    if isinstance(layers, (str, int)) or not layers or any(isinstance(i, bool) or i not in found for i in layers):
        raise ValueError(f"layers must be a list of indices of ablations, some of {found}, got {layers!r}")
    return set(layers)


def _rename(config: MetaplasticConfig, chosen: set[int], options: dict[str, Any]) -> None:
    """Changes the names and the options of the chosen layers in ``config``."""
    given = config.mixer_options or {}
    for name in dict.fromkeys(config.mixers[i] for i in sorted(chosen)):
        form = FORMS[name]
        if unknown := sorted(set(options) - (set(mixer_defaults(form)) - set(mixer_defaults(name)))):
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))}: options must be of {form!r} and not of {name!r}"
            )
        wanted = given.get(name, {}) | options
        if form in config.mixers:  # its layers stay as they are
            present = given.get(form, {})
            wanted = {n: x for n, x in present.items() if n not in mixer_defaults(name)} | wanted
            a, b = _complete(config, form, wanted), _complete(config, form, present)
            if different := sorted(n for n in a if a[n] != b[n]):
                n = different[0]
                raise ValueError(
                    f"mixer_options: the new layers {form!r} would have {n} = {a[n]!r}, but the model has layers "
                    f"{form!r} with {n} = {b[n]!r}; a configuration has one set of options per mixer"
                )
        else:
            given = given | {form: wanted}
    config.mixers = [FORMS[name] if i in chosen else name for i, name in enumerate(config.mixers)]
    config.mixer_options = {name: x for name, x in given.items() if name in config.mixers}


def _complete(config: MetaplasticConfig, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with all defaults, as they can be compared (files turn tuples into lists)."""
    filled = mixer_defaults(name) | config.fill(name, options)
    return {n: tuple(x) if isinstance(x, list) else x for n, x in filled.items()}
