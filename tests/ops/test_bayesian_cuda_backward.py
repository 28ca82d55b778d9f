"""The backward pass of ops.bayesian by chunks: in batched products, and its CUDA kernels on the emulator."""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from metaplastic.ops import accuracy
from metaplastic.ops.accuracy import Case
from metaplastic.ops.bayesian import chunked, parallel_backward
from metaplastic.ops.bayesian.chunked import Plan
from metaplastic.ops.bayesian.cuda.problem import cut
from metaplastic.ops.bayesian.frame import Frame
from metaplastic.ops.contract import compute_dtype
from metaplastic.rules.bayesian import rotate

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)

whole = importlib.import_module("metaplastic.ops.bayesian.cuda")
cuda = importlib.import_module("metaplastic.ops.bayesian.cuda.backward")
NAMES = ("q", "k", "v", "g", "process_noise", "observation_noise", "rotation")
KERNELS = ["open", "careful", "mean", "reads", "source", "careful", "careful_covariance", "covariance", "known"]
KERNELS += ["inputs", "careful"]


def kept(inputs, mean, covariance, offsets, scale, size=64, turning=False):
    """What a forward pass keeps for the backward: M^T, P and L^-1 of every chunk, K and V padded to multiples of 16.

    ``turning``: states in a frame that turns with the keys since the sequence's start.
    """
    plan = Plan(*inputs, None, scale)
    plan.chunks = table = parallel_backward.Table(*inputs[0].shape[:2], offsets, size, inputs[0].device)
    first, states = plan.split(mean, covariance), []
    for chunk in range(table.count):
        n = int(table.sequence[chunk])
        if int(table.number[chunk]) == 0:
            entry, angle = tuple(x[n : n + 1] for x in first), 0.0
        given = plan.take(slice(chunk, chunk + 1))
        noise = given.observation_noise
        frame = Frame(given._replace(observation_noise=noise.where(noise > 0, 1)))
        found = frame.enter(*entry)
        m, p = entry
        if turning and frame.angle is not None:
            back = -(angle + 0 * frame.angle[..., -1, :])
            m, p = rotate(m, back), rotate(rotate(p, back).mT, back)
            angle = angle + frame.angle[..., -1, :]
        k, v = -m.shape[-2] % 16, -m.shape[-1] % 16
        states.append((F.pad(m.mT, (0, k, 0, v)), F.pad(p, (0, k, 0, k)), found.whitening))
        entry = frame.leave(*found.final())
    return [torch.cat(x) for x in zip(*states, strict=True)]


def errors(inputs, case, dtype, *, turning=True, rooms=0, prior=False):
    """Of every gradient, in the Euclidean norm, against the reference in float64; ``rooms`` left for more chunks;
    ``prior``: also of that of a prior variance, all of the initial covariance."""
    exact = accuracy.as_reference(inputs) | {"output_variance": case.variance}
    read = accuracy.OPERATORS["bayesian"][0](**exact, backend="reference")
    outputs = [read.output, read.variance if case.variance else None, *(read.state if case.final else (None, None))]
    source = torch.Generator().manual_seed(1)
    weights = [
        None if x is None else torch.randn(x.shape, generator=source, dtype=torch.float64).bfloat16().double()
        for x in outputs
    ]
    pairs = zip(outputs, weights, strict=True)
    loss = torch.stack([(x * w).sum() for x, w in pairs if x is not None and w is not None]).sum()
    names = [n for n in NAMES if n in exact]
    states = list(exact["initial_state"])
    expected = torch.autograd.grad(loss, [exact[n] for n in names] + states, materialize_grads=True, allow_unused=True)
    given = [exact[n].detach() if n in exact else None for n in NAMES]
    offsets = None if case.offsets is None else torch.tensor(case.offsets)
    mean, covariance = (x.detach() for x in states)
    real = inputs["g"].dtype
    saved = [x.to(real) for x in kept(given, mean, covariance, offsets, case.scale, turning=turning)]
    saved = [torch.cat([x, x.new_full((rooms, *x.shape[1:]), torch.nan)]) for x in saved]
    d = [None if w is None else w.to(dtype if i == 0 else real) for i, w in enumerate(weights)]
    own = [None if x is None else inputs[n].detach() for n, x in zip(NAMES, given, strict=True)]
    found = cuda.backward(*d, *own, mean.to(real), covariance.to(real), *saved, offsets, case.scale)
    assert all(x.dtype == y.dtype for x, y in zip(found, own, strict=False) if y is not None)
    found = [x for x in found if x.numel() or case.length == 0]
    found[-1] = (found[-1] + found[-1].mT) / 2  # as the operator symmetrises the initial covariance
    if prior:
        expected, found = ([*x, x[-1].diagonal(dim1=-2, dim2=-1).sum(-1)] for x in (expected, found))
    return {
        name: ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item()
        for name, x, y in zip((*names, "mean", "covariance", "prior")[: len(found)], found, expected, strict=True)
    }


