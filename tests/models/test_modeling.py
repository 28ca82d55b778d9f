"""Rung 5: the language model with Hugging Face's cache, generate, saving and loading."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM, MetaplasticModel

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
KINDS = {
    "palimpsa_d": {"mixers": "palimpsa_d", "intermediate_size": 24},
    "ablation": {"mixers": "palimpsa_d_additive", "intermediate_size": None},
    "mixed": {"mixers": ["palimpsa_d", "palimpsa_d_additive", "palimpsa_d"], "num_hidden_layers": 3},
}


def config(kind="palimpsa_d", **changes):
    options = {"palimpsa_d": {"num_heads": 2, "decay_range": (0.1, 1.0)}, "palimpsa_d_additive": {"num_heads": 2}}
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "mixer_options": options}
    return MetaplasticConfig(**(sizes | {"initializer_range": 0.4} | KINDS[kind] | changes))


def make(kind="palimpsa_d", **changes):
    torch.manual_seed(0)
    model = MetaplasticForCausalLM(config(kind, **changes)).eval()
    model.generation_config.pad_token_id = 0
    return model


def tokens(batch=3, length=12, seed=0):
    return torch.randint(1, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids, count):
    """Teacher-forced arg max, without a cache: what greedy generation must equal."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_through_the_cache(kind):
    model, ids = make(kind), tokens()
    whole = model(ids, use_cache=False).logits
    for cuts in ([12], [1] * 12, [2, 1, 9], [5, 7]):
        cache, logits = None, []
        for piece in ids.split(cuts, 1):
            out = model(piece, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        assert isinstance(cache, DynamicCache)
        assert int(cache.tokens_seen) == 12
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_the_teacher_forced_argmax(kind):
    model, ids = make(kind), tokens()
    expected = greedy(model, ids, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False), expected)
    assert len(expected[:, 12:].unique()) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_batch_generates_as_alone(kind):
    model, ids = make(kind), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :11] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row in range(3):
        start = int((mask[row] == 0).sum())
        alone = model.generate(ids[row : row + 1, start:], max_new_tokens=6, do_sample=False)
        assert torch.equal(out[row : row + 1, start:], alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_anywhere(kind, dtype):
    model, ids = make(kind), tokens(4, 9)
    mask = torch.tensor([[c == "1" for c in row] for row in ("000111111", "111111000", "110010111", "000000000")])
    logits = model(ids, attention_mask=mask.to(dtype), use_cache=False).logits
    for row in range(3):
        alone = model(ids[row : row + 1, mask[row]], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, mask[row]], alone, rtol=0, atol=2e-5)
    embeds = model.get_input_embeddings()(ids).detach()
    garbage = embeds.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    out = model(inputs_embeds=garbage, attention_mask=mask.to(dtype), use_cache=False).logits
    torch.testing.assert_close(out, logits, rtol=0, atol=2e-5)
    d, d_weight = torch.autograd.grad(out.square().sum(), [garbage, model.model.layers[0].mixer.q_proj.weight])
    assert not d[~mask].any()
    assert d.isfinite().all()
    assert d_weight.isfinite().all()


def test_padding_while_continuing_from_a_cache():
    model, ids = make(), tokens(2, 10)
    cache = model(ids[:, :4], use_cache=True).cache
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 0, 1, 1], [1] * 10])
    logits = model(ids[:, 4:], attention_mask=mask, cache=cache).logits
    kept = ids[:1, mask[0].bool()]
    torch.testing.assert_close(logits[:1, -2:], model(kept, use_cache=False).logits[:, -2:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_generate_from_a_saved_cache(kind):
    """The whole text, or only what is new with a mask over the whole: fed once, and the saved cache can be forked."""
    model, ids = make(kind), tokens()
    expected = greedy(model, ids, 5)
    saved = model(ids[:, :7], use_cache=True).cache
    whole = model.generate(ids, cache=copy.deepcopy(saved), max_new_tokens=5, do_sample=False)
    assert torch.equal(whole, expected)
    new = model.generate(
        ids[:, 7:], attention_mask=torch.ones_like(ids), cache=copy.deepcopy(saved), max_new_tokens=5, do_sample=False
    )
    assert torch.equal(new, expected[:, 7:])
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    padded = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True).cache
    reference = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, cache=padded, max_new_tokens=5, do_sample=False), reference
    )
    with pytest.raises(ValueError, match="cache has seen 7 tokens but the prompt has only 7"):
        model.generate(ids[:, :7], cache=copy.deepcopy(saved), max_new_tokens=5)
    embeds = model.get_input_embeddings()(ids)
    from_embeds = model.generate(inputs_embeds=embeds, cache=copy.deepcopy(saved), max_new_tokens=5, do_sample=False)
    assert torch.equal(from_embeds, expected[:, 12:])


