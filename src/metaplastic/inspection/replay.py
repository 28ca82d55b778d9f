"""Hooks that look at every mixer while a model runs. What they find: ``metaplastic.inspection.kinds``.

Layers carry no diagnostics: their inputs are caught by hooks, ``mixer.gates`` gives the inputs of the rule, and the
rule is replayed in chunks of at most 64 tokens. What is kept is a few numbers per head and token.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import MIXERS
from ..ops.contract import inside_sequences
from .kinds import KINDS, MEASURES, Call, Kind, Spread


@dataclass(frozen=True)
class LayerMemory:
    """What one mixer's memory did. ``layer.window`` is short for ``layer.measures.get("window")``, and so on: None
    where its rule has no such quantity (``note`` says so) or no token counted."""

    name: str  # of the module within the model
    kind: str  # its class
    tokens: int  # that count, over all rows of the batch: not padding, not the tail of packed sequences
    note: str
    memory: type[Kind]  # which measures it has
    measures: dict[str, Spread | Tensor]

    def __getattr__(self, name: str) -> Any:
        if name not in MEASURES:
            raise AttributeError(f"a memory has {', '.join(MEASURES)}, got {name!r}")
        return self.measures.get(name)


class Watch:
    """What :func:`watch` collects; :meth:`report` may be called at any time."""

    def __init__(self, names: dict[nn.Module, str]):
        self._seen = {mixer: _Collected(name, mixer) for mixer, name in names.items()}

    def report(self) -> tuple[LayerMemory, ...]:
        """One entry per mixer that has run, in the order of the model's modules. ValueError if none has."""
        if ran := tuple(c.summary() for c in self._seen.values() if c.calls):
            return ran
        raise ValueError(f"model: none of its {len(self._seen)} mixers has run, so there is nothing to report")


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[Watch]:
    """Looks at every mixer in ``model`` whenever it runs inside the block, whatever runs it: a forward pass, with or
    without cache, ``generate``, a training step, a model of another library around our layers.

    The model computes what it would without; its mode, gradients and hooks are as before afterwards, exceptions or not.
    Compiled models run uncompiled meanwhile (compiled code may skip hooks). Several calls add up.

    >>> with watch(model) as memory:                          # doctest: +SKIP
    ...     model.generate(prompt, max_new_tokens=100)
    >>> [layer.limit for layer in memory.report()]            # doctest: +SKIP
    """
    kinds = tuple(MIXERS.values())
    names = {module: name for name, module in model.named_modules() if isinstance(module, kinds)}
    if not names:
        raise ValueError(f"model must contain a mixer of metaplastic.layers, got a {type(model).__name__} without one")
    found = Watch(names)
    with contextlib.ExitStack() as undo:
        for mixer in names:
            hook = mixer.register_forward_pre_hook(found._seen[mixer].look, with_kwargs=True)
            undo.callback(hook.remove)
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield found


class _Collected:
    """One mixer and what its kind of memory has collected."""

    def __init__(self, name: str, mixer: Any):
        self.name, self.mixer, self.calls, self.tokens = name, mixer, 0, 0
        self.memory = KINDS.get(getattr(mixer, "memory_type", Kind), Kind)()

    @torch.no_grad()
    def look(self, mixer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        self.calls += 1
        call = inspect.signature(mixer.forward).bind(*args, **kwargs).arguments
        x: Tensor = call["x"]
        state, mask, cu_seqlens = (call.get(n) for n in ("state", "mask", "cu_seqlens"))
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        if cu_seqlens is not None:
            keep = inside_sequences(cu_seqlens, x.shape[1], x.device)[None]
        self.tokens += int(keep.sum())
        if not callable(getattr(mixer, "gates", None)):
            return
        memory = None if state is None else state.memory
        gates = mixer.gates(x, state, mask=mask, cu_seqlens=cu_seqlens)
        with torch.autocast(x.device.type, enabled=False):  # the replay is float32 or more, whatever the model is in
            self.memory.look(Call(gates, memory, keep, cu_seqlens))

    def summary(self) -> LayerMemory:
        kind = type(self.memory)
        return LayerMemory(self.name, type(self.mixer).__name__, self.tokens, kind.note, kind, self.memory.report())