@pytest.mark.parametrize(
    "case",
    [
        Case(length=150, batch=1),
        Case(decay="mixed", batch=1, length=150, offsets=(0, 0, 1, 70, 70, 140), key_size=6, value_size=4),
        Case(
            batch=1, length=70, heads=1, key_size=6, noise_groups=2, noise_per_key=True, rotation=True, decay="per key"
        ),
        Case(batch=1, length=150, heads=1, key_size=6, rotation=True, offsets=(0, 140, 150), final=False),
        Case(batch=1, length=150, heads=1, key_size=6, decay="per key", rotation=True, offsets=(0, 140, 150)),
    ],
    ids=str,
)
def test_batched_products(case):
    """Everything the operator knows, and chunks of sequences of any length."""
    worst = errors(accuracy.example("bayesian", case, torch.float64), case, torch.float64)
    assert max(worst.values()) < 1e-12, worst


def test_float64_where_float32_is_too_little(monkeypatch):
    """Of two sequences one has noises a thousandth of the prior variance: its chunks are done in float64, and the room
    that a forward pass leaves for more chunks is not looked at."""
    given, found = [], parallel_backward._hard
    monkeypatch.setattr(parallel_backward, "_hard", lambda *x: given.append(found(*x)) or given[-1])
    case = Case(
        batch=1, length=150, heads=1, key_size=16, value_size=16, decay="per key", noise_per_key=True,
        offsets=(0, 0, 70, 150), variance=False, final=False,
    )  # fmt: skip
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, torch.arange(150) % 8])
        inputs["q"][:, ::2] = inputs["k"][:, ::2]
        inputs["g"].fill_(-1e-3)
        inputs["process_noise"].fill_(2e-3)
        inputs["observation_noise"].fill_(1.0)[:, 70:] = 1e-3
        inputs["initial_state"].mean.zero_()
        inputs["initial_state"].covariance.copy_(torch.eye(16).expand_as(inputs["initial_state"].covariance))
    check(errors(inputs, case, torch.bfloat16, rooms=3))
    assert [x.tolist() for x in given] == [[False, False, True, True]]
    monkeypatch.setattr(parallel_backward, "_hard", lambda *x: found(*x) & False)
    assert errors(inputs, case, torch.bfloat16)["observation_noise"] > 5e-5  # float32 throughout


