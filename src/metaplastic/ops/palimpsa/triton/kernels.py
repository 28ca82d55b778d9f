r"""The Triton kernels of Palimpsa: forward and backward, token by token; :mod:`.launch` runs them.

One head of one sequence, with state M (information) and J (excess precision), and alpha_t = exp(g_t):

    M_t = alpha_t M_{t-1} + w_t k_t^T           J_t = alpha_t J_{t-1} + beta_t (k_t^2)^T
    R_t = 1 / (J_t + prior)                     y_t = (M_t R_t) q_t             var_t = R_t q_t^2

The gradients walk t = T..1, from those of the final state (alpha_{T+1} = 1), with n_t = (dy_t q_t^T) R_t:

    dM_t = alpha_{t+1} dM_{t+1} + n_t           x_t = n_t M_t R_t + (dvar_t (q_t^2)^T) R_t^2
    dJ_t = alpha_{t+1} dJ_{t+1} - x_t           dprior = -sum x_t
    dq_t = (M_t R_t)^T dy_t + 2 q_t (R_t^T dvar_t)
    dk_t = dM_t^T w_t + 2 k_t (dJ_t^T beta_t)   dw_t = dM_t k_t                 dbeta_t = dJ_t k_t^2
    dg_t = alpha_t (<dM_t, M_{t-1}> + <dJ_t, J_{t-1}>)

Every state is made by these lines, never by taking a token back out: exact for every decay, alpha = 0 included.

Layout   One program per sequence, head and block of value rows. Its state is a tile [BK keys, BV value rows] in
         registers; what is beyond K and V is zero and stays zero. States are stored with the rows contiguous,
         [K, V]: a thread then holds a small square of keys and rows, and both kinds of sums cost few exchanges.
         Sums leave out the keys beyond K by `where`, from which the compiler sees which registers it can leave out
         altogether: K = 96 costs 96, not 128.
Order    Tokens are loaded one ahead of their use.
Memory   Forward saves nothing. Backward saves the state before every SPAN-th token in a first sweep. Then, last span
         first, it saves the state before every GROUP-th token of the span, and for every token replays the 0 to
         GROUP - 1 tokens in between. SPAN is about sqrt(GROUP T), so that 2 sqrt(T / GROUP) states are saved.
Sums     dq, dk and dg are sums over value rows: every block writes its part, the parts are added afterwards in a fixed
         order. No atomics: results are the same bit for bit in every run.
Types    Everything is float64 for a float64 q, else float32. All offsets that grow with the inputs are 64-bit.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

GROUP = 4


@triton.jit
def _program(sequences, heads, BLOCKS: tl.constexpr, BV: tl.constexpr):
    """Sequence, head and value block of this program, and its row of the table: first token, tokens, span, slot."""
    program = tl.program_id(0).to(tl.int64)
    block = program % BLOCKS
    head = program // BLOCKS % heads
    sequence = program // BLOCKS // heads
    row = sequences + 4 * sequence
    values = block * BV + tl.arange(0, BV)
    return sequence, head, block, values, tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _token(at, pitch, t, there, REAL: tl.constexpr):
    """Row t of a tensor whose rows are `pitch` apart; zero where not `there`."""
    return tl.load(at + t * pitch, mask=there, other=0.0).to(REAL)


@triton.jit
def _outer(key, value):
    return key[:, None] * value[None, :]


@triton.jit
def _inverse(x):
    """1 / x of a positive x, for two instructions: a division would first bring x in range."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _advance(m, j, k, w, beta, alpha, first, last, heads, is_key, is_value, K: tl.constexpr, V: tl.constexpr):
    """The state after tokens first..last - 1 of the sequence; k, w, beta and alpha point at its token 0."""
    more = first < last
    k_t = _token(k, heads * K, first, is_key & more, m.dtype)
    w_t = _token(w, heads * V, first, is_value & more, m.dtype)
    beta_t = _token(beta, heads * V, first, is_value & more, m.dtype)
    alpha_t = _token(alpha, heads, first, more, m.dtype)
    for t in range(first, last):
        more = t + 1 < last
        k_next = _token(k, heads * K, t + 1, is_key & more, m.dtype)
        w_next = _token(w, heads * V, t + 1, is_value & more, m.dtype)
        beta_next = _token(beta, heads * V, t + 1, is_value & more, m.dtype)
        alpha_next = _token(alpha, heads, t + 1, more, m.dtype)
        m = alpha_t * m + _outer(k_t, w_t)
        j = alpha_t * j + _outer(k_t * k_t, beta_t)
        k_t, w_t, beta_t, alpha_t = k_next, w_next, beta_next, alpha_next
    return m, j


