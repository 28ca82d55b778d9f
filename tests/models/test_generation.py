"""generate(): greedy, beams, sampling, embeddings, and going on from a saved cache, each against full recomputation."""

import pytest
import torch

from metaplastic.models import fork_cache

from .conftest import greedy, left_padding, make, states, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


def test_greedy_is_the_teacher_forced_argmax(kind):
    model, ids = make(kind), tokens()
    expected = greedy(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False), expected)
    assert len(expected[:, 12:].unique()) > 3


def test_left_padded_batch_generates_as_alone(kind):
    model, ids = make(kind), tokens()
    out = model.generate(ids, attention_mask=left_padding(ids, 5, 11), max_new_tokens=6, do_sample=False)
    for row, start in enumerate((5, 11, 0)):
        alone = model.generate(ids[row : row + 1, start:], max_new_tokens=6, do_sample=False)
        assert torch.equal(out[row : row + 1, start:], alone)


@torch.no_grad()
def beam_search(model, ids, mask, beams, steps):
    """All ``beams`` best continuations of one row, best first, by recomputing everything at every step."""
    found, scores = ids, torch.zeros(1)
    for _ in range(steps):
        rows = mask.expand(len(found), -1)
        rows = torch.cat([rows, rows.new_ones(len(found), found.shape[1] - rows.shape[1])], 1)
        logits = model(found, attention_mask=rows, use_cache=False).logits[:, -1]
        total = (scores[:, None] + logits.log_softmax(-1)).flatten()
        scores, best = total.topk(beams)
        found = torch.cat([found[best // logits.shape[1]], best[:, None] % logits.shape[1]], 1)
    return found


@pytest.mark.parametrize("beams", [2, 5])
def test_beam_search_is_the_search_by_hand(kind, beams):
    model, ids = make(kind), tokens()
    mask = left_padding(ids, 7, 0, 2)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, num_beams=beams, num_return_sequences=beams, do_sample=False
    )
    expected = [beam_search(model, ids[row : row + 1], mask[row : row + 1], beams, 5) for row in range(3)]
    assert torch.equal(out, torch.cat(expected))
    if beams == 5:  # or beams would not have mattered
        assert not torch.equal(out[::beams], greedy(model, ids, 5, mask))


def test_beams_that_end_early():
    """With an end token beams are dropped and swapped at different steps."""
    model, ids = make("mixed"), tokens()
    options = {"max_new_tokens": 8, "num_beams": 4, "do_sample": False, "early_stopping": True}
    ends = greedy(model, ids, 3)[:, -1].tolist()
    cached = model.generate(ids, eos_token_id=ends, **options)
    assert torch.equal(cached, model.generate(ids, eos_token_id=ends, use_cache=False, **options))
    ended = torch.isin(cached[:, 12:-1], torch.tensor(ends)).any(1)
    assert ended.any()
    assert not ended.all()


def test_beams_find_the_best_of_all_continuations(kind):
    """Exhaustive on a small vocabulary: as many beams as there are prefixes."""
    model = make(kind, vocab_size=5)
    ids, steps = tokens(1, 6) % 4 + 1, 3
    tails = torch.cartesian_prod(*[torch.arange(5)] * steps)
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(125, -1), tails], 1), use_cache=False).logits.log_softmax(-1)
    scores = logits[:, 5:-1].gather(2, tails[..., None]).sum((1, 2))
    out = model.generate(ids, max_new_tokens=steps, num_beams=125, do_sample=False, length_penalty=0.0)
    assert torch.equal(out[0, 6:], tails[scores.argmax()])


def test_sampling_several_sequences(kind):
    """The same draws from the cached and the recomputed distribution, in a padded batch."""
    model, ids = make(kind), tokens(2)
    options = {"attention_mask": left_padding(ids, 4), "max_new_tokens": 8, "do_sample": True}
    drawn = []
    for use_cache in (True, False, True):
        torch.manual_seed(1)
        drawn.append(model.generate(ids, num_return_sequences=3, use_cache=use_cache, **options))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (6, 20)
    assert len(drawn[0][:, 12:].unique(dim=0)) == 6
    assert not torch.equal(drawn[0], model.generate(ids, num_return_sequences=3, **options))


def test_from_embeddings(kind):
    model, ids = make(kind), tokens()
    mask, embeds = left_padding(ids, 3), model.get_input_embeddings()(ids).detach()
    expected = greedy(model, ids, 6, mask)[:, 12:]
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected)
    cache = model(inputs_embeds=embeds[:, :5], attention_mask=mask[:, :5], use_cache=True).cache
    assert torch.equal(model.generate(inputs_embeds=embeds, cache=cache, **options), expected)


@pytest.mark.parametrize("cuts", [[1], [7], [11], [1, 1, 1, 2], [3, 4, 1]])
@torch.no_grad()
def test_from_a_saved_cache(kind, cuts):
    """The prompt fed in pieces (also shorter than the convolution), then the whole text or only what is new."""
    model, ids = make(kind), tokens()
    mask = left_padding(ids, 2)
    expected, saved, start = greedy(model, ids, 5, mask), None, 0
    for piece in cuts:
        end = start + piece
        saved = model(ids[:, start:end], attention_mask=mask[:, :end], cache=saved, use_cache=True).cache
        start = end
    before = [x.clone() for x in states(saved)]
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    for _ in range(2):
        assert torch.equal(model.generate(ids, cache=fork_cache(saved), **options), expected)
    new = model.generate(ids[:, start:], cache=fork_cache(saved), **options)
    assert torch.equal(new, expected[:, start:])
    assert all(torch.equal(a, b) for a, b in zip(before, states(saved), strict=True))
    assert int(saved.tokens_seen) == start
    assert torch.equal(model.generate(ids, cache=saved, **options), expected)