def test_chunks_kept_in_another_order():
    """As the chunked backend keeps them: the first chunks of all sequences, then the second ones, and so on."""
    case = Case(batch=1, length=150, heads=1, key_size=4, value_size=4, offsets=(0, 66, 70, 150), variance=False)
    inputs = accuracy.example("bayesian", case, torch.float64)
    given = [inputs[n].detach() if n in inputs else None for n in NAMES]
    states, offsets = [x.detach() for x in inputs["initial_state"]], torch.tensor(case.offsets)
    m, p, w = kept(given, *states, offsets, case.scale)
    table = parallel_backward.Table(1, 150, offsets, 64, m.device)
    order, place = torch.argsort(table.number, stable=True), table.by_number()
    assert order.tolist() == [0, 2, 3, 1, 4]
    d_output = torch.randn(1, 150, 1, 4, dtype=torch.float64)
    both = [
        parallel_backward.adjoint(d_output, None, None, None, tuple(given), *states, saved, offsets, case.scale)
        for saved in (
            parallel_backward.Saved(m.mT[..., :4, :4], p[..., :4, :4], w),
            parallel_backward.Saved(m.mT[order][..., :4, :4], p[order][..., :4, :4], w[order], place),
        )
    ]
    for a, b in zip((*both[0][0], *both[0][1:]), (*both[1][0], *both[1][1:]), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, length=150, heads=2, key_size=8, offsets=(0, 66, 70, 150), noise_groups=2),
        Case(batch=2, length=100, heads=1, key_size=8, decay="mixed"),
    ],
    ids=str,
)
def test_the_chunked_backend_elsewhere(case, monkeypatch):
    """What it does on devices that are no CPU, in float32, done on one."""
    monkeypatch.setattr(chunked, "_work", compute_dtype)
    inputs = accuracy.example("bayesian", case, torch.float32)
    given = [None if n not in inputs else inputs[n].detach() for n in NAMES]
    states = [x.detach() for x in inputs["initial_state"]]
    offsets = None if case.offsets is None else torch.tensor(case.offsets)
    output, variance, *finals = chunked._filter(*given, *states, offsets, case.scale, True, True)
    final, kept = finals[:2], finals[2:]
    source = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=source) for x in (output, variance, *final)]
    found = chunked.all_at_once(*weights, given, *states, kept, Plan(*given, offsets, case.scale), case.scale)
    double = [None if x is None else x.double() for x in (*given, *states, *weights)]
    *exact, mean, covariance = double[:9]
    kept = chunked._filter(*exact, mean, covariance, offsets, case.scale, True, True)[4:]
    expected = chunked._adjoint(*double[9:], *exact, mean, covariance, *kept, offsets, case.scale)
    for x, y in zip(found, expected, strict=True):
        assert ((x.double() - y).norm() <= 3e-6 * y.norm()).item()


@pytest.mark.parametrize("apply", [whole.apply, chunked.apply], ids=["cuda", "chunked on a CPU"])
def test_float32_is_exact_with_one_key(apply):
    """Throughout, at a noise of 1e-3 of the prior variance, forgotten a little or not at all."""
    source = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(1, 1, 1, 16, generator=source), dim=-1).expand(1, 200, 1, 16)
    q = torch.where(torch.arange(200)[:, None, None] % 2 == 0, k, torch.randn(1, 200, 1, 16, generator=source))
    v, dy = (torch.randn(1, 200, 1, 16, generator=source) for _ in range(2))
    for g, process in ((0.0, 0.0), (-1e-3, 2e-3)):
        gates = [torch.full((1, 200, 1), x) for x in (g, process, 1e-3)]
        given = [q, k, v, *gates, None, torch.zeros(1, 1, 16, 16), torch.eye(16).expand(1, 1, 16, 16)]

        def run(apply, dtype, given=given):
            leaves = [None if x is None else x.to(dtype).clone().requires_grad_() for x in given]
            output, _, *states = apply(*leaves, None, 1.0, False)
            wanted = [x for x in leaves if x is not None]
            return [output, *states, *torch.autograd.grad((output * dy.to(dtype)).sum(), wanted)]

        pairs = zip(run(apply, torch.float32), run(chunked.apply, torch.float64), strict=True)
        errors = [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]
        assert max(errors) < 1e-3, errors


def build(emulator, keys, values):  # noqa: F811
    """All kernels, some at a time: the compiler is what takes long here."""

    def one(name):
        return emulator(cuda.FOLDER, f"backward_{name}", 0, KEYS=keys, VALUES=values)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(one, {*KERNELS}))


