"""Text tokenised once: the folder is whole or can be gone on with, and its blocks are those of PackedText."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from metaplastic.tasks import PackedText, ShardedText, byte_tokenizer, shards, tokenising, train_tokenizer, write_shards
from metaplastic.tasks.shards import Permutation
from metaplastic.tasks.tokenising import is_held_out

from .test_stream import Texts, same, texts_of

LENGTHS = [[100], [7, 0, 1, 15, 16, 14, 40, 3, 0, 0, 5], [15, 15, 31], [1] * 50, [0, 300, 2, 2, 250, 0]]
ORIGIN = {"files": "texts"}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Several batches of documents to a shard, and several shards to a batch."""
    monkeypatch.setattr(tokenising, "CHARACTERS", 60)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def numbers_tokenizer(count):
    """A tokenizer of words that are their ids: 0, 1, 2, and `count` - 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({str(n): n for n in (0, 1, 2, count - 1)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="0")


def write(folder, texts, tokenizer, **options):
    return write_shards(Texts(texts), ORIGIN, tokenizer, folder, **({"held_out": 0.0} | options))


def content(folder):
    """Every file of a finished folder."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != tokenising.LOCK)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# Blocks


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shard_tokens", [1, 33, 10**9])
def test_blocks_are_those_of_packed_text(tokenizer, tmp_path, lengths, shard_tokens):
    texts = texts_of(lengths)
    index = write(tmp_path / "a", texts, tokenizer, shard_tokens=shard_tokens)
    for shard in index["shards"][:-1]:
        assert shard["train"]["tokens"] >= shard_tokens
    assert len(index["shards"]) == {1: len(texts), 10**9: 1}.get(shard_tokens, len(index["shards"]))
    for block_length in (2, 7, 32):
        packed = PackedText([("text", text) for text in texts], tokenizer, block_length)
        sharded = ShardedText(tmp_path / "a", block_length)
        assert same(list(sharded), list(packed)) and sharded.dropped_tokens == packed.dropped_tokens
        assert same([sharded[-1]], [packed[-1]])
        with pytest.raises(IndexError, match=f"index: got {len(packed)}, expected a block number below {len(packed)}"):
            sharded[len(packed)]
    lengths = [len(text.encode()) + 1 for text in texts]
    assert np.concatenate(list(sharded.lengths())).tolist() == lengths
    assert sum(sharded.histogram().values()) == len(texts)
    counted = Counter(2 ** (length.bit_length() - 1) for length in lengths)
    assert {n: count for n, count in sharded.histogram().items() if count} == counted
    for number, text in enumerate(texts):
        assert sharded.document(number, 5).tolist() == [*text.encode(), 256][:5]


