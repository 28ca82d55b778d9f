"""The Bayesian Layer's CUDA forward pass on the emulator of emulation.py: the kernels' own sources, on the CPU.

What only a GPU can show (speed, rounding inside tensor cores, races) is in test_gpu.py.
"""

import importlib

import pytest
import torch

from metaplastic.ops import accuracy, nvrtc
from metaplastic.ops.accuracy import Case
from metaplastic.ops.bayesian import chunked
from metaplastic.ops.bayesian.cuda import kinds

from .emulation import emulator, needs_compiler  # noqa: F401 (the first is a fixture)

forward = importlib.import_module("metaplastic.ops.bayesian.cuda.forward")  # the package's `bayesian` is the operator
general = importlib.import_module("metaplastic.ops.bayesian.cuda.general")
problem = importlib.import_module("metaplastic.ops.bayesian.cuda.problem")
NAMES = ("q", "k", "v", "g", "process_noise", "observation_noise")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture
def emulated(emulator, monkeypatch):  # noqa: F811
    """The names of the kernels that ran. What looks for hard heads and finds none is not even compiled."""
    used = []

    def kernel(folder, name, device, **definitions):
        if not definitions.get("CAREFUL"):
            used.append(name)
            return emulator(folder, name, device, **definitions)

        def launch(blocks, *given):
            hard = given[23]
            if hard.any():
                used.append("careful scan")
                emulator(folder, name, device, **definitions)(blocks, *given)

        return launch

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    return used


def arguments(inputs, case):
    if "initial_state" in inputs:
        state = inputs["initial_state"]
    else:
        prior = inputs["prior_variance"][..., None, None] * torch.eye(case.key_size)
        covariance = prior.expand(case.rows, *prior.shape).contiguous()
        state = covariance.new_zeros(case.rows, case.heads, case.key_size, case.value_size), covariance
    return [x.detach() if x is not None else None for x in (*(inputs.get(n) for n in (*NAMES, "rotation")), *state)]


def run(case, dtype, keep=False):
    """Errors of output, variance and final state, each against the reference in float64, relative to the largest; and
    what is kept."""
    inputs = accuracy.example("bayesian", case, dtype)
    offsets = None if case.offsets is None else torch.tensor(case.offsets)
    found = forward.forward(*arguments(inputs, case), offsets, case.scale, True, keep)
    read = accuracy.OPERATORS["bayesian"][0](**accuracy.as_reference(inputs), backend="reference")
    pairs = zip(found[:4], (read.output, read.variance, *read.state), strict=True)
    return [((x.double() - y).abs().max() / y.abs().max()).item() if y.numel() else 0.0 for x, y in pairs], found[4:]


PACKED = (0, 0, 1, 40, 40, 84)


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, length=70, key_size=16, value_size=16, decay="mixed", initial=False),
        Case(batch=1, length=90, heads=1, key_size=5, value_size=6, offsets=PACKED, decay="mixed", noise_groups=2),
        Case(length=0),
    ],
    ids=str,
)
def test_keys_as_given(emulated, case):
    """bf16, one decay per head: 0, -0.1, -50, -1000 and -inf side by side."""
    errors, _ = run(case, HALF)
    assert errors[0] < 4e-3 and max(errors[1:]) < 2e-6, errors
    assert set(emulated) == ({"prepare", "scan", "output"} if case.length else {"scan"})


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, length=70, heads=1, decay="mixed", initial=False),
        Case(batch=1, length=90, heads=1, key_size=6, value_size=6, offsets=PACKED, decay="per key", noise_groups=2),
        Case(batch=1, length=84, key_size=6, value_size=5, offsets=(0, 70, 84), noise_per_key=True, rotation=True),
        Case(batch=1, length=20, heads=1, decay="per key", noise_per_key=True, rotation=True),
    ],
    ids=str,
)
def test_everything_else(emulated, case):
    """float32, decays and noises per key, rotations, noise groups: keys decayed and whitened beforehand."""
    errors, _ = run(case, FULL)
    assert max(errors) < 3e-6, errors
    assert set(emulated) == {"scan"}


@needs_compiler
@pytest.mark.parametrize(
    ("keys", "values"),
    [(128, 144), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((80, 48), (144, 16), (256, 80)))],
)
def test_head_sizes(emulated, keys, values):
    """As many keys as stay in registers, and values of two blocks; more keys, whose P stays in memory."""
    errors, _ = run(Case(batch=1, length=66, heads=1, key_size=keys, value_size=values), HALF)
    assert errors[0] < 4e-3 and max(errors[1:]) < 2e-6, errors