def test_a_reset_cache_is_new():
    model, ids = make(), tokens()
    cache = model(ids, use_cache=True).cache
    cache.reset()
    out = model(ids, cache=cache)
    torch.testing.assert_close(out.logits, model(ids, use_cache=False).logits, rtol=0, atol=2e-5)
    assert int(cache.tokens_seen) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_beams_reorder_every_state(kind):
    """Beam search equals scoring every continuation (exhaustive on a small vocabulary and few steps)."""
    model = make(kind, vocab_size=5)
    ids = tokens(1, 6) % 4 + 1
    steps, best, score = 3, None, -torch.inf
    for code in range(5**steps):
        tail = torch.tensor([[code // 5**i % 5 for i in range(steps)]])
        logits = model(torch.cat([ids, tail], 1), use_cache=False).logits.log_softmax(-1)
        total = sum(logits[0, 5 + i, tail[0, i]] for i in range(steps))
        if total > score:
            best, score = tail, total
    out = model.generate(ids, max_new_tokens=steps, num_beams=125, do_sample=False, length_penalty=0.0)
    assert torch.equal(out[:, 6:], best)


def test_sampling_runs_and_depends_on_the_seed():
    model, ids = make(), tokens()
    torch.manual_seed(1)
    first = model.generate(ids, max_new_tokens=20, do_sample=True)
    torch.manual_seed(1)
    again = model.generate(ids, max_new_tokens=20, do_sample=True)
    other = model.generate(ids, max_new_tokens=20, do_sample=True)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cached_states_stay_float32_in_a_bf16_model():
    model, ids = make().bfloat16(), tokens()
    cache = model(ids, use_cache=True).cache
    cache = model(ids[:, :1], cache=cache).cache
    layer = cache.layers[0]
    assert layer.recurrent_states[0].dtype == layer.recurrent_states[1].dtype == torch.float32
    assert layer.conv_states[0].dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=3).shape == (3, 15)


def test_the_state_does_not_grow():
    model, ids = make(), tokens()

    def size(cache):
        return sum(
            s.numel()
            for x in cache.layers
            for d in (x.conv_states, x.recurrent_states)
            for s in d.values()
            if s is not None
        )

    cache = model(ids[:, :1], use_cache=True).cache
    first = size(cache)
    assert size(model(ids, cache=cache).cache) == first > 0


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_bitwise(kind, tmp_path):
    model = make(kind)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.add_(0.01 * (number % 7) + 0.001)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    assert not list(tmp_path.glob("*.pt"))
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), MetaplasticForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(loaded, MetaplasticForCausalLM)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, MetaplasticModel)
    assert AutoConfig.from_pretrained(tmp_path).mixers == model.config.mixers
    assert loaded.config.mixer_arguments(0).keys() == model.config.mixer_arguments(0).keys()


def test_untied_embeddings(tmp_path):
    model = make(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)


def test_missing_and_unexpected_weights_are_errors(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    removed = {n: w for n, w in weights.items() if "q_proj" not in n}
    save_file(removed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit .*missing keys: model.layers.0.mixer.q_proj.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(weights | {"model.extra": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys: model.extra"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(
        {n: w for n, w in weights.items() if "A_log" not in n},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, strict=False)
    mixer, saved = loaded.model.layers[0].mixer, model.model.layers[0].mixer
    assert mixer.A_log.isfinite().all()
    assert torch.equal(mixer.dt_bias, saved.dt_bias)  # loaded neighbours of a missing parameter are not drawn anew
    assert torch.equal(mixer.b_scale, saved.b_scale)
    assert torch.equal(mixer.q_proj.weight, saved.q_proj.weight)
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|deserializ"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_initialisation():
    model = make(initializer_range=0.02)
    mixer = model.model.layers[0].mixer
    assert model.model.embed_tokens.weight.detach().std() == pytest.approx(0.02, rel=0.2)
    assert mixer.q_proj.weight.detach().std() == pytest.approx(0.02, rel=0.2)
    assert mixer.beta_up.weight.detach().abs().max() > 0.1  # uniform, +- rank^-1/2
    assert torch.equal(mixer.D, torch.ones(2))
    assert (mixer.A_log.exp() <= 1).all()


def test_meta_device():
    with torch.device("meta"):
        model = MetaplasticForCausalLM(config())
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_a_loop(kind):
    model, ids = make(kind), tokens(1, 12)
    labels = ids.clone()
    labels[0, [0, 5]] = -100
    out = model(ids, labels=labels, cu_seqlens=torch.tensor([0, 5, 12]))
    assert out.cache is None
    parts = [model(ids[:, a:b], use_cache=False).logits for a, b in ((0, 5), (5, 12))]
    torch.testing.assert_close(out.logits, torch.cat(parts, 1), rtol=0, atol=2e-5)
    losses = [
        model(ids[:, a:b], labels=ids[:, a:b], num_items_in_batch=1, use_cache=False).loss for a, b in ((0, 5), (5, 12))
    ]
    assert out.loss.item() == pytest.approx(sum(losses).item() / 10, rel=1e-5)


def test_losses():
    model, ids = make(), tokens()
    logits = model(ids).logits[:, :-1].reshape(-1, 40)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    shifted = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=66).loss, expected / 2)


def test_gradient_checkpointing_agrees():
    ids = tokens()
    found = []
    for mode in (None, True, False):
        model = make().train()
        if mode is not None:
            model.gradient_checkpointing_enable({"use_reentrant": mode})
        model(ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_outputs():
    model, ids = make(), tokens()
    out = model(ids, output_hidden_states=True, logits_to_keep=2)
    assert len(out.hidden_states) == 3
    assert out.logits.shape == (3, 2, 40)
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1])[:, -2:], out.logits)
    assert isinstance(model(ids, return_dict=False), tuple)
    assert model(torch.empty(2, 0, dtype=torch.long), use_cache=False).logits.shape == (2, 0, 40)


