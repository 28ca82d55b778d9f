r"""The plasticity dial: how much evidence a layer's writes carry, from its additive ablation to full metaplasticity.

    beta_t = evidence(x_t) softplus(b_scale) s_t        dial = softplus(b_scale), one per head, >= 0

The write w does not contain the dial, so turning it changes how fast the memory grows sure and never what is written:
at 0 the excess precision J stays 0 and the layer is its ablation (Mamba2's rule), exactly (arXiv 2602.09075, Sec. 2.4).

**Zero.** softplus^-1(0) is minus infinity, which averages of weights turn into NaN. A dial of 0 is stored as -1000: its
softplus is exactly 0 in every floating type, and so is its gradient, which is finite; training therefore never leaves
an exact 0. To train from almost nothing, set a small value (0.01).

**The prior.** The rule depends on w / prior and beta / prior alone. A prior of p with the write p w is a prior of 1
with the evidence beta / p: the same layer with its dial divided by p. So the metaplastic form of an ablation keeps
prior = 1 and no write has to be scaled (which could not be done in v_proj, as SiLU and the convolution come after it).
A layer whose prior is not 1 writes w / prior; no ablation does, and :func:`ablation_form` refuses it.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.contract import compute_dtype
from ..rules import AdditiveState
from .evidence import Evidence

EXACT_ZERO = -1000.0  # a number of every floating type; exp(-1000) is 0 in all of them
_LINEAR = 20.0  # above it PyTorch's softplus is the identity

# Constructor arguments that a layer does not keep under their own name, and where they can be seen.
_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "conv_size": lambda layer: layer.conv.kernel_size,
    "conv_bias": lambda layer: layer.conv.bias is not None,
    "bias": lambda layer: layer.out_proj.bias is not None,
    "norm_eps": lambda layer: (layer.norm if hasattr(layer, "norm") else layer.o_norm).eps,
    "norm_groups": lambda layer: layer.norm.groups,
}

Dial = float | Tensor
Dials = Dial | Sequence[Dial] | Mapping[str, Dial]


class PlasticityChange:
    """What :func:`set_plasticity` changed. ``restore()``, or leaving a ``with`` block, brings it back bit for bit."""

    def __init__(self, saved: Sequence[tuple[Tensor, Tensor]]):
        self._saved = saved

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in self._saved:
            parameter.copy_(value)

    def __enter__(self) -> "PlasticityChange":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def plasticity(module: nn.Module) -> dict[str, Tensor]:
    """The dial ``softplus(b_scale) [H]`` of every metaplastic layer in ``module``, by name; detached copies.

    Raises ValueError if there is none.
    """
    return {name: F.softplus(b.detach().to(compute_dtype(b))) for name, b in _dials(module).items()}


@torch.no_grad()
def set_plasticity(module: nn.Module, value: Dials, layers: Sequence[str] | None = None) -> PlasticityChange:
    """Sets the dial of every metaplastic layer in ``module``, or of ``layers``; parameters change in place.

    Args:
        module: a layer or anything that contains some.
        value: >= 0. A number for all; a tensor ``[H]`` with one entry per head, for all layers; a list with one number
            or tensor per layer, in the order of :func:`plasticity`; or a mapping from some of its names.
        layers: names of the layers to change, as :func:`plasticity` gives them; None: all.

    Returns:
        The change, to be undone by ``restore()`` or at the end of a ``with`` block:
        ``with set_plasticity(model, 0): ...`` runs the ablation. Ignoring it keeps the new value.
    """
    dials = _choose(_dials(module), layers)
    if isinstance(value, Mapping):
        if layers is not None:
            raise ValueError("layers must be None when value names the layers itself")
        values = dict(zip(_choose(dials, list(value)), value.values(), strict=True))
    elif isinstance(value, str):
        raise TypeError(f"value must be numbers, got the string {value!r}")
    elif isinstance(value, Sequence):
        if len(value) != len(dials):
            raise ValueError(f"value must have one entry per layer, {len(dials)}, got {len(value)}")
        values = dict(zip(dials, value, strict=True))
    else:
        values = dict.fromkeys(dials, value)
    # Everything is checked before anything is changed.
    new = {name: _parameter(name, x, dials[name]) for name, x in values.items()}
    return _write([(dials[name], x) for name, x in new.items()])


def scale_plasticity(module: nn.Module, factor: float, layers: Sequence[str] | None = None) -> PlasticityChange:
    """Multiplies the dials by ``factor`` >= 0; as :func:`set_plasticity`."""
    if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
        raise ValueError(f"factor must be a finite number >= 0, got {factor!r}")
    return set_plasticity(module, {n: _dial(b) * factor for n, b in _choose(_dials(module), layers).items()})


@torch.no_grad()
def draw_plasticity(
    module: nn.Module,
    low: float = 0.1,
    high: float = 1.0,
    layers: Sequence[str] | None = None,
    *,
    generator: torch.Generator | None = None,
) -> PlasticityChange:
    """Draws the parameter b_scale (not its softplus) uniformly: by default as published for fine-tuning an ablation.

    U(0.1, 1) are dials of 0.74 to 1.31, so this changes the function at once; the paper fine-tunes from there.
    """
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"low must be <= high, both finite, got {low} and {high}")
    dials = _choose(_dials(module), layers).values()
    drawn = [torch.rand(b.shape, generator=generator, dtype=torch.float64) * (high - low) + low for b in dials]
    return _write(list(zip(dials, drawn, strict=True)))


def metaplastic_form(layer: nn.Module, *, plasticity: Dial | None = None, **options: Any) -> nn.Module:
    """A metaplastic layer with the weights of its ablation ``layer`` (palimpsa_d of palimpsa_d_additive, and so on).

    Args:
        layer: the trained ablation; it is left as it is and shares nothing with the result.
        plasticity: the dial to start with, a number or ``[H]``. 0 computes the same function as ``layer`` and cannot
            be trained away from it; None draws it as published for fine-tuning (:func:`draw_plasticity`).
        options: of the metaplastic class alone, such as ``beta_rank`` or ``train_prior``. The prior starts at 1.
    """
    from . import MIXERS  # it imports the layers

    found = [c for c in MIXERS.values() if issubclass(c, type(layer)) and issubclass(c, Evidence)]
    if isinstance(layer, Evidence) or len(found) != 1:
        raise TypeError(f"layer must be an ablation ({', '.join(_ablations())}), got {type(layer).__name__}")
    if strange := sorted(set(options) & set(inspect.signature(type(layer)).parameters)):
        raise ValueError(f"{strange[0]} is given by the layer: leave it out, got {options[strange[0]]!r}")
    if options.get("prior", 1.0) != 1.0:
        raise ValueError(f"prior must be 1 to keep the writes, got {options['prior']}: divide the plasticity by it")
    new = _rebuild(layer, found[0], _arguments(layer, type(layer)) | options)
    if plasticity is None:
        draw_plasticity(new)
    else:
        set_plasticity(new, plasticity)
    return new


def ablation_form(layer: nn.Module) -> nn.Module:
    """The ablation with the weights of a metaplastic ``layer``: what that computes at plasticity 0. It is a copy."""
    ablation = next((c for c in type(layer).__mro__ if c in _ablations().values()), None)
    if not isinstance(layer, Evidence) or ablation is None:
        raise TypeError(f"layer must be a metaplastic layer with an ablation, got {type(layer).__name__}")
    if layer.prior_log.any():
        prior = [round(p, 6) for p in layer.prior_log.detach().exp().tolist()]
        raise ValueError(f"layer writes w / prior, which no ablation does: its prior must be 1, got {prior}")
    return _rebuild(layer, ablation, _arguments(layer, ablation))


def _ablations() -> dict[str, type[nn.Module]]:
    """The additive mixers that have a metaplastic form, by name."""
    from . import MIXERS

    forms = [c for c in MIXERS.values() if issubclass(c, Evidence)]
    additive = {n: c for n, c in MIXERS.items() if c.memory_type is AdditiveState}
    return {n: c for n, c in additive.items() if any(issubclass(form, c) for form in forms)}


def _dials(module: nn.Module) -> dict[str, Tensor]:
    """The parameter b_scale of every metaplastic layer."""
    found: dict[str, Tensor] = {n: layer.b_scale for n, layer in module.named_modules() if isinstance(layer, Evidence)}
    if not found:
        raise ValueError(f"module must contain a metaplastic layer, got a {type(module).__name__} without one")
    return found


def _choose(dials: Mapping[str, Tensor], names: Sequence[str] | None) -> dict[str, Tensor]:
    if names is None:
        return dict(dials)
    if isinstance(names, str):
        raise TypeError(f"layers must be a list of names, got the single string {names!r}")
    if unknown := [n for n in names if n not in dials]:
        raise ValueError(f"unknown layer {', '.join(map(repr, unknown))}; known: {', '.join(map(repr, dials))}")
    return {n: dials[n] for n in names}


def _dial(b_scale: Tensor) -> Tensor:
    return F.softplus(b_scale.detach().double())


def _parameter(name: str, value: Any, b_scale: Tensor) -> Tensor:
    """The b_scale [H] whose softplus is ``value``, in float64."""
    where = f"plasticity of layer {name!r}"
    if not isinstance(value, Tensor | float | int) or isinstance(value, bool):
        raise TypeError(f"{where} must be a number or a tensor [H], got {type(value).__name__}")
    x = torch.as_tensor(value, dtype=torch.float64, device=b_scale.device).detach()
    if x.dim() and x.shape != b_scale.shape:
        raise ValueError(f"{where} must be a number or [H] = {list(b_scale.shape)}, got {list(x.shape)}")
    largest = torch.finfo(b_scale.dtype).max
    if not ((x >= 0) & (x <= largest)).all():
        raise ValueError(f"{where} must be >= 0 and a finite {b_scale.dtype}, got {x.tolist()}")
    inverse = (x + torch.log(-torch.expm1(-x))).where(x <= _LINEAR, x)
    return inverse.where(x > 0, EXACT_ZERO).expand(b_scale.shape)


def _write(changes: Sequence[tuple[Tensor, Tensor]]) -> PlasticityChange:
    change = PlasticityChange([(parameter, parameter.detach().clone()) for parameter, _ in changes])
    for parameter, value in changes:
        parameter.copy_(value)
    return change


def _arguments(layer: Any, ablation: type[nn.Module]) -> dict[str, Any]:
    """The arguments that ``layer`` was made with, as far as they are those of its ablation."""
    known = inspect.signature(ablation).parameters
    return {n: getattr(layer, n) if hasattr(layer, n) else _ARGUMENTS[n](layer) for n in known}


def _rebuild(layer: nn.Module, target: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """A ``target`` with copies of the weights of ``layer`` that it has too; the others as initialised."""
    new = target(**arguments).to(next(layer.parameters()))
    old, own = layer.state_dict(), new.state_dict()
    if strange := sorted(set(old) - set(own)) if isinstance(new, Evidence) else sorted(set(own) - set(old)):
        raise ValueError(f"layer must have the weights of its class alone (merge adapters first), see {strange[0]!r}")
    new.load_state_dict(own | {n: old[n].clone() for n in own if n in old}, assign=True)
    trained = {n: p.requires_grad for n, p in layer.named_parameters()}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return new.train(layer.training)
