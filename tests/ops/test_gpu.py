"""The backends on a CUDA device, against the float64 reference on the CPU. Run by hand: pytest -m gpu."""

import warnings

import pytest
import torch

from metaplastic import ops
from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.ops import accuracy, debug_checks, dispatch
from metaplastic.ops.accuracy import Case
from metaplastic.ops.palimpsa.cuda import layout, walks

pytestmark = pytest.mark.gpu
PAIRS = [  # fla: test_fla.py
    (op, backend) for op in dispatch.BACKENDS for backend in dispatch.on_device(op, "cuda") if backend != "fla"
]
KERNELS = [(op, b) for op, entries in dispatch.BACKENDS.items() for b, entry in entries.items() if entry.kernels]
CASES = (
    *accuracy.CASES,
    Case(length=0),
    Case(length=1),
    Case(batch=1, length=300, offsets=(0, 0, 130, 131, 280), decay="mixed"),
)


@pytest.fixture
def own_block_list(monkeypatch, tmp_path):
    """Compiled kernels stay where they are."""
    monkeypatch.setattr(dispatch, "block_list_path", lambda: tmp_path / "blocked.json")
    dispatch._forget()
    yield
    monkeypatch.undo()
    dispatch._forget()


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(op, backend, dtype, case):
    if (reason := dispatch.reason_against(op, backend, "cuda", dtype)) is not None:
        pytest.skip(reason)
    errors = accuracy.measure(op, backend, case, dtype, "cuda")
    assert not accuracy.failures(op, backend, errors, dtype), errors


