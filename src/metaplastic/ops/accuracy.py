"""How exact each backend is: one tolerance per backend and dtype, and the measurement that tests and ``doctor`` share.

An error is ``max |x - reference| / max |reference|`` over one tensor, the reference being the token-by-token rule in
float64 (on the CPU unless said otherwise), fed with the very same (rounded) inputs.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules.additive import AdditiveState
from ..rules.bayesian import GaussianState
from ..rules.delta import DeltaState
from ..rules.palimpsa import PalimpsaState
from . import additive, bayesian, delta, dispatch, palimpsa
from .dispatch import BACKENDS

OPERATORS = {
    "palimpsa": (palimpsa, PalimpsaState),
    "additive": (additive, AdditiveState),
    "delta": (delta, DeltaState),
    "bayesian": (bayesian, GaussianState),
}


class Tolerance(NamedTuple):
    forward: float  # outputs, variances, final states
    gradient: float  # every gradient, initial states included


# float32: rounding of sums over K and over a few hundred tokens. bf16 and fp16: everything is float32 until a result is
# rounded to that dtype, by 2^-8 and 2^-11 of its value; a gradient may be the sum of two rounded ones.
_BY_DTYPE = {
    torch.float64: Tolerance(1e-10, 1e-10),
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.bfloat16: Tolerance(4e-3, 8e-3),
    torch.float16: Tolerance(5e-4, 1e-3),
}
# fla rounds more than results: the operands of its products (decayed keys, differences to what the memory says) and the
# states between chunks are of the 16-bit type, which adds about one rounding to each result.
_FLA = {dtype: Tolerance(*(2 * x for x in _BY_DTYPE[dtype])) for dtype in (torch.bfloat16, torch.float16)}
TOLERANCES: dict[tuple[str, str], dict[torch.dtype, Tolerance]] = {
    (op, backend): _FLA if backend == "fla" else _BY_DTYPE for op, entries in BACKENDS.items() for backend in entries
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes, how strong the decays are, packed or dense, with or without an initial state."""

    batch: int = 2
    length: int = 70
    heads: int = 2
    key_size: int = 16
    value_size: int = 24
    decay: str = "mild"  # "none", "mild", "mixed" (0, -0.1, -50, -1000, -inf side by side), "uneven" (a head mild, the
    # next mixed, and so on) or "per key"
    offsets: tuple[int, ...] | None = None  # packed sequences; then batch is 1
    initial: bool = True
    scale: float = 0.7
    variance: bool = True  # asked for, and differentiated
    final: bool = True  # the final state has a gradient
    noise_groups: int = 0  # of ops.bayesian; 0: no group axis
    noise_per_key: bool = False
    rotation: bool = False

    @property
    def rows(self) -> int:
        return self.batch if self.offsets is None else len(self.offsets) - 1


CASES = (
    Case(),
    Case(decay="mixed", batch=1, key_size=5, value_size=3),
    Case(decay="mixed", batch=1, length=90, offsets=(0, 0, 1, 40, 40, 84)),
)

