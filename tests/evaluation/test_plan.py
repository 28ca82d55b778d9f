"""The plan's bytes against those of real models on the CPU."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from metaplastic.evaluation import memory
from metaplastic.evaluation.plan import Cluster, Step, _run, context_bytes, plan, plan_rows
from metaplastic.evaluation.words import digits
from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM, size
from metaplastic.models.checkpointing import checkpoint_activations
from metaplastic.recipes.language import MODELS, find
from metaplastic.training.flops import model_flops, seen_in_a_row

BATCH, LENGTH = 1, 256
OPTIONS = {"num_heads": 4, "key_size": 24, "value_size": 40}
KINDS = {name: {} for name in MIXERS} | {
    "palimpsa_d": {"backend": "chunked"},
    "palimpsa_m": {"backend": "chunked", "num_groups": 4},
    "attention": {"num_key_heads": 2},
}


def config(name, **changes):
    settings = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176}
    settings |= {"mixers": name, "mixer_options": {name: OPTIONS | KINDS[name]}}
    return MetaplasticConfig(**(settings | changes))


def waiting(module, run, *, hidden=False):
    """Bytes that ``run`` leaves for the backward pass, parameters and its result aside.

    ``hidden``: what selective checkpointing keeps is in no graph, but there: every tensor that was not before counts.
    """
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = []  # so that no address is used twice

    def pack(x):
        kept.append(x)
        return x

    gc.freeze()  # what is there now is not looked at below
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            result = run()
        assert kept and result is not None
        new = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x is not result]
    finally:
        gc.unfreeze()
    kept += new if hidden else []
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(count for place, count in storages.items() if place not in own)


def only_on_a_gpu(mixer) -> int:
    """The filter's inverse factors: on a CPU, where it computes in float64, they would be too coarse to read again."""
    chunks = LENGTH // memory.CHUNK
    return 4 * BATCH * chunks * mixer.num_heads * memory.CHUNK**2 if mixer.operator == "bayesian" else 0


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("mlp", [176, None])
def test_activations_of_a_block(name, mlp):
    """Within 2% of what PyTorch keeps."""
    block = MetaplasticForCausalLM(config(name, intermediate_size=mlp)).model.layers[0].train()
    x = torch.randn(BATCH, LENGTH, 64, requires_grad=True)
    found = waiting(block, lambda: block(x, keep_state=False)[0])
    counted = BATCH * LENGTH * memory.block_bytes(block, LENGTH) + memory.weight_copies(block)
    assert counted - only_on_a_gpu(block.mixer) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("name", ["palimpsa_d", "mamba2", "bayesian", "gated_deltanet", "attention"])