@torch.no_grad()
def test_many_continuations_of_one_cache(kind):
    """Beams and several samples from a saved cache need its sequences repeated."""
    model, ids = make(kind), tokens(2)
    saved = model(ids[:, :9], use_cache=True).cache
    for options in ({"num_beams": 3, "do_sample": False}, {"num_return_sequences": 3, "do_sample": True}):
        torch.manual_seed(2)
        expected = model.generate(ids, max_new_tokens=5, **options)
        torch.manual_seed(2)
        out = model.generate(ids, cache=fork_cache(saved, repeats=3), max_new_tokens=5, **options)
        assert torch.equal(out, expected)
        with pytest.raises(ValueError, match=r"cache holds the states of 2 sequences, but the input has 6 rows"):
            model.generate(ids, cache=fork_cache(saved), max_new_tokens=5, **options)


@torch.no_grad()
def test_a_cache_that_has_seen_the_whole_prompt():
    model, ids = make(), tokens()
    saved = model(ids[:, :7], use_cache=True).cache
    with pytest.raises(ValueError, match="cache has seen 7 tokens but the prompt has only 7"):
        model.generate(ids[:, :7], cache=saved, max_new_tokens=5)


def test_the_returned_cache_goes_on(kind):
    model, ids = make(kind), tokens()
    out = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert int(out.cache.tokens_seen) == 15  # the last token was not fed
    mask = torch.ones_like(out.sequences)  # without it generated tokens that happen to be 0 would count as padding
    more = model.generate(out.sequences, attention_mask=mask, cache=out.cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(more, greedy(model, ids, 8))


@torch.no_grad()
def test_new_tokens_after_the_returned_cache(kind):
    """Of a text that generate() wrote, the last token has to be fed with the new ones: nothing is skipped silently."""
    model, ids = make(kind), tokens()
    out = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    whole = torch.cat([out.sequences, tokens(3, 5, seed=1)], 1)
    embeds, ones = model.get_input_embeddings()(whole), torch.ones_like(whole)
    expected = greedy(model, whole, 4)
    options = {"max_new_tokens": 4, "do_sample": False}

    def go_on(start, mask=ones, embedded=False):
        prompt = {"inputs_embeds": embeds[:, start:]} if embedded else {"input_ids": whole[:, start:]}
        return model.generate(**prompt, attention_mask=mask, cache=fork_cache(out.cache), **options)

    padded = ones.clone()
    padded[0, :3] = 0  # generate() treats a mask of ones and others differently
    for embedded in (False, True):
        assert torch.equal(go_on(0, embedded=embedded)[:, -4:], expected[:, -4:])
        assert torch.equal(go_on(15, embedded=embedded)[:, -4:], expected[:, -4:])
        for mask in (ones, padded):
            with pytest.raises(
                ValueError, match="seen 15 .* 5 new .* covers 21, so that 1 .* is missing .*the last token"
            ):
                go_on(16, mask, embedded)
            with pytest.raises(ValueError, match="so that 3 of the text are missing$"):
                go_on(18, mask, embedded)
            with pytest.raises(ValueError, match="has 7 new ones, but attention_mask covers 21: 1 too few"):
                go_on(14, mask, embedded)


def test_an_empty_prompt():
    model, ids = make(), tokens()
    with pytest.raises(ValueError, match="input_ids must hold at least one token to begin with"):
        model.generate(ids[:, :0], max_new_tokens=2)
    with pytest.raises(ValueError, match="inputs_embeds must hold at least one token"):
        model.generate(inputs_embeds=torch.zeros(3, 0, 16), max_new_tokens=2)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(ids[:, :0], attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=2)


def test_what_a_recurrent_memory_cannot_do():
    model, ids = make(), tokens(1)
    with pytest.raises(ValueError, match=r"assisted generation|stateful|not support"):
        model.generate(ids, max_new_tokens=5, prompt_lookup_num_tokens=2)
    with pytest.raises(TypeError, match="cache must be a transformers.DynamicCache or None, got StaticCache"):
        model.generate(ids, max_new_tokens=5, cache_implementation="static")
    with pytest.raises(ValueError, match="only supported for models with only full attention"):
        model.generate(ids, max_new_tokens=5, cache_implementation="quantized")
    with pytest.raises(ValueError, match="prefill_chunk_size must be None, got 4"):
        model.generate(ids, max_new_tokens=5, prefill_chunk_size=4)
    with pytest.raises(ValueError, match="model_kwargs.*not used"):
        model.generate(ids, max_new_tokens=1, atention_mask=torch.ones(1, 12))


def test_generating_while_training_with_checkpoints():
    """As reinforcement learning does: no gradient is taken, so the cache is allowed."""
    model, ids = make(), tokens()
    expected = greedy(model, ids, 4)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
