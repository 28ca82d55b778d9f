"""Design models: the generic filter against a joint Gaussian, every special case against its rule, and the page."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from metaplastic import layers, ops
from metaplastic.rules import approximations, delta, design, longhorn
from metaplastic.rules.special_cases import TABLES, Answer, Inputs, SpecialCase, apart, decay_order, draw, table

F64 = torch.float64
PAGE = (Path(__file__).parents[2] / "docs" / "design_models.md").read_text()
CASES = {f"{name}: {case.name}": case for name, cases in TABLES.items() for case in cases}
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# -- the special cases: one test each, and the tables of the page are these cases ---------------------------------


def answer_and_gradients(run, inputs):
    """The answer, and the gradient of a random sum of its output and final memory in every input."""
    leaves = Inputs(*(x.clone().requires_grad_() for x in inputs))
    answer = run(leaves)
    output, mean = answer.output, answer.mean
    score = (output * normal(*output.shape, seed=1)).sum() + (mean * normal(*mean.shape, seed=2)).sum()
    gradients = torch.autograd.grad(score, leaves, allow_unused=True)
    return answer, [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, gradients, strict=True)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_special_case_is_its_rule(case):
    """All that the rule says of outputs and final memory, and the gradients of both in every input."""
    inputs = draw()
    found, through_filter = answer_and_gradients(case.filtered, inputs)
    expected, through_rule = answer_and_gradients(case.expected, inputs)
    for name in Answer._fields:
        if getattr(expected, name) is not None:
            close(getattr(found, name), getattr(expected, name), msg=lambda text, name=name: f"{name}: {text}")
    for name, a, b in zip(Inputs._fields, through_filter, through_rule, strict=True):
        close(a, b, msg=lambda text, name=name: f"d{name}: {text}")
    assert through_rule[Inputs._fields.index("v")].norm() > 1
    if case.model(inputs)[2] is not design.EXACT:  # and the approximation is what makes it so
        assert apart(case, inputs) > 0.05


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_the_page_is_generated(name):
    """Every row of the page is a case of the test above, and no case is missing."""
    shown = PAGE.split(f"<!-- table: {name} -->\n")[1].split("<!-- end -->")[0].strip()
    assert shown == table(name)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines() if line.startswith("| ")][2:]
    assert [f"{name}: {row}" for row in rows] == [key for key in CASES if key.startswith(f"{name}: ")]


@pytest.mark.parametrize("layer", [layers.PalimpsaD, layers.PalimpsaM])
def test_the_gates_of_the_layers(layer):
    """What Palimpsa-D and -M feed their memory, filtered: values w / beta, noise 1 / beta."""
    torch.manual_seed(0)
    mixer = layer(hidden_size=16, num_heads=2, key_size=4, value_size=3).double()
    q, k, w, beta, g, prior = mixer.gates(normal(2, 6, 16))
    precision = prior[:, None].expand(2, 4)
    model = design.regression(design.temper(g, precision), q, k, w / beta, 1 / beta)
    start = design.init_state(2, 2, 3, 4, prior_variance=1 / precision[:, None])
    y, variance, _ = design.scan(model, start, approximations.PALIMPSA)
    expected = ops.palimpsa(q, k, w, beta, g, prior, output_variance=True)
    torch.testing.assert_close(y, expected.output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-10, atol=1e-10)


# -- what is not the same, and by how much ------------------------------------------------------------------------


def test_the_two_places_of_the_decay_differ():
    """On the same gates; they agree where nothing decays."""
    x = draw()
    other = decay_order.undecayed_residual(x).output
    usual = delta.scan(x.q, x.k, x.v, x.g.exp() * decay_order.strength(x), x.g)[0]
    assert f"apart by {relative(other, usual):.2f} relative" in PAGE
    still = x._replace(g=0 * x.g)
    close(decay_order.undecayed_residual(still).output, delta.scan(x.q, x.k, x.v, decay_order.strength(x), 0 * x.g)[0])


def test_longhorn_as_it_runs_is_its_step_on_one_hot_keys_only():
    x = draw()
    rough, step = (longhorn.scan(x.q, x.k, x.v, x.beta, approximate=a)[0] for a in (True, False))
    assert f"differ by {relative(rough, step):.2f} relative" in PAGE
    k = torch.eye(4, dtype=F64)[torch.arange(7) % 4][None, :, None].expand_as(x.k) * 0.7
    close(*(longhorn.scan(x.q, k, x.v, x.beta, approximate=a)[0] for a in (True, False)))


# -- the filter itself --------------------------------------------------------------------------------------------


def dense(batch=2, length=5, heads=2, columns=3, size=4, number=2):
    """Nothing diagonal, nothing shared but the transition: M numbers observed with correlated noise."""
    token = (batch, length, heads)
    root, error = normal(*token, size, size, seed=1), normal(*token, columns, number, number, seed=2)
    move = design.drift(0.5 * normal(*token, size, size, seed=3), root @ root.mT)
    seen, value = normal(*token, columns, number, size, seed=4), normal(*token, columns, number, seed=5)
    noise = error @ error.mT + 0.1 * torch.eye(number, dtype=F64)
    model = design.DesignModel(move, seen, noise, value, normal(*token, 1, size, seed=6))
    prior = torch.linspace(0.5, 1.5, heads * columns * size, dtype=F64).view(heads, columns, size)
    return model, design.init_state(batch, heads, columns, size, prior_variance=prior)


def test_the_joint_gaussian_of_all_states_and_observations_conditioned():
    """One column's whole history written as one Gaussian vector, conditioned on what was seen until each token."""
    model, start = dense()
    y, variance, final = design.scan(model, start)
    b, h, c, size = 1, 1, 2, 4
    # x_t = sum over s <= t of (A_t ... A_{s+1}) e_s, with e_0 the start and e_s the noise of step s
    maps, sources, rows = [torch.eye(size, dtype=F64)], [start.covariance[b, h, c]], []
    for t in range(5):
        a, q = (x[b, h, 0] for x in model.transition(t, start.covariance))
        maps = [a @ m for m in maps] + [torch.eye(size, dtype=F64)]
        sources.append(q)
        x_now = torch.cat(maps, 1)
        rows.append((x_now, t))
        joint = torch.block_diag(*sources)
        wide = [torch.cat([m, m.new_zeros(size, joint.shape[0] - m.shape[1])], 1) for m, _ in rows]
        look = torch.cat([model.seen[b, s, h, c] @ m for m, (_, s) in zip(wide, rows, strict=True)])
        noise = torch.block_diag(*(model.noise[b, s, h, c] for _, s in rows))
        gain = x_now @ joint @ look.T @ torch.linalg.inv(look @ joint @ look.T + noise)
        mean = gain @ torch.cat([model.value[b, s, h, c] for _, s in rows])
        covariance = x_now @ joint @ x_now.T - gain @ look @ joint @ x_now.T
        q = model.query[b, t, h, 0]
        torch.testing.assert_close(y[b, t, h, c], q @ mean, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(variance[b, t, h, c], q @ covariance @ q, rtol=1e-10, atol=1e-11)
        if t == 4:
            torch.testing.assert_close(final.mean[b, h, c], mean, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(final.covariance[b, h, c], covariance, rtol=1e-10, atol=1e-11)


def test_columns_that_share_their_noise_are_one_big_filter():
    """vec(S) as a single column of K V numbers, V of them observed: covariance I (x) P (arXiv 2605.31163, App. C)."""
    case, x = CASES["bayesian_layer: Bayesian Layer, one decay"], draw()
    model, start, _ = case.model(x)
    _, _, expected = design.scan(model, start)
    columns, one = x.v.shape[-1], torch.eye(x.v.shape[-1], dtype=F64)

    def spread(matrix):
        return torch.einsum("ij,bhckl->bhcikjl", one, matrix).flatten(3, 4).flatten(4)

    def transition(t, covariance):
        matrix, added = model.transition(t, start.covariance)
        return spread(matrix), spread(added)

    seen = torch.einsum("ij,bthk->bthijk", one, x.k).flatten(4)[..., None, :, :]
    noise = x.noise[..., None, None, None] * one
    whole = design.DesignModel(transition, seen, noise, x.v[..., None, :], seen[..., 0, :])
    prior = (1 / x.prior)[:, None, None]
    _, _, found = design.scan(whole, design.init_state(2, 2, 1, columns * 4, prior_variance=prior))
    close(found.mean.view(2, 2, columns, 4), expected.mean)
    close(found.covariance, spread(expected.covariance[:, :, :1]))


@pytest.mark.parametrize("g", [0.0, -0.7, -float("inf")])
def test_tempering_is_a_linear_gaussian_transition(g):
    """A P A^T + Q is the tempered covariance and Q is a covariance; A P^{-1}-weighs the mean by alpha."""
    root = normal(1, 2, 3, 4, 4)
    belief = design.Belief(normal(1, 2, 3, 4, seed=1), root @ root.mT + 0.1 * torch.eye(4, dtype=F64))
    prior = normal(2, 4, seed=2).exp()
    gate = torch.full((1, 1, 2), g, dtype=F64)
    matrix, noise = design.temper(gate, prior)(0, belief.covariance)
    found, alpha = design.predict(belief, matrix, noise), gate.exp()[0, 0, 0]
    old, precision = approximations.information(belief)
    expected = torch.linalg.inv(alpha * precision + (1 - alpha) * torch.diag_embed(prior)[:, None])
    torch.testing.assert_close(found.covariance, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.mean, alpha * (expected @ old[..., None])[..., 0], rtol=1e-10, atol=1e-10)
    assert torch.linalg.eigvalsh(noise).min() > -1e-10


def test_a_padded_token_is_the_identity_and_a_scan_can_be_cut():
    model, start = dense()
    _, _, state = design.scan(model, start)
    one = torch.eye(4, dtype=F64).expand(2, 1, 2, 4, 4)
    zero = [0 * x[:, :1] for x in (model.seen, model.value)]
    padding = model._replace(transition=design.drift(one, 0 * one), seen=zero[0], noise=model.noise[:, :1])
    same = design.step(state, padding._replace(value=zero[1]), 0)
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))
    first = design.DesignModel(model.transition, *(x[:, :2] for x in model[1:]))
    later = design.DesignModel(lambda t, p: model.transition(t + 2, p), *(x[:, 2:] for x in model[1:]))
    pieces = design.scan(later, design.scan(first, start)[2])[2]
    assert all(torch.equal(a, b) for a, b in zip(state, pieces, strict=True))
    empty = design.scan(design.DesignModel(model.transition, *(x[:, :0] for x in model[1:])), start)
    assert empty[0].shape == (2, 0, 2, 3) and torch.equal(empty[2].mean, start.mean)


