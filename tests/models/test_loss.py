"""The loss fused with the output layer is the plain one, gradients included, and is never taken silently."""

import copy

import pytest
import torch
from torch import nn

from metaplastic.models import MetaplasticForCausalLM, loss
from metaplastic.ops import cross_entropy

from .conftest import make, tokens

needs_torch = pytest.mark.skipif(
    cross_entropy.choose("cpu", torch.float32) is None, reason="PyTorch before 2.13 has no chunked linear cross-entropy"
)


def wide(**changes):
    """A vocabulary much larger than the width, so that there are several chunks."""
    return make(num_hidden_layers=1, mixers="palimpsa_d", vocab_size=500, **changes).train()


def answer(model, form, batch):
    model.loss_form = form
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    assert (out.logits is None) == (form == "fused")
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@needs_torch
@pytest.mark.parametrize("tied", [True, False])
def test_fused_is_plain_within_rounding(tied):
    model, ids = wide(tie_word_embeddings=tied), tokens(3, 40)
    labels = ids.clone()
    labels[0, :30] = -100
    packed, offsets = ids.view(1, -1), torch.tensor([0, 7, 60, 120])
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
    batches = [
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "labels": labels.int(), "num_items_in_batch": torch.tensor(7)},
        {"input_ids": ids, "shift_labels": shifted, "num_items_in_batch": 1000},
        {"input_ids": packed, "labels": labels.view(1, -1), "cu_seqlens": offsets},
        {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": 1},  # nothing to predict
    ]
    exact = copy.deepcopy(model).double()
    for batch in batches:
        whole, expected = answer(exact, "fused", batch)
        errors = {}
        for form in ("plain", "fused"):
            found, gradients = answer(model, form, batch)
            torch.testing.assert_close(found.double(), whole, rtol=1e-6, atol=0)
            errors[form] = {name: float((g.double() - expected[name]).norm()) for name, g in gradients.items()}
        for name, gradient in expected.items():  # where terms cancel, rounding alone differs by a factor
            assert gradient.any() or batch is batches[-1]
            assert errors["fused"][name] <= 5 * errors["plain"][name] + 1e-6 * float(gradient.norm()), name


@needs_torch
def test_float64_is_fused_in_float64():
    """Hugging Face's plain loss is float32 whatever the logits, so it is written out here."""
    model, ids = wide().double(), tokens(2, 30)
    fused, found = answer(model, "fused", {"input_ids": ids, "labels": ids})
    model.zero_grad()
    plain = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    plain.backward()
    torch.testing.assert_close(fused, plain.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10 * scale, msg=name)


@needs_torch
def test_no_logits_are_made():
    """The largest tensor that a fused step makes is not [B, T, vocabulary]."""
    from .test_checkpointing import Made

    model, ids = wide(), tokens(4, 64)
    largest = {}
    for form in ("plain", "fused"):
        model.loss_form = form
        with Made() as made:
            model(ids, labels=ids).loss.backward()
        largest[form] = max(size for _, size in made.made.values())
    assert largest["plain"] == 4 * 64 * 500 * 4
    assert largest["fused"] < largest["plain"] / 4


def test_without_labels_and_after_loading_nothing_changes(tmp_path):
    model, ids = wide(), tokens()
    model.loss_form = "fused"
    assert model(ids).logits.shape == (3, 12, 500)
    model.save_pretrained(tmp_path)
    assert "loss_form" not in (tmp_path / "config.json").read_text()
    assert MetaplasticForCausalLM.from_pretrained(tmp_path).loss_form == "plain"


def test_auto_is_plain_on_a_cpu_and_where_only_the_weight_would_be_read(monkeypatch):
    model, ids = wide(), tokens()
    model.loss_form = "auto"
    assert model(ids, labels=ids).logits is not None
    monkeypatch.setattr(cross_entropy, "choose", lambda device, dtype: "fla")
    head, of = model.lm_head, ("cuda", torch.bfloat16)
    assert loss.backend("auto", head, *of) == "fla"
    assert loss.backend("auto", nn.Linear(16, 16, bias=False), *of) is None  # logits no larger than activations

    class Adapter(nn.Linear):
        pass

    hooked = nn.Linear(16, 500, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    for other, reason in (
        (Adapter(16, 500, bias=False), "the output layer is a Adapter, expected torch's own Linear"),
        (nn.Linear(16, 500), "has a bias"),
        (hooked, "has hooks"),
    ):
        assert loss.backend("auto", other, *of) is None
        with pytest.raises(ValueError, match=f"loss: got 'fused', which cannot be here: .*{reason}"):
            loss.backend("fused", other, *of)


def test_what_cannot_be_fused_says_why(monkeypatch):
    model, ids = wide(), tokens()
    model.loss_form = "fused"
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ValueError,
            match="cannot be here: fla runs on cuda.*; torch returns the loss itself in bfloat16; expected 'plain', or",
        ),
    ):
        model(ids, labels=ids)
    monkeypatch.setattr(torch.nn, "LinearCrossEntropyOptions", object, raising=False)
    with pytest.raises(ValueError, match=r"expected 'plain', or 'auto', which chooses, or float32 \(no bf16\)$"):
        loss.backend("fused", model.lm_head, "cpu", torch.bfloat16)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    with pytest.raises(ValueError, match=r"torch needs PyTorch 2\.13, and this is"):
        model(ids, labels=ids)
    with pytest.raises(RuntimeError, match=r"ops\.cross_entropy: backend 'torch' needs PyTorch 2\.13"):
        cross_entropy.summed_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2).long(), "torch")
    model.loss_form = "quick"
    with pytest.raises(ValueError, match="loss must be one of auto, fused, plain, got 'quick'"):
        model(ids, labels=ids)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ImportWarning")  # the library says what it lacks
@pytest.mark.parametrize("backend", cross_entropy.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_is_plain_within_rounding_on_a_gpu(backend, dtype, monkeypatch):
    """Gradients of the float32 weights, the products in ``dtype``; the plain loss has the same rounding."""
    if (reason := cross_entropy.reason_against(backend, "cuda", dtype)) is not None:
        pytest.skip(f"{backend} {reason}")
    monkeypatch.setattr(cross_entropy, "choose", lambda *_: backend)
    sizes = {"hidden_size": 128, "vocab_size": 3001, "initializer_range": 0.05}
    model = make(num_hidden_layers=1, mixers="palimpsa_d", **sizes).cuda().train()
    ids = torch.randint(3001, (3, 500), generator=torch.Generator().manual_seed(0)).cuda()
    labels = ids.masked_fill(torch.arange(500, device="cuda") % 5 == 0, -100)
    exact, expected = answer(model.double(), "plain", {"input_ids": ids, "labels": labels})
    model.float()
    for items in (None, torch.tensor(4000.0, device="cuda")):
        errors = {}
        for form in ("plain", "fused"):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                found, gradients = answer(
                    model, form, {"input_ids": ids, "labels": labels, "num_items_in_batch": items}
                )
            share = 1.0 if items is None else float((labels[:, 1:] != -100).sum()) / 4000
            assert float(found) == pytest.approx(share * float(exact), rel=1e-5 if dtype == torch.float32 else 2e-3)
            errors[form] = {
                name: float((g.double() / share - expected[name]).norm() / expected[name].norm())
                for name, g in gradients.items()
            }
        # Of matrices: the gradient of a few numbers (D) is a sum that cancels, where rounding is a matter of luck.
        for name in (name for name in errors["plain"] if expected[name].dim() > 1):
            allowed = 2 * errors["plain"][name] + (1e-5 if dtype == torch.float32 else 4e-3)
            assert errors["fused"][name] <= allowed, name
