"""The CUDA forward pass: outputs, variances and final states. The equations are in the kernels.

bf16 inputs run on tensor cores (forward.cu); every other input type, and sequences of a few tokens, token by token
(recurrent.cu); one token of every sequence, which is decoding, as fast as memory allows (decode.cu).
Where few heads leave the device idle, long sequences are cut into spans that run side by side: one pass over k, w and
beta finds the states they start from.
"""

from torch import Tensor

from ... import nvrtc
from . import layout
from .problem import Problem, cut, prepare
from .states import entry_states


def forward(
    q, k, w, beta, g, prior, information, excess_precision, offsets: Tensor | None, scale: float, output_variance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B,T,H,V] in q's dtype, variance [B,T,H,V] (empty unless asked for), final M and J [N,H,V,K]."""
    problem = prepare(q, k, w, beta, g, prior, information, excess_precision, offsets)
    p, (heads, keys, values) = problem, problem.shape
    sequences = len(p.cuts) - 1
    outside = p.cuts[-1] < q.shape[0] * q.shape[1] or not keys  # tokens beyond the last sequence read zero
    new = p.w.new_zeros if outside else p.w.new_empty
    output = new(p.w.shape)
    variance = new(p.w.shape if output_variance else (0,), dtype=p.g.dtype)
    m, j = problem.new_state(sequences, heads), problem.new_state(sequences, heads)
    if m.numel():
        if p.single_tokens:
            _decode(problem, output, variance, m, j, scale)
        else:
            _read(problem, output, variance, m, j, scale)
    output = output if q.dtype == output.dtype else output.to(q.dtype)
    if p.sizes == (keys, values):
        return output, variance, m, j
    keys, values = p.sizes
    read = output[..., :values].contiguous(), variance[..., :values].contiguous()
    return *read, m[:, :, :values, :keys].contiguous(), j[:, :, :values, :keys].contiguous()


def _decode(p: Problem, output: Tensor, variance: Tensor, m: Tensor, j: Tensor, scale: float) -> None:
    shape = layout.decode(p)
    run = nvrtc.kernel(layout.FOLDER, "decode", p.device, VARIANCE=int(variance.numel() > 0), **shape.definitions)
    blocks = -(-m.numel() // (p.shape[1] * shape.rows))
    inputs = (p.q, p.k, p.w, p.beta, p.g, p.prior, *p.state)
    run(blocks, *inputs, output, variance, m, j, m.shape[0], *p.shape, scale)


def _read(p: Problem, output: Tensor, variance: Tensor, m: Tensor, j: Tensor, scale: float) -> None:
    tensor_cores = layout.on_tensor_cores(p)
    shape = layout.forward(*p.shape[1:]) if tensor_cores else layout.recurrent(p)
    spans = cut(p.cuts, layout.span_length(p, shape), p.q.device)
    entry = p.state if spans.count == spans.sequences else entry_states(p, spans)
    blocks = shape.blocks(p, spans.count)
    definitions = {"VARIANCE": int(variance.numel() > 0), **shape.definitions}
    arguments = (p.q, p.k, p.w, p.beta, p.g, p.prior, spans.table, *entry, output, variance, m, j)
    if tensor_cores:
        nvrtc.kernel(layout.FOLDER, "forward", p.device, **definitions)(blocks, *arguments, *p.shape, scale)
    else:
        run = nvrtc.kernel(layout.FOLDER, "recurrent", p.device, JOB=layout.READ, **definitions)
        run(blocks, *arguments, None, *p.shape, scale)
