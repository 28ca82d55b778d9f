"""What every operator promises beside its numbers: values in and out, causality, layouts, errors, compilers."""

import importlib

import pytest
import torch
import torch._dynamo.testing

from metaplastic import ops
from metaplastic.ops import accuracy, contract, dispatch
from metaplastic.ops.accuracy import Case
from metaplastic.rules import AdditiveState, PalimpsaState

PAIRS = [(op, backend) for op in dispatch.BACKENDS for backend in dispatch.on_device(op, "cpu")]
OPS = list(accuracy.OPERATORS)


def here(op, backend):
    if (reason := dispatch.reason_against(op, backend, "cpu", torch.float32)) is not None:
        pytest.skip(f"{op}/{backend} {reason}")


def call(op, inputs, **changes):
    return accuracy.OPERATORS[op][0](**(inputs | changes))


def tensors(inputs):
    for x in inputs.values():
        if isinstance(x, tuple):
            yield from x
        elif isinstance(x, torch.Tensor):
            yield x


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@pytest.mark.parametrize("length", [0, 1, 20])
def test_states_and_inputs_are_values(op, backend, length):
    """Nothing given is changed, and nothing returned shares memory with what was given."""
    here(op, backend)
    inputs = accuracy.example(op, Case(length=length), torch.float32)
    before = [x.detach().clone() for x in tensors(inputs)]
    read = call(op, inputs, backend=backend)
    (read.output.sum() + sum(s.sum() for s in read.state)).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(inputs), strict=True))
    with torch.no_grad():
        for s in read.state:
            s.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(inputs), strict=True))


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_any_split_is_one_function(op, backend):
    here(op, backend)
    inputs = accuracy.example(op, Case(length=75, decay="mixed"), torch.float64)
    whole = call(op, inputs, backend=backend)
    state, outputs, variances = inputs["initial_state"], [], []
    along_time = [n for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim() > 1]
    for start, end in ((0, 1), (1, 3), (3, 3), (3, 70), (70, 75)):
        piece = {n: x[:, start:end] if n in along_time else x for n, x in inputs.items()}
        read = call(op, piece, backend=backend, initial_state=state)
        state = read.state
        outputs.append(read.output)
        variances.append(read.variance)
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(variances, 1), whole.variance, rtol=0, atol=1e-12)
    loss = torch.cat(outputs, 1).square().sum() + sum(s.sum() for s in state)
    expected = whole.output.square().sum() + sum(s.sum() for s in whole.state)
    leaves = [x for x in tensors(inputs) if x.requires_grad]
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_strictly_causal(op, backend):
    """Changing token 40 changes no earlier output, bit for bit."""
    here(op, backend)
    inputs = accuracy.example(op, Case(length=80), torch.float32)
    first = call(op, inputs, backend=backend)
    changed = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.dim() > 1:
            changed[name] = x.detach().clone()
            changed[name][:, 40] *= 2
    second = call(op, changed, backend=backend)
    assert torch.equal(first.output[:, :40], second.output[:, :40])
    assert torch.equal(first.variance[:, :40], second.variance[:, :40])
    assert not torch.equal(first.output[:, 40:], second.output[:, 40:])


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_layouts(op, backend):
    """Non-contiguous inputs, expanded gradients (out.sum().backward())."""
    here(op, backend)
    inputs = accuracy.example(op, Case(), torch.float64)
    expected = torch.autograd.grad(call(op, inputs, backend=backend).output.sum(), [inputs["q"], inputs["k"]])
    strided = {n: scattered(x) if isinstance(x, torch.Tensor) and x.dim() > 2 else x for n, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    found = torch.autograd.grad(call(op, strided, backend=backend).output.sum(), [strided["q"], strided["k"]])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_the_tail_of_a_packed_batch_is_nothing(op, backend):
    """Garbage beyond the last offset: zero output, exactly zero gradient, states untouched."""
    here(op, backend)
    case = Case(batch=1, length=30, offsets=(0, 10, 21))
    inputs = accuracy.example(op, case, torch.float32)
    clean = call(op, inputs, backend=backend)
    with torch.no_grad():
        for x in inputs.values():
            if isinstance(x, torch.Tensor) and x.dim() > 2:
                x[:, 21:] = torch.finfo(x.dtype).max / 2
    read = call(op, inputs, backend=backend)
    assert not read.variance[:, 21:].any()
    assert torch.equal(read.output[:, :21], clean.output[:, :21])
    assert not read.output[:, 21:].any()
    assert all(torch.equal(a, b) for a, b in zip(read.state, clean.state, strict=True))
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.dim() > 2]
    for d in torch.autograd.grad(read.output.sum() + read.variance.sum() + sum(s.sum() for s in read.state), leaves):
        assert not d[:, 21:].any()
        assert d.isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("beta", [0.0, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("prior", [1e-6, 1.0, 1e6])
def test_extreme_evidence_stays_finite(backend, beta, prior):
    """Gates of 0 and -1000 in neighbouring heads, collinear and zero keys, tiny to huge evidence."""
    here("palimpsa", backend)
    length = 200
    k = torch.nn.functional.normalize(torch.ones(1, 1, 1, 4), dim=-1).expand(1, length, 2, 4).clone()
    k[:, ::3] = 0
    g = torch.tensor([0.0, -1000.0]).expand(1, length, 2)
    w = torch.randn(1, length, 2, 3)
    inputs = [
        x.clone().requires_grad_()
        for x in (k, k, w * min(beta, 1.0), torch.full_like(w, beta), g, torch.full((2,), prior))
    ]
    read = ops.palimpsa(*inputs, output_variance=True, backend=backend)
    assert read.output.isfinite().all()
    assert (read.variance > 0).any()
    assert (read.variance >= 0).all()
    assert (read.state.excess_precision >= 0).all()
    for d in torch.autograd.grad(read.output.sum() + read.variance.sum() + read.state.information.sum(), inputs):
        assert d.isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_error_messages_name_the_argument(op):
    inputs = accuracy.example(op, Case(), torch.float32)
    write = "w" if op == "palimpsa" else "v"
    other = AdditiveState if op == "palimpsa" else PalimpsaState
    good = inputs["initial_state"]
    wrong = {
        "q must be": {"q": inputs["q"][0]},
        "q must be floating": {"q": inputs["q"].long()},
        "k must be": {"k": inputs["k"][:, :-1]},
        f"{write} must be": {write: inputs[write][:, :, :1]},
        "g must be": {"g": inputs["g"][..., None].expand(-1, -1, -1, 3)},
        "g must be <= 0": {"g": inputs["g"] + 5},
        "g must be <= 0 .* nan": {"g": inputs["g"] * torch.nan},
        "initial_state must be a": {"initial_state": other(*[good[0]] * len(other._fields))},
        "initial_state must be a .*State, got tuple": {"initial_state": tuple(good)},
        r"initial_state\.\w+ must be .*16": {"initial_state": type(good)(*(s.transpose(2, 3) for s in good))},
        r"initial_state\.\w+ must be torch.float32": {"initial_state": type(good)(*(s.double() for s in good))},
        "batch size must be 1": {"cu_seqlens": torch.tensor([0, 3])},
        "cu_seqlens must be an int32 or int64 tensor": {"cu_seqlens": torch.tensor([0.0, 3.0])},
        "backend must be one of": {"backend": "fast"},
        f"{write} must be a tensor": {write: None},
    }
    if op == "palimpsa":
        wrong |= {
            "prior must be > 0": {"prior": inputs["prior"] * 0},
            "prior must be": {"prior": inputs["prior"][:1]},
            "beta must be >= 0": {"beta": -inputs["beta"]},
            "beta must be": {"beta": inputs["beta"][..., :1]},
            "excess_precision must be >= 0": {"initial_state": PalimpsaState(good[0], -good[1])},
        }
    if op == "delta":
        wrong |= {"beta must be >= 0": {"beta": -inputs["beta"]}, "beta must be": {"beta": inputs["beta"][:1]}}
        wrong |= {"beta must be finite": {"beta": inputs["beta"] / 0}}
    if op == "bayesian":
        above = good.covariance.detach().clone()
        above[0, 0, 0, 1] = torch.inf
        scales = torch.ones(good.covariance.shape[0], 1, 1, 1).index_fill(0, torch.tensor([0]), 1e6)
        uneven = good.covariance.detach() * scales
        uneven[-1] = uneven[-1].triu()
        covariance, turn = good.covariance, torch.zeros(*inputs["g"].shape, 8)
        wrong |= {
            "process_noise must be >= 0": {"process_noise": -inputs["process_noise"]},
            "observation_noise must be > 0": {"observation_noise": 0 * inputs["observation_noise"]},
            "observation_noise must be": {"observation_noise": inputs["observation_noise"][:1]},
            "groups G of observation_noise must divide": {"observation_noise": torch.ones(*inputs["g"].shape, 5)},
            r"g must be \[B, T, H\] or \[B, T, H, K / 2\]": {"rotation": turn, "g": inputs["g"][:1]},
            "rotation must be": {"rotation": turn[..., :3]},
            "prior_variance": {"initial_state": None},
            "prior_variance must be > 0": {"initial_state": None, "prior_variance": torch.zeros(2)},
            r"prior_variance must be \[H\] or \[H, G\] = \[2\], got \[3\]": {
                "initial_state": None,
                "prior_variance": torch.ones(3),
            },
            "covariance must be symmetric": {"initial_state": type(good)(good[0], covariance.triu())},
            "covariance must be symmetric, got": {"initial_state": type(good)(good[0], uneven)},
            "covariance must be finite": {"initial_state": type(good)(good[0], above)},
            "mean must be finite": {"initial_state": type(good)(good[0] / 0, covariance)},
            "process_noise must be finite": {"process_noise": inputs["process_noise"] + torch.inf},
            "rotation must be finite": {"rotation": turn + torch.nan},
            "prior_variance must be finite": {"initial_state": None, "prior_variance": torch.full((2,), torch.inf)},
            "covariance must be positive definite": {"initial_state": type(good)(good[0], -covariance)},
        }
    for message, change in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call(op, inputs, **change)
    if op == "bayesian":
        odd = accuracy.example(op, Case(key_size=5), torch.float32)
        with pytest.raises(ValueError, match="rotation needs an even key size, got K = 5"):
            call(op, odd, rotation=torch.zeros(*odd["g"].shape, 2))
    with pytest.raises(TypeError):
        call(op, inputs, chunk_sizes=3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [([1, 5], "start at 0"), ([0, 5, 4], "never decrease"), ([0, 91], "end at T = 90"), ([], r"\[N \+ 1\]")],
)
def test_bad_offsets(op, offsets, message):
    inputs = accuracy.example(op, Case(batch=1, length=90, initial=False), torch.float32)
    for backend in dispatch.on_device(op, "cpu"):
        here(op, backend)
        with pytest.raises(ValueError, match=message):
            call(op, inputs, cu_seqlens=torch.tensor(offsets, dtype=torch.int64), backend=backend)


def test_nothing_is_said_of_variance_unless_asked():
    inputs = accuracy.example("palimpsa", Case(), torch.float32) | {"output_variance": False}
    assert call("palimpsa", inputs).variance is None


def scattered(x):
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("op", "backend"), [p for p in PAIRS if p[1] != "reference"])
def test_registered_as_a_proper_custom_op(op, backend):
    """Schema, fake tensors and autograd registration, as torch.library checks them."""
    here(op, backend)
    for case, strided in ((Case(length=12), True), (Case(batch=1, length=20, offsets=(0, 7, 7, 16)), False)):
        inputs = accuracy.example(op, case, torch.float32)
        if strided:  # results are contiguous whatever the inputs
            inputs = {n: scattered(x) if isinstance(x, torch.Tensor) and x.dim() > 2 else x for n, x in inputs.items()}
        states = list(inputs["initial_state"])
        names = {
            "palimpsa": ("q", "k", "w", "beta", "g", "prior"),
            "additive": ("q", "k", "v", "g"),
            "delta": ("q", "k", "v", "beta", "g"),
            "bayesian": ("q", "k", "v", "g", "process_noise", "observation_noise"),
        }[op]
        rotation = [None] if op == "bayesian" else []
        arguments = [*(inputs[n] for n in names), *rotation, *states, inputs.get("cu_seqlens"), 0.5]
        arguments += {"palimpsa": [True], "additive": [], "delta": [], "bayesian": [True, True]}[op]
        run = importlib.import_module("metaplastic.ops.bayesian.chunked")._filter if op == "bayesian" else None
        torch.library.opcheck(run or dispatch.load(op, backend), tuple(arguments))


@pytest.mark.parametrize(("op", "backend"), [p for p in PAIRS if p[1] != "reference"])
def test_compiles_to_one_graph_for_every_length(op, backend):
    here(op, backend)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(inputs):
        read = accuracy.OPERATORS[op][0](**inputs, backend=backend)
        return read.output.sum() + sum(s.sum() for s in read.state) + read.variance.sum()

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for length in (5, 9, 70):
        inputs = accuracy.example(op, Case(length=length), torch.float64)
        leaves = [x for x in tensors(inputs) if x.requires_grad]
        expected = torch.autograd.grad(run(inputs), leaves)
        for a, b in zip(torch.autograd.grad(compiled(inputs), leaves), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


def test_named_backends_run_exactly_that(monkeypatch):
    inputs = accuracy.example("palimpsa", Case(), torch.float32)
    monkeypatch.setattr(dispatch, "_used", {})
    call("palimpsa", inputs, backend="chunked")
    assert dispatch.used() == {"palimpsa": ["chunked"]}
    dispatch.block({dispatch.configuration("palimpsa", "chunked", "cpu", torch.float32): "test"})
    assert "blocked" in dispatch.backends()["palimpsa"]["chunked on cpu"]
    with pytest.raises(RuntimeError, match="blocked"):
        call("palimpsa", inputs, backend="chunked")


def test_auto_falls_back_loudly_and_once(recwarn):
    here("palimpsa", "cpu")
    inputs = accuracy.example("palimpsa", Case(), torch.float32)
    call("palimpsa", inputs)
    assert not recwarn.list
    dispatch.block({dispatch.configuration("palimpsa", "cpu", "cpu", torch.float32): "test"})
    with pytest.warns(UserWarning, match="slow 'chunked' backend .*doctor"):
        call("palimpsa", inputs)
    call("palimpsa", inputs)
    assert not recwarn.list
    assert ops.backends()["palimpsa"]["auto on cpu"] == "chunked"


def test_an_unreadable_block_list_is_said_and_survived():
    path = dispatch.block_list_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{ not json")
    dispatch._blocked.cache_clear()
    with pytest.warns(UserWarning, match="unreadable block list"):
        assert dispatch.reason_against("palimpsa", "chunked", "cpu", torch.float32) is None


@pytest.mark.parametrize(("op", "backend"), [p for p in PAIRS if p[1] != "reference"])
def test_autocast_does_not_reach_inside(op, backend):
    here(op, backend)
    inputs = accuracy.example(op, Case(), torch.float32)
    outside = accuracy.results(op, backend, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = accuracy.results(op, backend, inputs)
    assert all(torch.equal(inside[name], x) for name, x in outside.items())


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_forward_mode_is_right_or_refused(op, backend):
    here(op, backend)
    inputs = accuracy.example(op, Case(), torch.float64)
    inputs = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    inputs["initial_state"] = type(inputs["initial_state"])(*(s.detach() for s in inputs["initial_state"]))

    def run(q):
        return call(op, inputs, q=q, backend=backend).output.sum()

    if backend != "reference":
        with pytest.raises(NotImplementedError, match="forward-mode differentiation needs backend='reference'"):
            torch.func.jvp(run, (inputs["q"],), (inputs["q"],))
    else:
        assert torch.func.jvp(run, (inputs["q"],), (inputs["q"],))[1] != 0


def test_a_thread_that_outlives_the_main_thread_finishes():
    here("palimpsa", "cpu")
    import subprocess
    import sys

    code = (
        "import threading, time, torch; from metaplastic import ops\n"
        "def work():\n"
        "    time.sleep(0.5); q = torch.rand(2, 300, 8, 16); g = -torch.rand(2, 300, 8)\n"
        "    print(ops.palimpsa(q, q, q, q, g, torch.ones(8)).output.shape)\n"
        "torch.set_num_threads(2); threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "torch.Size([2, 300, 8, 16])" in done.stdout, done.stderr


def test_an_observation_noise_of_zero_is_seen_where_values_are_not_checked(monkeypatch):
    """As on devices: it must not be taken for what stands beyond a sequence's end."""
    monkeypatch.setattr(contract, "readable", lambda x: False)
    inputs = accuracy.example("bayesian", Case(), torch.float32)
    with torch.no_grad():
        inputs["observation_noise"][0, 5] = 0.0
        read = ops.bayesian(**inputs, backend="chunked")
    assert read.output[0, 5:].isnan().all() and read.state.covariance[0].isnan().all()
    assert read.output[1].isfinite().all() and read.state.covariance[1].isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_scale_is_a_finite_number(op):
    inputs = accuracy.example(op, Case(length=3), torch.float32)
    for wrong, error, words in (
        ("a", TypeError, f"{op}: scale must be a number, got 'a'"),
        (None, TypeError, f"{op}: scale must be a number, got None"),
        (torch.ones(()), TypeError, f"{op}: scale must be a number .*multiply q.*, got a tensor"),
        (float("nan"), ValueError, f"{op}: scale must be finite, got nan"),
    ):
        with pytest.raises(error, match=words):
            call(op, inputs, scale=wrong)
    assert call(op, inputs, scale=2).output.shape == inputs["q"].shape[:3] + call(op, inputs).output.shape[3:]