@pytest.mark.parametrize(("words", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path, words, dtype):
    texts = [f"1 {words - 1} 2", f"{words - 1}"]
    index = write(tmp_path / "a", texts, numbers_tokenizer(words))
    assert (index["dtype"], index["vocabulary"]) == (dtype, words)
    assert (tmp_path / "a" / "00000.train.tokens").stat().st_size == 6 * np.dtype(dtype).itemsize
    blocks = [row["input_ids"].tolist() for row in ShardedText(tmp_path / "a", 3)]
    assert blocks == [[1, words - 1, 2], [0, words - 1, 0]]
    assert shards.tokenizer_of(tmp_path / "a")(f"{words - 1}")["input_ids"] == [words - 1]


def test_a_tokenizer_with_merges(tmp_path):
    texts = texts_of([400, 30, 0, 77])
    trained = train_tokenizer(texts * 2, 300)
    write(tmp_path / "a", texts, trained, shard_tokens=50)
    packed = PackedText([("text", text) for text in texts], trained, 16)
    assert same(list(ShardedText(tmp_path / "a", 16)), list(packed))
    assert len(ShardedText(tmp_path / "a", 16)) < sum(len(text.encode()) + 1 for text in texts) // 16  # it has merges
    assert shards.tokenizer_of(tmp_path / "a").get_vocab() == trained.get_vocab()


# Order


@pytest.mark.parametrize("key", ["0 0", "another"])
def test_a_permutation_is_one(key):
    for size in [*range(1, 70), 997, 1000, 1024, 1025]:
        permutation = Permutation(size, key)
        assert sorted(map(permutation, range(size))) == list(range(size))
    if size > 70:
        assert [permutation(n) for n in range(size)] != list(range(size))
    large = Permutation(10**13 + 7, key)
    found = {large(n) for n in range(1000)}
    assert len(found) == 1000 and all(0 <= n < 10**13 + 7 for n in found)
    assert 0.45 < np.mean([n / 10**13 for n in found]) < 0.55


@pytest.mark.parametrize(
    "size", [2, 5, pytest.param(3, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)]
)
def test_every_place_is_as_likely_for_every_block(size):
    """Chi-square of where each block goes over 1,500 keys, against its 99.999 % quantile for `size` - 1 degrees."""
    counts = np.zeros((size, size))
    for key in range(1500):
        permutation = Permutation(size, str(key))
        for place in range(size):
            counts[place, permutation(place)] += 1
    expected = 1500 / size
    bound = {2: 19.5, 3: 23.0, 5: 28.5, 12: 43.2}[size]
    assert (((counts - expected) ** 2 / expected).sum(1) < bound).all()


def test_every_pass_has_all_blocks_in_an_order_of_its_own(tokenizer, tmp_path):
    write(tmp_path / "a", texts_of([300, 150, 7, 90]), tokenizer, shard_tokens=100)
    plain = [row["input_ids"].tolist() for row in ShardedText(tmp_path / "a", 8)]
    orders = []
    for seed in (0, 1):
        shuffled = ShardedText(tmp_path / "a", 8, seed=seed)
        for epoch in (0, 1, 2):
            shuffled.set_epoch(epoch)
            orders.append([row["input_ids"].tolist() for row in shuffled])
            again = ShardedText(tmp_path / "a", 8, seed=seed)
            again.set_epoch(epoch)
            assert same(list(again), list(shuffled))
            assert sorted(orders[-1]) == sorted(plain)
    assert len({str(order) for order in [plain, *orders]}) == 7


def test_it_travels_as_a_path_and_is_read_by_workers(tokenizer, tmp_path):
    write(tmp_path / "a", texts_of([2000, 150, 7, 90]), tokenizer, shard_tokens=100)
    shuffled = ShardedText(tmp_path / "a", 8, seed=3)
    shuffled.set_epoch(2)
    rows = list(shuffled)
    data = pickle.dumps(shuffled)
    assert len(data) < 400
    assert same(list(pickle.loads(data)), rows)
    loader = DataLoader(shuffled, batch_size=None, num_workers=2)
    assert same(list(loader), rows)


def test_few_maps_are_held_at_a_time(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAPPED", 3)
    texts = texts_of([20] * 40)
    write(tmp_path / "a", texts, tokenizer, shard_tokens=1)
    dataset = ShardedText(tmp_path / "a", 16, seed=0)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    list(dataset)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 6


# Going on


DANGERS = ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (tokenising, "_tokenise"))


def write_and_die(folder, texts, tokenizer, at, **options):
    """In a child that kills itself at its `at`-th danger; whether it lived. The child is this process, forked."""
    child = os.fork()
    if child == 0:
        count = 0

        def deadly(original):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        try:
            for where, name in DANGERS:
                setattr(where, name, deadly(getattr(where, name)))
            write(folder, texts, tokenizer, **options)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


def test_killed_anywhere_it_goes_on_to_the_same_bytes(tokenizer, tmp_path):
    texts, options = texts_of([30, 45, 0, 200, 5, 5, 61]), {"shard_tokens": 70, "held_out": 0.3}
    write(tmp_path / "whole", texts, tokenizer, **options)
    expected = content(tmp_path / "whole")
    assert len([name for name in expected if "held_out.tokens" in name]) >= 1
    at, left = 1, Counter()
    while not write_and_die(tmp_path / str(at), texts, tokenizer, at, **options):
        folder = tmp_path / str(at)
        if not (finished := (folder / shards.INDEX).is_file()):
            with pytest.raises(ValueError, match=r"is not finished|has no index\.json"):
                ShardedText(folder, 8)
            if (folder / shards.PROGRESS).is_file():
                left[len(json.loads((folder / shards.PROGRESS).read_text())["shards"])] += 1
        write(folder, texts, tokenizer, **options)
        assert content(folder) == expected, at
        left["finished"] += finished
        at += 1
    assert set(left) >= {0, 1, 2, "finished"}, left  # deaths all along the way


def test_killed_again_and_again_it_gets_there(tokenizer, tmp_path):
    texts, options = texts_of([30, 45, 0, 200, 5, 5, 61]), {"shard_tokens": 70, "held_out": 0.3}
    write(tmp_path / "whole", texts, tokenizer, **options)
    deaths = 0
    while not write_and_die(tmp_path / "a", texts, tokenizer, 14, **options):
        deaths += 1
        assert deaths < 50
    assert deaths > 1
    assert content(tmp_path / "a") == content(tmp_path / "whole")


def test_going_on_tokenises_nothing_again_but_what_follows_the_last_shard(tokenizer, tmp_path, monkeypatch):
    texts = texts_of([50] * 20)
    source, original, tokenised = Texts(texts), tokenising._tokenise, []

    def stop_at(count):
        def call(batch, **options):
            if len(tokenised) >= count:
                raise KeyboardInterrupt
            tokenised.extend(text for _, text in batch)
            return original(batch, **options)

        monkeypatch.setattr(tokenising, "_tokenise", call)

    stop_at(11)
    with pytest.raises(KeyboardInterrupt):
        write_shards(source, ORIGIN, tokenizer, tmp_path / "a", held_out=0.0, shard_tokens=250)
    entries = json.loads((tmp_path / "a" / shards.PROGRESS).read_text())["shards"]
    documents = sum(entry["train"]["documents"] for entry in entries)
    assert len(entries) >= 2 and 0 < documents < len(tokenised)
    tokenised.clear()
    stop_at(100)
    reports = []
    write_shards(
        Texts(texts), ORIGIN, tokenizer, tmp_path / "a", held_out=0.0, shard_tokens=250,
        report=lambda *counted: reports.append(counted),
    )  # fmt: skip
    assert tokenised == texts[documents:]
    assert reports[-1] == (20, sum(len(text.encode()) + 1 for text in texts))


WORKERS = """
import json, os, signal, sys
from metaplastic.tasks import byte_tokenizer, tokenising, write_shards
from tests.tasks.test_stream import Texts

if __name__ == "__main__":
    folder, texts, deaths = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    original, tokenising.CHARACTERS = tokenising._Shard.finish, 60
    def finish(self):
        global deaths
        deaths -= 1
        if deaths == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)
    tokenising._Shard.finish = finish
    write_shards(Texts(texts), {"files": "texts"}, byte_tokenizer(), folder, held_out=0.3, shard_tokens=70, workers=2)
"""


def test_workers_give_the_same_bytes_and_die_with_their_parent(tokenizer, tmp_path):
    texts = texts_of([30, 45, 0, 200, 5, 5, 61, 90, 33] * 3)
    write(tmp_path / "whole", texts, tokenizer, shard_tokens=70, held_out=0.3)
    (tmp_path / "script.py").write_text(WORKERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, tmp_path / "script.py", tmp_path / "a", json.dumps(texts)]
    # Its output ends when the last process that could write there has ended: run() waits for that.
    killed = subprocess.run([*arguments, "4"], env=environment, capture_output=True, text=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    progress = json.loads((tmp_path / "a" / shards.PROGRESS).read_text())
    assert len(progress["shards"]) == 3
    write(tmp_path / "a", texts, tokenizer, shard_tokens=70, held_out=0.3)
    assert content(tmp_path / "a") == content(tmp_path / "whole")


def test_a_finished_folder_is_left_as_it_is(tokenizer, tmp_path, monkeypatch):
    texts = texts_of([30, 45])
    index = write(tmp_path / "a", texts, tokenizer)
    before = content(tmp_path / "a")
    monkeypatch.setattr(tokenising, "_tokenise", None)
    assert write(tmp_path / "a", texts, tokenizer, workers=7) == index
    assert content(tmp_path / "a") == before


def fail_at_shard(number, monkeypatch, folder, texts, tokenizer, **options):
    original = tokenising._Shard.finish
    with monkeypatch.context() as patch:
        patch.setattr(tokenising._Shard, "finish", lambda self: original(self) if self._number < number else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(folder, texts, tokenizer, **options)


@pytest.mark.parametrize("whole", [True, False])
def test_other_data_settings_or_tokenizers_are_refused(tokenizer, tmp_path, monkeypatch, whole):
    texts, folder = texts_of([30, 45, 70]), tmp_path / "a"
    if whole:
        write(folder, texts, tokenizer, shard_tokens=31)
    else:
        fail_at_shard(1, monkeypatch, folder, texts, tokenizer, shard_tokens=31)
    before = content(folder)
    for options, expected in (
        ({"held_out": 0.5}, r"holds other shards \(held_out was 0.0 and is 0.5\): choose another output"),
        ({"shard_tokens": 32}, "shard_tokens was 31 and is 32"),
    ):
        with pytest.raises(ValueError, match=expected):
            write(folder, texts, tokenizer, **({"shard_tokens": 31} | options))
    with pytest.raises(ValueError, match="files was 'texts' and is 'others'"):
        write_shards(Texts(texts), {"files": "others"}, tokenizer, folder, held_out=0.0, shard_tokens=31)
    with pytest.raises(ValueError, match="tokenizer: sha256 was"):
        write(folder, texts, numbers_tokenizer(300), shard_tokens=31)
    assert {name: data for name, data in content(folder).items() if not name.startswith(".staging")} == {
        name: data for name, data in before.items() if not name.startswith(".staging")
    }


def test_before_anything_is_written_other_data_begin_anew(tokenizer, tmp_path, monkeypatch):
    """A bad file in the first shard, mended: the source is another one, and there is nothing to keep."""
    folder, texts, options = tmp_path / "a", texts_of([30, 45, 70, 12, 60]), {"shard_tokens": 60}
    write(tmp_path / "whole", texts, tokenizer, **options)
    fail_at_shard(0, monkeypatch, folder, ["broken " * 30, "text"], tokenizer, shard_tokens=90, held_out=0.5)
    assert not json.loads((folder / shards.PROGRESS).read_text())["shards"]
    (folder / "00000.held_out.tokens").write_bytes(b"named, and then killed before it was entered")
    assert write(folder, texts, tokenizer, **options)["settings"] == {"held_out": 0.0, "shard_tokens": 60}
    assert content(folder) == content(tmp_path / "whole")


def test_before_anything_is_written_it_may_be_killed_at_beginning_anew(tokenizer, tmp_path, monkeypatch):
    """And then goes on with either data, as long as there is no shard of one of them."""
    texts, options = texts_of([30, 45]), {"shard_tokens": 60}
    write(tmp_path / "whole", texts, tokenizer, **options)
    numbers, at, lived = numbers_tokenizer(300), 0, False
    write(tmp_path / "before", ["0 1 2"], numbers, shard_tokens=90)
    while not lived:
        at += 1
        folder = tmp_path / str(at)
        fail_at_shard(0, monkeypatch, folder, ["0 1 2"], numbers, shard_tokens=90)
        lived = write_and_die(folder, texts, tokenizer, at, **options)
        found = [file for name in (shards.INDEX, shards.PROGRESS) if (file := folder / name).is_file()]
        if not any(json.loads(file.read_text())["shards"] for file in found):
            before = shutil.copytree(folder, tmp_path / f"{at}, as before")
            write(before, ["0 1 2"], numbers, shard_tokens=90)
            assert content(before) == content(tmp_path / "before"), at
        write(folder, texts, tokenizer, **options)
        assert content(folder) == content(tmp_path / "whole"), at
    assert at > 8


@pytest.mark.parametrize("whole", [True, False])
def test_the_copy_of_the_tokenizer_is_checked_before_going_on(tokenizer, tmp_path, monkeypatch, whole):
    folder, texts = tmp_path / "a", texts_of([30, 45, 70])
    if whole:
        write(folder, texts, tokenizer, shard_tokens=31)
    else:
        fail_at_shard(1, monkeypatch, folder, texts, tokenizer, shard_tokens=31)
    shutil.rmtree(folder / "tokenizer")
    numbers_tokenizer(258).save_pretrained(folder / "tokenizer")
    with pytest.raises(ValueError, match=r"data: .*tokenizer is not the tokenizer of these shards \(SHA-256 "):
        write(folder, texts, tokenizer, shard_tokens=31)
    tokenizer.save_pretrained(folder / "tokenizer")
    assert len(write(folder, texts, tokenizer, shard_tokens=31)["shards"]) == 3


def test_bad_outputs_and_settings_are_named(tokenizer, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for folder, options, expected in (
        ("file", {}, "output: .*file is a file, expected a folder"),
        ("other", {}, "output: .*other holds notes.txt and no shards, expected a new or empty folder"),
        ("a", {"held_out": 1.0}, "held_out: got 1.0, expected a share of at least 0 and below 1"),
        ("a", {"shard_tokens": 0}, "shard_tokens: got 0, expected at least 1"),
        ("a", {"workers": 0}, "workers: got 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=expected):
            write(tmp_path / folder, ["text"], tokenizer, **options)
    without = numbers_tokenizer(4)
    without.eos_token = None
    with pytest.raises(ValueError, match="without eos_token"):
        write(tmp_path / "a", ["text"], without)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="source: got no document with text"):
        write(tmp_path / "a", [], tokenizer)
    write(tmp_path / "a", ["text"], tokenizer)  # of which nothing stands in the way
    with tokenising._alone(tmp_path / "b"), pytest.raises(ValueError, match="another process is writing in"):
        write(tmp_path / "b", ["text"], tokenizer)


# Held out


def test_held_out_is_a_matter_of_the_text_alone(tokenizer, tmp_path):
    texts = [f"text {n % 400}" for n in range(500)]
    found = []
    for name, options in (("a", {"shard_tokens": 300}), ("b", {})):
        write(tmp_path / name, texts, tokenizer, held_out=0.2, **options)
        sides = {}
        for split in shards.SPLITS:
            dataset = ShardedText(tmp_path / name, 2, split=split)
            count = dataset.index["shards"] and sum(shard[split]["documents"] for shard in dataset.index["shards"])
            sides[split] = [tokenizer.decode(dataset.document(n, 99)[:-1].tolist()) for n in range(count)]
        found.append(sides)
    assert found[0] == found[1]
    train, held_out = found[0]["train"], found[0]["held_out"]
    assert train == [text for text in texts if text in set(train)] and not set(train) & set(held_out)
    assert held_out == [text for text in texts if is_held_out(text, 0.2)] and len(train) + len(held_out) == 500
    assert 50 < len(set(held_out)) < 110
    assert set(held_out) <= {text for text in texts if is_held_out(text, 0.3)}
    digest = int(hashlib.sha256(b"text 7").hexdigest()[:16], 16) / 2**64
    assert is_held_out("text 7", digest * 1.001) and not is_held_out("text 7", digest * 0.999)


def test_a_split_without_a_block_is_named(tokenizer, tmp_path):
    write(tmp_path / "a", ["some text"], tokenizer)
    with pytest.raises(ValueError, match="a has 0 tokens in its split 'held_out', expected .* = 4: tokenise with"):
        ShardedText(tmp_path / "a", 4, split="held_out")
    with pytest.raises(ValueError, match="a has 10 tokens in its split 'train', expected at least block_length = 11"):
        ShardedText(tmp_path / "a", 11)
    with pytest.raises(ValueError, match="block_length: got 1, expected an integer of at least 2"):
        ShardedText(tmp_path / "a", 1)
    with pytest.raises(ValueError, match="split: got 'test', expected one of 'train', 'held_out'"):
        ShardedText(tmp_path / "a", 4, split="test")


# Damage


@pytest.fixture
def folder(tokenizer, tmp_path):
    write(tmp_path / "a", texts_of([60] * 9, seed=1), tokenizer, shard_tokens=180, held_out=0.4)
    assert {
        f"0000{n}.{split}.{part}" for n in (0, 1) for split in shards.SPLITS for part in ("tokens", "starts")
    } <= set(os.listdir(tmp_path / "a"))
    return tmp_path / "a"


@pytest.mark.parametrize("name", ["00000.train.tokens", "00001.held_out.starts", "00001.train.starts"])
def test_a_file_that_is_missing_cut_or_longer_is_named(folder, name):
    whole = (folder / name).read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b""):
        (folder / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} has {len(damaged)} bytes, expected {len(whole)}"):
            ShardedText(folder, 8)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        ShardedText(folder, 8)


@pytest.mark.parametrize("name", ["00000.train.tokens", "00001.held_out.starts", "00001.train.starts"])
def test_a_bit_that_turned_is_found_by_checking(folder, name):
    index = shards.read_index(folder)
    shards.check_content(folder, index)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged: SHA-256"):
        shards.check_content(folder, index)


def test_damage_is_found_before_going_on(tokenizer, tmp_path, monkeypatch):
    texts = texts_of([60] * 9)
    fail_at_shard(2, monkeypatch, tmp_path / "a", texts, tokenizer, shard_tokens=100)
    damaged = tmp_path / "a" / "00001.train.tokens"
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    with pytest.raises(ValueError, match=r"00001\.train\.tokens is damaged: SHA-256"):
        write(tmp_path / "a", texts, tokenizer, shard_tokens=100)


def test_ids_and_borders_that_cannot_be_are_found_when_they_are_read(folder):
    for name, value, expected in (
        (
            "00001.train.tokens",
            b"\xff\xff",
            r"00001\.train\.tokens is damaged: it holds the id 65535, expected ids below 258",
        ),
        ("00001.train.starts", b"\0" * 8, r"00001\.train\.starts is damaged: its positions do not rise"),
        ("00000.train.starts", None, r"00000\.train\.starts is damaged: its ends are not those of its text"),
    ):
        whole = (folder / name).read_bytes()
        middle = len(whole) // 16 * 8
        if value is None:
            middle, value = 0, b"\1"
        (folder / name).write_bytes(whole[:middle] + value + whole[middle + len(value) :])
        with pytest.raises(ValueError, match=expected):
            list(ShardedText(folder, 64))
        (folder / name).write_bytes(whole)
    list(ShardedText(folder, 64))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "", lambda text: text[:-40], lambda text: "[]", lambda text: "{}",
        lambda text: text.replace("metaplastic shards", "parquet"),
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"tokens": 1', '"tokens": "1'), lambda text: text.replace('"held_out"', '"test"'),
        lambda text: text.replace("uint16", "int16"), lambda text: text.replace("uint16", "words"),
        lambda text: text.replace("uint16", "uint32"), lambda text: text.replace("258", "256"),
        lambda text: text.replace("258", "true"), lambda text: "[" * 100_000,
        lambda text: re.sub(r'("documents": )\d+', r"\g<1>0", text),
        lambda text: re.sub(r'("documents": )\d+', r"\g<1>999", text),
        lambda text: re.sub(r'("documents": )', r"\1-", text),
        lambda text: re.sub(r'("documents": \d+)', r"\1.0", text),
        lambda text: re.sub(r'"starts": "\w+"', r'"starts": "0123"', text),
        lambda text: re.sub(r'"sha256": \{[^}]*\}', '"sha256": {}', text),
        lambda text: re.sub(r',\s*"starts": "\w+"', "", text),
    ],
)  # fmt: skip
def test_an_index_that_is_none_is_named(folder, damage):
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(damage(text))
    with pytest.raises(ValueError, match=r"index\.json is no index of shards"):
        ShardedText(folder, 8)


def test_an_index_of_another_folder_is_named(folder):
    """Every number is one that could be, and not that of these files."""
    text = (folder / "index.json").read_text()
    for change, expected in (
        (lambda index, entry: index["shards"].pop(), r"index\.json names [1-9]\d* shards, but there is 0000"),
        (lambda index, entry: entry.update(documents=0, tokens=0, sha256={}), r"00000\.held_out\.tokens is there, exp"),
        (lambda index, entry: entry.update(tokens=999), r"00000\.held_out\.tokens has \d+ bytes, expected 1,998"),
        (lambda index, entry: entry.update(documents=1), r"00000\.held_out\.starts has \d+ bytes, expected 8"),
    ):
        index = json.loads(text)
        change(index, index["shards"][0]["held_out"])
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=expected):
            ShardedText(folder, 8)
    (folder / "index.json").write_text(text.replace('"vocabulary": 258', '"vocabulary": 300'))
    with pytest.raises(ValueError, match=r"index\.json names 300 ids, but its tokenizer has 258"):
        shards.tokenizer_of(folder)


def test_progress_without_a_place_is_named(tokenizer, tmp_path, monkeypatch):
    fail_at_shard(1, monkeypatch, tmp_path / "a", texts_of([30, 45]), tokenizer, shard_tokens=31)
    progress = json.loads((tmp_path / "a" / shards.PROGRESS).read_text())
    del progress["place"]
    (tmp_path / "a" / shards.PROGRESS).write_text(json.dumps(progress))
    with pytest.raises(ValueError, match=r"progress\.json is no index of shards \(KeyError: 'place'\)"):
        write(tmp_path / "a", texts_of([30, 45]), tokenizer, shard_tokens=31)


def test_folders_without_shards_and_other_tokenizers(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="data: .*nowhere is no folder, expected a folder written by"):
        ShardedText(tmp_path / "nowhere", 8)
    with pytest.raises(ValueError, match=r"data: .* has no index\.json, expected a folder written by"):
        ShardedText(folder / "tokenizer", 8)
    numbers_tokenizer(7).save_pretrained(folder / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer is not the tokenizer of these shards"):
        shards.tokenizer_of(folder)
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer holds no tokenizer that can be read"):
        shards.tokenizer_of(folder)


def test_the_fingerprint_is_of_the_content(tokenizer, tmp_path):
    texts = texts_of([30, 45, 70])
    changed, joined = [*texts[:2], texts[2][:-1] + "x"], [texts[0] + "x" + texts[1], texts[2]]
    for name, each in (("a", texts), ("b", texts), ("c", changed), ("d", joined)):
        write(tmp_path / name, each, tokenizer)
    prints = [ShardedText(tmp_path / name, 8).fingerprint for name in "abcd"]
    assert prints[0] == prints[1] == ShardedText(tmp_path / "a", 16, seed=4).fingerprint
    assert len(set(prints)) == 3


# Training a tokenizer


def test_a_trained_tokenizer_is_the_same_every_time_and_loses_nothing(tmp_path):
    from metaplastic.tasks import load_tokenizer, standard_library_documents

    texts = [text for _, text in standard_library_documents(max_bytes=200_000)]
    first, second = (train_tokenizer(iter(texts), 600) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 600 and (first.eos_token_id, first.pad_token_id, first.padding_side) == (0, 1, "left")
    first.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in [*texts[:20], " naïve café — 日本語 😀\x00\r\n", "a , b . c <|endoftext|>"]:
        ids = loaded(text, split_special_tokens=True)["input_ids"]
        assert loaded.decode(ids) == text and 0 not in ids and len(ids) <= len(text.encode())
    both = (first, train_tokenizer(texts, 300))
    sizes = [sum(len(tokenizer(text)["input_ids"]) for text in texts) for tokenizer in both]
    assert sizes[0] < sizes[1] < sum(len(text.encode()) for text in texts)
    with pytest.raises(ValueError, match="vocab_size: got 257, expected at least 258"):
        train_tokenizer(texts, 257)


# Speed


def test_blocks_are_read_far_faster_than_a_model_needs_them(tokenizer, tmp_path, monkeypatch):
    """Here 2 M tokens per second of this process are asked for; docs/training.md has what was measured."""
    monkeypatch.setattr(tokenising, "CHARACTERS", 2**21)
    write(tmp_path / "a", texts_of([3000] * 400), tokenizer, shard_tokens=300_000)
    dataset = ShardedText(tmp_path / "a", 1024, seed=0)
    torch.stack([row["input_ids"] for row in dataset])
    started = time.process_time()  # whatever else the machine does
    read = sum(len(dataset[n]["input_ids"]) for n in range(len(dataset)))
    assert read / (time.process_time() - started) > 2e6
