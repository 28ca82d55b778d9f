import itertools
import json
import random

import pytest
import torch

from metaplastic.tasks import PackedStream, PackedText, byte_tokenizer, set_aside
from metaplastic.tasks import stream as module

LENGTHS = [[100], [7, 1, 15, 16, 14, 40, 3, 5], [15, 15, 31], [1] * 50, [300, 2, 2, 250]]


class Texts:
    """A source of texts that counts how many it has given."""

    def __init__(self, texts):
        self.texts, self.place, self.given = texts, 0, 0

    def __iter__(self):
        while self.place < len(self.texts):
            self.place += 1
            self.given += 1
            yield "text", self.texts[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def texts_of(lengths, seed=0):
    generator = random.Random(seed)
    return ["".join(generator.choices("abcdé ", k=length)) for length in lengths]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Several batches of documents to a window, and several windows to a batch."""
    monkeypatch.setattr(module, "CHARACTERS", 60)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def take(stream, count):
    return list(itertools.islice(iter(stream), count))


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_first_pass_without_shuffling_gives_the_blocks_of_packed_text(tokenizer, lengths):
    texts = texts_of(lengths)
    whole = list(PackedText([("text", text) for text in texts], tokenizer, 8))
    stream = PackedStream(Texts(texts), tokenizer, 8, window=1)
    assert same(take(stream, len(whole)), whole)
    assert same(take(stream, 2 * len(whole)), whole * 2)  # one block at a time there is no other order


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [3, 5, 1000])
def test_every_pass_has_all_blocks_in_another_order_within_windows(tokenizer, lengths, window):
    texts = texts_of(lengths)
    packed = PackedText([("text", text) for text in texts], tokenizer, 8)
    whole = [tuple(row["input_ids"].tolist()) for row in packed]
    stream = PackedStream(Texts(texts), tokenizer, 8, window=window, seed=1)
    given = [tuple(row["input_ids"].tolist()) for row in take(stream, 3 * len(whole))]
    passes = [given[n * len(whole) : (n + 1) * len(whole)] for n in range(3)]
    for one in passes:
        for first in range(0, len(whole), window):
            assert sorted(one[first : first + window]) == sorted(whole[first : first + window])
    if len(whole) > 5:
        assert passes[0] != whole and len({tuple(one) for one in passes}) == 3
    other = PackedStream(Texts(texts), tokenizer, 8, window=window, seed=1)
    assert [tuple(row["input_ids"].tolist()) for row in take(other, len(given))] == given
    assert len(take(stream, 3 * len(whole) + 1)) and stream.state_dict(3 * len(whole) + 1)["epoch"] == 3
    assert stream.state_dict(3 * len(whole) + 1)["dropped"] == 3 * packed.dropped_tokens
    if len(whole) > 5:
        differently = PackedStream(Texts(texts), tokenizer, 8, window=window, seed=2)
        assert [tuple(row["input_ids"].tolist()) for row in take(differently, len(given))] != given


WINDOWS = (1, 3, 7, 1000)
EVERY = [
    pytest.param(lengths, window, marks=() if (number - place) % 4 in (0, 3) else (pytest.mark.slow,))
    for (number, lengths), (place, window) in itertools.product(enumerate(LENGTHS), enumerate(WINDOWS))
]


@pytest.mark.parametrize(("lengths", "window"), EVERY)  # of each length two windows, of each window two lengths or more
def test_it_resumes_after_every_block(tokenizer, lengths, window):
    texts = texts_of(lengths)
    count = 5 * len(PackedText([("text", text) for text in texts], tokenizer, 8)) // 2
    expected = take(PackedStream(Texts(texts), tokenizer, 8, window=window), count + 8)
    stream = PackedStream(Texts(texts), tokenizer, 8, window=window)
    rows = iter(stream)
    for used in range(count):
        state = json.loads(json.dumps(stream.state_dict(used)))
        again = PackedStream(Texts(texts), tokenizer, 8, window=window)
        again.load_state_dict(state)
        assert again.state_dict(used) == state
        assert same(take(again, 8), expected[used : used + 8]), used
        next(rows)


def test_a_reader_that_fetches_ahead_gets_the_place_of_what_it_used(tokenizer):
    texts = texts_of(LENGTHS[1])
    expected = take(PackedStream(Texts(texts), tokenizer, 8, window=3), 60)
    stream = PackedStream(Texts(texts), tokenizer, 8, window=3)
    rows = iter(stream)
    assert len(list(itertools.islice(rows, 15))) == 15
    for used in range(30):
        again = PackedStream(Texts(texts), tokenizer, 8, window=3)
        again.load_state_dict(stream.state_dict(used))
        assert same(take(again, 5), expected[used : used + 5])
        next(rows)
    with pytest.raises(
        ValueError, match=r"used: got 0 blocks, expected at least \d+: places before that are forgotten"
    ):
        stream.state_dict(0)


def test_resuming_reads_one_window_again_and_nothing_before_it(tokenizer):
    texts = texts_of([20] * 500)
    stream = PackedStream(Texts(texts), tokenizer, 8, window=10)
    take(stream, 1000)
    state = stream.state_dict(999)
    source = Texts(texts)
    again = PackedStream(source, tokenizer, 8, window=10)
    again.load_state_dict(state)
    take(again, 1)
    assert source.given <= 10  # ten blocks are some four documents, read in batches of three
    assert len(json.dumps(state)) < 300  # and the state holds no text


def test_memory_holds_a_window_of_an_endless_stream(tokenizer):
    class Endless(Texts):
        def __iter__(self):
            while True:
                self.place += 1
                self.given += 1
                yield "text", f"document number {self.place}"

    source = Endless([])
    stream = PackedStream(source, tokenizer, 8, window=16)
    for number, _ in enumerate(itertools.islice(iter(stream), 2000), 1):
        stream.state_dict(number)
        assert len(stream._windows) <= 2
        assert source.given * 18 <= (number + 2 * 16) * 8 + 200


@pytest.mark.parametrize("count", [2, 3])
def test_shares_of_processes_are_batches_in_turn(tokenizer, count):
    texts = texts_of(LENGTHS[1])
    whole = take(PackedStream(Texts(texts), tokenizer, 8, window=5), 4 * count * 3)
    for index in range(count):
        share = PackedStream(Texts(texts), tokenizer, 8, window=5).share(4, index, count)
        wanted = [row for number, row in enumerate(whole) if number // 4 % count == index]
        assert same(take(share, 12), wanted)


def test_held_out_documents_stay_held_out(tokenizer):
    texts = ["held out one", "held out two", "trained on", "held out two", "as well"]
    source = Texts(texts)
    held_out = set_aside(source, 2)
    assert [text for _, text in held_out] == texts[:2]
    stream = PackedStream(source, tokenizer, 4, window=2, without=(text for _, text in held_out))
    seen = "".join(tokenizer.decode(row["input_ids"]) for row in take(PackedStream(source, tokenizer, 4, window=1), 30))
    assert "held out two" in seen  # without being told, it comes again
    source.load_state_dict({"place": 2})
    ids = torch.cat([row["input_ids"] for row in take(stream, 4)])
    assert not {ord(letter) for letter in "h2"} & set(ids.tolist()) - {ord("n")}
    assert set_aside(Texts(texts), 9) == [("text", text) for text in texts]


def test_changed_text_in_the_window_to_resume_in_is_an_error(tokenizer):
    texts = texts_of([20] * 40)
    stream = PackedStream(Texts(texts), tokenizer, 8, window=10)
    take(stream, 35)
    state = stream.state_dict(35)
    changed = [*texts[:13], "x" * 20, *texts[14:]]
    for other in (changed, texts[:12]):
        again = PackedStream(Texts(other), tokenizer, 8, window=10)
        again.load_state_dict(state)
        with pytest.raises(ValueError, match=r"dataset: its text has changed where this run goes on \(block 30 of"):
            take(again, 1)
    before = PackedStream(Texts(["?" * 20, *texts[1:]]), tokenizer, 8, window=10)
    before.load_state_dict(state)
    assert len(take(before, 5)) == 5  # what is spent is not compared, as the docstring says


@pytest.mark.parametrize("window", [1, 10])
def test_where_a_window_ends_the_text_just_read_is_compared(tokenizer, window):
    texts = texts_of([20] * 40)
    stream = PackedStream(Texts(texts), tokenizer, 8, window=window)
    take(stream, 41)
    state = stream.state_dict(40)
    assert state["sha256"] and state["position"] == window
    ends = itertools.accumulate(len(text.encode()) + 1 for text in texts)
    last = next(number for number, end in enumerate(ends) if end >= 40 * 8)  # of the last block before the place
    again = PackedStream(Texts([*texts[:last], "x" * 20, *texts[last + 1 :]]), tokenizer, 8, window=window)
    again.load_state_dict(state)
    with pytest.raises(
        ValueError, match=rf"dataset: its text has changed where this run goes on \(block {40 - window} "
    ):
        take(again, 1)


def test_the_fingerprint_is_that_of_the_first_blocks(tokenizer):
    texts = texts_of([20] * 500)
    first = PackedStream(Texts(texts), tokenizer, 8).fingerprint
    stream = PackedStream(Texts(texts), tokenizer, 8, window=3, seed=5)
    rows = take(stream, 10)
    assert stream.fingerprint == first == stream.fingerprint
    assert same(take(stream, 10), rows)  # asking does not move the stream
    assert PackedStream(Texts([*texts[:10], "other" * 4, *texts[11:]]), tokenizer, 8).fingerprint != first
    assert PackedStream(Texts([texts[0] + texts[1], *texts[2:]]), tokenizer, 8).fingerprint != first
    assert PackedStream(Texts([*texts[:499], "other" * 4]), tokenizer, 8).fingerprint == first


def test_bad_streams_are_named(tokenizer):
    for texts in ([], ["abc"], ["", ""]):
        with pytest.raises(
            ValueError, match=r"dataset: got \d tokens of text to train on, expected at least block_length"
        ):
            take(PackedStream(Texts(texts), tokenizer, 8), 1)
    with pytest.raises(ValueError, match="window: got 0, expected an integer of at least 1"):
        PackedStream(Texts(["abc"]), tokenizer, 2, window=0)
    with pytest.raises(ValueError, match="block_length: got 1"):
        PackedStream(Texts(["abc"]), tokenizer, 1)
    bare = byte_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match="without eos_token"):
        PackedStream(Texts(["abc"]), bare, 2)
