"""Kernels for inputs that have none from beginning to end, on the emulator: decays per key within a chunk, and the
recursions of the backward pass."""

from dataclasses import replace

import pytest
import torch

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case
from metaplastic.ops.bayesian.cuda import general, key_decays
from metaplastic.ops.bayesian.cuda.problem import prepare
from metaplastic.ops.bayesian.key_decay import KeyDecay

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)
from .test_bayesian_cuda_backward import NAMES, check, errors

STEPS = {"backward_reach", "backward_step"}
WALK = {"walk_mean", "walk_reach", "walk_step"}
PAIRS = {"key_pairs", "key_pairs_back", "key_scan"}

pytestmark = needs_compiler


@pytest.fixture
def here(emulated, monkeypatch):  # noqa: F811
    """The names of the kernels that ran, those for other inputs among them."""
    monkeypatch.setattr(key_decays, "DEVICES", ("cpu",))
    return emulated


@pytest.mark.parametrize(("keys", "groups"), [(6, 1), (100, 2)])
def test_decays_per_key(here, keys, groups):
    """Against the halves of halves in float64: decays of all strengths side by side, exactly 0 and 1 among them."""
    source = torch.Generator().manual_seed(0)
    g = -0.3 * torch.rand(2, 1, 1, 64, keys, generator=source)
    g[..., ::7, :], g[..., ::5, :], g[0, 0, 0, 3] = -1000.0, 0.0, -torch.inf
    x, y, d, noise = (
        torch.randn(2, 1, n, *size, generator=source)
        for n, *size in ((groups, 128, keys), (groups, 64, keys), (groups, 64, 128), (1, 64, keys))
    )
    found, exact = key_decays.KernelDecay(g), KeyDecay(g.double())
    m = d[..., :64]
    pairs = [
        (found.entry, exact.entry),
        (found.tail, exact.tail),
        (found.last, exact.last),
        (found.crossed(y, x), exact.crossed(y.double(), x.double())),
        (found.gathered(noise), exact.gathered(noise.double())),
        (found.gathered(noise[..., :1]), exact.gathered(noise[..., :1].double())),
        (found.scattered(noise), exact.scattered(noise.double())),
        (found.of_pairs().entry, exact.of_pairs().entry),
        (found.pairs(y, y), exact.pairs(y.double(), y.double())),
        (found.over_earlier(m, y), exact.over_earlier(m.double(), y.double())),
        (found.over_later(m, y), exact.over_later(m.double(), y.double())),
        *zip(
            found.crossed_gradients(d, y, x), exact.crossed_gradients(d.double(), y.double(), x.double()), strict=True
        ),
    ]
    for a, b in pairs:
        assert a.shape == b.shape
        assert (a - b).norm() <= 3e-7 * b.norm()
    assert {*here} >= PAIRS


@pytest.mark.parametrize("noise_per_key", [False, True])
def test_what_the_forward_pass_gives_to_the_scan(here, monkeypatch, noise_per_key):
    case = Case(
        batch=1, length=150, heads=2, key_size=20, value_size=16, offsets=(0, 60, 60, 140), decay="per key",
        noise_per_key=noise_per_key, noise_groups=2, rotation=noise_per_key,
    )  # fmt: skip
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    given = [inputs[n].detach() if n in inputs else None for n in NAMES]
    problem = prepare(*given, *(x.detach() for x in inputs["initial_state"]), torch.tensor(case.offsets))
    found = general.give(problem)
    assert {"key_pairs", "key_scan"} <= {*here}
    monkeypatch.setattr(key_decays, "DEVICES", ())
    for name, a, b in zip(found._fields, found, general.give(problem), strict=True):
        assert a is b is None or (a - b).norm() <= 1e-6 * b.norm(), name


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (Case(batch=1, heads=1, key_size=64, value_size=64, decay="per key", noise_per_key=True), PAIRS | WALK),
        (Case(batch=1, key_size=64, value_size=128, rotation=True, noise_groups=2, variance=False), WALK),
        (Case(batch=1, key_size=6, value_size=64, decay="per key", rotation=True), PAIRS),
    ],
    ids=["decays and noises per key", "rotations, noise groups", "rotations, decays per pair"],  # a set has no order
)
def test_the_backward_pass(here, case, kernels):
    """Packed sequences of several chunks, of one token, of none."""
    case = replace(case, length=140, offsets=(0, 0, 1, 40, 40, 130))
    check(errors(accuracy.example("bayesian", case, torch.bfloat16), case, torch.bfloat16))
    assert {*here} == kernels


def test_small_noises_are_done_in_float64(here):
    case = Case(batch=1, length=128, heads=1, key_size=64, value_size=64, decay="per key", variance=False, final=False)
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    with torch.no_grad():
        inputs["observation_noise"].fill_(1e-3)
    check(errors(inputs, case, torch.bfloat16))
    assert not WALK & {*here}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "values"), [(200, 256), (40, 130)])
def test_more_keys_and_values(emulated, keys, values):  # noqa: F811
    case = Case(batch=1, length=70, heads=2, key_size=keys, value_size=values, decay="uneven", variance=False)
    check(errors(accuracy.example("bayesian", case, torch.bfloat16), case, torch.bfloat16))
    assert (keys > 128) == ({*emulated} >= STEPS)
