"""Losses, packed batches however they are announced, gradient checkpointing: gradients equal to the plain way."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from .conftest import make, same_numbers, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
LENGTHS = (5, 1, 2, 4)  # shorter than the convolution, too


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert all(g.isfinite().all() for g in found.values())
    return found


def close(a, b, atol=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def loop(model, sequences, items):
    """The loss of sequences one by one: the reference for every way of packing them."""
    return sum(
        model(ids, labels=ids, num_items_in_batch=items, use_cache=False).loss for ids in sequences if ids.shape[1] > 1
    )


def test_losses():
    model, ids = make(), tokens()
    logits = model(ids).logits[:, :-1].reshape(-1, 40)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    shifted = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=66).loss, expected / 2)


def collated(sequences, **options):
    return DataCollatorWithFlattening(**options)([{"input_ids": ids[0].tolist()} for ids in sequences])


def test_packed_equals_a_loop_with_gradients(kind):
    """By offsets, and as Hugging Face's collator announces it in each of its ways."""
    model, sequences = make(kind).train(), tokens(1, 12).split(LENGTHS, 1)
    items = sum(length - 1 for length in LENGTHS)
    reference = loop(model, sequences, items)
    expected = gradients(model, reference)
    packed, offsets = torch.cat(sequences, 1), torch.tensor([0, 5, 6, 8, 12])
    logits = torch.cat([model(ids, use_cache=False).logits for ids in sequences], 1)
    batches = [{"input_ids": packed, "labels": packed, "cu_seqlens": offsets}]
    batches.append({"input_ids": packed, "labels": packed, "cu_seqlens": offsets.int()})
    ways = (
        {},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"position_ids_start": 2},
    )
    batches += [collated(sequences, **options) for options in ways]
    for batch in batches:
        out = model(**batch)
        assert out.cache is None
        same_numbers(out.logits, logits)
        torch.testing.assert_close(out.loss, reference, rtol=1e-5, atol=0)
        close(gradients(model, out.loss), expected)
    base = model.model(batches[2]["input_ids"], position_ids=batches[2]["position_ids"]).last_hidden_state
    same_numbers(model.lm_head(base), logits)


def test_packed_labels_and_tail(kind):
    """Nothing is predicted across a border, and what follows the last sequence counts for nothing."""
    model, ids = make(kind), tokens(1, 12)
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[:, 9:] = torch.nan
    embeds.requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids, cu_seqlens=torch.tensor([0, 5, 5, 9]))
    torch.testing.assert_close(out.loss, loop(model, (ids[:, :5], ids[:, 5:9]), 7), rtol=0, atol=1e-5)
    (d,) = torch.autograd.grad(out.loss, embeds)
    assert not out.logits[:, 9:].any()
    assert not d[:, 9:].any()
    assert d.isfinite().all()


def test_positions_without_borders_mean_nothing(kind):
    model, ids = make(kind), tokens()
    expected = model(ids, use_cache=False).logits
    plain = torch.arange(12)[None]
    for positions in (plain, plain.expand(3, -1), plain + 7):
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, expected)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]).expand(3, -1)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as Hugging Face makes them for left padding
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits, padded)
    cache = model(ids[:, :11], position_ids=plain[:, :11], use_cache=True).cache
    out = model(ids[:, 11:], cache=cache, position_ids=plain[:, 11:]).logits
    same_numbers(out, expected[:, 11:])


def test_packing_that_cannot_be():
    model, ids = make(), tokens()
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    offsets = torch.tensor([0, 4, 12])
    one, mask = ids[:1], torch.ones(1, 12)
    for call, message in (
        (lambda: model(ids, position_ids=restart), "position_ids says that sequences are packed.*batch size 3"),
        (lambda: model(one, position_ids=restart, attention_mask=mask), "packed.*and an attention_mask"),
        (lambda: model(ids, seq_idx=restart // 4), "seq_idx says that sequences are packed"),
        (lambda: model(one, position_ids=restart[:, :3]), r"position_ids must be \[B, T\] = \[1, 12\], got \[1, 3\]"),
        (lambda: model(one, position_ids=restart, use_cache=True), "cannot be used with a cache"),
        (lambda: model(one, cu_seqlens=offsets, seq_idx=restart), "give cu_seqlens or seq_idx, not both"),
        (lambda: model(one, cu_seq_lens_q=offsets), "cu_seq_lens_q and cu_seq_lens_k must be equal"),
        (lambda: model(one, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets + 1), "cu_seq_lens_k must be equal"),
        (lambda: model(one, attention_mask=mask, cu_seqlens=offsets), "not both"),
        (lambda: model(ids, cu_seqlens=offsets, use_cache=False), "batch size must be 1"),
        (lambda: model(one, cache=model(one).cache, cu_seqlens=offsets), "cannot be used with a cache"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for function in (model, model.model):
        with pytest.raises(TypeError, match="unexpected argument 'atention_mask'"):
            function(ids, atention_mask=torch.ones(3, 12))
        with pytest.raises(ValueError, match="output_attentions must be False or None, got True"):
            function(ids, output_attentions=True)
        function(ids, output_attentions=False)


def test_gradient_checkpointing_agrees(kind):
    """Both modes, with padding, against none; packed as well."""
    ids, mask = tokens(), torch.ones(3, 12)
    mask[0, :4] = 0
    found = []
    for mode in (None, True, False):
        model = make(kind).train()
        if mode is not None:
            model.gradient_checkpointing_enable({"use_reentrant": mode})
        padded = gradients(model, model(ids, attention_mask=mask, labels=ids).loss)
        row = ids.view(1, -1)
        packed = gradients(model, model(row, labels=row, cu_seqlens=torch.tensor([0, 5, 12, 36])).loss)
        found.append((padded, packed))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            close(a, b, 1e-6)
    with pytest.raises(ValueError, match="cannot write a cache"):
        model(ids, use_cache=True)


def test_checkpoints_recompute_the_blocks():
    """Or the comparison above would prove nothing: each mixer runs once more in backward."""
    model, ids, calls = make().train(), tokens(), []
    for block in model.model.layers:
        block.mixer.register_forward_hook(lambda *_: calls.append(1))
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2 + 4
