"""What a run says of itself: its model's FLOPs beside the device's peak, and what each memory does."""

import itertools
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.models.size import size
from metaplastic.tasks.text import collate_packed
from metaplastic.training import train
from metaplastic.training.flops import least_seconds, model_flops, peak_flops, seen_in_a_row
from metaplastic.training.memory import memory_measures, rows_to_watch

from .rows import packed_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("mixer", MIXERS)
def test_training_flops_are_those_that_run(mixer):
    """PyTorch counts the products of a forward and backward pass; the rest of the model's is the memory's."""
    config = MetaplasticConfig(
        vocab_size=90, hidden_size=24, num_hidden_layers=2, mixers=mixer, intermediate_size=40,
        mixer_options={mixer: {"num_heads": 2}},
    )  # fmt: skip
    model, length = MetaplasticForCausalLM(config).train(), 33
    ids = torch.randint(90, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    names = [torch.ops.aten.mm, torch.ops.aten.addmm]
    ran = sum(counter.get_flop_counts()["Global"].get(name, 0) for name in names)
    counted = size(config)
    assert ran == 3 * counted.matrix_products * length
    rest = model_flops(counted, seen_in_a_row(length)) - 3 * counted.matrix_products
    if mixer == "attention":
        pairs = length * (length + 1) // 2
        assert rest * length == pytest.approx(3 * 2 * 2 * 2 * 12 * 2 * pairs)  # layers, heads, K and V, products
    else:
        assert rest == 3 * (counted.memory_rule + counted.convolutions) > 0


def test_tokens_seen():
    for length, window in ((7, None), (7, 3), (7, 7), (7, 20), (1, None)):
        brute = sum(min(t + 1, window or length) for t in range(length)) / length
        assert seen_in_a_row(length, window) == pytest.approx(brute)


def test_a_peak_is_known_or_given_or_absent():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 > peak_flops("NVIDIA H100 PCIe")
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for unknown in ("NVIDIA GeForce GTX 1080", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert peak_flops(unknown) is None
    config = MetaplasticConfig(hidden_size=16, vocab_size=20)
    assert least_seconds(config, 32, CPU, None) is None
    assert least_seconds(config, 32, CPU, 1e12) == model_flops(size(config), 0) / 1e12


def test_a_run_logs_its_share_of_the_peak_and_its_memory(tiny, tmp_path, undisturbed):
    settings = {"mixer": "palimpsa_d,bayesian", "layers": 2}
    result = train(tiny(**settings, steps=4, peak_flops=1e9), tmp_path / "run")
    history = result["measurements"]["history"]
    config = MetaplasticConfig.from_pretrained(tmp_path / "run" / "final")
    flops = model_flops(size(config), 0)
    for entry in (entry for entry in history if "loss" in entry):
        assert entry["mfu"] == pytest.approx(entry["tokens_per_second"] * flops / 1e9, abs=1e-4) and entry["mfu"] > 0
        assert entry["grad_norm"] > 0
    (entry,) = (entry for entry in history if "eval_loss" in entry)
    assert entry["eval_layer_0_window"] >= 1 and entry["eval_layer_0_ratio"] > 0
    assert 0 < entry["eval_layer_1_uncertainty"] <= 1 and "eval_layer_1_ratio" not in entry
    plain = json.loads((undisturbed / "results.json").read_text())["measurements"]["history"]
    assert not any("mfu" in entry for entry in plain)  # unknown: absent


def test_windows_and_ratios_are_the_medians_of_the_gates(network):
    """Of Palimpsa-D beside its ablation, on packed rows, from the gates and the rule itself."""
    from metaplastic.rules import palimpsa

    model = network().eval()
    batch = collate_packed(packed_rows(3))
    found = memory_measures(model, batch)
    caught = {}
    for number, block in enumerate(model.model.layers):
        block.mixer.register_forward_hook(
            lambda _, args, kwargs, out, n=number: caught.update({n: args[0]}), with_kwargs=True
        )
    with torch.no_grad():
        model.model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
        for number, block in enumerate(model.model.layers):
            gates = block.mixer.gates(caught[number], cu_seqlens=batch["cu_seqlens"])
            window = 1 / (1 - gates.g[0].double().exp())
            assert found[f"layer_{number}_window"] == pytest.approx(float(_median(window)), rel=1e-4)
    assert "layer_1_ratio" not in found
    gates = model.model.layers[0].mixer.gates(caught[0], cu_seqlens=batch["cu_seqlens"])
    ratios, offsets = [], batch["cu_seqlens"].tolist()
    for begin, end in itertools.pairwise(offsets):
        q, k, w, beta, g = (x.detach()[:, begin:end].double() for x in gates[:5])
        state = palimpsa.init_state(1, q.shape[2], w.shape[3], q.shape[3], dtype=torch.float64)
        for t in range(end - begin):
            state = palimpsa.step(state, k[:, t], w[:, t], beta[:, t], g[:, t])
            importance = state.excess_precision[0].flatten(1) + gates.prior.detach().double()[:, None]
            low, high = importance.aminmax(dim=1)
            ratios.append((high - low) / low)
    assert found["layer_0_ratio"] == pytest.approx(float(_median(torch.stack(ratios))), rel=1e-4)


def _median(values):
    """Over tokens, then over heads, of values that occurred."""
    lower = values.sort(0).values[(len(values) + 1) // 2 - 1]
    return lower.sort().values[(len(lower) - 1) // 2]


def test_a_memory_that_forgets_nothing_has_no_window(network):
    model = network()
    with torch.no_grad():
        model.model.layers[0].mixer.A_log.fill_(-torch.inf)
    found = memory_measures(model.eval(), collate_packed(packed_rows(2)))
    assert "layer_0_window" not in found and "layer_1_window" in found


def test_rows_to_watch():
    assert rows_to_watch(list("abc"), 1024) == ["a", "b"]
    assert rows_to_watch(list("abc"), 9999) == ["a"] and rows_to_watch(list("abc"), 4) == list("abc")
