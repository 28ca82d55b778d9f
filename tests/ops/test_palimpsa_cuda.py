"""The CUDA kernels, emulated on the CPU: the same sources, compiled for this machine with a C++ compiler.

What only a GPU can show (speed, rounding inside tensor cores, races) is in test_gpu.py.
"""

import pytest
import torch

from metaplastic.ops import accuracy, nvrtc
from metaplastic.ops.accuracy import Case
from metaplastic.ops.palimpsa import cuda
from metaplastic.ops.palimpsa.cuda import layout, states

from .emulation import emulated, emulator, needs_compiler  # noqa: F401 (the first two are fixtures)


def run(case, dtype):
    """Errors of output, variance and final states, each against the reference in float64, relative to the largest."""
    inputs = accuracy.example("palimpsa", case, dtype)
    exact = accuracy.as_reference(inputs)
    expected = accuracy.OPERATORS["palimpsa"][0](**exact, backend="reference")
    state = inputs.get("initial_state") or (None, None)
    offsets = inputs.get("cu_seqlens")
    names = ("q", "k", "w", "beta", "g", "prior")
    arguments = [*(inputs[n] for n in names), *state, None if offsets is None else offsets.long(), case.scale, True]
    found = cuda.forward(*arguments)
    pairs = zip(found, (expected.output, expected.variance, *expected.state), strict=True)
    return [((x.double() - y).abs().max() / y.abs().max()).item() if y.numel() else 0.0 for x, y in pairs]


@needs_compiler
@pytest.mark.parametrize("decay", ["none", "mild", "mixed"])
def test_every_decay(emulated, decay):  # noqa: F811
    """0, -0.1, -50, -1000 and -inf side by side in one tile: the tensor-core kernel rescales where it must."""
    errors = run(Case(batch=1, length=70, decay=decay), torch.bfloat16)
    assert max(errors) < 4e-3, errors
    assert max(errors[1:]) < 2e-5, errors  # float32 results
    assert "forward" in emulated


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, length=90, offsets=(0, 0, 1, 40, 40, 84), decay="mixed"),
        Case(batch=1, length=40, heads=1, key_size=5, value_size=3, initial=False),
        Case(batch=1, length=20, heads=1, key_size=130, value_size=20, decay="mixed"),  # warps share rows
        Case(length=0),
        Case(length=5),  # token by token
    ],
    ids=str,
)
def test_shapes(emulated, case):  # noqa: F811
    errors = run(case, torch.bfloat16)
    assert errors[0] < 4e-3 and max(errors[1:]) < 2e-5, errors


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_token_by_token(emulated, dtype):  # noqa: F811
    for case in accuracy.CASES[1:]:
        errors = run(case, dtype)
        assert max(errors) < accuracy.TOLERANCES["palimpsa", "chunked"][dtype].forward, errors
    assert set(emulated) == {"recurrent"}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_decoding(emulated, dtype):  # noqa: F811
    for case in (
        Case(batch=5, length=1, heads=3, key_size=6, value_size=7, decay="mixed"),
        Case(batch=1, length=6, offsets=(0, 1, 2, 3, 4), decay="mixed", initial=False),  # packed, and a tail
        Case(batch=2, length=1, heads=2, key_size=12, value_size=20, decay="mild"),  # three blocks a head
        Case(batch=1, length=1, heads=2, key_size=75, value_size=9, decay="mild"),  # three pieces, the last not whole
    ):
        errors = run(case, dtype)
        assert max(errors) < accuracy.TOLERANCES["palimpsa", "chunked"][dtype].forward, errors
        assert dtype == torch.float64 or max(errors[1:]) < 2e-6, errors  # float32 results
    assert set(emulated) == {"decode"}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, (0, 0, 1, 193, 258)], ids=str)