def test_bad_calls():
    model, ids = make(), tokens()
    cache = model(ids, use_cache=True).cache
    for call, message in (
        (lambda: model(), "exactly one of input_ids and inputs_embeds"),
        (lambda: model(ids, attention_mask=torch.ones(3, 13)), "attention_mask must be"),
        (lambda: model(ids, attention_mask=torch.ones(3, 1, 12, 12)), "attention_mask must be"),
        (lambda: model(ids[:1], attention_mask=torch.ones(1, 12), cu_seqlens=torch.tensor([0, 12])), "not both"),
        (lambda: model(ids[:1], cache=cache, cu_seqlens=torch.tensor([0, 12])), "cannot be used with a cache"),
        (lambda: model(ids, cu_seqlens=torch.tensor([0, 12]), use_cache=False), "batch size must be 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError):
        model(ids, atention_mask=torch.ones(3, 12))
    with pytest.raises(ValueError, match="model_kwargs.*not used"):
        model.generate(ids, max_new_tokens=1, atention_mask=torch.ones(3, 12))
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot write a cache"):
        model(ids, use_cache=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixers": "palimpsa"}, "unknown mixer 'palimpsa'; known: palimpsa_d"),
        ({"mixers": ["palimpsa_d"]}, "num_hidden_layers is 2, got 1"),
        (
            {"mixer_options": {"palimpsa_d": {"heads": 2}}},
            "unknown option 'heads' of mixer 'palimpsa_d'; known: num_heads",
        ),
        ({"mixer_options": {"mamba": {}}}, "unknown mixer 'mamba'"),
        ({"mixer_options": {"palimpsa_d_additive": {"prior": 1.0}}}, "unknown option 'prior'"),
        ({"hidden_sizes": 3}, "unknown configuration key 'hidden_sizes'; known: vocab_size"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"intermediate_size": 0}, "intermediate_size must be >= 1, or None"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize(
    "kind",
    ["palimpsa_d", pytest.param("ablation", marks=pytest.mark.slow), pytest.param("mixed", marks=pytest.mark.slow)],
)
def test_compiled_training_and_decode(kind):
    """fullgraph, equal to eager, and one graph for every length."""
    torch._dynamo.reset()
    model, ids = make(kind), tokens(2, 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (6, 11, 20):
        piece = ids[:, :length]
        loss = compiled(piece, labels=piece, use_cache=False).loss
        expected = model(piece, labels=piece, use_cache=False).loss
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
        weight = model.model.layers[0].mixer.k_proj.weight
        a, b = (torch.autograd.grad(x, weight)[0] for x in (loss, expected))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    with torch.no_grad():
        cache = model(ids[:, :-2], use_cache=True).cache
        for position in (-2, -1):
            out = compiled(ids[:, position:][:, :1], cache=cache, use_cache=True)
        torch.testing.assert_close(out.logits[:, -1], model(ids, use_cache=False).logits[:, -1], rtol=0, atol=1e-5)


def test_a_loaded_prior_stays_constant(tmp_path):
    model = make()
    with torch.no_grad():
        model.model.layers[0].mixer.prior_log.fill_(0.3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    assert loaded.model.layers[0].mixer.prior_log[0] == pytest.approx(0.3)


def test_packed_labels_and_tail():
    """Nothing is predicted across a border, and what follows the last sequence counts for nothing."""
    model, ids = make(), tokens(1, 12)
    offsets = torch.tensor([0, 5, 5, 9])
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[:, 9:] = torch.nan
    embeds.requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids, cu_seqlens=offsets)
    alone = [
        model(ids[:, a:b], labels=ids[:, a:b], num_items_in_batch=7, use_cache=False).loss for a, b in ((0, 5), (5, 9))
    ]
    torch.testing.assert_close(out.loss, sum(alone), rtol=0, atol=1e-5)
    (d,) = torch.autograd.grad(out.loss, embeds)
    assert not out.logits[:, 9:].any()
    assert not d[:, 9:].any()
    assert d.isfinite().all()
