"""Backend ``fla``: what is done for its kernels (on the CPU, by a stand-in), and on a GPU the kernels themselves."""

import sys
import types

import pytest
import torch

from metaplastic import ops
from metaplastic.ops import accuracy, dispatch, fla, fla_tuning
from metaplastic.ops.accuracy import Case
from metaplastic.rules.additive import AdditiveState
from metaplastic.rules.delta import DeltaState

OPS = {"additive": ("v", "g", "mean"), "delta": ("v", "beta", "g", "mean")}


def _stand_in(op):
    """What flash-linear-attention does, and takes: at least a token in every sequence, K and V of whole multiples."""

    def run(q, k, v, g, scale, initial_state, output_final_state, beta=None, cu_seqlens=None, cu_seqlens_cpu=None):
        assert output_final_state and q.dtype == k.dtype == v.dtype and g.dtype == torch.float32
        assert q.shape[1] > 0 and q.shape[3] % 8 == 0 and v.shape[3] % 8 == 0 and g.min() >= -20
        if cu_seqlens is not None:
            assert torch.equal(cu_seqlens, cu_seqlens_cpu) and cu_seqlens.diff().min() > 0
            assert cu_seqlens[-1] == q.shape[1] and len(cu_seqlens) == len(initial_state) + 1
        inputs = {"q": q, "k": k, "v": v, "g": g, "cu_seqlens": cu_seqlens, "scale": scale, "backend": "chunked"}
        if op == "delta":
            read = ops.delta(**inputs, beta=beta, initial_state=DeltaState(initial_state))
            return read.output, read.state.mean
        read = ops.additive(**inputs, initial_state=AdditiveState(initial_state.mT))
        return read.output, read.state.mean.mT

    return run


@pytest.fixture
def library(monkeypatch):
    """The package as far as it is used; its switches for what Triton miscompiles."""
    modules = {
        "gla": {"chunk_gla": _stand_in("additive")},
        "simple_gla": {"chunk_simple_gla": _stand_in("additive")},
        "gated_delta_rule": {"chunk_gated_delta_rule": _stand_in("delta")},
        "kda": {"chunk_kda": _stand_in("delta")},
        "common": {"chunk_o": types.SimpleNamespace()},
        "common.backends": {},
        "common.backends.tilelang": {"CommonTileLangBackend": types.SimpleNamespace(can_use=lambda: False)},
    }
    for name, names in {"": {}, "ops": {}, **{f"ops.{n}": v for n, v in modules.items()}}.items():
        module = types.ModuleType(f"fla.{name}".rstrip("."))
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    switches = sys.modules["fla.ops.common"].chunk_o
    switches.IS_NVIDIA_HOPPER, switches.TRITON_ABOVE_3_4_0, switches.TRITON_ABOVE_3_7_1 = True, True, True
    return switches


