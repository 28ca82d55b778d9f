"""The write and its evidence: the kernels on the CPU by Triton's interpreter and compiled, and on a GPU as they are.

PyTorch's form of it is what the layers run on a CPU (layers/test_palimpsa_d.py).
"""

import pytest
import torch

from metaplastic.ops import evidence, fused
from metaplastic.ops.evidence.check import CASES, Case, example, results

from .evidence_cases import errors, second_derivatives
from .test_short_convolution import needs_triton, run

INTERPRETED = """
import torch
from metaplastic.ops.evidence.check import CASES, measure
from metaplastic.ops.fused_accuracy import failures
from tests.ops.evidence_cases import errors, second_derivatives

half = torch.float16
found = [[errors(case, half) for case in CASES], second_derivatives(half)]
found.append([failures(measure(case, half, "cpu"), half) for case in CASES])
"""
COMPILED = """
from metaplastic.ops.evidence import kernels, launch
from tests.ops.machine_code import sizes

types = dict.fromkeys(("c", "sums"), "*fp32")
types |= dict.fromkeys(("u", "e", "s", "w", "beta", "dw", "d_beta", "du", "de", "ds"), "*bf16")
found = sizes([(x, launch._options(192)) for x in (kernels.forward_kernel, kernels.backward_kernel)], types)
"""


@needs_triton
def test_interpreted():
    """Rounded once, from float32; derivatives of the gradients are those of PyTorch's operations; the doctor agrees."""
    wrong, different, failed = run(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert len(wrong) == len(CASES) and max(max(case.values()) for case in wrong) < 1.0, wrong
    assert different == 0 and failed == [{}] * len(CASES)


@needs_triton
def test_kernels_compile():
    assert min(run(COMPILED, TRITON_INTERPRET="0")) > 1000  # bytes of machine code


def test_who_computes(monkeypatch):
    u, e, s, c = example(Case(1, 3, 2, 4), torch.bfloat16)[0].values()

    def choose(u, e, s=s, c=c):
        return evidence.choose(u, e, s, c)

    assert choose(u, e) == "torch"  # no GPU
    monkeypatch.setattr(fused, "reason_against", lambda name, device: None if name == "evidence" else "not this one")
    assert choose(u, e) == "triton"
    assert choose(u.float(), e.float()) == choose(u, e.half()) == "torch"
    assert choose(u, e, s[:, :, :1]) == choose(u, e, s, c[:1]) == choose(u, e[:, :, :, :1]) == "torch"
    wide = u.new_zeros(1, 3, 2, 5000)
    assert choose(wide, wide) == "torch"
    chosen = []
    torch.func.vmap(lambda x: chosen.append(choose(x, x)) or x)(u)
    with torch.autograd.forward_ad.dual_level():
        chosen.append(choose(u, e))
    compiled = torch.compile(lambda *given: evidence.write_and_evidence(*given), fullgraph=True, backend="eager")
    assert chosen == ["torch", "torch"]
    assert all(map(torch.equal, compiled(u, e, s, c), evidence.plain.write_and_evidence(u, e, s, c)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(dtype):
    if (reason := fused.reason_against("evidence", "cuda")) is not None:
        pytest.skip(reason)
    for case in (*CASES, Case(4, 2048, 16, 48), Case(1, 2048, 16, 192), Case(1, 100, 2, 4096)):
        wrong = errors(case, dtype, "cuda")
        assert max(wrong.values()) < 1.0, (case, wrong)
    assert second_derivatives(dtype, "cuda") == 0
    given, upstream = example(Case(2, 1000, 4, 48), dtype, "cuda")
    first, *others = (list(results("auto", given, upstream).values()) for _ in range(20))
    assert evidence.choose(**given) == "triton" and all(all(map(torch.equal, first, other)) for other in others)