def check(worst, inexact=4e-3, exact=1e-5):
    """q, k and v are rounded to bf16 at the end; all others are about as exact as float32."""
    assert max(worst[n] for n in ("q", "k", "v")) < inexact, worst
    assert max(x for n, x in worst.items() if n not in ("q", "k", "v")) < exact, worst


@needs_compiler
def test_kernels(emulated, emulator):  # noqa: F811
    """Decays of every strength in packed sequences of several chunks, of one token, of none."""
    build(emulator, 64, 64)
    case = Case(
        batch=1, length=150, heads=1, key_size=24, value_size=40, decay="mixed", offsets=(0, 0, 1, 60, 60, 140),
        variance=False,
    )  # fmt: skip
    check(errors(accuracy.example("bayesian", case, torch.bfloat16), case, torch.bfloat16))
    assert emulated == [f"backward_{name}" for name in KERNELS]


@needs_compiler
def test_a_covariance_in_steps(emulated, emulator, monkeypatch):  # noqa: F811
    """The recursion of more keys than a block can hold, done with fewer."""
    build(emulator, 64, 64)
    monkeypatch.setattr(cuda, "IN_ONE_BLOCK", 0)
    case = Case(
        batch=1, length=100, heads=1, key_size=24, value_size=40, decay="mixed", offsets=(0, 0, 1, 90), variance=False
    )
    check(errors(accuracy.example("bayesian", case, torch.bfloat16), case, torch.bfloat16))
    assert {"backward_reach", "backward_step"} <= {*emulated} and "backward_covariance" not in emulated


@needs_compiler
def test_kernels_with_a_small_noise(emulated, emulator):  # noqa: F811
    """Keys seen again and again at a noise of 1e-3 of the prior variance: what remains is what large numbers leave."""
    build(emulator, 64, 64)
    case = Case(batch=1, length=120, heads=1, key_size=16, value_size=16, variance=False, final=False)
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, torch.randint(0, 8, (case.length,), generator=source)])
        inputs["q"][:, ::2] = inputs["k"][:, ::2]
        inputs["g"].fill_(-1e-3)
        inputs["process_noise"].fill_(2e-3)
        inputs["observation_noise"].fill_(1e-3)
        inputs["initial_state"].mean.zero_()
        inputs["initial_state"].covariance.copy_(torch.eye(16))
    check(errors(inputs, case, torch.bfloat16), exact=2e-3)


@needs_compiler
@pytest.mark.parametrize("decay", ["none", "coupled", "mixed"])
def test_kernels_with_one_key(emulated, emulator, decay):  # noqa: F811
    """One key throughout at a noise of 1e-3 of the prior variance: the first token tells most of all."""
    build(emulator, 64, 64)
    offsets = (0, 40, 150)
    case = Case(batch=1, length=150, heads=1, key_size=16, value_size=16, offsets=offsets, variance=False, final=False)
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, :1].expand_as(inputs["k"]))
        inputs["q"][:, ::2] = inputs["k"][:, ::2]
        if decay == "mixed":
            inputs["g"].copy_(
                torch.tensor([0.0, -1e-3, -1e-3, -50.0, 0.0, -1000.0])[torch.arange(150) % 61 // 11][..., None]
            )
        else:
            inputs["g"].fill_(-1e-3 if decay == "coupled" else 0.0)
        inputs["process_noise"].copy_(-torch.expm1(2 * inputs["g"]) + (1e-4 if decay == "none" else 0.0))
        inputs["observation_noise"].fill_(1e-3)
        inputs["initial_state"].mean.zero_()
        inputs["initial_state"].covariance.copy_(torch.eye(16).expand_as(inputs["initial_state"].covariance))
    check(errors(inputs, case, torch.bfloat16), exact=2e-3)


@needs_compiler
def test_what_is_left_of_a_prior(emulated, emulator):  # noqa: F811
    """One key throughout, nothing forgotten, no process noise: a millionth of what the prior's gradient is made of."""
    build(emulator, 64, 64)
    case = Case(batch=1, length=150, heads=1, key_size=16, value_size=16, variance=False, final=False)
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, :1].expand_as(inputs["k"]))
        inputs["q"][:, ::2] = inputs["k"][:, ::2]
        for name, value in (("g", 0.0), ("process_noise", 0.0), ("observation_noise", 1e-3)):
            inputs[name].fill_(value)
        inputs["initial_state"].mean.zero_()
        inputs["initial_state"].covariance.copy_(torch.eye(16))
    worst = errors(inputs, case, torch.bfloat16, prior=True)
    assert worst["prior"] < 1.5e-4
    assert worst["g"] < 2e-3  # twice as much if <P, dP> were rounded to float32