@needs_compiler
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_what_is_kept(emulated, dtype):
    """Entry states and inverse factors of every chunk, in the order that the chunked backend keeps them in."""
    case = Case(batch=1, length=66, heads=1, noise_groups=2)
    _, (means, covariances, whitenings) = run(case, dtype, keep=True)
    exact = arguments(accuracy.as_reference(accuracy.example("bayesian", case, dtype)), case)
    expected = chunked._filter(*exact, None, case.scale, True, True)[4:]
    for c, length in enumerate((64, 2)):
        # Values of a group are padded to 16.
        pairs = (
            (means[c].mT[..., :12], expected[0][c]),
            (covariances[c], expected[1][c]),
            (whitenings[c][..., :length, :length], expected[2][c][..., :length, :length]),
        )
        for found, exactly in pairs:
            assert ((found - exactly).abs().max() / exactly.abs().max()).item() < 2e-6
    assert torch.equal(whitenings, whitenings.tril())
    assert torch.equal(whitenings[1, 0, 0, 2:, 2:], torch.eye(62))  # tokens beyond the end


@needs_compiler
@pytest.mark.parametrize(("process", "noise"), [(1e-4, 1e-3), (0.0, 1e-3), (0.0, 0.04)])
def test_one_key_throughout(emulated, process, noise):
    """At a small noise: nothing is written along other keys, and what float32 leaves of the covariance, of which the
    key's is less than its rounding in the end, is kept for the backward too. At 0.04 no token's variance is far above
    its noise, but the key's far below the others'."""
    case = Case(batch=1, length=130, heads=1, key_size=16, value_size=16)
    inputs = accuracy.example("bayesian", case, HALF)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, :1].expand_as(inputs["k"]))
        for name, value in (("g", 0.0), ("process_noise", process), ("observation_noise", noise)):
            inputs[name].fill_(value)
        inputs["initial_state"].mean.zero_()
        inputs["initial_state"].covariance.copy_(torch.eye(16))
    found = forward.forward(*arguments(inputs, case), None, 1.0, False, True)
    exact = chunked.apply(*arguments(accuracy.as_reference(inputs), case), None, 1.0, False)
    assert emulated == ["prepare", "scan", "careful scan", "output"]
    assert (found[2] - exact[2]).norm() < (2e-5 if noise < 0.01 else 1e-4) * exact[2].norm()
    if process:
        return
    rests, careful = problem.Rests.of(found[5], 3)
    assert careful.tolist() == [0, 1, 1]
    key = inputs["k"][0, 0, 0].double()
    for chunk in (1, 2):
        high = found[5][chunk, 0, 0]
        unit = torch.exp2(torch.frexp(high).exponent.double() - 32)  # rest.cuh
        variance = key @ (high.double() + unit * rests[chunk, 0, 0]) @ key
        left = 1 / (1 / key.square().sum() + 64 * chunk / noise)
        assert abs(variance / left - 1) < 2e-5
        assert noise > 0.01 or abs(key @ high.double() @ key / left - 1) > 2e-5


