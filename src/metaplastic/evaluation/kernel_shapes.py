"""What ``metaplastic bench kernels`` measures: shapes of layers, who stands beside whom, inputs."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .speed import PALIMPSA_D_170M


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    key_size: int
    value_size: int
    # Above exp(-0.1), or "new model": from 1 to far below, a range of its own in every head; or mild ones "per key".
    decays: str = "mild"

    @property
    def elements(self) -> int:
        """Memory elements times tokens."""
        return self.batch * self.length * self.heads * self.key_size * self.value_size


# One layer of the published models (arXiv 2602.09075, Tables 5 and 6) and the same work as one long sequence.
SHAPES = {
    "760M-D": Shape(16, 2048, 16, 96, 192),
    "170M-D": Shape(16, 2048, 16, 48, 48),
    "2.7B-M": Shape(8, 2048, 80, 128, 64),
    "760M-D, one long text": Shape(1, 32768, 16, 96, 192),
    "760M-D, decays of a new model": Shape(16, 2048, 16, 96, 192, "new model"),
}
# Who stands beside whom: label, operator, backend. "mesa" is no operator of ours: a peer alone.
SIDES = (
    ("Palimpsa", "palimpsa", "auto"),
    ("Simple GLA (flash-linear-attention)", "additive", "fla"),
    ("Gated DeltaNet (flash-linear-attention)", "delta", "fla"),
)
# The Bayesian Layer beside the delta rule and MesaNet of as many heads of its size; and heads of its own.
FILTER = "Bayesian Layer, 4 heads of 128 x 128"
FILTER_SHAPE = Shape(16, 2048, 4, 128, 128)
FILTER_SIDES = (("Bayesian Layer", "bayesian", "cuda"), SIDES[2], ("MesaNet (flash-linear-attention)", "mesa", "fla"))
MORE_FILTERS = {
    f"{FILTER}, decays per key": Shape(16, 2048, 4, 128, 128, "per key"),
    "Bayesian Layer, 4 heads of 256 x 256": Shape(8, 2048, 4, 256, 256),
}
WIDTHS = (32, 64, 96, 128, 192, 256)  # K = V of the single head
STEPS = (("palimpsa_d", "auto"), ("palimpsa_d_additive", "chunked"), ("palimpsa_d_additive", "fla"))
STEP_BATCH = 16  # with fewer rows launching takes the host longer than 170M takes the GPU
PALIMPSA_D_760M: dict[str, Any] = PALIMPSA_D_170M | {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "options": {"num_heads": 16, "key_size": 96, "value_size": 192},
}
TRAINING = {"training step 170M-D": PALIMPSA_D_170M, "training step 760M-D": PALIMPSA_D_760M}


def kernel_inputs(op: str, shape: Shape, device: str = "cuda") -> dict[str, Any]:
    """As :func:`metaplastic.evaluation.speed.operator_inputs`, on the device: bf16, decays and priors in float32."""
    source = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        each = (shape.batch, shape.length, shape.heads, *sizes)
        return torch.randn(each, generator=source, device=device)

    per_key = (shape.key_size,) if shape.decays == "per key" else ()
    q, k = (torch.nn.functional.normalize(draw(shape.key_size), dim=-1).bfloat16() for _ in range(2))
    written, g = draw(shape.value_size).bfloat16(), -0.1 * draw(*per_key).sigmoid()
    if shape.decays == "new model":  # A, dt and a projection of normed activations, as layers draw them
        rates, steps = torch.rand(2, shape.heads, generator=source, device=device)
        bias = torch.log(torch.expm1(0.001 * 100**steps))
        g = -16 * rates * torch.nn.functional.softplus(bias + 0.7 * draw())
    made: dict[str, Tensor] = {"q": q, "k": k, "g": g, ("w" if op == "palimpsa" else "v"): written}
    if op == "palimpsa":
        made |= {"beta": draw(shape.value_size).sigmoid().bfloat16(), "prior": torch.ones(shape.heads, device=device)}
    elif op == "delta":
        made["beta"] = draw().sigmoid().bfloat16()
    elif op == "mesa":  # its layer gives weights and ridge in float32, the ridge 1 before training
        made |= {"beta": draw().sigmoid(), "ridge": torch.ones(shape.heads, shape.key_size, device=device)}
    elif op == "bayesian":  # noise as much as the decay takes off
        made |= {"process_noise": 1 - (2 * g).exp(), "observation_noise": 0.05 + 0.45 * draw().sigmoid()}
        made["prior_variance"] = torch.ones(shape.heads, device=device)
    return {n: x.requires_grad_() for n, x in made.items()}
