"""The cache: any split through it, forks, gradients, and everything it must refuse."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticForCausalLM, fork_cache

from .conftest import WINDOW, config, make, same_numbers, states, tokens


@pytest.mark.parametrize("exact", [False, True])
def test_any_split_through_the_cache(kind, exact):
    model, ids = make(kind), tokens()
    if exact:  # whatever float32 hides
        model = model.double()
    whole = model(ids, use_cache=False).logits
    for cuts in ([12], [1] * 12, [2, 1, 9], [5, 0, 7]):
        cache, logits = None, []
        for piece in ids.split(cuts, 1):
            out = model(piece, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        assert isinstance(cache, DynamicCache)
        assert int(cache.tokens_seen) == 12
        if exact:
            torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=1e-11)
        else:
            same_numbers(torch.cat(logits, 1), whole)


@pytest.mark.parametrize("of", [lambda c: DynamicCache(config=c), lambda _: DynamicCache()])
def test_a_cache_made_by_the_caller(kind, of):
    model, ids = make(kind), tokens()
    cache = of(model.config)
    assert model(ids[:, :5], cache=cache).cache is cache
    out = model(ids[:, 5:], cache=cache).logits
    same_numbers(out, model(ids, use_cache=False).logits[:, 5:])


def first_convolution(model):
    return model.model.layers[0].mixer.conv.weight


def test_gradients_through_the_cache(kind):
    """Back-propagation through time across calls; a detached fork cuts it."""
    model, ids = make(kind).double().train(), tokens()
    weight = model.model.layers[0].mixer.v_proj.weight if kind == "attention" else first_convolution(model)
    whole = torch.autograd.grad(model(ids, use_cache=False).logits[:, 5:].square().sum(), weight)[0]
    cache = model(ids[:, :5], use_cache=True).cache
    cut = fork_cache(cache, detach=True)
    split = torch.autograd.grad(model(ids[:, 5:], cache=cache).logits.square().sum(), weight)[0]
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-9)
    truncated = torch.autograd.grad(model(ids[:, 5:], cache=cut).logits.square().sum(), weight)[0]
    assert not torch.allclose(truncated, whole, rtol=1e-2)


@torch.no_grad()
def test_forks_are_independent(kind):
    model, ids = make(kind), tokens()
    saved = model(ids[:, :6], use_cache=True).cache
    before, first = [x.clone() for x in states(saved)], model(ids[:, 6:8], cache=fork_cache(saved)).logits
    for fork in (fork_cache(saved), copy.deepcopy(saved), fork_cache(fork_cache(saved))):
        model(ids[:, :4], cache=fork_cache(fork))
        assert torch.equal(model(ids[:, 6:8], cache=fork).logits, first)
        for x in states(fork):
            x.fill_(9.0)
        fork.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, states(saved), strict=True))
    assert int(saved.tokens_seen) == 6
    twice = fork_cache(saved, repeats=2)
    again = model(ids[:, 6:8].repeat_interleave(2, 0), cache=twice).logits[::2]
    same_numbers(again, first)
    saved.reset()
    assert not states(fork_cache(saved))


@torch.no_grad()
def test_a_call_that_raises_leaves_the_cache_as_it_was(kind):
    """Whichever layer it is that fails, or an argument that is looked at last."""
    model, ids = make(kind), tokens()
    cache = model(ids[:, :6], use_cache=True).cache
    before, expected = [x.clone() for x in states(cache)], model(ids[:, 6:], cache=fork_cache(cache)).logits

    def interrupt(*_):
        raise KeyboardInterrupt

    for module in (*(block.mixer for block in model.model.layers), model.model.norm):
        handle = module.register_forward_pre_hook(interrupt)
        for call in (
            lambda: model(ids[:, 6:], cache=cache),
            lambda: model.generate(ids, cache=cache, max_new_tokens=2),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
        handle.remove()
    for wrong in ({"labels": ids}, {"logits_to_keep": -1}, {"attention_mask": torch.ones(3, 3)}):
        with pytest.raises(ValueError, match="labels|logits_to_keep|attention_mask"):
            model(ids[:, 6:], cache=cache, **wrong)
    assert int(cache.tokens_seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(before, states(cache), strict=True))
    assert torch.equal(model(ids[:, 6:], cache=cache).logits, expected)


@torch.no_grad()
def test_selecting_and_reordering_permutes_every_state(kind):
    model, ids = make(kind), tokens()
    saved = model(ids, use_cache=True).cache
    order = torch.tensor([2, 0, 0])
    expected = [x[order] for x in states(saved)]
    for move in ("reorder_cache", "batch_select_indices"):
        moved = fork_cache(saved)
        getattr(moved, move)(order)
        assert all(torch.equal(a, b) for a, b in zip(states(moved), expected, strict=True))
    moved = fork_cache(saved)
    moved.batch_repeat_interleave(2)
    assert moved.batch_size == 6
    assert all(torch.equal(a[1::2], b) for a, b in zip(states(moved), states(saved), strict=True))


def test_a_reset_cache_is_new(kind):
    model, ids = make(kind), tokens()
    cache = model(ids, use_cache=True).cache
    cache.reset()
    out = model(ids[:2], cache=cache)
    same_numbers(out.logits, model(ids[:2], use_cache=False).logits)
    assert int(cache.tokens_seen) == 12


def test_the_state_does_not_grow(kind):
    """Attention's does, up to its window."""
    model, ids = make(kind), tokens()
    cache = model(ids[:, :1], use_cache=True).cache
    first = [x.shape for x in states(cache)]
    model(ids, cache=cache)
    second = [x.shape for x in states(cache)]
    grows = [MIXERS[name].growing_state for name in model.config.mixers]
    assert [layer.recurrent_states[0].shape[1] == WINDOW - 1 for layer in cache.layers] == grows
    assert any(grows) or first == second
    assert [x.shape for x in states(model(ids, cache=cache).cache)] == second
    assert len(first) == sum(1 + len(MIXERS[name].memory_type._fields) for name in model.config.mixers)


