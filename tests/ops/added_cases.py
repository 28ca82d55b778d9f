"""What the kernels of what a shard adds are run on, and how far they are from batched products in float64."""

import torch

from metaplastic.ops.added import plain


def inputs(B, T, H, K, V, each, count, dtype, device="cpu"):
    torch.manual_seed(0)
    k = torch.randn(B, T, H, K + 3)[..., 1 : K + 1].to(device, dtype)  # columns of a wider matrix
    values = [torch.randn(B, H, T, V).to(device, dtype).transpose(1, 2) for _ in range(count)]
    left = torch.rand(B, H, K if each else 1, T).to(device).permute(0, 3, 1, 2)
    return k, left, values


def error(found, expected):
    assert found.shape == expected.shape
    return (
        float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
        if found.numel()
        else 0.0
    )


def errors(k, left, values):
    from metaplastic.ops.added import launch  # needs Triton

    exact = k.double(), left.double(), [v.double() for v in values]
    sums, expected = launch.sums(k, left, values), plain.sums(*exact)
    of_sums = [torch.randn_like(x) for x in sums]
    gradients = launch.gradients(of_sums, k, left, values)
    assert [x.dtype for x in gradients] == [x.dtype for x in (k, left, *values)]
    others = plain.gradients([x.double() for x in of_sums], *exact)
    return [[error(*pair) for pair in zip(a, b, strict=True)] for a, b in ((sums, expected), (gradients, others))]


CASES = [  # B, T, H, K, V, a decay for each key, evidence
    (2, 150, 2, 24, 40, False, 2),
    (1, 300, 1, 96, 70, False, 2),
    (1, 70, 2, 48, 48, True, 1),
    (1, 1, 1, 5, 3, True, 2),
    (2, 0, 1, 4, 4, False, 1),
    (1, 70, 1, 256, 130, False, 2),
]
