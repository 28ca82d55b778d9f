"""Training compiled block by block: one graph for all layers of a kind, the numbers of eager steps, names as they were.

What several processes do with it is computed in one start of Python (slow): ``python -m tests.training.test_compile``.
"""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from metaplastic.layers import MIXERS
from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.models.checkpointing import checkpoint_activations
from metaplastic.training import run, train
from metaplastic.training.compiled import compile_blocks
from metaplastic.training.context import context_group, parallelise_context

from . import parallel_jobs as jobs
from .test_parallel import assert_same_curve
from .test_run import Stop
from .test_streaming import stop_at

# PyTorch's compiler looks at .grad of all inputs and hides its own warning, but not from who makes it an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
ROOT = Path(__file__).parents[2]
OPTIONS = {name: {"num_heads": 2, "key_size": 4, "value_size": 4} for name in MIXERS}
CUT = ("palimpsa_d", "gated_deltanet")  # one that exchanges what a shard adds, one that hands its state on
FORMS = (("palimpsa_d", "ddp", "none"), ("palimpsa_d", "fsdp2", "selective"), ("bayesian", "fsdp2", "none"))


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def build(mixers: list[str], how: str = "none", backend: str | None = None) -> MetaplasticForCausalLM:
    torch.manual_seed(0)
    options = {name: OPTIONS[name] for name in set(mixers)}
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": len(mixers), "intermediate_size": 8}
    model = MetaplasticForCausalLM(MetaplasticConfig(mixers=mixers, mixer_options=options, **sizes)).train()
    checkpoint_activations(model, how)
    if backend is not None:
        compile_blocks(model, backend)
    return model


def step(model, length, borders=None, *, batch=1, training=True, bf16=False):
    """The loss and, in training, all gradients."""
    ids = torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(length)).to(model.device)
    offsets = None if borders is None else torch.tensor([0, *borders], dtype=torch.int32)
    model.train(training).zero_grad()
    with torch.set_grad_enabled(training), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        loss = model(ids, labels=ids, cu_seqlens=offsets, use_cache=False).loss
    if training:
        loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if training}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def check(mixers: list[str], how: str, backend: str) -> list[int]:
    """What each of some steps adds in graphs; every one gives what it gives uncompiled (documents are laid out anew,
    so sums of the convolution's backward are in another order)."""
    model, plain, added = build(mixers, how, backend), build(mixers, how), []
    packed = [(12, [5, 12]), (12, [12]), (12, [3, 4, 9]), (12, [2, 2, 4, 6, 8, 9, 12])]
    calls = [(call, {}) for call in packed] + [((12, [4, 12]), {"training": False}), ((7, [7]), {"training": False})]
    calls += [((12, [1, 12]), {}), ((7, [3, 7]), {}), ((9, [3, 8, 9]), {})]
    for (length, borders), options in calls:
        before = graphs()
        loss, gradients = step(model, length, borders, **options)
        added.append(graphs() - before)
        expected, others = step(plain, length, borders, **options)
        same(loss, gradients, expected, others)
    return added


def same(loss, gradients, expected, others) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, gradient in others.items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * size + 1e-9, msg=name)


def test_one_graph_for_all_layers_and_packings():
    """One for training, one for evaluation, one for batches of another length, of 24 layers."""
    assert check(["palimpsa_d"] * 24, "none", "eager") == [1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert not counters["graph_break"]


@pytest.mark.slow
def test_one_graph_of_each_kind_in_turns():
    assert check(["palimpsa_d", "mamba2", "attention"] * 4, "none", "eager") == [3, 0, 0, 0, 3, 0, 0, 3, 0]
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_every_mixer_whatever_is_computed_again(mixer, how):
    assert check([mixer] * 3, how, "aot_eager") == [1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert not counters["graph_break"]


@pytest.mark.slow
def test_what_is_computed_again_in_plain_rows():
    """Selective, in bfloat16: the same bits; evaluation has a graph for any batch."""
    model, plain, added = build(["palimpsa_d"] * 2, "selective", "aot_eager"), build(["palimpsa_d"] * 2), []
    for batch, training in ((5, True), (5, False), (3, False), (5, True)):
        before = graphs()
        loss, gradients = step(model, 12, batch=batch, training=training, bf16=True)
        added.append(graphs() - before)
        expected, others = step(plain, 12, batch=batch, training=training, bf16=True)
        assert torch.equal(loss, expected)
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in others.items())
    assert added == [1, 1, 0, 0]


def test_names_and_copies_are_those_of_the_model(tmp_path):
    model, plain = build(["palimpsa_d"] * 2, backend="eager"), build(["palimpsa_d"] * 2)
    model.save_pretrained(tmp_path)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert set(load_file(tmp_path / "model.safetensors")) <= set(plain.state_dict())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mixer.o_proj.weight.zero_()  # a copy runs its own weights
    changed, loss, expected = (step(each, 12)[0] for each in (other, model, plain))
    assert torch.equal(loss, expected) and not torch.equal(loss, changed)
    pickled, before = pickle.loads(pickle.dumps(model)), graphs()  # runs uncompiled
    assert torch.equal(step(pickled, 12)[0], expected) and graphs() == before


def test_backends_that_leave_the_graph(monkeypatch):
    """Are allowed to, and no others."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    model = build(["palimpsa_d_additive", "palimpsa_d"])
    model.model.layers[0].mixer.backend = "fla"
    compile_blocks(model)
    assert [options["fullgraph"] for options in made] == [False, True]


def test_what_cannot_be_compiled_claims_no_folder(tiny, tmp_path, monkeypatch):
    def compile_blocks(model, **how):
        raise Stop(f"{type(model).__name__} {how}")

    monkeypatch.setattr(run, "compile_blocks", compile_blocks)
    with pytest.raises(Stop, match="MetaplasticForCausalLM {'pieces': False}"):
        train(tiny(compile=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_compiled_run_goes_on_and_is_the_run(tiny, tmp_path, monkeypatch, undisturbed):
    """Evaluations, measures of the memory, checkpoints and a resumption between the steps."""
    used = []
    monkeypatch.setattr(run, "compile_blocks", lambda model, **_: used.append(1) or compile_blocks(model, "eager"))
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            train(tiny(compile=True), tmp_path / "run")
    before = graphs()
    assert before > 0
    train(tiny(compile=True), tmp_path / "run")
    assert len(used) == 2 and 0 < graphs() - before <= 3  # training, a smaller batch at the end of a pass, evaluation
    assert_same_curve(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_inductor_gives_the_gradients(mixer):
    """PyTorch's compiler itself, here with C++: float32 gradients of another number of documents each time."""
    model, plain = (build([mixer] * 2, backend=backend) for backend in ("inductor", None))
    for borders in ([5, 12], [12], [3, 4, 9], [2, 2, 4, 6, 8, 9, 12]):
        loss, gradients = step(model, 12, borders)
        expected, others = step(plain, 12, borders)
        same(loss, gradients, expected, others)
    # On a CPU, where the convolution is PyTorch's, one for every power of two documents.
    assert graphs() == (1 if mixer == "attention" else 3) and not counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_on_a_device_in_bfloat16(mixer, how):
    """One graph for every number of documents, and gradients as near to float32's as those of eager steps.

    Errors are those of a weight in all layers and steps: some are two numbers, sums that cancel, of which one alone may
    be much nearer or farther by chance.
    """
    model, plain, exact = (build([mixer] * 2, how).cuda() for _ in range(3))
    compile_blocks(model)
    squares = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))  # of both errors and of the gradient itself
    for borders in ([5, 12], [12], [3, 4, 9], [2, 2, 4, 6, 8, 9, 12]):
        borders = [16 * border for border in borders]
        runs = [step(m, 16 * 12, borders, bf16=m is not exact) for m in (exact, plain, model)]
        (_, true), (_, eager), (_, found) = runs
        for name, gradient in true.items():
            parts = (eager[name] - gradient, found[name] - gradient, gradient)
            squares[re.sub(r"\d+", "", name)] += torch.tensor([float(x.square().sum()) for x in parts])
    for name, (of_eager, of_compiled, whole) in squares.items():
        assert of_compiled.sqrt() <= 1.5 * of_eager.sqrt() + 0.02 * whole.sqrt(), name
    assert graphs() == 1 and not counters["graph_break"]


