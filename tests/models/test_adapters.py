"""LoRA through PEFT: it reaches every Linear, leaves the base alone, and merges to the same model."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from .conftest import greedy, make, tokens
from .test_saving import same_bits

pytestmark = [  # PEFT and these tests say it by names that work in every supported version
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def adapted(model, targets="all-linear", **options):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, **options))


def train(model, ids, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    model.eval()
    return loss


def linears(model):
    return {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}


def test_every_linear_learns(kind):
    """The modules are called: a layer that only read their weights would give their adapters no gradient."""
    base, ids = make(kind), tokens()
    expected = linears(base)
    model = adapted(base)
    assert {name.split(".lora_B")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters()
            if ".lora_B" in name} == expected  # fmt: skip
    train(model, ids, 1)
    train(model, ids, 1)  # B starts at zero, so A has a gradient from the second step on
    for name, p in model.named_parameters():
        if "lora_" in name:
            assert p.grad is not None and p.grad.abs().max() > 0, name
        else:
            assert p.grad is None, name


def test_named_targets(kind):
    base = make(kind)
    some = sorted({name.rsplit(".", 1)[-1] for name in linears(base)})[:2]
    model = adapted(base, some)
    found = {name.split(".lora_B")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_B" in name}
    assert found == set(some)
    train(model, tokens(), 1)
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)


def test_base_weights_adapter_files_and_merging(kind, tmp_path):
    base, ids = make(kind), tokens()
    before = copy.deepcopy(base.state_dict())
    model = adapted(base)
    untrained = model(input_ids=ids).logits
    torch.testing.assert_close(untrained, make(kind)(ids).logits, rtol=0, atol=1e-6)  # B is zero
    train(model, ids)
    logits = model(input_ids=ids).logits
    assert not torch.allclose(logits, untrained, atol=1e-3)
    after = {n.replace("base_model.model.", "").replace(".base_layer", ""): x for n, x in model.state_dict().items()}
    same_bits(before, {n: x for n, x in after.items() if "lora_" not in n})
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("*.bin"))
    loaded = PeftModel.from_pretrained(make(kind), tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=ids).logits, logits)
    exact = copy.deepcopy(loaded).double()
    expected = exact(input_ids=ids).logits
    torch.testing.assert_close(exact.merge_and_unload()(ids).logits, expected, rtol=0, atol=1e-10)
    merged = loaded.merge_and_unload()
    scale = max(1.0, logits.abs().max().item())
    torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-5 * scale)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(ids).logits, merged(ids).logits)


def test_generating_with_an_adapter(kind):
    model, ids = adapted(make(kind)), tokens()
    train(model, ids)
    expected = greedy(model, ids, 6)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False), expected)
    beams = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(input_ids=ids, **beams), model.generate(input_ids=ids, use_cache=False, **beams))
    cache = model(input_ids=ids[:, :7], use_cache=True).cache
    assert torch.equal(model.generate(input_ids=ids, cache=cache, max_new_tokens=6, do_sample=False), expected)
    with model.disable_adapter():
        plain = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, greedy(make(kind), ids, 6))
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_gradient_checkpointing(reentrant):
    ids, found = tokens(), []
    for checkpointing in (False, True):
        model = adapted(make("mixed"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        train(model, ids, 1)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 10
    for name, d in found[0].items():
        torch.testing.assert_close(d, found[1][name], rtol=0, atol=1e-6)