def test_selective_checkpointing(name):
    """Within 3%: there is a state of the random numbers for every block."""
    model = MetaplasticForCausalLM(config(name)).model.train()
    checkpoint_activations(model, "selective")
    ids = torch.randint(0, 97, (BATCH, LENGTH))
    found = waiting(model, lambda: model(ids, use_cache=False).last_hidden_state, hidden=True)
    counted = sum(memory.kept_by_checkpointing(block, "selective", LENGTH) for block in model.layers)
    counted = BATCH * LENGTH * (counted + memory._norm(model.norm))
    assert counted - sum(only_on_a_gpu(block.mixer) for block in model.layers) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_whole_step(checkpointing):
    """Weights, gradients and averages to the byte; what waits within 2%."""
    model = MetaplasticForCausalLM(config("palimpsa_d_additive")).train()
    found = plan(model.config, Cluster(1), Step(BATCH, LENGTH, BATCH, checkpointing=checkpointing, loss="plain"))
    checkpoint_activations(model, checkpointing)
    ids, outputs = torch.randint(0, 97, (BATCH, LENGTH)), []
    kept = waiting(model, lambda: outputs.append(model(ids, labels=ids, use_cache=False)) or outputs)
    parts = dict(found.memory)
    if checkpointing == "full":  # the block that is computed again is not there yet, nor are its copies of weights
        del parts["activations of one block"]
        parts["bf16 copies of weights"] = memory.weight_copies(model.lm_head)
    expected = sum(parts[name] for name in parts if name not in ("weights", "gradients", "optimiser"))
    expected -= BATCH * LENGTH * memory.logits_bytes(model)  # of these nothing waits: they are there for a moment
    assert expected == pytest.approx(kept, rel=0.02)
    outputs[0].loss.backward()
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    optimiser.step()
    assert found.memory["weights"] == sum(p.nbytes for p in model.parameters())
    assert found.memory["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    assert found.memory["optimiser"] == sum(x.nbytes for s in optimiser.state.values() for x in s.values())


def test_what_is_sent():
    """By hand: 8 GPUs, and 4 pairs that share a row."""
    network, parameters = config("palimpsa_d"), size(config("palimpsa_d")).parameters
    step = Step(rows=16, length=LENGTH, batch_size=1)
    found = plan(network, Cluster(8, inside=2e9), step)
    assert (found.at_once, found.accumulation) == (1, 2)
    assert found.sent == {"gradients (all-reduce)": pytest.approx(2 * 7 / 8 * 4 * parameters)}
    assert found.seconds["gradients (all-reduce)"] == pytest.approx(7 / 8 * 4 * parameters / 1e9)
    flops = 2 * LENGTH * model_flops(size(network), seen_in_a_row(LENGTH))
    assert found.flops == pytest.approx(flops)
    sharded = plan(
        network, Cluster(8, node=4, between=1e9), Step(16, LENGTH, 1, "fsdp2", context_parallel=2, checkpointing="full")
    )
    assert (sharded.at_once, sharded.accumulation) == (1, 4)
    assert sharded.flops == pytest.approx(4 / 3 * flops)
    assert sharded.memory["weights"] == parameters / 2
    assert sharded.sent["weights (all-gather)"] == pytest.approx(4 * 2 * 7 / 8 * 4 * parameters)
    assert sharded.sent["gradients (reduce-scatter)"] == pytest.approx(7 / 8 * 4 * parameters)
    assert sharded.seconds["gradients (reduce-scatter)"] == pytest.approx(7 / 8 * 4 * parameters / 1e9)
    memory_state, channels = 4 * (1 + 2 * 24 * 40), 2 * 4 * 24 + 4 * 40
    a_row = 4 * (memory_state + 4 * 2 * 24 * 40 + 2 * 3 * channels)  # forward, backward, the convolution's inputs
    assert sharded.sent["states (context)"] == 4 * 2 * a_row  # 4 rows, 2 layers, one neighbour
    assert sharded.seconds["states (context)"] == pytest.approx(8 * a_row / 450e9)  # within a machine
    words = dict(plan_rows(network, Cluster(8, memory=1e6), step))
    assert "too much" in "".join(words) and words["a step"] == "16 rows of 256 = 4,096 tokens"


def test_the_loss_is_what_a_device_would_do():
    """Fused where the vocabulary is larger than the width, with nothing kept for it."""
    for vocabulary, form in ((97, "fused"), (64, "plain")):
        network = config("mamba2", vocab_size=vocabulary)
        auto, given = (plan(network, Cluster(1), Step(2, LENGTH, 2, loss=loss)) for loss in ("auto", form))
        assert auto == given and auto.loss == form
        assert ("output layer and loss" in auto.memory) == (form == "plain")
        words = dict(plan_rows(network, Cluster(1), Step(2, LENGTH, 2)))
        assert words["loss"] == f"{form} (what auto chooses on CUDA)"
    assert dict(plan_rows(network, Cluster(1), Step(2, LENGTH, 2, loss="plain")))["loss"] == "plain"


def test_numbers_are_for_people():
    """No exponents, one unit in what adds up, one row is one, and nothing sent is not told."""
    for gpus, rows, length in ((1, 1, LENGTH), (8, 64, 2**18), (1, 4, 8)):
        words = dict(plan_rows(config("palimpsa_d"), Cluster(gpus, peak=1e12), Step(rows, length, 1)))
        assert not re.search(r"\de[+-]", " ".join(words.values()))
        parts = [value for name, value in words.items() if name.startswith("  ") and "ms" not in value]
        assert len({value.split()[1] for value in [*parts, words["memory of a GPU"]]}) == 1
        assert ("communication" in words) == (gpus > 1)
        assert words["of a GPU"].startswith("1 row at once, ")
    assert _run(Step(128, 4096, 2), 30e9, 0.126, 0.151) == [
        ("the run", "30.0 G tokens, 57,221 steps: 2.0 to 2.4 hours")
    ]
    assert _run(Step(1, LENGTH, 1), 1e3, 0.5)[0][1] == "1.00 K tokens, 4 steps: 2.0 seconds"
    assert _run(Step(1, LENGTH, 1), 1e3, 0.5, 0.501)[0][1].endswith(": 2.0 seconds")
    assert not _run(Step(1, LENGTH, 1), None, 1.0)
    assert [digits(value) for value in (1070, 0.01546, 25, 17_580.0, 0)] == ["1,070", "0.0155", "25.0", "17,600", "0"]


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "attention"])
def test_states_are_those_of_the_layers(name):
    mixer = MetaplasticForCausalLM(config(name)).model.layers[0].mixer
    assert memory.state_elements(mixer) == sum(x.numel() for x in mixer.init_state(1).memory)
    assert context_bytes(mixer, 3) > context_bytes(mixer, 2) or mixer.operator not in ("palimpsa", "additive")