@needs_compiler
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(batch=3, length=1, key_size=8, value_size=12, decay="mixed", initial=False), HALF),
        (
            Case(batch=1, length=1, key_size=20, value_size=280, decay="per key", noise_groups=2, noise_per_key=True),
            FULL,  # two tiles of values
        ),
        pytest.param(
            Case(length=1, heads=1, key_size=132, value_size=140), FULL, marks=pytest.mark.slow
        ),  # P read twice
        pytest.param(Case(length=1, key_size=8), torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decoding(emulated, case, dtype):
    errors, _ = run(case, dtype)
    assert errors[0] < accuracy.TOLERANCES["bayesian", "cuda"][dtype].forward, errors
    assert max(errors[1:]) < 1e-6, errors
    assert set(emulated) == {"decode"}


@needs_compiler
def test_decoding_keeps_the_covariance_symmetric(emulated):
    """Bit for bit: nothing else does, and what is not would grow over many tokens."""
    given = arguments(accuracy.example("bayesian", case := Case(length=1, key_size=20, decay="per key"), HALF), case)
    given[-1] = (given[-1] + given[-1].mT) / 2
    for _ in range(3):
        _, _, *given[-2:] = forward.forward(*given, None, 1.0, False, False)[:4]
        assert torch.equal(given[-1], given[-1].mT)
    assert set(emulated) == {"decode"}


@needs_compiler
def test_decoding_what_the_kernel_does_not_take(emulated):
    for case in (Case(length=1, rotation=True), Case(length=1, key_size=6), Case(length=1, value_size=5)):
        errors, _ = run(case, FULL)
        assert max(errors) < 1e-6, errors
    assert not emulated


def test_every_kernel_compiles():
    """With the run-time compiler itself, which needs no GPU."""
    pytest.importorskip("cuda.bindings", reason="no cuda-bindings here: the CUDA kernels are NOT compiled")
    pytest.importorskip("nvidia.cu13", reason="no NVRTC here: the CUDA kernels are NOT compiled")
    sizes = {"KEYS": 128}
    kinds_of_scan = [{"FULL": full, "CAREFUL": careful} for full in (0, 1) for careful in (0, 1)]
    kernels = [("scan", sizes | kind) for kind in kinds_of_scan] + [("prepare", sizes)]
    back = sizes | {"VALUES": 128}
    names = ("open", "mean", "reads", "source", "covariance", "careful", "careful_covariance", "known", "inputs")
    kernels += [(f"backward_{n}", back) for n in names]
    kernels += [("output", sizes | {"VARIANCE": 1, "FOR_BACKWARD": 1})]
    kernels += [(f"backward_{n}", {"KEYS": 256, "VALUES": 64}) for n in ("reach", "step")]
    kernels += [(n, sizes) for n in ("walk_mean", "walk_reach", "walk_step", "key_pairs", "key_pairs_back")]
    kernels += [("key_scan", {"GATHERED": kind}) for kind in range(3)]
    of_decode = {"VARIANCE": 1, "PER_KEY_DECAY": 1, "PER_KEY_NOISE": 0, "GROUPS": 2, "VALUES": 64, "INPUT": "bf16"}
    for name, definitions in [*kernels, ("decode", sizes | of_decode)]:
        assert nvrtc.machine_code(forward.FOLDER, name, "sm_90a", definitions)


@pytest.mark.parametrize("dtype", accuracy.KERNEL_DTYPES, ids=str)
def test_the_checked_sizes_take_every_kernel(dtype):
    """No kernel of up to 256 keys is left out by the doctor."""
    checked = {kinds.kernels(dtype, *sizes) for sizes in accuracy.SIZES}
    assert {kinds.kernels(dtype, keys, 16) for keys in range(1, 257)} <= checked
    assert len(checked) == (1 if dtype == FULL else 4)


def test_a_decode_step_without_a_kernel_keeps_the_covariance_symmetric():
    """Rotations: the rule's own step; what rounding leaves would grow from step to step."""
    case = Case(batch=1, length=1, heads=1, key_size=16, value_size=8, rotation=True, decay="none")
    given = arguments(accuracy.example("bayesian", case, FULL), case)
    for _ in range(200):
        *_, mean, covariance = forward.step(*given, 1.0, False)
        assert torch.equal(covariance, covariance.mT)
        given[7:] = mean, covariance


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, 0.0])
@pytest.mark.parametrize("offsets", [None, (0, 70, 100)])
def test_an_observation_noise_that_cannot_be_is_seen(wrong, offsets):
    """Devices check no values: it must not be taken for what stands beyond a sequence's end."""
    case = Case(batch=1, length=100, heads=1, key_size=16, value_size=4, rotation=True, offsets=offsets)
    inputs = accuracy.example("bayesian", case, FULL)
    with torch.no_grad():
        inputs["observation_noise"][:, 5] = wrong
    found = general.give(problem.prepare(*arguments(inputs, case), None if offsets is None else torch.tensor(offsets)))
    assert not found.keys[0, :, :, 5].isfinite().any() and found.keys[0, :, :, :5].isfinite().all()
    assert found.keys[1].isfinite().all()


def test_what_kernels_load_from_is_aligned():
    x = torch.arange(68.0)[1:65].view(8, 8)
    for y in (x, x.T):
        found = problem.aligned(y)
        assert found.data_ptr() % problem.ALIGNMENT == 0 and found.is_contiguous() and torch.equal(found, y)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_rotation_that_is_no_number_is_its_own_sequences_alone(wrong):
    case = Case(batch=1, length=300, heads=2, key_size=16, value_size=4, rotation=True, offsets=(0, 70, 70, 200, 300))
    inputs = accuracy.example("bayesian", case, FULL)
    offsets = torch.tensor(case.offsets)
    at, ends = general.turn(problem.prepare(*arguments(inputs, case), offsets))
    inputs["rotation"] = inputs["rotation"].detach().index_fill(1, torch.tensor([90]), wrong)
    found, found_ends = general.turn(problem.prepare(*arguments(inputs, case), offsets))
    own = torch.tensor([2, 3, 4])  # chunks of the third sequence
    assert found[own[0], :, 20:].isnan().all() and found[own[1:]].isnan().all() and found_ends[2].isnan().all()
    others = torch.tensor([0, 1, 5, 6])
    assert torch.equal(found[others], at[others]) and torch.equal(found[2, :, :20], at[2, :, :20])
    assert torch.equal(found_ends[[0, 1, 3]], ends[[0, 1, 3]])
