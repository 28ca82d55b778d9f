import math
import random
import time
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from metaplastic.tasks import MQARConfig, Score, mqar, score

SHAPES = [(8, 2, 6), (64, 16, 8192), (64, 4, 40), (130, 8, 101), (128, 32, 66), (64, 4, 40_000)]


def rows_of(filler, shape=(64, 8, 200), rows=500, seed=0, power=0.01):
    return mqar.generate(MQARConfig(*shape, power=power, filler=filler), rows, seed)


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_solver_reads_every_answer(filler, shape):
    batch = rows_of(filler, shape)[:]
    assert score(mqar.solve(batch["input_ids"]), batch["labels"]) == Score(500 * shape[1], 500 * shape[1])


@pytest.mark.parametrize("filler", ["zero", "random", "legacy"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layout(filler, shape):
    length, pairs, vocabulary = shape
    dataset = rows_of(filler, shape)
    batch = dataset[:]
    ids, labels, queries = batch["input_ids"], batch["labels"], dataset.query_positions
    assert ids.shape == labels.shape == (500, length)
    keys, values = ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2]
    assert keys.min() >= 1 and keys.max() < vocabulary // 2 <= values.min() and values.max() < vocabulary
    assert all(len(row.unique()) == pairs for tokens in (keys, values, queries) for row in tokens)
    assert (queries >= 2 * pairs).all() and (queries % 2 == 0).all() and (queries < length).all()
    assert torch.equal(ids.gather(1, queries), keys)
    assert torch.equal(labels.gather(1, queries + 1), values)
    assert (labels != -100).sum() == 500 * pairs
    assert torch.equal(dataset.distance, (queries - 2 * torch.arange(pairs)).int()) and dataset.distance.min() >= 2


def test_filler_never_holds_a_key_of_its_row():
    for filler, allowed in (("zero", True), ("random", True), ("legacy", False)):
        ids = rows_of(filler, (128, 16, 64), rows=2000)[:]["input_ids"]
        occurrences = (ids[:, :, None] == ids[:, None, 0:32:2]).sum(1)
        assert (occurrences == 2).all() == allowed  # once in its pair, once as a query
        assert (ids[:, 32:] == 0).any(1).all() == (filler == "zero")


def test_legacy_filler_misleads_the_solver_as_published():
    batch = rows_of("legacy", (128, 16, 64), rows=500)[:]
    assert 0.5 < score(mqar.solve(batch["input_ids"]), batch["labels"]).accuracy < 0.99


def test_random_filler_is_even_over_what_the_keys_leave():
    ids = rows_of("random", (64, 4, 16), rows=20_000)[:]["input_ids"]
    counts = torch.bincount(ids[:, 8:].flatten(), minlength=16).double()
    keys, others = counts[1:8], torch.cat([counts[:1], counts[8:]])  # tokens that may be keys, and those that never are
    assert (keys / keys.mean() - 1).abs().max() < 0.03 and (others / others.mean() - 1).abs().max() < 0.03


def test_keys_and_values_are_drawn_evenly():
    ids = rows_of("zero", (16, 4, 20), rows=40_000)[:]["input_ids"]
    for column in range(8):
        low, high = (1, 10) if column % 2 == 0 else (10, 20)
        share = torch.bincount(ids[:, column], minlength=20)[low:high] / len(ids)
        assert (share * (high - low) - 1).abs().max() < 0.06


@pytest.mark.parametrize("power", [0.01, 1.0, 3.0])
def test_query_slots_follow_the_power_law(power):
    pairs, slots = 3, 29
    dataset = rows_of("zero", (64, pairs, 100), rows=40_000, power=power)
    drawn = ((dataset.query_positions - 2 * pairs) // 2).numpy()
    weight = np.arange(1, slots + 1) ** (power - 1.0)
    weight /= weight.sum()
    second = np.array(
        [sum(weight[j] * weight[i] / (1 - weight[j]) for j in range(slots) if j != i) for i in range(slots)]
    )
    for pair, expected in ((0, weight), (1, second)):  # one after another without replacement, the first pair first
        share = np.bincount(drawn[:, pair], minlength=slots) / len(drawn)
        assert np.abs(share - expected).max() < 5 * np.sqrt(expected.max() / len(drawn))


def test_a_steep_power_still_gives_distinct_slots():
    for power in (1e-6, 60.0):
        queries = rows_of("zero", (2048, 8, 100), rows=50, power=power).query_positions
        assert all(len(row.unique()) == 8 for row in queries)


@pytest.mark.parametrize("filler", ["zero", "random", "legacy"])
def test_rows_depend_on_the_seed_alone(filler):
    first = rows_of(filler, seed=3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    again, other = rows_of(filler, seed=3), rows_of(filler, seed=4)
    for name in ("input_ids", "labels", "distance"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert np.array_equal(numpy_state, np.random.get_state()[1])
    assert torch.equal(torch_state, torch.get_rng_state())


def test_rows_of_one_dataset_differ():
    ids = rows_of("zero", rows=5000).input_ids
    assert len(ids.unique(dim=0)) == 5000


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("rows", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_rows_in_seconds_and_in_little_memory(filler, rows):
    """100,000 rows under a gigabyte: so many seconds and bytes for each."""
    tracemalloc.start()  # sees what numpy holds; the tensors are counted below
    started = time.perf_counter()
    dataset = rows_of(filler, (512, 128, 8192), rows=rows)
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors = sum(tensor.nbytes for tensor in (dataset.input_ids, dataset.labels, dataset.distance))
    assert len(dataset) == rows
    assert peak + tensors < 0.6e4 * rows
    assert seconds < 30e-5 * rows  # about 2e-5 on two cores


def test_rows_come_as_int64_one_by_one_in_slices_and_in_batches():
    dataset = rows_of("zero", rows=10)
    row = dataset[3]
    assert dataset.input_ids.dtype == torch.int16 and rows_of("zero", (64, 4, 40_000), 2).labels.dtype == torch.int32
    assert row["input_ids"].dtype == row["labels"].dtype == torch.int64 and row["input_ids"].shape == (64,)
    assert len(list(dataset)) == len(dataset) == 10
    batches = list(DataLoader(dataset, batch_size=4))
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), dataset[:]["labels"])
    assert torch.equal(dataset[torch.tensor([3])]["input_ids"][0], row["input_ids"])


def test_labels_are_shifted_by_the_loss_of_a_causal_model():
    """Logits with the right value where the query stands get a loss of 0 after the Hugging Face shift."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    batch = rows_of("random", rows=5)[:]
    logits = 100.0 * torch.nn.functional.one_hot(mqar.solve(batch["input_ids"]).clamp(min=0), 200)
    assert ForCausalLMLoss(logits, batch["labels"], vocab_size=200) < 1e-6
    assert score(logits, batch["labels"]).accuracy == 1


def test_scores_count_and_do_not_depend_on_batches():
    batch = rows_of("zero", rows=50)[:]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 64, 200, generator=generator) + 4 * torch.nn.functional.one_hot(
        mqar.solve(batch["input_ids"]).clamp(min=0), 200
    )
    whole = score(logits, batch["labels"])
    assert whole.total == 50 * 8 and 0 < whole.correct < whole.total
    assert whole.accuracy == whole.correct / whole.total
    assert score(logits.argmax(-1), batch["labels"]) == whole
    for size in (1, 7):
        pieces = zip(logits.split(size), batch["labels"].split(size), strict=True)
        assert sum((score(*piece) for piece in pieces), Score()) == whole
    assert math.isnan(score(logits, torch.full_like(batch["labels"], -100)).accuracy)


def test_accuracy_by_age_adds_up():
    dataset = rows_of("legacy", (64, 8, 40))
    batch = dataset[:]
    answers = mqar.solve(batch["input_ids"])
    right = answers.gather(1, dataset.query_positions) == batch["input_ids"][:, 1:16:2]
    assert int(right.sum()) == score(answers, batch["labels"]).correct < right.numel()
    old = dataset.distance > dataset.distance.float().median()
    assert right[old].float().mean() < right[~old].float().mean()  # more filler in between, more collisions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 63}, "sequence_length: got 63, expected an even number"),
        ({"sequence_length": 30}, "sequence_length: got 30, expected at least 32 for 8 pairs"),
        ({"pairs": 0}, "pairs: got 0, expected an integer of at least 1"),
        ({"pairs": True}, "pairs: got True, expected an integer"),
        ({"vocabulary": 17}, "vocabulary: got 17, expected at least 18 for 8 distinct keys"),
        ({"power": 0.0}, "power: got 0.0, expected a finite number above 0"),
        ({"power": math.nan}, "power: got nan, expected a finite number above 0"),
        ({"filler": "none"}, "filler: got 'none', expected one of zero, random, legacy"),
    ],
)
def test_a_bad_configuration_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        MQARConfig(**{"sequence_length": 64, "pairs": 8, **changes})


def test_bad_arguments_are_named():
    config = MQARConfig(64, 8)
    with pytest.raises(ValueError, match="rows: got 0, expected an integer of at least 1"):
        mqar.generate(config, 0, 0)
    with pytest.raises(ValueError, match="seed: got -1, expected an integer of at least 0"):
        mqar.generate(config, 1, -1)
    labels = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"predictions: got torch.int64 \[2, 7\], expected token ids"):
        score(labels[:, :7], labels)
    with pytest.raises(ValueError, match=r"predictions: got torch.float32 \[2, 8\], expected logits"):
        score(labels.float(), labels)
