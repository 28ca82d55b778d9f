"""What only a CUDA device shows: more than 2^31 elements, 100,000 sequences or tokens, a host that waits for nothing.

Run by hand: pytest -m gpu; without what takes 50 GB of device memory, -m "gpu and not slow".
"""

import threading

import pytest
import torch

from metaplastic import ops
from metaplastic.ops import accuracy, dispatch

pytestmark = pytest.mark.gpu
NAMES = ("q", "k", "w", "beta", "g")


def make(batch, length, heads, keys, values, dtype, backend="cuda", seed=0):
    if (reason := dispatch.reason_against("palimpsa", backend, "cuda", dtype)) is not None:
        pytest.skip(reason)
    source = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, length, heads)

    def normal(size):
        return torch.randn(*shape, size, generator=source, device="cuda", dtype=dtype)

    q, k = (normal(keys).mul_(keys**-0.5) for _ in range(2))
    inputs = {"q": q, "k": k, "w": normal(values), "beta": normal(values).abs_()}
    inputs["g"] = torch.rand(*shape, generator=source, device="cuda").mul_(-1)
    inputs["prior"] = torch.rand(heads, generator=source, device="cuda") + 0.5
    return {n: x.requires_grad_() for n, x in inputs.items()}, normal(values)


def results(inputs, d_output, backend, cu_seqlens=None):
    """Output and the gradients of every token's inputs."""
    output = ops.palimpsa(**inputs, cu_seqlens=cu_seqlens, backend=backend).output
    gradients = torch.autograd.grad(output, [inputs[n] for n in NAMES], d_output)
    return dict(zip(("output", *NAMES), (output.detach(), *gradients), strict=True))


def part(inputs, d_output, take):
    """The same problem on some of its tokens alone."""
    alone = {n: (x if n == "prior" else take(x)).detach().clone().requires_grad_() for n, x in inputs.items()}
    return alone, take(d_output).clone()


def equal(found, expected, at_most):
    for name, x in found.items():
        x, y = x.double(), expected[name].double()
        assert y.norm() > 0
        assert (x - y).norm() <= at_most * y.norm(), (name, ((x - y).norm() / y.norm()).item())


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "keys"), [("cuda", 64), ("triton", 16)])
def test_beyond_2_to_the_31_elements(backend, keys):
    """The last sequences, which lie beyond, as if they were alone."""
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs 100 GB of device memory")
    inputs, d_output = make(1025, 2048, 16, keys, 64, torch.bfloat16, backend)
    assert inputs["w"].numel() > 2**31
    found = {n: x[-16:].clone() for n, x in results(inputs, d_output, backend).items()}
    expected = results(*part(inputs, d_output, lambda x: x[-16:]), backend)
    equal(found, expected, 1e-3)


