r"""The Triton kernels of the short convolution, forward and backward; :mod:`.launch` runs them.

One channel of one sequence x_0 .. x_{L-1}, before which its state stands, x_{-(W-1)} .. x_{-1}:

    p_t = bias + sum_j weight_j x_{t-W+1+j}             y_t = p_t, or SiLU(p_t) = p_t s_t with s_t = 1 / (1 + exp(-p_t))
    state' = x_{L-W+1} .. x_{L-1}

    dp_t = dy_t, or dy_t s_t (1 + p_t (1 - s_t))        0 for t < 0 and t >= L
    dx_i = sum_j weight_j dp_{i+W-1-j}                  for i >= -(W-1): where i < 0, the gradient of the state;
           + dstate'_{i-(L-W+1)}                        where i >= L-W+1
    dweight_j = sum_t dp_t x_{t-W+1+j}                  dbias = sum_t dp_t

Layout   A program has BC channels and walks along the tokens of a block, at most BT of one sequence. What it looks back
         on (W - 1 inputs) and, in the backward, ahead to (W - 1 values of dp) stays in registers: every number is read
         and every exponential taken once, but for the W - 1 tokens at either end of a block. ROWS tokens are loaded at
         a time, all before the first is used.
Blocks   Dense: the same number for every row. Packed: block b of the n-th sequence is slot offsets[n] // BT + n + b,
         which leaves enough slots for every length, so that nothing has to be counted before the launch; a slot finds
         its sequence by bisection. What is behind the last sequence counts as one more, of zeros. Slots left over have
         no token.
Sums     Each program of the backward adds up dweight and dbias over its slots, and the sums of the programs are added
         up afterwards. No atomics: results are the same bit for bit in every run.
Types    Sums are float64 for a float64 x, else float32; p is made again from x, not read back. All offsets that grow
         with the inputs are 64-bit.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)

import triton
import triton.language as tl


@triton.jit
def _block(offsets, slot, tokens, sequences, BT: tl.constexpr, PACKED: tl.constexpr):
    """Of this slot: sequence, its first token in x, its length, and the block's first token, counted from there.

    ``tokens``: of x along T. The first token is behind the last of the sequence in a slot that was left over.
    """
    if PACKED:
        low = slot * 0
        high = low + sequences
        while low < high:
            middle = (low + high + 1) // 2
            behind = tl.load(offsets + middle).to(tl.int64) // BT + middle > slot
            low = tl.where(behind, low, middle)
            high = tl.where(behind, middle - 1, high)
        begin = tl.load(offsets + low).to(tl.int64)
        first = tl.maximum(slot - begin // BT - low, 0) * BT
        end = tl.load(offsets + low + 1, mask=low < sequences, other=0).to(tl.int64)
        end = tl.where(low < sequences, end, tokens)
        begin = tl.minimum(tl.maximum(begin, 0), tokens)  # unread until now: whatever they are, this stays within x
        length = tl.maximum(tl.minimum(end, tokens) - begin, 0)
        sequence = low
    else:
        blocks = tl.maximum((tokens + BT - 1) // BT, 1).to(tl.int64)
        sequence = slot // blocks
        first = slot % blocks * BT
        begin = slot * 0
        length = begin + tokens
    return sequence, begin, length, first


@triton.jit
def _input(x, pitch, state, channels, i, here, W: tl.constexpr, STATE: tl.constexpr):
    """Input i of a sequence that begins at x, i >= -(W - 1): below 0 what its state has, or zeros if it has none."""
    if STATE:
        return tl.load(tl.where(i < 0, state + (W - 1 + i) * channels, x + i * pitch), mask=here, other=0.0)
    else:
        return tl.load(x + i * pitch, mask=here & (i >= 0), other=0.0)


@triton.jit
def _sigmoid(p):
    """1 / (1 + exp(-p)), the division as two instructions: it would first bring the sum in range."""
    root = tl.rsqrt(1 + tl.exp(-p))
    return root * root


@triton.jit
def _preactivation(weights, bias, window, W: tl.constexpr):
    p = bias
    for j in tl.static_range(W):
        p = p + weights[j] * window[j]
    return p


@triton.jit(do_not_specialize=["tokens", "sequences"])
def forward_kernel(
    x, weight, bias, state, y, new_state, offsets, tokens, sequences, channels, batch_pitch, pitch,
    W: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    REAL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program per slot and block of channels; rows of x are ``pitch`` apart, and y has none of its gaps."""
    parts = tl.cdiv(channels, BC)
    program = tl.program_id(0).to(tl.int64)
    channel = (program % parts).to(tl.int32) * BC + tl.arange(0, BC)
    here = channel < channels
    sequence, begin, length, first = _block(offsets, program // parts, tokens, sequences, BT, PACKED)
    count = tl.minimum(length - first, BT).to(tl.int32)
    inside = sequence < sequences
    if PACKED:
        x += begin * pitch
        y += begin * channels
    else:
        x += sequence * batch_pitch
        y += sequence * tokens * channels
    x += channel
    y += channel
    state += sequence * ((W - 1) * channels) + channel
    new_state += sequence * ((W - 1) * channels) + channel

    weights = ()
    for j in tl.static_range(W):
        weights = weights + (tl.load(weight + channel * W + j, mask=here, other=0.0).to(REAL),)
    if BIAS:
        offset = tl.load(bias + channel, mask=here, other=0.0).to(REAL)
    else:
        offset = tl.zeros([BC], REAL)

    if (first == 0) & inside:
        for k in tl.static_range(W - 1):
            kept = _input(x, pitch, state, channels, length - (W - 1) + k, here, W, STATE)
            tl.store(new_state + k * channels, kept, mask=here)

    window = ()
    for k in tl.static_range(W - 1):
        back = _input(x, pitch, state, channels, first - (W - 1) + k, here & inside & (count > 0), W, STATE)
        window = window + (back.to(REAL),)
    x += first * pitch
    y += first * channels
    for t in range(0, count, ROWS):
        rows = ()
        for r in tl.static_range(ROWS):
            rows = rows + (tl.load(x + r * pitch, mask=here & inside & (t + r < count), other=0.0),)
        for r in tl.static_range(ROWS):
            window = window + (rows[r].to(REAL),)
            p = _preactivation(weights, offset, window, W)
            if SILU:
                p *= _sigmoid(p)
            if PACKED:
                p = tl.where(inside, p, 0.0)
            tl.store(y + r * channels, p.to(y.dtype.element_ty), mask=here & (t + r < count))
            window = window[1:]
        x += ROWS * pitch
        y += ROWS * channels


@triton.jit(do_not_specialize=["tokens", "sequences", "slots", "per_program"])
def backward_kernel(
    x, weight, bias, state, dy, d_new_state, dx, d_state, sums, offsets, tokens, sequences, slots, per_program,
    channels, batch_pitch, pitch, dy_batch_pitch, dy_pitch,
    W: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, REAL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program takes ``per_program`` slots one after the other.

    ``sums`` [programs, W or W + 1, C] are of dweight, and of dbias if there is one.
    """
    parts = tl.cdiv(channels, BC)
    program = tl.program_id(0).to(tl.int64)
    channel = (program % parts).to(tl.int32) * BC + tl.arange(0, BC)
    here = channel < channels
    program = program // parts
    sums += program * ((W + BIAS) * channels) + channel

    weights = ()
    totals = ()
    for j in tl.static_range(W):
        weights = weights + (tl.load(weight + channel * W + j, mask=here, other=0.0).to(REAL),)
        totals = totals + (tl.zeros([BC], REAL),)
    total = tl.zeros([BC], REAL)
    if BIAS:
        offset = tl.load(bias + channel, mask=here, other=0.0).to(REAL)
    else:
        offset = tl.zeros([BC], REAL)

    for slot in range(program * per_program, tl.minimum((program + 1) * per_program, slots)):
        sequence, begin, length, first = _block(offsets, slot, tokens, sequences, BT, PACKED)
        inside = sequence < sequences
        if PACKED:
            x_0 = x + begin * pitch + channel
            dy_0 = dy + begin * dy_pitch + channel
            dx_0 = dx + begin * channels + channel
        else:
            x_0 = x + sequence * batch_pitch + channel
            dy_0 = dy + sequence * dy_batch_pitch + channel
            dx_0 = dx + sequence * tokens * channels + channel
        of_sequence = sequence * ((W - 1) * channels) + channel

        # From here on tokens are counted from the block's first. dx_i is complete W - 1 tokens later: the block goes on
        # into the next one, and the first of a sequence begins with its state, even where it has no token.
        count = tl.minimum(length - first, BT).to(tl.int32)
        stop = tl.where((count > 0) | (first == 0), count + (W - 1), 0)
        loaded = tl.minimum(length - first, stop).to(tl.int32)
        loaded = tl.where(inside, loaded, 0)
        ahead = ()  # dp_{t-W+1} .. dp_{t-1}
        window = ()
        for k in tl.static_range(W - 1):
            i = first - (W - 1) + k
            back = _input(x_0, pitch, state + of_sequence, channels, i, here & (loaded > 0), W, STATE)
            window = window + (back.to(REAL),)
            ahead = ahead + (tl.zeros([BC], REAL),)
        x_t = x_0 + first * pitch
        dy_t = dy_0 + first * dy_pitch
        dx_i = dx_0 + (first - (W - 1)) * channels
        for t in range(0, stop, ROWS):
            rows = ()
            d_rows = ()
            for r in tl.static_range(ROWS):
                there = here & (t + r < loaded)
                rows = rows + (tl.load(x_t + r * pitch, mask=there, other=0.0),)
                d_rows = d_rows + (tl.load(dy_t + r * dy_pitch, mask=there, other=0.0),)
            for r in tl.static_range(ROWS):
                window = window + (rows[r].to(REAL),)
                dp = d_rows[r].to(REAL)
                if SILU:
                    p = _preactivation(weights, offset, window, W)
                    s = _sigmoid(p)
                    dp = dp * s * (1 + p * (1 - s))
                ahead = ahead + (dp,)
                own = tl.where(t + r < count, dp, 0.0)
                updated = ()
                for j in tl.static_range(W):
                    updated = updated + (totals[j] + own * window[j],)
                totals = updated
                if BIAS:
                    total += own

                d = weights[W - 1] * ahead[0]
                for j in tl.static_range(1, W):
                    d += weights[W - 1 - j] * ahead[j]
                if FINAL:
                    row = first + (t + r) - length
                    kept = here & inside & (row >= 0) & (row < W - 1)
                    d += tl.load(d_new_state + of_sequence + row * channels, mask=kept, other=0.0).to(REAL)
                d = d.to(dx.dtype.element_ty)
                here_too = here & (t + r < stop)
                tl.store(dx_i + r * channels, d, mask=here_too & (t + r >= W - 1))
                if STATE:
                    to = d_state + of_sequence + (t + r) * channels
                    tl.store(to, d, mask=here_too & inside & (first == 0) & (t + r < W - 1))
                window = window[1:]
                ahead = ahead[1:]
            x_t += ROWS * pitch
            dy_t += ROWS * dy_pitch
            dx_i += ROWS * channels

    for j in tl.static_range(W):
        tl.store(sums + j * channels, totals[j], mask=here)
    if BIAS:
        tl.store(sums + W * channels, total, mask=here)
