"""Rung 5: the language model's forward pass. Padding, outputs, and the calls it refuses."""

import pytest
import torch

from .conftest import make, same_numbers, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_anywhere(kind, dtype):
    model, ids = make(kind), tokens(4, 9)
    mask = torch.tensor([[c == "1" for c in row] for row in ("000111111", "111111000", "110010111", "000000000")])
    logits = model(ids, attention_mask=mask.to(dtype), use_cache=False).logits
    for row in range(3):
        alone = model(ids[row : row + 1, mask[row]], use_cache=False).logits
        same_numbers(logits[row : row + 1, mask[row]], alone)
    embeds = model.get_input_embeddings()(ids).detach()
    garbage = embeds.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    out = model(inputs_embeds=garbage, attention_mask=mask.to(dtype), use_cache=False).logits
    same_numbers(out, logits)
    weights = [p for p in model.model.layers[0].mixer.parameters() if p.dim() == 2]
    d, *d_weights = torch.autograd.grad(out.square().sum(), [garbage, *weights])
    assert not d[~mask].any()
    assert all(x.isfinite().all() for x in (d, *d_weights))


def test_padding_while_continuing_from_a_cache(kind):
    model, ids = make(kind), tokens(2, 10)
    cache = model(ids[:, :4], use_cache=True).cache
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 0, 1, 1], [1] * 10])
    logits = model(ids[:, 4:], attention_mask=mask, cache=cache).logits
    kept = ids[:1, mask[0].bool()]
    same_numbers(logits[:1, -2:], model(kept, use_cache=False).logits[:, -2:])


def test_embeddings_instead_of_tokens(kind):
    model, ids = make(kind), tokens()
    embeds = model.get_input_embeddings()(ids)
    expected = model(ids, use_cache=False).logits
    assert torch.equal(model(inputs_embeds=embeds, use_cache=False).logits, expected)
    cache = model(inputs_embeds=embeds[:, :5], use_cache=True).cache
    out = model(inputs_embeds=embeds[:, 5:], cache=cache).logits
    same_numbers(out, expected[:, 5:])


def test_outputs(kind):
    model, ids = make(kind), tokens()
    out = model(ids, output_hidden_states=True, logits_to_keep=2)
    layers = len(model.model.layers)
    assert [x.shape for x in out.hidden_states] == [(3, 12, 16)] * (layers + 1)
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
    seen = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, __, y: seen.append(y[0]))
    model(ids)
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states[1:-1], seen[:-1], strict=True))
    assert torch.equal(out.hidden_states[-1], model.model.norm(seen[-1]))
    assert out.logits.shape == (3, 2, 40)
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1])[:, -2:], out.logits)
    assert model(ids, logits_to_keep=torch.tensor([0, 3])).logits.shape == (3, 2, 40)
    assert isinstance(model(ids, return_dict=False), tuple)
    assert model(ids).hidden_states is None
    assert model(torch.empty(2, 0, dtype=torch.long), use_cache=False).logits.shape == (2, 0, 40)


def test_hidden_states_as_configured():
    model, ids = make(output_hidden_states=True), tokens()
    assert len(model(ids).hidden_states) == len(model.model(ids).hidden_states) == 3
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_a_cache_only_where_it_is_wanted():
    model, ids = make(), tokens()
    assert model(ids).cache is not None
    assert model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None
    assert model(ids, use_cache=True).cache is not None
    assert make(use_cache=False)(ids).cache is None


def test_bad_calls():
    model, ids = make(), tokens()
    embeds = model.get_input_embeddings()(ids)
    for call, message in (
        (lambda: model(), "exactly one of input_ids and inputs_embeds"),
        (lambda: model(ids, inputs_embeds=embeds), "exactly one of input_ids and inputs_embeds"),
        (lambda: model(ids, attention_mask=torch.ones(3, 13)), "attention_mask must be"),
        (lambda: model(ids, attention_mask=torch.ones(3, 1, 12, 12)), "attention_mask must be"),
        (lambda: model(ids, attention_mask=torch.full((3, 12), -torch.inf)), "attention_mask"),
        (lambda: model(ids, logits_to_keep=-1), "logits_to_keep must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: model(ids.tolist()), "input_ids must be a tensor, got list"),
        (lambda: model(inputs_embeds=embeds.tolist()), "inputs_embeds must be a tensor, got list"),
        (lambda: model(ids, attention_mask=[[1] * 12] * 3), "attention_mask must be a tensor, got list"),
        (lambda: model(ids, labels=ids.tolist()), "labels must be a tensor, got list"),
        (lambda: model(ids, position_ids=list(range(12))), "position_ids must be a tensor, got list"),
        (lambda: model(ids[:1], cu_seqlens=[0, 12]), "cu_seqlens must be a tensor, got list"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for function in (model, model.model):
        for wrong, message in (
            ({"input_ids": ids.float()}, "input_ids must be integers, got torch.float32"),
            ({"input_ids": ids > 3}, "input_ids must be integers, got torch.bool"),
            ({"input_ids": ids[0]}, r"input_ids must be \[B, T\], got \[12\]"),
            ({"inputs_embeds": ids}, "inputs_embeds must be floating point, got torch.int64"),
            ({"inputs_embeds": embeds[0]}, r"inputs_embeds must be \[B, T, D\] with D = 16, got \[12, 16\]"),
            ({"inputs_embeds": embeds[..., :5]}, r"with D = 16, got \[3, 12, 5\]"),
            ({"input_ids": ids, "position_ids": torch.ones(3, 12)}, "position_ids must be integers, got torch.float32"),
            ({"input_ids": ids[:1], "seq_idx": torch.ones(1, 12)}, "seq_idx must be integers"),
        ):
            with pytest.raises(ValueError, match=message):
                function(**wrong)
    for name in ("labels", "shift_labels"):
        for x, message in (
            (ids[:, 1:], rf"{name} must be \[B, T\] = \[3, 12\] like the tokens, got \[3, 11\]"),
            (ids[0], rf"{name} must be \[B, T\] = \[3, 12\] like the tokens, got \[12\]"),
            (ids.float(), f"{name} must be integers, got torch.float32"),
        ):
            with pytest.raises(ValueError, match=message):
                model(ids, **{name: x})
        for keep, got in ((1, "1"), (torch.tensor([0]), "a tensor")):
            with pytest.raises(ValueError, match=f"logits_to_keep must be 0 with {name}.*got {got}"):
                model(ids, **{name: ids}, logits_to_keep=keep)
    for keep in (True, 1.0, torch.tensor([0.5]), torch.tensor([[1]])):
        with pytest.raises(ValueError, match="logits_to_keep must be"):
            model(ids, logits_to_keep=keep)
    expected = model(ids, labels=ids).loss
    assert torch.equal(model(ids.int(), labels=ids.int()).loss, expected)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot write a cache"):
        model(ids, use_cache=True)