def test_what_cannot_be_planned():
    network = config("mamba2")
    with pytest.raises(ValueError, match="got 4 rows of 256 tokens a step, which 8 GPUs cannot") as few:
        plan(network, Cluster(8), Step(4, LENGTH, 1))
    assert str(few.value).endswith(": give --context-parallel 2, --tokens-per-step 2048 or --block-length 128")
    with pytest.raises(ValueError, match="share evenly: give --tokens-per-step 3072$"):  # attention; 3 is no factor
        plan(config("attention"), Cluster(12), Step(4, LENGTH, 1))
    with pytest.raises(ValueError, match="which 8 GPUs, 2 to a row, cannot share evenly: give --context-parallel 4,"):
        plan(network, Cluster(8), Step(2, LENGTH, 1, context_parallel=2))
    with pytest.raises(ValueError, match="context_parallel: got 3 of 8 GPUs, expected a divisor"):
        plan(network, Cluster(8), Step(4, LENGTH, 1, context_parallel=3))
    with pytest.raises(ValueError, match="context_parallel: Attention layers cannot be cut"):
        plan(config("attention"), Cluster(8), Step(4, LENGTH, 1, context_parallel=2))
    with pytest.raises(ValueError, match="parallel must be one of ddp, fsdp2, got 'tp'"):
        Step(4, LENGTH, 1, "tp")
    with pytest.raises(ValueError, match="context_parallel must be >= 1, got 0"):
        Step(4, LENGTH, 1, context_parallel=0)
    with pytest.raises(ValueError, match="gpus must be > 0 and finite, got 0"):
        Cluster(0)


def test_the_page_says_what_is_counted():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    step, tokens = Step(128, 4096, 2, context_parallel=2), find("palimpsa_d-760M").tokens
    for line in plan_rows(find("palimpsa_d-760M").network(), Cluster(256), step, tokens):
        assert "    " + "".join(f"{line[0]:26}{line[1]}") in page
    for model, mixer in MODELS.items():
        network = find(f"{model}-760M").network()
        with torch.device("meta"):
            block: Any = MetaplasticForCausalLM(network).model.layers[0]
        if block.mlp is not None:
            width, hidden = network.hidden_size, network.intermediate_size
            assert "12 D + 8 M | 51.2 KB" in page and round(12 * width + 8 * hidden, -2) == 51_200
            block.mlp = None
        whole = memory.block_bytes(block, 4096)
        assert re.search(rf"\| `{mixer}` \| .* \| {whole / 1000:.1f} KB \|", page), (mixer, whole)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tokens-per-step 0", "tokens_per_step: expected a multiple of rows of 4,096 tokens, got 0"),
        ("--tokens-per-step=-4096", "tokens_per_step: expected a multiple of rows of 4,096 tokens, got -4,096"),
        ("--block-length 0", "block_length must be >= 1, got 0"),
        ("--batch-size 0", "batch_size must be >= 1, got 0"),
        ("--checkpointing=", "checkpointing must be one of none, full, selective, got ''"),
        ("--gpus 256", "evenly: give --context-parallel 2, --tokens-per-step 1048576 or --block-length 2048"),
        ("--gpus 8192 --context-parallel 8192", "in 8,192 shards, expected at least 3 tokens in each"),
        ("--peak inf", "peak must be > 0 and finite, got inf TFLOP/s"),
        ("--memory=-3", "memory must be > 0 and finite, got -3 GB"),
        ("--gpus 0", "gpus must be > 0 and finite, got 0"),
        ("--efficiency 40", "efficiency must be a share of the peak, at most 1, got 40"),
        ("--batch-size 1000000000000", "batch_size"),
    ],
)
def test_what_is_no_plan_is_an_error_that_names_it(options, said):
    from typer.testing import CliRunner

    from metaplastic.cli import app

    result = CliRunner().invoke(app, ["plan", "--recipe", "palimpsa_d-760M", *options.split()])
    assert isinstance(result.exception, ValueError) and said in str(result.exception)