def test_spans_side_by_side(emulated, monkeypatch, dtype, offsets):  # noqa: F811
    """A sequence cut into spans reads as if it were not cut."""
    monkeypatch.setattr(layout, "span_length", lambda *_: 64)
    case = Case(
        batch=1 if offsets else 2, length=260, heads=1, key_size=12, value_size=8, offsets=offsets, decay="mixed"
    )
    errors = run(case, dtype)
    assert errors[0] < 4e-3 and max(errors[1:]) < (1e-10 if dtype == torch.float64 else 2e-5), errors
    assert "carry" in emulated


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, (0, 0, 1, 193, 258)], ids=str)
@pytest.mark.parametrize("length", [64, 1 << 20])
def test_chunk_states(emulated, monkeypatch, dtype, offsets, length):  # noqa: F811
    """The state before every 64 tokens, in the order that the docstring gives."""
    monkeypatch.setattr(layout, "span_length", lambda *_: length)
    case = Case(batch=1 if offsets else 2, length=260, heads=2, key_size=12, value_size=9, offsets=offsets)
    inputs = accuracy.example("palimpsa", case, dtype)
    exact = accuracy.as_reference(inputs)
    arguments = [*(inputs[n] for n in ("k", "w", "beta", "g")), *inputs["initial_state"]]
    m, j = states.chunk_states(*arguments, offsets=None if offsets is None else torch.tensor(offsets))
    cuts = offsets or (0, 260)
    place = 0
    for n in range(case.rows):
        row, start, end = (n, 0, 260) if offsets is None else (0, cuts[n], cuts[n + 1])
        for h in range(2):
            for at in range(start, end, 64):
                tokens = {x: exact[x][row : row + 1, start:at, h : h + 1] for x in ("q", "k", "w", "beta", "g")}
                entry = type(exact["initial_state"])(*(s[n : n + 1, h : h + 1] for s in exact["initial_state"]))
                after = accuracy.OPERATORS["palimpsa"][0](
                    **tokens, prior=exact["prior"][h : h + 1], initial_state=entry, backend="reference"
                ).state
                for found, expected in zip((m[place], j[place]), after, strict=True):
                    error = (found - expected[0, 0]).abs().max() / expected.abs().max()
                    assert error < (1e-10 if dtype == torch.float64 else 2e-5), (n, h, at, error)
                place += 1
    assert place == len(m)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Compilations that really happen, with a compiler that returns its options."""
    done = []

    def compile_(name, source, headers, options):
        done.append(name)
        return repr((source, options)).encode()

    monkeypatch.setenv("METAPLASTIC_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 0))
    return done


def test_machine_code_is_cached(counted, monkeypatch, tmp_path):
    first = nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"})
    assert nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"}) == first
    assert len(counted) == 1
    assert nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "double"}) != first
    assert nvrtc.machine_code(layout.FOLDER, "carry", "sm_80", {"REAL": "float"}) != first
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 1))
    nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"})
    assert len(counted) == 4
    assert {path.suffix for path in (tmp_path / "cuda").iterdir()} == {".cubin"}  # no half-written file stays behind


@pytest.mark.parametrize("damage", [b"", b"x", lambda whole: whole[:-1], lambda whole: whole[:-1] + b"?"])
def test_a_damaged_cache_is_compiled_anew(counted, tmp_path, damage):
    code = nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"})
    (path,) = (tmp_path / "cuda").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole) if callable(damage) else damage)
    assert nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"}) == code
    assert len(counted) == 2
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(counted, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METAPLASTIC_CACHE", str(tmp_path / "file"))
    assert nvrtc.machine_code(layout.FOLDER, "carry", "sm_90", {"REAL": "float"})
    assert "cannot be kept" in caplog.text


def test_every_kernel_compiles():
    """With the run-time compiler itself, which needs no GPU."""
    pytest.importorskip("cuda.bindings", reason="no cuda-bindings here: the CUDA kernels are NOT compiled")
    pytest.importorskip("nvidia.cu13", reason="no NVRTC here: the CUDA kernels are NOT compiled")
    for keys, values in ((96, 192), (48, 48), (128, 64), (256, 256)):
        for variance in (0, 1):
            assert nvrtc.machine_code(
                layout.FOLDER, "forward", "sm_90", {"VARIANCE": variance, **layout.forward(keys, values).definitions}
            )
        for job in (layout.CHUNKS, layout.LOCAL):
            assert nvrtc.machine_code(
                layout.FOLDER, "states", "sm_90", {"JOB": job, **layout.states(keys, values).definitions}
            )
    for pieces, kinds in ((1, ("bf16", "float")), (5, ("half", "float")), (2, ("double", "double"))):
        given = dict(zip(("INPUT", "REAL"), kinds, strict=True)) | {"KEY_PIECES": pieces, "VARIANCE": 1}
        assert nvrtc.machine_code(layout.FOLDER, "decode", "sm_90", given)