@triton.jit(do_not_specialize=["heads"])
def forward_kernel(
    q, k, w, beta, alpha, prior, information, excess, output, variance, sequences, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """`information` and `excess` [N, H, K, V] hold the initial states and are left with the final ones."""
    sequence, head, _, values, start, length, _, _ = _program(sequences, heads, (V + BV - 1) // BV, BV)
    keys = tl.arange(0, BK)
    is_key, is_value = keys < K, values < V
    row = start * heads + head
    q += row * K + keys
    k += row * K + keys
    w += row * V + values
    beta += row * V + values
    output += row * V + values
    variance += row * V + values
    alpha += row
    tile = (sequence * heads + head) * K * V + keys[:, None] * V + values[None, :]
    in_tile = is_key[:, None] & is_value[None, :]
    m = tl.load(information + tile, mask=in_tile, other=0.0)
    j = tl.load(excess + tile, mask=in_tile, other=0.0)
    base = tl.load(prior + head)

    more = length > 0
    q_t = _token(q, heads * K, 0, is_key & more, m.dtype)
    k_t = _token(k, heads * K, 0, is_key & more, m.dtype)
    w_t = _token(w, heads * V, 0, is_value & more, m.dtype)
    beta_t = _token(beta, heads * V, 0, is_value & more, m.dtype)
    alpha_t = _token(alpha, heads, 0, more, m.dtype)
    for t in range(0, length):
        more = t + 1 < length
        q_next = _token(q, heads * K, t + 1, is_key & more, m.dtype)
        k_next = _token(k, heads * K, t + 1, is_key & more, m.dtype)
        w_next = _token(w, heads * V, t + 1, is_value & more, m.dtype)
        beta_next = _token(beta, heads * V, t + 1, is_value & more, m.dtype)
        alpha_next = _token(alpha, heads, t + 1, more, m.dtype)
        m = alpha_t * m + _outer(k_t, w_t)
        j = alpha_t * j + _outer(k_t * k_t, beta_t)
        r = _inverse(j + base)
        y = tl.sum(tl.where(is_key[:, None], m * r * q_t[:, None], 0.0), 0)
        tl.store(output + t * heads * V, y.to(output.dtype.element_ty), mask=is_value)
        if VARIANCE:
            var = tl.sum(tl.where(is_key[:, None], r * (q_t * q_t)[:, None], 0.0), 0)
            tl.store(variance + t * heads * V, var, mask=is_value)
        q_t, k_t, w_t, beta_t, alpha_t = q_next, k_next, w_next, beta_next, alpha_next
    tl.store(information + tile, m, mask=in_tile)
    tl.store(excess + tile, j, mask=in_tile)


@triton.jit(do_not_specialize=["heads", "tokens"])
def backward_kernel(
    q, k, w, beta, alpha, prior, information, excess, d_output, d_variance, sequences, saved,
    dq, dk, dw, dbeta, dg, d_information, d_excess, d_prior, heads, tokens,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    """`d_information` and `d_excess` hold the gradients of the final states and are left with the initial ones'.

    `saved` [slots, H, blocks, 2, K, BV] is scratch; `dq`, `dk` and `dg` have a part of `tokens` tokens for every block,
    `d_prior` [spans, H, blocks, BV] one for every span as well.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    sequence, head, block, values, start, length, span, slot = _program(sequences, heads, BLOCKS, BV)
    keys = tl.arange(0, BK)
    is_key, is_value = keys < K, values < V
    row = start * heads + head
    part = (block * tokens + start) * heads + head
    q += row * K + keys
    k += row * K + keys
    w += row * V + values
    beta += row * V + values
    alpha += row
    d_output += row * V + values
    d_variance += row * V + values
    dq += part * K + keys
    dk += part * K + keys
    dg += part
    dw += row * V + values
    dbeta += row * V + values
    tile = (sequence * heads + head) * K * V + keys[:, None] * V + values[None, :]
    in_tile = is_key[:, None] & is_value[None, :]
    base = tl.load(prior + head)
    d_prior += (slot * heads + head) * V + values

    # A slot holds M and J of this block.
    SIZE: tl.constexpr = K * BV
    pitch = heads * (BLOCKS * 2 * SIZE)
    saved += (slot * heads + head) * (BLOCKS * 2 * SIZE) + block * (2 * SIZE)
    saved += keys[:, None] * BV + tl.arange(0, BV)[None, :]
    is_saved = is_key[:, None]
    spans = tl.cdiv(length, span)
    groups = saved + spans * pitch

    m = tl.load(information + tile, mask=in_tile, other=0.0)
    j = tl.load(excess + tile, mask=in_tile, other=0.0)
    for c in range(0, spans):
        tl.store(saved + c * pitch, m, mask=is_saved)
        tl.store(saved + c * pitch + SIZE, j, mask=is_saved)
        first = c * span
        last = tl.where(c + 1 < spans, first + span, first)  # nobody needs the state after the last span
        m, j = _advance(m, j, k, w, beta, alpha, first, last, heads, is_key, is_value, K, V)

    dm = tl.load(d_information + tile, mask=in_tile, other=0.0)
    dj = tl.load(d_excess + tile, mask=in_tile, other=0.0)
    alpha_next = base * 0 + 1
    for back in range(0, spans):
        c = spans - 1 - back
        begin = c * span
        end = tl.minimum(begin + span, length)
        tl.debug_barrier()  # other threads wrote, or still read, what this one now reads or writes
        m = tl.load(saved + c * pitch, mask=is_saved, other=0.0)
        j = tl.load(saved + c * pitch + SIZE, mask=is_saved, other=0.0)
        for group in range(0, tl.cdiv(end - begin, GROUP)):
            tl.store(groups + group * pitch, m, mask=is_saved)
            tl.store(groups + group * pitch + SIZE, j, mask=is_saved)
            first = begin + group * GROUP
            last = tl.minimum(first + GROUP, end)
            m, j = _advance(m, j, k, w, beta, alpha, first, last, heads, is_key, is_value, K, V)
        tl.debug_barrier()

        x_sum = tl.zeros([BV], m.dtype)
        for left in range(0, end - begin):
            t = end - 1 - left
            group = (t - begin) // GROUP
            q_t = _token(q, heads * K, t, is_key, m.dtype)
            k_t = _token(k, heads * K, t, is_key, m.dtype)
            w_t = _token(w, heads * V, t, is_value, m.dtype)
            beta_t = _token(beta, heads * V, t, is_value, m.dtype)
            dy_t = _token(d_output, heads * V, t, is_value, m.dtype)
            alpha_t = tl.load(alpha + t * heads)
            before_m = tl.load(groups + group * pitch, mask=is_saved, other=0.0)
            before_j = tl.load(groups + group * pitch + SIZE, mask=is_saved, other=0.0)
            before_m, before_j = _advance(
                before_m, before_j, k, w, beta, alpha, begin + group * GROUP, t, heads, is_key, is_value, K, V
            )
            r = _inverse(alpha_t * before_j + _outer(k_t * k_t, beta_t) + base)
            mean = (alpha_t * before_m + _outer(k_t, w_t)) * r
            n = _outer(q_t, dy_t) * r
            x = n * mean
            of_q = mean * dy_t[None, :]
            if VARIANCE:
                dvar_t = _token(d_variance, heads * V, t, is_value, m.dtype)
                spread = q_t[:, None] * r
                x += dvar_t[None, :] * (spread * spread)
                of_q += (2 * dvar_t)[None, :] * spread
            dm = alpha_next * dm + n
            dj = alpha_next * dj - x
            # One sum over keys for four quantities, one over rows for two.
            here = is_key[:, None]
            of_w, of_beta = tl.where(here, dm * k_t[:, None], 0.0), tl.where(here, dj * (k_t * k_t)[:, None], 0.0)
            of_g, x = tl.where(here, dm * before_m + dj * before_j, 0.0), tl.where(here, x, 0.0)
            of_rows, of_all = tl.split(tl.sum(tl.join(tl.join(of_w, of_beta), tl.join(of_g, x)), 0))
            dw_t, dbeta_t = tl.split(of_rows)
            g_t, x_t = tl.split(of_all)
            of_q = tl.where(here, of_q, 0.0)
            of_k = tl.where(here, dm * w_t[None, :] + dj * _outer(2 * k_t, beta_t), 0.0)
            dq_t, dk_t = tl.split(tl.sum(tl.join(of_q, of_k), 1))
            x_sum += x_t
            tl.store(dq + t * heads * K, dq_t.to(dq.dtype.element_ty), mask=is_key)
            tl.store(dk + t * heads * K, dk_t.to(dk.dtype.element_ty), mask=is_key)
            tl.store(dw + t * heads * V, dw_t.to(dw.dtype.element_ty), mask=is_value)
            tl.store(dbeta + t * heads * V, dbeta_t.to(dbeta.dtype.element_ty), mask=is_value)
            # 0 even if a long-forgotten state is huge.
            tl.store(dg + t * heads, tl.where(alpha_t > 0, alpha_t * tl.sum(g_t, 0), 0.0))
            alpha_next = alpha_t
        tl.store(d_prior + c * heads * V, -x_sum, mask=is_value)
    tl.store(d_information + tile, alpha_next * dm, mask=in_tile)
    tl.store(d_excess + tile, alpha_next * dj, mask=in_tile)