@pytest.mark.parametrize(("op", "backend"), KERNELS)
@pytest.mark.parametrize("dtype", accuracy.KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("sizes", accuracy.SIZES, ids=str)
def test_every_kernel(op, backend, dtype, sizes):
    """The very cases ``metaplastic doctor`` runs."""
    if (reason := dispatch.reason_against(op, backend, "cuda", dtype, sizes)) is not None:
        pytest.skip(reason)
    for case in accuracy.kernel_cases(op, backend, dtype)[sizes]:
        errors = accuracy.measure(op, backend, case, dtype, "cuda", reference="cuda")
        assert not accuracy.failures(op, backend, errors, dtype), (case, errors)


@pytest.mark.parametrize("sizes", accuracy.SIZES, ids=str)
@pytest.mark.parametrize("initial", [True, False])
def test_palimpsa_in_turns(monkeypatch, sizes, initial):
    """As where heads share multiprocessors: these would be too many for a test, so the device counts as a small one."""
    if (reason := dispatch.reason_against("palimpsa", "cuda", "cuda", torch.bfloat16, sizes)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(layout, "_processors", lambda device: 1)
    monkeypatch.setattr(walks, "MOST_ROUNDS", 100)
    taken, turns_of = [], walks.turns_of

    def counted(*given):
        taken.append(turns_of(*given))
        return taken[-1]

    monkeypatch.setattr(walks, "turns_of", counted)
    size = {"key_size": sizes[0], "value_size": sizes[1]}
    case = Case(batch=8, length=330, **size, decay="uneven", variance=False, initial=initial)
    errors = accuracy.measure("palimpsa", "cuda", case, torch.bfloat16, "cuda", reference="cuda")
    assert not accuracy.failures("palimpsa", "cuda", errors, torch.bfloat16), errors
    assert max(taken) == 3


@pytest.mark.parametrize(
    ("different", "noise", "apart"),
    [(1, 1e-3, 0), (2, 1e-3, 0), (4, 1e-3, 0), (1, 0.04, 0), (1, 0.2, 0), (1, 1e-3, 1e-2), (1, 0.04, 1e-2)],
)
def test_few_keys_throughout(different, noise, apart):
    """The filter, nothing forgotten: at a noise of a thousandth of the prior variance P k is less than P's rounding,
    and of the prior's gradient a millionth is left. ``apart``: keys are nearly collinear."""
    if (reason := dispatch.reason_against("bayesian", "cuda", "cuda", torch.bfloat16)) is not None:
        pytest.skip(reason)
    source = torch.Generator().manual_seed(different)

    def normal(*shape):
        return torch.randn(*shape, generator=source).bfloat16()

    shape = (1, 2000, 2, 64)
    every_key, others = (torch.nn.functional.normalize(normal(*size), dim=-1) for size in ((different, 64), shape))
    k = every_key[torch.randint(different, shape[:3], generator=source)]
    if apart:
        k = torch.nn.functional.normalize(k + apart * torch.randn(shape, generator=source), dim=-1).bfloat16()
    q = torch.where(torch.arange(2000)[:, None, None] % 2 == 0, k, others)
    v, weights, none = normal(*shape), normal(*shape).cuda().double(), torch.zeros(shape[:3])
    given = {"q": q, "k": k, "v": v, "g": none, "process_noise": none.clone(), "observation_noise": none + noise}
    given["prior_variance"] = torch.ones(2)

    def run(backend, exact):
        leaves = {n: (x.double() if exact else x).cuda().requires_grad_() for n, x in given.items()}
        read = ops.bayesian(**leaves, backend=backend)
        found = torch.autograd.grad((read.output.double() * weights).sum(), list(leaves.values()))
        return dict(zip(("output", "mean", *leaves), (read.output, read.state.mean, *found), strict=True))

    expected, found = run("chunked", True), run("cuda", False)
    errors = {n: ((found[n].double() - x).norm() / x.norm()).item() for n, x in expected.items()}
    assert max(errors.values()) < 5e-3, errors


def test_auto_where_the_cuda_kernels_are_blocked(own_block_list):
    """Triton runs instead, which is said once; for other heads the CUDA kernels stay."""
    for backend in ("cuda", "triton"):
        if (reason := dispatch.reason_against("palimpsa", backend, "cuda", torch.float32)) is not None:
            pytest.skip(reason)
    inputs = accuracy.example("palimpsa", Case(length=20, key_size=96, value_size=192), torch.float32, "cuda")
    other = accuracy.example("palimpsa", Case(length=20, key_size=16, value_size=24), torch.float32, "cuda")

    def runs(inputs):
        dispatch._used.clear()
        ops.palimpsa(**inputs)
        return dispatch.used()["palimpsa"]

    assert runs(inputs) == ["cuda"]
    dispatch.block({dispatch.configuration("palimpsa", "cuda", "cuda", torch.float32, (96, 192)): "wrong"})
    with pytest.warns(UserWarning, match=r"slow 'triton' backend \(cuda: failed its check .* heads of 96 x 192"):
        assert runs(inputs) == ["triton"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(inputs) == ["triton"] and runs(other) == ["cuda"]
    dispatch.block({dispatch.configuration("palimpsa", "cuda", "cuda", torch.float32): "wrong"})
    with pytest.warns(UserWarning, match="slow 'triton' backend"):
        assert runs(other) == ["triton"]
    with pytest.raises(RuntimeError, match="backend 'cuda' failed its check"):
        ops.palimpsa(**other, backend="cuda")


@pytest.mark.filterwarnings("ignore:.*slow 'chunked' backend")
@pytest.mark.parametrize("mixer", MIXERS)
def test_model(mixer):
    torch.manual_seed(0)
    model = MetaplasticForCausalLM(
        MetaplasticConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, mixers=mixer, intermediate_size=64)
    ).eval()
    ids = torch.randint(1, 50, (2, 90))
    expected = model(ids, labels=ids)
    on_gpu = model.cuda()
    found = on_gpu(ids.cuda(), labels=ids.cuda())
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=1e-3)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    out = on_gpu.generate(ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    alone = on_gpu.generate(ids[:1, 7:].cuda(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(out[:1, 7:], alone)


def test_value_checks_only_on_request():
    inputs = accuracy.example("additive", Case(), torch.float32, "cuda")
    inputs["g"] = inputs["g"].detach() + 5
    accuracy.OPERATORS["additive"][0](**inputs)
    debug_checks(True)
    try:
        with pytest.raises(ValueError, match="g must be <= 0"):
            accuracy.OPERATORS["additive"][0](**inputs)
    finally:
        debug_checks(False)
