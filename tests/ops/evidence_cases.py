"""What the kernels of the write and its evidence are run on, and how far they are from float64, 1 being allowed."""

import torch

from metaplastic.ops.evidence import write_and_evidence


def inputs(B, T, H, V, strength, dtype, device="cpu"):
    """u and dbeta as some columns of wider matrices, dw with heads outside: no operator needs contiguous ones."""
    torch.manual_seed(0)
    wide = 3 * torch.randn(B, T, H * (V + 2) + 8, device=device)
    u, d_beta = (x.to(dtype)[..., 8:].unflatten(-1, (H, V + 2))[..., :V] for x in (wide, wide.flip(-1)))
    e = 4 * torch.randn(B, T, H, V, device=device)
    dw = torch.randn(B, H, T, V, device=device).to(dtype).transpose(1, 2)
    s = torch.rand(B, T, H, 1, device=device).to(strength)
    if T:
        s[:, T // 2] = 0.0  # a padded token
    c = torch.rand(H, device=device) + 0.5
    return [u, e.to(dtype), s, c], [dw.to(torch.promote_types(dtype, strength)), d_beta]


def results(given, upstream, backend):
    leaves = [x.detach().requires_grad_() for x in given]
    found = write_and_evidence(*leaves, backend)
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, [d.to(found[0].dtype) for d in upstream])]


def errors(*case, device="cpu"):
    """By name: beside rounding to the result's own type, once, 1e-6 of the terms of a sum in float32."""
    given, upstream = inputs(*case, device=device)
    found = results(given, upstream, "triton")
    u, e, s, c = (x.double() for x in given)
    dw, d_beta = (d.double() for d in upstream)
    of_c = (d_beta * e.sigmoid() * s).abs().sum((0, 1, 3))
    terms = {"of s": ((dw * u).abs() + c[:, None] * d_beta.abs()).sum(-1, keepdim=True), "of c": of_c}
    exact = results([u, e, s, c], [dw, d_beta], "torch")
    wrong = {}
    for name, x, y, like in zip(
        ("w", "beta", "of u", "of e", "of s", "of c"), found, exact, (found[0], found[0], *given), strict=True
    ):
        assert x.shape == y.shape and x.dtype == like.dtype
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
            given, upstream = inputs(1, 3, 2, 5, dtype, dtype, device)
            leaves = {n: x.detach().requires_grad_(n in wanted) for n, x in zip("uesc", given, strict=True)}
            made = write_and_evidence(*leaves.values(), backend)
            made, upstream = made[wanted == "ec" :], upstream[wanted == "ec" :]  # then w needs no gradient
            leaves = [leaves[n] for n in wanted]
            first = torch.autograd.grad(made, leaves, upstream, create_graph=True)
            total = sum(x.float().square().sum() for x in first)
            found[backend] += [*first, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]
    return sum(not torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


CASES = [  # B, T, H, V, dtype of the strength (None: that of all)
    (2, 45, 3, 48, None),
    (1, 70, 2, 5, torch.float32),
    (1, 3, 2, 300, None),
    (1, 1, 1, 1, None),
    (2, 0, 2, 8, None),
]
