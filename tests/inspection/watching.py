"""Small models with odd weights, what their mixers were given, found by another way than the code under test."""

import numpy as np
import torch

from metaplastic.layers import MIXERS, plasticity
from metaplastic.layers.mixer import MixerState
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.rules import PalimpsaState

PRECISE = [name for name, kind in MIXERS.items() if kind.memory_type is PalimpsaState]


def build(*names, dtype=torch.float64, **more):
    """One block per name, with odd weights and priors; ``more``: options of all of its mixers."""
    torch.manual_seed(0)
    options = {name: {"num_heads": 3, "key_size": 4, "value_size": 6} | more for name in set(names)}
    config = MetaplasticConfig(
        vocab_size=20, hidden_size=12, num_hidden_layers=len(names), mixers=list(names), mixer_options=options,
        initializer_range=0.3,
    )  # fmt: skip
    model = MetaplasticForCausalLM(config).to(dtype)
    if set(names) & set(PRECISE):
        plasticity.draw_plasticity(model, -2, 3)
    for block in model.model.layers:  # a prior of its own for every head
        if hasattr(block.mixer, "prior_log"):
            block.mixer.prior_log.copy_(torch.tensor([-1.0, 0.0, 2.0]))
        for parameter in ("prior_variance", "stationary_variance", "noise_bias"):
            if hasattr(block.mixer, parameter):
                getattr(block.mixer, parameter).data.add_(torch.randn_like(getattr(block.mixer, parameter)))
    return model


def tokens(*shape):
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(2))


def catch(model, run):
    """The arguments of every mixer's call, by another way than the code under test: a wrapped forward."""
    calls = {}
    originals = {}
    for name, module in model.named_modules():
        if isinstance(module, tuple(MIXERS.values())):

            def forward(*args, _name=name, _module=module, **kwargs):
                x, state = (*args, None)[:2]
                kept = None
                if state is not None:
                    memory = type(state.memory)(*(s.detach().clone() for s in state.memory))
                    kept = MixerState(state.convolution.detach().clone(), memory)
                rows = {name: x for name, x in kwargs.items() if name in ("mask", "cu_seqlens")}  # what gates take
                calls.setdefault(_name, []).append((_module, x, kept, rows))
                return originals[_name](*args, **kwargs)

            originals[name], module.forward = module.forward, forward
    with torch.no_grad():
        run()
    for name, module in model.named_modules():
        if name in originals:
            del module.forward
    return calls


def spans(x, kwargs):
    """Row, first and last token, and number of every sequence of a call."""
    offsets = kwargs.get("cu_seqlens")
    if offsets is None:
        return [(b, 0, x.shape[1], b) for b in range(x.shape[0])]
    return [(0, int(offsets[n]), int(offsets[n + 1]), n) for n in range(len(offsets) - 1)]


def quartiles(x):
    return [torch.from_numpy(np.quantile(x.numpy(), p, axis=0, method="inverted_cdf")) for p in (0.25, 0.5, 0.75, 1.0)]


def arguments(case):
    if case == "padded":
        rows = ["0" * 70 + "1" * 80, "1" * 150, "110" * 50, "0" * 149 + "1", *["0" * 150] * 2]
        return {"input_ids": tokens(6, 150), "attention_mask": torch.tensor([[int(c) for c in r] for r in rows])}
    if case == "packed":  # an empty sequence, one of one token, a tail that does not count
        return {"input_ids": tokens(1, 200), "cu_seqlens": torch.tensor([0, 90, 90, 91, 180], dtype=torch.int32)}
    return {"input_ids": tokens(2, 150)}