# Head sizes that between them take every way in which the GPU kernels cut a state: few and many keys, one warp or
# several to a row, one block or several to the values, sizes that are padded, the largest.
SIZES = ((16, 16), (48, 48), (64, 64), (96, 192), (128, 64), (128, 128), (192, 192), (256, 256), (33, 17), (5, 200))
# Chunks of 64 and a rest; heads that just fill a device or just do not, for sizes that are cut otherwise then, or whose
# sequences take turns (the reference keeps its states of every token: larger ones would take tens of GB); and for one
# size what does not depend on it: one sequence cut into pieces that run side by side, few tokens, one token of every
# sequence, packed sequences, no gradient of the final state.
MANY = 128 * 64
KERNEL_CASES = (
    *(
        Case(batch=1, length=134, key_size=keys, value_size=values, decay="uneven", variance=variance)
        for keys, values in SIZES
        for variance in (False, True)
    ),
    *(
        Case(
            batch=batch, length=length, key_size=keys, value_size=values, decay="uneven", variance=False, initial=False
        )
        for keys, values in SIZES
        if keys * values <= MANY
        for batch, length in ((50, 34), (72, 70))
    ),
    Case(batch=24, length=70, key_size=96, value_size=192, decay="uneven", variance=False, initial=False),
    Case(batch=1, length=1100, key_size=48, value_size=48, decay="uneven", variance=False),
    Case(batch=1, length=1100, key_size=48, value_size=48, decay="uneven", variance=False, initial=False, final=False),
    Case(length=7, key_size=48, value_size=48, decay="mixed", variance=False),
    Case(batch=3, length=1, key_size=48, value_size=48, decay="mixed"),
    Case(batch=1, length=4, key_size=48, value_size=48, offsets=(0, 1, 2, 3, 4), variance=False),
    Case(
        batch=1, length=300, key_size=48, value_size=48, decay="uneven", offsets=(0, 0, 130, 131, 280), variance=False
    ),
)
KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def kernel_cases(op: str, backend: str, dtype: torch.dtype) -> dict[tuple[int, int], list[Case]]:
    """Beside ``CASES``, for a backend that runs other kernels for other heads: K and V -> what they must pass."""
    found: dict[tuple[int, int], list[Case]] = {}
    if BACKENDS[op][backend].kernels and dtype in KERNEL_DTYPES:
        for case in KERNEL_CASES:
            found.setdefault((case.key_size, case.value_size), []).append(case)
    return found


def example(op: str, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict:
    """Keyword arguments for the operator, all requiring gradients. Keys have unit norm, some are zero or equal."""
    source = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.length, case.heads)

    def normal(*size):
        return torch.randn(*size, generator=source, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(*shape, case.key_size), dim=-1) for _ in range(2))
    if case.length > 9:
        k[:, 3], k[:, 7:9] = 0.0, k[:, 6:7]
    g = -0.2 * torch.rand(*shape, generator=source, dtype=torch.float64)
    if case.decay == "none":
        g = torch.zeros_like(g)
    elif case.decay in ("mixed", "uneven"):
        choices = torch.tensor([0.0] * 5 + [-0.1] * 5 + [-50.0, -1000.0, -torch.inf], dtype=torch.float64)
        mixed = choices[torch.randint(len(choices), shape, generator=source)]
        g = mixed if case.decay == "mixed" else torch.where(torch.arange(case.heads) % 2 == 0, g, mixed)
    elif case.decay == "per key":
        size = case.key_size // 2 if case.rotation else case.key_size
        g = -torch.rand(*shape, size, generator=source, dtype=torch.float64)
        if case.length > 1:  # one token alone keeps decays that differ
            g[:, case.length // 2] = -1000.0
    states = [normal(case.rows, case.heads, case.value_size, case.key_size) for _ in range(2)]
    inputs = {"q": q, "k": k}
    if op == "palimpsa":
        inputs["w"] = normal(*shape, case.value_size)
        inputs["beta"] = torch.rand(*shape, case.value_size, generator=source, dtype=torch.float64) ** 4 * 3
        inputs["g"] = g
        inputs["prior"] = 0.5 + torch.rand(case.heads, generator=source, dtype=torch.float64)
        states[1] = states[1].abs()
    elif op == "delta":
        beta = 2 * torch.rand(*shape, generator=source, dtype=torch.float64) ** 2
        inputs |= {"v": normal(*shape, case.value_size), "beta": beta, "g": g}
        states = [states[0].mT]
    elif op == "bayesian":
        of_groups = (case.noise_groups,) if case.noise_groups else ()
        of_keys = (case.key_size,) if case.noise_per_key else ()
        inputs |= {"v": normal(*shape, case.value_size), "g": g}
        inputs["process_noise"] = 0.1 * torch.rand(*shape, *of_keys, generator=source, dtype=torch.float64)
        inputs["observation_noise"] = 0.05 + torch.rand(*shape, *of_groups, generator=source, dtype=torch.float64)
        if case.rotation:
            inputs["rotation"] = normal(*shape, case.key_size // 2)
        if not case.initial:
            inputs["prior_variance"] = 0.5 + torch.rand(case.heads, *of_groups, generator=source, dtype=torch.float64)
        root = normal(case.rows, case.heads, *of_groups, case.key_size, case.key_size)
        covariance = root @ root.mT / case.key_size + 0.1 * torch.eye(case.key_size, dtype=torch.float64)
        states = [states[0].mT, covariance]
    else:
        inputs |= {"v": normal(*shape, case.value_size), "g": g}
        states = states[:1]
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # Decays, variances and angles are always at least float32.
    gates = set(inputs) - {"q", "k", "v", "w", "beta"}
    made = {n: x.to(device, state_dtype if n in gates else dtype).requires_grad_() for n, x in inputs.items()}
    if case.initial:
        made["initial_state"] = OPERATORS[op][1](*(s.to(device, state_dtype).requires_grad_() for s in states))
    if case.offsets is not None:
        made["cu_seqlens"] = torch.tensor(case.offsets, device=device, dtype=torch.int32)
    return made | {"scale": case.scale, "output_variance": case.variance}


def results(
    op: str, backend: str, inputs: dict, seed: int = 1, final: bool = True, gradients: bool = True
) -> dict[str, Tensor]:
    """Outputs and, through a random weighting of all of them, every gradient: name -> float64 CPU tensor.

    ``final``: whether the final states are in the weighting. ``gradients``: False for outputs alone.
    """
    operator, state_type = OPERATORS[op]
    with torch.set_grad_enabled(gradients):
        read = operator(**inputs, backend=backend)
    outputs = {"output": read.output} | ({} if read.variance is None else {"variance": read.variance})
    outputs |= {f"final {name}": x for name, x in zip(state_type._fields, read.state, strict=True)}
    if not gradients:
        return {n: x.to("cpu", torch.float64) for n, x in outputs.items()}
    source = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), device=read.output.device)
    for name, x in outputs.items():
        if name.startswith("final") and not final:
            continue
        # Rounded to bf16, the weights are the same gradient in every dtype: upstream rounding is not the backend's.
        weights = torch.randn(x.shape, generator=source, dtype=torch.float64).bfloat16()
        loss = loss + (x.double() * weights.to(x.device, torch.float64)).sum()
    leaves = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    for name, x in zip(state_type._fields, inputs.get("initial_state") or (), strict=False):
        leaves[f"initial {name}"] = x
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    else:  # nothing was computed from any input (no token, no state)
        found = [torch.zeros_like(x) for x in leaves.values()]
    found = {f"gradient of {n}": d for n, d in zip(leaves, found, strict=True)}
    return {n: x.detach().to("cpu", torch.float64) for n, x in (outputs | found).items()}


