"""The CPU kernels of Palimpsa: forward, decode and backward in Numba; :mod:`.cpu` cuts the work and runs them.

One head of one sequence, with state M (information) and J (excess precision), both [V, K], and alpha_t = exp(g_t):

    M_t = alpha_t M_{t-1} + w_t k_t^T           J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
    R_t = 1 / (J_t + prior)                     y_t = (M_t R_t) q_t             var_t = R_t q_t^2

The gradients walk t = T..1, from those of the final state (alpha_{T+1} = 1), with n_t = (dy_t q_t^T) R_t:

    dM_t = alpha_{t+1} dM_{t+1} + n_t           x_t = n_t M_t R_t + (dvar_t (q_t^2)^T) R_t^2
    dJ_t = alpha_{t+1} dJ_{t+1} - x_t           dprior = -sum x_t
    dq_t = (M_t R_t)^T dy_t + 2 q_t (R_t^T dvar_t)
    dk_t = dM_t^T w_t + 2 k_t (dJ_t^T beta_t)   dw_t = dM_t k_t                 dbeta_t = dJ_t k_t^2
    dg_t = alpha_t (<dM_t, M_{t-1}> + <dJ_t, J_{t-1}>)

The last line needs the earlier state but, unlike a running sum of differences, is exact beside alpha = 0.

Layout   The value rows of a head are cut into tiles of one SIMD vector (64 bytes: 16 rows of float32, 8 of float64),
         the last one padded. A tile is stored key by key with its rows along the lanes, so that y, dw and dbeta are
         sums of whole vectors; only dq and dk are sums over lanes. It stays in the L1 or L2 cache.
Tasks    One head of one sequence, or some of its tiles where heads are few; dq, dk and dg then have that many partial
         copies. The cut follows from the shapes alone and sums run in a fixed order: no bit depends on the threads.
Memory   Forward saves nothing. Backward stores the state of every S-th token in a sweep, then replays S tokens of one
         tile at a time and walks them back. S is what fits the L2 cache, or sqrt(T) if that is more, so that the
         scratch of a thread grows with sqrt(T) (2 K V + 32 K) elements: at K = 32, V = 64 in float32, 0.7 MB for
         T = 1024 and 6 MB for T = 65536.
Types    float64 for a float64 q, else float32; sums over tiles and tokens (dg, dprior) in float64. The only fast-math
         flag is "contract", which allows fused multiply-adds: infinities and NaNs behave as everywhere.
"""

# pyright: reportCallIssue=false
# (an @intrinsic is called without the typing context that it is defined with)

from numba import njit

from .lanes import VECTOR_BYTES, lane_sum, lane_sums, load, splat, spread, store

BLOCK = 8  # tokens that forward copies to scratch at a time: with a small state they share the L1 cache

# Kernels. Tensors arrive flat, [token, head, feature] with all sequences in one row, cut by `offsets`. In scratch, the
# features of a token are padded with zeros to whole vectors. A state is [sequence, head, tile, key, M or J, lane].
# -(-a // b) rounds a / b up.

_helper = njit(error_model="numpy", fastmath={"contract"})


def _kernel(function):
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # Numba finds no folder it can write to
        return njit(**options)(function)


@_helper
def _copy_in(block, source, at, stride, tokens, width):
    """`width` features of consecutive tokens. The features of one head are a thin slice of memory: read in place,
    line after line would miss the cache, or they would compete for the same few lines of it."""
    lanes = VECTOR_BYTES // block.itemsize
    to = 0
    for _ in range(tokens):
        for i in range(0, width, lanes):
            store(block, to, load(source, at + i, width - i))
            to += lanes
        at += stride


@_helper
def _copy_out(target, to, stride, block, tokens, width):
    lanes = VECTOR_BYTES // block.itemsize
    at = 0
    for _ in range(tokens):
        for i in range(0, width, lanes):
            store(target, to + i, load(block, at), width - i)
            at += lanes
        to += stride


