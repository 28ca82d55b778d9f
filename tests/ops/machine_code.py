"""Triton kernels compiled for GPUs that need not be there. Run where Triton may be imported (see ``run``)."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def sizes(kernels, types):
    """Bytes of machine code of every (kernel, options), for two makers' GPUs; pointers' ``types`` by name."""
    found = []
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        for kernel, options in kernels:
            given = dict(options)
            warps = given.pop("num_warps")
            signature = {n: "constexpr" if n in given else types.get(n, "i32") for n in kernel.arg_names}
            constants = {(i,): given[n] for i, n in enumerate(kernel.arg_names) if n in given}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            found.append(len(triton.compile(source, target=target, options={"num_warps": warps}).kernel))
    return found