def test_gradcheck():
    model, start = dense(1, 2, 1, 2, 2, 2)
    a, q = (torch.stack([model.transition(t, start.covariance)[n][:, :, 0] for t in range(2)], 1) for n in range(2))

    def run(a, q, mean, root, *rest):
        belief = design.Belief(mean, root @ root.mT)
        y, variance, state = design.scan(design.DesignModel(design.drift(a, q), *rest), belief)
        return y, variance, *state

    given = (a, q, start.mean, start.covariance, *model[1:])
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in given])


def test_what_does_not_fit_is_named():
    model, start = dense()
    for name, wrong in (
        ("seen", model.seen[..., :3]),
        ("noise", model.noise[:, :, :, :2]),
        ("value", model.value[:1]),
        ("query", model.query[:, :, :1]),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got \["):
            design.scan(model._replace(**{name: wrong}), start)
    wide = design.drift(torch.zeros(3, 5, 1, 4, 4, dtype=F64), torch.zeros(3, 5, 1, 4, 4, dtype=F64))
    single = design.DesignModel(wide, *(x[:1, :, :1] for x in model[1:]))
    with pytest.raises(ValueError, match=r"^transition: got a covariance \[3, 1, 3, 4, 4\], expected \[1, 1, 3"):
        design.scan(single, design.Belief(start.mean[:1, :1], start.covariance[:1, :1]))
    with pytest.raises(ValueError, match="matrix, noise: got"):
        design.drift(torch.eye(3), torch.eye(3))
    with pytest.raises(ValueError, match="keep: got 'precision'"):
        approximations.restore(torch.ones(1, 1), "precision")


def mistakes():
    """A likely mistake, the error it gets, and how the message begins and ends."""
    x = draw()
    still, prior = design.temper(x.g, x.ridge), torch.ones((), dtype=F64)
    one: Any = 1.0

    def start(variance):
        return design.init_state(2, 2, 6, 4, prior_variance=variance)

    def regressed(**other):
        return design.regression(still, **({"q": x.q, "k": x.k, "v": x.v, "noise": x.noise} | other))

    def filtered(variance=prior, transition=still, **other):
        return design.scan(regressed()._replace(transition=transition, **other), start(variance))

    narrow, wide = "got torch.float32, expected torch.float64", "expected a floating-point tensor"
    known, eye = torch.zeros(2, 7, 2, 4, 4, dtype=F64), torch.eye(4)
    return {
        "a number as prior variance": (lambda: start(one), TypeError, f"prior_variance: got float 1.0, {wide}"),
        "a whole number": (lambda: start(torch.tensor(1)), TypeError, "prior_variance: got a tensor of torch.int64"),
        "heads for columns": (
            lambda: design.init_state(2, 2, 6, 4, prior_variance=torch.ones(3, 4)), ValueError,
            "prior_variance: got [3, 4], expected what broadcasts to [H, V, N] = [2, 6, 4]",
        ),
        "more axes than the state": (
            lambda: start(torch.ones(5, 2, 6, 4)), ValueError, "prior_variance: got [5, 2, 6, 4], expected what",
        ),
        "a number as noise": (lambda: regressed(noise=0.1), TypeError, f"noise: got float 0.1, {wide}"),
        "a float32 key": (lambda: regressed(k=x.k.float()), TypeError, f"k: {narrow} as in q"),
        "a float32 prior": (
            lambda: filtered(prior.float()), TypeError,
            f"state.mean: {narrow} as in seen (a first state has the dtype of init_state's prior_variance)",
        ),
        "a float32 query": (lambda: filtered(query=regressed().query.float()), TypeError, f"query: {narrow} as in s"),
        "a number as value": (lambda: filtered(value=0.0), TypeError, f"value: got float 0.0, {wide}"),
        "a float32 transition": (
            lambda: filtered(transition=lambda t, covariance: (eye, eye)), TypeError, f"transition's A: {narrow}",
        ),
        "a transition without noise": (
            lambda: filtered(transition=lambda t, covariance: (known[:, t, :, None], 0)), TypeError,
            f"transition's Q: got int 0, {wide}",
        ),
        "a drift without noise": (lambda: design.drift(known, one), TypeError, f"noise: got float 1.0, {wide}"),
        "a number as tempered prior": (lambda: design.temper(x.g, one), TypeError, f"prior: got float 1.0, {wide}"),
        "one tempered prior a head": (
            lambda: design.temper(x.g, x.prior), ValueError, "prior: got [2], expected [H, N]",
        ),
        "one decay a head": (lambda: design.temper(x.g[0, 0], x.ridge), ValueError, "g: got [2], expected [B, T, H]"),
        "a number to reset to": (lambda: approximations.reset(one), TypeError, f"variance: got float 1.0, {wide}"),
        "one variance a head": (
            lambda: approximations.reset(x.prior), ValueError, "variance: got [2], expected [B, T, H]",
        ),
        "a number to restore": (
            lambda: approximations.restore(one, "mean"), TypeError, f"prior: got float 1.0, {wide}",
        ),
        "one prior a head to restore": (
            lambda: approximations.restore(x.prior, "mean"), ValueError, "prior: got [2], expected [H, N]",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("mistake", mistakes())
def test_the_likeliest_mistakes_are_told_in_words(mistake):
    """The message names the argument, what came and what was expected."""
    make, kind, expected = mistakes()[mistake]
    with pytest.raises(kind) as raised:
        make()
    assert str(raised.value).startswith(expected)


def test_the_code_of_the_page_runs(capsys):
    """And prints what the page shows."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, names)
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", PAGE, re.S))
    assert all(torch.isfinite(x.grad).all() and x.grad.norm() > 0 for x in (names["k"], names["log_decay"]))
    # Without a fast part the example is the Bayesian Layer without dynamics.
    torch.testing.assert_close(names["slow_only"], names["bayesian_layer"], rtol=1e-10, atol=1e-10)
    assert relative(names["y"], names["bayesian_layer"]) > 0.1
    # The custom approximation keeps both speeds' own blocks and nothing between them.
    whole = names["belief"]
    kept = names["keep_apart"](None, whole).covariance
    assert torch.equal(kept, torch.block_diag(*[torch.ones(4, 4, dtype=F64)] * 2) * whole.covariance)
    assert kept[..., :4, 4:].norm() == 0 < whole.covariance[..., :4, 4:].norm()


def test_the_page_names_the_tools_it_describes():
    """Every approximation and transition of the code, and every field of a special case, is there by name."""
    public = [name for name, x in vars(approximations).items() if isinstance(x, design.Approximation)]
    assert len(public) == 4
    for name in (*public, "both(", "reset(variance)", "restore(prior, keep=", "design.drift(", "design.temper("):
        assert f"`{name}" in PAGE, name
    described = PAGE.split("declare the pair")[1]
    assert all(f"`{field}`" in described for field in (*SpecialCase._fields, *Answer._fields))
    assert all(f"`{call}`" in PAGE for call in ("before(t, predicted)", "after(predicted, updated)"))