@needs_compiler
def test_gradients_of_any_size(emulated, emulator):  # noqa: F811
    """Split numbers are scaled tile by tile: a factor of 1e-8 or 1e8 on the loss changes nothing else, and where
    nothing is read and nothing remains all is zero."""
    build(emulator, 64, 64)
    case = Case(batch=1, length=70, heads=1, key_size=16, value_size=16, variance=False)
    inputs = accuracy.example("bayesian", case, torch.bfloat16)
    d_output = torch.randn(1, 70, 1, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        inputs["q"][:, :64], inputs["g"][:, 0], inputs["g"][:, 64] = 0, -1000, -1000
        inputs["process_noise"][:, 64] = 0
    d_output[:, :64] = 0
    given = [inputs[n].detach() if n in inputs else None for n in NAMES]
    states = [x.detach() for x in inputs["initial_state"]]
    double = [None if x is None else x.double() for x in given]
    saved = [x.float() for x in kept(double, *(x.double() for x in states), None, case.scale)]

    def run(factor):
        return cuda.backward(d_output * factor, None, None, None, *given, *states, *saved, None, case.scale)

    for tiny, huge in zip(run(2.0**-27), run(2.0**27), strict=True):
        assert tiny.isfinite().all() and huge.isfinite().all()
        assert torch.equal(tiny, huge * 2.0**-54)
        if tiny.dim() > 2 and tiny.shape[1] == 70:
            assert not tiny[:, :64].any() and tiny[:, 64:].any()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("keys", "values"), [(128, 128), (128, 20), (40, 100)])
def test_kernels_of_every_size(emulated, emulator, keys, values):  # noqa: F811
    build(emulator, *(-(-size // 64) * 64 for size in (keys, values)))
    case = Case(batch=2, length=70, heads=2, key_size=keys, value_size=values, decay="uneven", variance=False)
    check(errors(accuracy.example("bayesian", case, torch.bfloat16), case, torch.bfloat16))
    assert len(emulated) == len(KERNELS)


def test_the_order_in_which_recursions_leave_chunks():
    """The last one of every sequence, the last but one, ...; kernels beside a recursion work in that order."""
    found = cut((0, 0, 1, 150, 350), torch.device("cpu"))
    assert found.backwards.tolist() == [0, 3, 7, 2, 6, 1, 5, 4]
    assert cut((0, 0), torch.device("cpu")).backwards.tolist() == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"key_size": 128, "value_size": 128}, True),
        ({"key_size": 256, "value_size": 256}, True),
        ({"key_size": 257}, False),
        ({"value_size": 260}, False),
        ({"decay": "per key"}, False),
        ({"noise_per_key": True}, False),
        ({"noise_groups": 1}, True),
        ({"noise_groups": 2}, False),
        ({"rotation": True}, False),
    ],
)
def test_which_inputs_have_kernels(changed, expected):
    case = Case(**({"batch": 1, "length": 2, "heads": 1} | changed))
    for dtype, possible in ((torch.bfloat16, True), (torch.float32, False)):
        inputs = accuracy.example("bayesian", case, dtype)
        assert cuda.has_kernels(*(inputs.get(n) for n in NAMES)) is (expected and possible)
