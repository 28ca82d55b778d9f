"""The Triton kernels on the CPU: run by Triton's interpreter, and compiled by the real compiler, which needs no GPU.

What only a GPU can show (speed, what the compiler made of them) is in test_gpu.py.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here: the Triton kernels are NOT checked"
)

# Triton reads TRITON_INTERPRET when it is imported: a process of its own.
SETUP = """
import json, sys
import torch
from metaplastic.ops import accuracy, dispatch
from metaplastic.ops.accuracy import Case

dispatch.BACKENDS["palimpsa"]["triton"] = dispatch.Backend("metaplastic.ops.palimpsa.triton:apply", (), "triton", False)

found = []

def measure(dtype, cases, group=4):
    from metaplastic.ops.palimpsa.triton import kernels
    kernels.GROUP = group
    for case in cases:
        errors = accuracy.measure("palimpsa", "triton", case, dtype)
        wrong = accuracy.failures("palimpsa", "chunked", errors, dtype)  # one tolerance for every backend
        found.append((str(case), len(errors), wrong))
"""


def run(code: str, **environment: str) -> list:
    """What ``code`` leaves in ``found``."""
    environment = os.environ | {"TRITON_CACHE_DIR": os.environ["METAPLASTIC_CACHE"]} | environment
    code += "\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(code: str) -> None:
    for case, names, wrong in run(SETUP + code, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        assert names in (10, 12), case  # every output, every gradient, those of the initial state too
        assert not wrong, (case, wrong)


@needs_triton
def test_every_decay():
    """0, -0.1, -50, -1000 and -inf side by side; several spans and groups, the last ones incomplete."""
    check("""
shape = dict(batch=1, heads=1, key_size=3, value_size=2)
measure(torch.float64, [Case(length=15, decay="mixed", **shape), Case(length=10, decay="none", initial=False, **shape)])
""")


@needs_triton
def test_shapes():
    """Packed with empty and one-token sequences and a tail, several blocks of value rows, no token, many heads."""
    check("""
measure(torch.float64, [
    Case(batch=1, length=12, heads=1, key_size=5, value_size=3, offsets=(0, 0, 1, 9, 9, 10), decay="mixed"),
    Case(batch=1, length=3, heads=2, key_size=17, value_size=40, decay="mixed"),
    Case(batch=2, length=1, heads=2, key_size=1, value_size=1, scale=1.0),
    Case(batch=1, length=4, heads=1, offsets=(0,)),
    Case(length=0), Case(batch=0), Case(value_size=0), Case(batch=1, length=2, key_size=0),
])
""")


@needs_triton
def test_types():
    """float16 inputs are rounded at the end only. (bfloat16, which the interpreter truncates, is for a GPU.)"""
    check("""
shape = dict(batch=1, heads=1, key_size=5, value_size=9, decay="mixed")
measure(torch.float32, [Case(length=11, **shape)], group=2)
measure(torch.float16, [Case(length=6, **shape)])
""")


@needs_triton
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_kernels_compile(target):
    """By the compiler itself, for an NVIDIA and an AMD GPU."""
    assert min(run(COMPILE.replace("TARGET", repr(target)), TRITON_INTERPRET="0")) > 1000  # bytes of machine code


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from metaplastic.ops.palimpsa.triton import kernels, launch

types = dict.fromkeys(("q", "k", "w", "beta", "output", "d_output", "dw", "dbeta"), "*bf16")
types |= dict(sequences="*i64", heads="i32", tokens="i32")
found = []
for kernel, blocks in (
    (kernels.forward_kernel, launch.forward_blocks(24, 24, 4)),
    (kernels.backward_kernel, launch.backward_blocks(24, 24, 4)),
):
    options = blocks.options | dict(K=24, V=24, GROUP=4, VARIANCE=True)
    signature = {n: "constexpr" if n in options else types.get(n, "*fp32") for n in kernel.arg_names}
    constants = {(i,): options[n] for i, n in enumerate(kernel.arg_names) if n in options}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget(*TARGET), options=dict(num_warps=blocks.warps))
    found.append(len(made.kernel))
"""
