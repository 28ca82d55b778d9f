"""How far the kernels of the write and its evidence are from float64, 1 being allowed."""

import torch

from metaplastic.ops.evidence import write_and_evidence
from metaplastic.ops.evidence.check import Case, example, results


def errors(case, dtype, device="cpu"):
    """By name: beside rounding to the result's own type, once, 1e-6 of the terms of a sum in float32."""
    inputs, upstream = example(case, dtype, device)
    found = results("triton", inputs, upstream)
    wide, (dw, d_beta) = {n: x.double() for n, x in inputs.items()}, (d.double() for d in upstream)
    u, e, s, c = wide.values()
    of_c = (d_beta * e.sigmoid() * s).abs().sum((0, 1, 3))
    of_s = ((dw * u).abs() + c[:, None] * d_beta.abs()).sum(-1, keepdim=True)
    terms = {"gradient of s": of_s, "gradient of c": of_c}
    like = {"w": found["w"], "beta": found["w"]} | {f"gradient of {n}": x for n, x in inputs.items()}
    wrong = {}
    for name, y in results("torch", wide, [dw, d_beta]).items():
        x = found[name]
        assert x.shape == y.shape and x.dtype == like[name].dtype
        rounding = torch.finfo(x.dtype)
        allowed = rounding.eps / 2 * y.abs() + 1e-6 * terms.get(name, y.abs()) + rounding.tiny * rounding.eps
        wrong[name] = float(((x.double() - y).abs() / allowed).max()) if x.numel() else 0.0
        wrong[name] = wrong[name] if wrong[name] == wrong[name] else 1e9
    return wrong


def second_derivatives(dtype, device="cpu"):
    """How many of those of the kernels are not the very ones of PyTorch's operations; for all inputs, and for some."""
    found = {"triton": [], "torch": []}
    for wanted in ("uesc", "ues", "ue", "ec"):
        for backend in found:
            given, upstream = example(Case(1, 3, 2, 5), dtype, device)
            leaves = {n: x.detach().requires_grad_(n in wanted) for n, x in given.items()}
            made = write_and_evidence(**leaves, backend=backend)
            made, upstream = made[wanted == "ec" :], upstream[wanted == "ec" :]  # then w needs no gradient
            leaves = [leaves[n] for n in wanted]
            first = torch.autograd.grad(made, leaves, upstream, create_graph=True)
            total = sum(x.float().square().sum() for x in first)
            found[backend] += [*first, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]
    return sum(not torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