# Several processes


@pytest.mark.slow
def test_processes_share_a_compiled_step(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.training.test_compile", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    alone = torch.load(tmp_path / "alone.pt")
    for mixer, parallel, how in FORMS:
        one, two = alone[mixer, "plain"], torch.load(tmp_path / f"{mixer} {parallel} {how}.pt")[mixer, "plain"]
        assert two["sharded"] == {parallel == "fsdp2"}
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        for name, gradient in one["gradients"].items():
            size = float(gradient.abs().max())
            torch.testing.assert_close(two["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * size + 3e-7, msg=name)
        assert json.loads((tmp_path / f"{mixer} {parallel} {how}.json").read_text()) == {"breaks": 0, "graphs": 2}
    cut = torch.load(tmp_path / "context.pt")
    assert len(cut) == len(CUT) * 2
    for case in cut.values():  # rows; packed rows, two of which are compiled: with one number of documents, with any
        assert case["graphs"][0] < case["graphs"][1] <= case["graphs"][2] == case["graphs"][-1] < 32
        for plain, found in case["steps"]:
            same(*found, *plain)


def compiled_step(folder: Path, mixer: str, parallel: str, how: str) -> None:
    """As ``parallel_jobs.one_step``, with an evaluation at its end."""
    plain, name = jobs.small, f"{mixer} {parallel} {how}"

    def small(mixer):
        model = plain(mixer)
        checkpoint_activations(model, how)
        compile_blocks(model, "aot_eager")
        return model

    jobs.small, jobs.FORMS = small, [(mixer, "plain")]
    jobs.one_step(folder, name, parallel)
    if int(os.environ["RANK"]) == 0:
        found = {"breaks": sum(counters["graph_break"].values()), "graphs": graphs()}
        (folder / f"{name}.json").write_text(json.dumps(found))


def compiled_context(folder: Path) -> None:
    """Steps of two processes that share rows, compiled in pieces around what they exchange, beside uncompiled ones."""
    dist.init_process_group("gloo")
    group, found = context_group(2), {}
    for mixer in CUT:
        for how in ("none", "full"):
            torch._dynamo.reset()
            counters.clear()
            plain, cut = models = [build([mixer] * 3, how) for _ in range(2)]
            compile_blocks(cut, "aot_eager", pieces=True)
            for model in models:
                parallelise_context(model, group)
            case = found[mixer, how] = {"steps": [], "graphs": []}
            for borders in (None, [2, 12], [6, 6, 12], [1, 5, 9, 11], [2, 2, 4, 6, 8, 9, 12]):
                steps = [step(model, 12, borders, batch=3 if borders is None else 1) for model in models]
                case["steps"].append([(loss, {n: g.clone() for n, g in all_.items()}) for loss, all_ in steps])
                case["graphs"].append(graphs())
    if dist.get_rank() == 0:
        torch.save(found, folder / "context.pt")
    dist.barrier()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    jobs._warm_up()
    jobs.well(jobs.pair(compiled_context, folder))
    jobs.well(jobs.wait(jobs.fork(jobs.one_step, folder, "alone", None)))
    for form in FORMS:
        jobs.well(jobs.pair(compiled_step, folder, *form))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