def call(op, inputs, **changes):
    """The backend's own function, as the operator calls it; q, k, v in float32 here."""
    inputs = inputs | changes
    state = inputs.get("initial_state")
    given = [None if state is None and n == "mean" else state.mean if n == "mean" else inputs[n] for n in OPS[op]]
    return getattr(fla, op)(inputs["q"], inputs["k"], *given, inputs.get("cu_seqlens"), inputs["scale"])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(length=0),
        Case(length=1, initial=False),
        Case(decay="mixed", key_size=5, value_size=3),
        Case(decay="per key", key_size=9, value_size=8, length=40),
        Case(decay="mixed", batch=1, length=30, offsets=(0, 0, 1, 17, 17, 28), key_size=8, value_size=11),
        Case(batch=1, length=9, offsets=(0, 0)),
        Case(batch=1, length=9, offsets=(0,)),
    ],
    ids=str,
)
def test_arguments(library, op, case):
    """Padding, empty sequences, the tail, decays of -inf: outputs, final states and every gradient."""
    inputs = accuracy.example(op, case, torch.float32)
    read = accuracy.OPERATORS[op][0](**inputs | {"backend": "reference", "output_variance": False})
    output, final = call(op, inputs)
    assert output.shape == read.output.shape and final.shape == read.state.mean.shape
    torch.testing.assert_close(output, read.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, read.state.mean, rtol=1e-4, atol=1e-5)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves += list(inputs.get("initial_state") or ())
    if not case.length or (case.offsets and case.offsets[-1] == 0):
        return
    weights = [torch.randn_like(x) for x in (output, final)]

    def gradients(*found):
        return torch.autograd.grad(found, leaves, weights)

    expected = gradients(read.output, read.state.mean)
    for x, y in zip(gradients(output, final), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_what_it_does_not_take(library, op):
    inputs = accuracy.example(op, Case(length=4), torch.bfloat16)
    with pytest.raises(ValueError, match=f"{op}: v must be torch.bfloat16 like q for backend 'fla', got torch.float32"):
        call(op, inputs, v=inputs["v"].float())
    large = accuracy.example(op, Case(length=2, key_size=257, value_size=2), torch.float32)
    if op == "delta":
        with pytest.raises(ValueError, match="delta: q must have K of at most 256 for backend 'fla'.*got 257"):
            call(op, large)
    else:
        call(op, large)


@pytest.mark.parametrize("op", OPS)
def test_gradients_that_cannot_be_trusted_are_refused(library, op):
    """Before the forward pass, in words; outputs alone are given, and gradients of a decay per key."""
    library.TRITON_ABOVE_3_7_1 = False
    inputs = accuracy.example(op, Case(length=4), torch.float32)
    with pytest.raises(RuntimeError, match=f"ops.{op}: backend 'fla' has no gradients here: Triton .* torch.no_grad"):
        call(op, inputs)
    with torch.no_grad():
        call(op, inputs)
    assert "miscompiles" in dispatch.no_gradients(op, "fla")
    assert dispatch.no_gradients(op, "fla", per_key=True) is None and dispatch.no_gradients(op, "chunked") is None
    call(op, accuracy.example(op, Case(length=4, decay="per key"), torch.float32))
    with fla.unchecked() as void:
        assert "miscompiles" in void
        call(op, inputs)
    assert library.TRITON_ABOVE_3_7_1 is False
    sys.modules["fla.ops.common.backends.tilelang"].CommonTileLangBackend.can_use = lambda: True
    assert (dispatch.no_gradients(op, "fla") is None) == (op == "delta")
    library.IS_NVIDIA_HOPPER = False
    call(op, inputs)
    with fla.unchecked() as void:
        assert void == ""


def test_outputs_alone_are_measured_where_there_are_no_gradients(monkeypatch):
    monkeypatch.setattr(dispatch, "no_gradients", lambda op, backend, per_key=False: "not here")
    errors = accuracy.measure("additive", "chunked", Case(length=5), torch.float64)
    assert set(errors) == {"output", "variance", "final mean"} and max(errors.values()) < 1e-12


def test_the_configurations_that_are_worth_a_try():
    """Not the deepest pipelines, few warps or tiles that the head does not fill; never none at all."""

    def config(warps, stages, **tiles):
        return types.SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=tiles)

    configs = [config(w, s, BK=k, BV=v) for w in (1, 4, 8) for s in (2, 4) for k in (64, 128) for v in (64, 128)]
    left = fla_tuning._fewer(None, configs, {"K": 96}, V=48)
    assert {(c.num_warps, c.num_stages, c.kwargs["BK"], c.kwargs["BV"]) for c in left} == {
        (w, 2, k, 64) for w in (4, 8) for k in (64, 128)
    }
    few = [config(1, 4), config(2, 4)]
    assert fla_tuning._fewer(None, few, {}) == few
    assert fla_tuning._fewer(lambda configs, nargs, **options: configs[:1], few, {}) == few[:1]


def test_mesanet_as_its_layer_calls_it(monkeypatch):
    """A peer in timings: normed keys as they are, no states, its layer's number of steps."""
    asked = {}

    def chunk_mesa_net(q, k, v, g, beta, lamb, max_CG_iteration, use_qk_l2norm_in_kernel=False):
        asked.update(lamb=lamb, steps=max_CG_iteration, norm=use_qk_l2norm_in_kernel)
        return beta[..., None] * v + g[..., None] + (q - k), None, None

    for name, names in {"fla": {}, "fla.ops": {}, "fla.ops.mesa_net": {"chunk_mesa_net": chunk_mesa_net}}.items():
        module = types.ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    beta, g, ridge = torch.rand(1, 2, 3), -torch.rand(1, 2, 3), torch.ones(3, 4)
    output = fla.mesa(q, k, v, beta, g, ridge)
    torch.testing.assert_close(output, beta[..., None] * v + g[..., None] + (q - k))
    assert asked["lamb"] is ridge and asked["steps"] == 30 and not asked["norm"]
    assert "30 steps" in fla.MESA_NOTE