def as_reference(inputs: dict, device: str = "cpu") -> dict:
    """The same inputs in float64 on the CPU (or ``device``)."""

    def convert(x):
        if isinstance(x, tuple):
            return type(x)(*(convert(s) for s in x))
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(device, torch.float64).requires_grad_() if x.is_floating_point() else x.cpu()

    return {name: convert(x) for name, x in inputs.items()}


@functools.lru_cache(maxsize=64)
def _expected(op: str, case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """What the reference makes of ``case``, kept for every backend that is measured against it."""
    return results(op, "reference", as_reference(example(op, case, dtype), device), final=case.final)


def measure(
    op: str, backend: str, case: Case, dtype: torch.dtype, device: str = "cpu", reference: str = "cpu"
) -> dict[str, float]:
    """Relative error of every output and gradient of ``backend`` on one case (of outputs alone if it has no others).

    ``reference``: the device of the rule in float64. Large states take seconds on a CPU.
    """
    gradients = dispatch.no_gradients(op, backend, case.decay == "per key") is None
    inputs = example(op, case, dtype, device)
    found = results(op, backend, inputs, final=case.final, gradients=gradients)
    expected = {name: x for name, x in _expected(op, case, dtype, reference).items() if name in found}
    errors = {}
    for name, exact in expected.items():
        magnitude = exact.abs().max().item() if exact.numel() else 0.0
        difference = (found[name] - exact).abs().max().item() if exact.numel() else 0.0
        errors[name] = difference / max(magnitude, 1e-30) if difference == difference else float("inf")
    return errors


def failures(op: str, backend: str, errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The errors of :func:`measure` that exceed the backend's tolerance."""
    tolerance = TOLERANCES[op, backend][dtype]
    return {
        name: error
        for name, error in errors.items()
        if not error <= (tolerance.gradient if name.startswith("gradient") else tolerance.forward)
    }