@pytest.mark.slow
def test_one_sequence_beyond_2_to_the_31_elements():
    """Its last tokens, which remember nothing from before the last 4,096 (g is -0.5 on average)."""
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs 100 GB of device memory")
    inputs, d_output = make(1, 2**21 + 4096, 16, 64, 64, torch.bfloat16)
    assert inputs["w"].numel() > 2**31
    found = {n: x[:, -2048:].clone() for n, x in results(inputs, d_output, "cuda").items()}
    alone = results(*part(inputs, d_output, lambda x: x[:, -4096:]), "cuda")
    equal(found, {n: x[:, -2048:] for n, x in alone.items()}, 5e-3)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_100000_short_sequences(backend, dtype):
    """Of one to three tokens; the last 500 of them as if they were alone."""
    lengths = torch.randint(1, 4, (100_000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    inputs, d_output = make(1, int(offsets[-1]), 2, 16, 24, dtype, backend)
    start = int(offsets[-501])
    found = {n: x[:, start:] for n, x in results(inputs, d_output, backend, offsets).items()}
    alone, d_alone = part(inputs, d_output, lambda x: x[:, start:])
    alone = {n: x.detach().double().requires_grad_() for n, x in alone.items()}
    expected = results(alone, d_alone.double(), "chunked", offsets[-501:] - start)
    equal(found, expected, 5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("observation", [1e-3, 1.0])
@pytest.mark.parametrize("decays", ["strong", "none"])
@pytest.mark.parametrize("kind", ["unit", "one", "collinear", "few", "zero"])
def test_100000_tokens_of_the_filter(kind, decays, observation):
    """bf16 inputs: covariance positive definite at the end, everything as in float64.

    "none": what no key meets drifts, to a variance of 11; "strong": 1, exp(-50) and exp(-1000) side by side.
    """
    if (reason := dispatch.reason_against("bayesian", "cuda", "cuda", torch.bfloat16)) is not None:
        pytest.skip(reason)
    source, shape = torch.Generator("cuda").manual_seed(0), (1, 100_000, 2)

    def normal(*size):
        return torch.randn(size, generator=source, device="cuda", dtype=torch.float64)

    raw, v = normal(*shape, 64), normal(*shape, 64).bfloat16()
    q = torch.nn.functional.normalize(normal(*shape, 64), dim=-1).bfloat16()
    if kind in ("one", "few"):
        raw = raw[:, torch.randint(1 if kind == "one" else 16, shape[1:2], generator=source, device="cuda")]
    elif kind == "collinear":
        raw = raw[:, :1] + 1e-3 * raw
    k = torch.nn.functional.normalize(raw, dim=-1).bfloat16()
    if kind == "zero":
        k = k * (torch.rand(*shape, 1, generator=source, device="cuda") > 0.3)
    q[:, ::2] = k[:, ::2]
    if decays == "strong":
        choices = torch.tensor([0.0] * 20 + [-50.0, -1000.0], device="cuda")
        g = choices[torch.randint(len(choices), shape, generator=source, device="cuda")]
        process = -torch.expm1(2 * g)
    else:
        g, process = torch.zeros(shape, device="cuda"), torch.full(shape, 1e-4, device="cuda")
    inputs = (q, k, v, g, process, torch.full(shape, observation, device="cuda"))

    def run(inputs, backend):
        prior = torch.ones(2, device="cuda", dtype=inputs[3].dtype)
        return ops.bayesian(*inputs, prior_variance=prior, backend=backend, output_variance=True)

    found, exact = run(inputs, "cuda"), run([x.double() for x in inputs], "chunked")
    covariance = found.state.covariance
    assert torch.equal(covariance, covariance.mT)
    assert torch.linalg.eigvalsh(covariance.double()).min() > 0
    pairs = {"output": (found.output, exact.output), "variance": (found.variance, exact.variance)}
    pairs |= {name: (getattr(found.state, name), x) for name, x in exact.state._asdict().items()}
    errors = {name: ((x.double() - y).norm() / y.norm()).item() for name, (x, y) in pairs.items()}
    assert max(errors.values()) < 5e-3, errors


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_training_step_waits_for_nothing(backend, packed, dtype):
    """No copy to the host, no synchronisation, once the kernels are there: offsets given on the CPU."""
    inputs, d_output = make(1 if packed else 16, 640 if packed else 80, 4, 32, 48, dtype, backend)
    for step in range(2):  # other offsets, so that nothing is remembered
        offsets = torch.tensor([0, 0, 100 + step, 101 + step, 400, 600]) if packed else None
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            results(inputs, d_output, backend, offsets)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_first_thing_that_a_thread_does():
    """A thread that has not used the device yet has no context; autograd's is one, and its first launch may be ours."""
    inputs, _ = make(1, 64, 2, 16, 24, torch.float32)
    expected = ops.palimpsa(**inputs, backend="cuda").output
    torch.cuda.synchronize()
    found = []
    thread = threading.Thread(target=lambda: found.append(ops.palimpsa(**inputs, backend="cuda").output))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("op", ["palimpsa", "additive", "delta", "bayesian"])
def test_offsets_on_either_device(op):
    """int32 or int64, on the CPU or the device: the same numbers."""
    case = accuracy.Case(batch=1, length=90, offsets=(0, 0, 1, 40, 40, 84))
    inputs = accuracy.example(op, case, torch.float32, "cuda")
    expected = accuracy.results(op, "auto", inputs)
    for offsets in (inputs["cu_seqlens"].cpu(), inputs["cu_seqlens"].long(), inputs["cu_seqlens"].cpu().long()):
        found = accuracy.results(op, "auto", inputs | {"cu_seqlens": offsets})
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