def test_every_kernel_is_compiled_by_one_process(monkeypatch, tmp_path):
    """Configurations of tuned kernels, and kernels that are not tuned, for each type and size: what another process has
    claimed is left to it, and what does not compile ends nothing."""
    compiled = []

    class JITFunction:
        def __init__(self, name):
            self.__name__ = name

        def run(self, x, grid, heads, config=None):
            compiled.append((self.__name__, x.dtype, heads, config))
            if self.__name__ == "broken":
                raise RuntimeError("out of shared memory")

    class Autotuner:
        early_config_prune, nargs, do_bench, arg_names = None, None, None, ("x",)
        configs = [types.SimpleNamespace(num_warps=w, num_stages=2, kwargs={}) for w in (1, 4, 8)]

        def __init__(self, kernel):
            self.fn = self.base_fn = kernel

        def prune_configs(self, options):
            return self.early_config_prune(self.configs, self.nargs, **options)

        def _bench(self, *args, config, **options):
            self.do_bench(lambda: self.fn.run(*args, config=config.num_warps, **options), quantiles=None)

    kernels = [
        JITFunction("broken"),
        *(Autotuner(JITFunction(name)) for name in ("broken", "tuned")),
        JITFunction("plain"),
    ]

    def run(call):
        for dtype in (torch.float32, torch.float16, torch.float32):
            for kernel in kernels:
                kernel.run(torch.zeros(call.batch, dtype=dtype), grid=lambda meta: meta, heads=call.heads)

    for name, names in {
        "triton": {},
        "triton.runtime": {},
        "triton.runtime.autotuner": {"Autotuner": Autotuner},
        "triton.runtime.jit": {"JITFunction": JITFunction},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla_tuning, "_run", run)
    monkeypatch.setattr(fla_tuning, "_tuners", lambda: kernels[1:3])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launch = JITFunction.run
    calls = [fla_tuning.Call("mesa", batch, heads, 8, 8, True) for batch, heads in ((2, 1), (2, 2), (3, 2))]

    def process(calls):
        compiled.clear()
        JITFunction.run = launch  # as in a new process
        for kernel in kernels[1:3]:
            kernel.early_config_prune = None
        fla_tuning._compile_unclaimed(calls, str(tmp_path))
        return list(compiled)

    first, second, third = process(calls[:1]), process(calls), process(calls)
    warps = {"tuned": (4, 8), "plain": (None,), "broken": (4, 8, None)}
    types_ = (torch.float32, torch.float16)

    def wanted(heads):
        return {(name, dtype, heads, w) for name in warps for w in warps[name] for dtype in types_}

    assert set(first) == wanted(1) and set(second) == wanted(2) and not third
    assert len(first) == len(second) == len(wanted(1))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ImportWarning")  # the library says what it lacks
def test_tuning_from_kernels_that_others_compiled(monkeypatch, tmp_path):
    """Two processes compile all that the shortened tuner tries; the one that tunes then compiles next to nothing."""
    if (reason := dispatch.reason_against("additive", "fla", "cuda", torch.bfloat16)) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = fla_tuning.Call("additive", 2, 2, 16, 16, False)
    fla_tuning.compile_all([call], processes=2)
    compiled = set(tmp_path.rglob("*.cubin"))
    with fla_tuning.quick():
        fla_tuning._run(call)
    tuned = [tuner for tuner in fla_tuning._tuners() if tuner.cache]
    assert len(tuned) >= 3 and len(compiled) >= sum(len(tuner.configs_timings) for tuner in tuned) - 2
    assert len(set(tmp_path.rglob("*.cubin")) - compiled) <= 2


GPU_CASES = [
    Case(),
    Case(decay="mixed", batch=1, key_size=5, value_size=3),
    Case(length=0),
    Case(length=1),
    Case(decay="mixed", batch=1, length=90, offsets=(0, 0, 1, 40, 40, 84)),
    Case(decay="per key"),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parity_on_a_gpu(op, dtype):
    """One process compiles each kernel once: all cases in one test (about 50 s, nearly all of them compilation)."""
    if (reason := dispatch.reason_against(op, "fla", "cuda", dtype)) is not None:
        pytest.skip(reason)
    cases = GPU_CASES if dtype == torch.bfloat16 else [case for case in GPU_CASES if case.decay != "per key"]
    with fla_tuning.untuned():
        for case in cases:
            errors = accuracy.measure(op, "fla", case, dtype, "cuda")
            assert not accuracy.failures(op, "fla", errors, dtype), (case, errors)
            with_gradients = dispatch.no_gradients(op, "fla", case.decay == "per key") is None
            assert ("gradient of q" in errors) == with_gradients