def test_memories_stay_float32_in_a_bf16_model(kind):
    model, ids = make(kind).bfloat16(), tokens()
    cache = model(ids[:, :1], cache=model(ids, use_cache=True).cache).cache
    for layer in cache.layers:
        expected = [torch.float32] * layer.number_of_states
        if MIXERS[layer.mixer].growing_state:  # activations and positions
            expected = [torch.bfloat16, torch.bfloat16, torch.int64]
        assert [x.dtype for x in layer.recurrent_states.values()] == expected
        assert layer.conv_states[0].dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=3).shape == (3, 15)


def test_there_is_no_way_back():
    model, ids = make(), tokens()
    cache = model(ids, use_cache=True).cache
    cache.crop(0)
    with pytest.raises(NotImplementedError, match=r"cannot be rolled back: fork_cache\(cache\).*take back 3 tokens"):
        cache.crop(-3)
    with pytest.raises(NotImplementedError, match="cannot be rolled back"):
        cache.activate_past_recording()
    assert not cache.is_croppable


def test_a_cache_that_does_not_fit():
    model, ids = make(), tokens()
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="holds the states of 3 sequences, but the input has 2 rows"):
        model(ids[:2], cache=cache)
    for kind in ("palimpsa_d_additive", "mixed"):  # with equal shapes, additive states would be read as something else
        with pytest.raises(ValueError, match=r"states of another model: of mixers .'palimpsa_d', .*, expected"):
            make(kind)(ids, cache=cache)
    deeper = make(num_hidden_layers=3, mixers="palimpsa_d")
    with pytest.raises(ValueError, match="states of another model"):
        deeper(ids, cache=cache)
    with pytest.raises(TypeError, match="cache must be a transformers.DynamicCache or None, got StaticCache"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=9))
    attention = DynamicCache()
    attention.update(torch.ones(3, 1, 2, 4), torch.ones(3, 1, 2, 4), 0)
    with pytest.raises(ValueError, match="must come from a metaplastic model or be empty"):
        model(ids, cache=attention)
    with pytest.raises(TypeError, match="cache must be the cache that a metaplastic model returned, got DynamicCache"):
        fork_cache(attention)
    for repeats in (0, True, 1.0):
        with pytest.raises(ValueError, match=f"repeats must be an integer >= 1, got {repeats}"):
            fork_cache(cache, repeats=repeats)


def test_the_old_name_of_the_argument(kind):
    model, ids = make(kind), tokens()
    out = model(ids[:, :5], use_cache=True)
    expected = model(ids[:, 5:], cache=fork_cache(out.cache)).logits
    assert torch.equal(model(ids[:, 5:], past_key_values=fork_cache(out.cache)).logits, expected)
    base = model.model(ids[:, 5:], past_key_values=fork_cache(out.cache)).last_hidden_state
    assert torch.equal(model.lm_head(base), expected)
    inputs = model.prepare_inputs_for_generation(ids[:, 5:], past_key_values=fork_cache(out.cache))
    assert torch.equal(model(**inputs).logits, expected)
    assert out.past_key_values is out.cache
    for function in (model, model.model):
        with pytest.raises(ValueError, match="give cache or past_key_values"):
            function(ids, cache=out.cache, past_key_values=out.cache)


def test_a_convolution_of_one_has_an_empty_state():
    options = {"palimpsa_d": {"num_heads": 2, "conv_size": 1}}
    model, ids = MetaplasticForCausalLM(config(mixer_options=options)).eval(), tokens()
    cache = model(ids[:, :5], use_cache=True).cache
    out = model(ids[:, 5:], cache=fork_cache(cache)).logits
    same_numbers(out, model(ids, use_cache=False).logits[:, 5:])