@_helper
def _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows):
    """What consecutive tokens write, to scratch: k, k^2, w and beta in padded rows, and alpha."""
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    _, k, w, beta, alpha, _ = inputs
    lanes = VECTOR_BYTES // k.itemsize
    _copy_in(k_block, k, token * keys, heads * keys, tokens, keys)
    _copy_in(w_block, w, token * values + v, heads * values, tokens, rows)
    _copy_in(beta_block, beta, token * values + v, heads * values, tokens, rows)
    for i in range(0, tokens * -(-keys // lanes) * lanes, lanes):
        store(k2_block, i, load(k_block, i) * load(k_block, i))
    for s in range(tokens):
        alpha_block[s] = alpha[token + s * heads]


@_helper
def _advance(writes, tokens, row, pitch, keys, source, at, target, to, stride):
    """The recurrence on one tile, from the state source[at:]. The first token leaves target[to:], the next one the
    state `stride` after that (0: only the last state is kept)."""
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    lanes = VECTOR_BYTES // target.itemsize
    key = 0
    for s in range(tokens):
        w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha_block, s)
        for i in range(keys):
            m, j = load(source, at + 2 * i * lanes), load(source, at + (2 * i + 1) * lanes)
            store(target, to + 2 * i * lanes, m * alpha_t + w_t * spread(k_block, key + i))
            store(target, to + (2 * i + 1) * lanes, j * alpha_t + beta_t * spread(k2_block, key + i))
        row += pitch
        key += -(-keys // lanes) * lanes
        source, at, to = target, to, to + stride


@_kernel
def forward_kernel(inputs, offsets, state, output, variance, sizes, scratch, first, last):
    """`state` holds the initial states and is left with the final ones."""
    q, prior = inputs[0], inputs[5]
    heads, keys, values, group = sizes
    writes, (q_block, output_block, variance_block) = scratch[:5], scratch[5:]
    k_block, k2_block, w_block, beta_block, alpha_block = writes
    lanes = VECTOR_BYTES // q.itemsize
    key_pitch = -(-keys // lanes) * lanes
    groups = -(-values // (group * lanes))
    one = splat(q.dtype.type(1))
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group * lanes
        rows = min(group * lanes, values - v)
        pitch = -(-rows // lanes) * lanes
        start = ((n * heads + h) * -(-values // lanes) * lanes + v) * 2 * keys
        base = spread(prior, h)
        for t in range(offsets[n], offsets[n + 1], BLOCK):
            tokens, token = min(BLOCK, offsets[n + 1] - t), t * heads + h
            _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows)
            _copy_in(q_block, q, token * keys, heads * keys, tokens, keys)
            for tile in range(0, pitch, lanes):
                for s in range(tokens):
                    row, key, at = s * pitch + tile, s * key_pitch, start + tile * 2 * keys
                    w_t, beta_t, alpha_t = load(w_block, row), load(beta_block, row), spread(alpha_block, s)
                    read, var = one - one, one - one
                    for i in range(key, key + keys):
                        m = load(state, at) * alpha_t + w_t * spread(k_block, i)
                        j = load(state, at + lanes) * alpha_t + beta_t * spread(k2_block, i)
                        store(state, at, m)
                        store(state, at + lanes, j)
                        r = one / (j + base)
                        read = read + m * r * spread(q_block, i)
                        if variance is not None:
                            var = var + r * (spread(q_block, i) * spread(q_block, i))
                        at += 2 * lanes
                    store(output_block, row, read)
                    store(variance_block, row, var)
            _copy_out(output, token * values + v, heads * values, output_block, tokens, rows)
            if variance is not None:
                _copy_out(variance, token * values + v, heads * values, variance_block, tokens, rows)


@_kernel
def decode_kernel(inputs, states, finals, output, variance, sizes, scratch, first, last):
    """Sequences of one token, one head a task. The states are [row, key] as callers have them, keys along the lanes."""
    q, k, w, beta, alpha, prior = inputs
    heads, keys, values = sizes
    (information, excess), (final_information, final_excess) = states, finals
    one = splat(q.dtype.type(1))
    for token in range(first, last):
        base, alpha_t = spread(prior, token % heads), spread(alpha, token)
        for row in range(token * values, (token + 1) * values):
            w_t, beta_t = spread(w, row), spread(beta, row)
            read, var = one - one, one - one
            for i in range(0, keys, VECTOR_BYTES // q.itemsize):
                at, left = row * keys + i, keys - i
                q_t, k_t = load(q, token * keys + i, left), load(k, token * keys + i, left)
                m, j = w_t * k_t, beta_t * (k_t * k_t)
                if information.size:
                    m, j = load(information, at, left) * alpha_t + m, load(excess, at, left) * alpha_t + j
                store(final_information, at, m, left)
                store(final_excess, at, j, left)
                r = one / (j + base)
                read, var = read + m * r * q_t, var + r * (q_t * q_t)
            output[row] = lane_sum(read)
            if variance is not None:
                variance[row] = lane_sum(var)


@_helper
def _walk(scratch, tokens, row, pitch, keys, base, gradient, at, dg, dg_at, dg_stride, d_variance):
    """The gradients of `tokens` tokens from one tile, last token first. Adds to those of q, k and g; returns sum x."""
    k_block, k2_block, w_block, beta_block, alpha_block, q_block, dy_block, dvar_block = scratch[:8]
    dq_block, dk_block, dw_block, dbeta_block, dq_lanes, dk_lanes, replay = scratch[8:15]
    lanes = VECTOR_BYTES // gradient.itemsize
    size, key_pitch = 2 * keys * lanes, -(-keys // lanes) * lanes
    one = splat(gradient.dtype.type(1))
    zero = one - one
    total = 0.0
    for s in range(tokens - 1, -1, -1):
        place, before, to = row + s * pitch, s * size, at
        w_t, beta_t, dy_t = load(w_block, place), load(beta_block, place), load(dy_block, place)
        alpha_next = spread(alpha_block, s + 1)
        dw_t, dbeta_t, m_sum, j_sum, x_sum = zero, zero, zero, zero, zero
        for chunk in range(s * key_pitch, s * key_pitch + keys, lanes):
            for i in range(chunk, min(chunk + lanes, s * key_pitch + keys)):
                q_t, k_t = spread(q_block, i), spread(k_block, i)
                r = one / (load(replay, before + size + lanes) + base)
                mean = load(replay, before + size) * r
                n_t = q_t * dy_t * r
                x_t = n_t * mean
                dq_t = mean * dy_t
                if d_variance is not None:
                    dvar_t, spread_t = load(dvar_block, place), q_t * r
                    x_t = x_t + dvar_t * (spread_t * spread_t)
                    dq_t = dq_t + dvar_t * (spread_t + spread_t)
                dm = load(gradient, to) * alpha_next + n_t
                dj = load(gradient, to + lanes) * alpha_next - x_t
                store(gradient, to, dm)
                store(gradient, to + lanes, dj)
                store(dq_lanes, (i - chunk) * lanes, dq_t)
                store(dk_lanes, (i - chunk) * lanes, dm * w_t + dj * (beta_t * (k_t + k_t)))
                dw_t = dw_t + dm * k_t
                dbeta_t = dbeta_t + dj * spread(k2_block, i)
                m_sum = m_sum + dm * load(replay, before)
                j_sum = j_sum + dj * load(replay, before + lanes)
                x_sum = x_sum + x_t
                before += 2 * lanes
                to += 2 * lanes
            store(dq_block, chunk, load(dq_block, chunk) + lane_sums(dq_lanes))
            store(dk_block, chunk, load(dk_block, chunk) + lane_sums(dk_lanes))
        store(dw_block, place, dw_t)
        store(dbeta_block, place, dbeta_t)
        dg[dg_at + s * dg_stride] += lane_sum(m_sum + j_sum)
        total += lane_sum(x_sum)
    return total


@_kernel
def backward_kernel(
    inputs, offsets, initial, gradient, d_output, d_variance, results, sums, sizes, scratch, first, last
):
    """`gradient` holds the gradients of the final states and is left with those of the initial ones."""
    q, alpha, prior = inputs[0], inputs[4], inputs[5]
    dq, dk, dw, dbeta = results
    dg, dprior = sums
    heads, keys, values, group, segment = sizes
    writes, alpha_block, (q_block, dy_block, dvar_block) = scratch[:5], scratch[4], scratch[5:8]
    dq_block, dk_block, dw_block, dbeta_block, _, _, replay, entries = scratch[8:]
    lanes = VECTOR_BYTES // q.itemsize
    size, key_pitch = 2 * keys * lanes, -(-keys // lanes) * lanes
    groups = -(-values // (group * lanes))
    for task in range(first, last):
        n, h, v = task // (heads * groups), task // groups % heads, task % groups * group * lanes
        rows = min(group * lanes, values - v)
        tiles = -(-rows // lanes)
        pitch = tiles * lanes
        start = ((n * heads + h) * -(-values // lanes) * lanes + v) * 2 * keys
        begin, end = offsets[n], offsets[n + 1]
        segments = -(-(end - begin) // segment)
        shift = task % groups * alpha.size  # to the partial sums of this group of tiles
        dprior[task] = 0

        for i in range(0, tiles * size, lanes):  # the state that each segment starts from
            store(entries, i, load(initial, start + i))
        for index in range(segments - 1):
            _fetch(writes, inputs, (begin + index * segment) * heads + h, segment, heads, keys, values, v, rows)
            for tile in range(tiles):
                at = (index * tiles + tile) * size
                _advance(writes, segment, tile * lanes, pitch, keys, entries, at, entries, at + tiles * size, 0)

        for index in range(segments - 1, -1, -1):
            t = begin + index * segment
            tokens, token = min(segment, end - t), t * heads + h
            _fetch(writes, inputs, token, tokens, heads, keys, values, v, rows)
            alpha_block[tokens] = alpha[token + tokens * heads] if t + tokens < end else 1
            _copy_in(q_block, q, token * keys, heads * keys, tokens, keys)
            _copy_in(dy_block, d_output, token * values + v, heads * values, tokens, rows)
            if d_variance is not None:
                _copy_in(dvar_block, d_variance, token * values + v, heads * values, tokens, rows)
            for i in range(tokens * key_pitch):
                dq_block[i] = dk_block[i] = 0
            for i in range(shift + token, shift + token + tokens * heads, heads):
                dg[i] = 0
            for tile in range(tiles):
                for i in range(0, size, lanes):
                    store(replay, i, load(entries, (index * tiles + tile) * size + i))
                _advance(writes, tokens, tile * lanes, pitch, keys, replay, 0, replay, size, size)
                at, base = start + tile * size, spread(prior, h)
                dprior[task] -= _walk(
                    scratch, tokens, tile * lanes, pitch, keys, base, gradient, at, dg, shift + token, heads, d_variance
                )
            _copy_out(dq, (shift + token) * keys, heads * keys, dq_block, tokens, keys)
            _copy_out(dk, (shift + token) * keys, heads * keys, dk_block, tokens, keys)
            _copy_out(dw, token * values + v, heads * values, dw_block, tokens, rows)
            _copy_out(dbeta, token * values + v, heads * values, dbeta_block, tokens, rows)
            for s in range(tokens):
                i = shift + token + s * heads
                dg[i] = alpha_block[s] * dg[i] if alpha_block[s] > 0 else 0  # 0 even if a long-forgotten state is huge

        if begin < end:
            for i in range(start, start + tiles * size, lanes):
                store(gradient, i, load(gradient, i) * spread(alpha, begin * heads + h))
