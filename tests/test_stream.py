"""Shards, packing, the stream: what a rank reads, and every bad input that it may meet."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import train_gpt
from conftest import some_documents, write_shard

BOS = 63


def lengths_to_tokens(lengths):
    """Documents BOS, then numbers that are nowhere else."""
    tokens = np.arange(sum(lengths)) + 100
    tokens[np.cumsum(lengths) - lengths] = BOS
    return tokens.astype(np.uint16)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=20, max_size=80), max_len=st.integers(2, 20), slot_tokens=st.integers(5, 40),
       slots=st.sampled_from([1, 2, 8]))
def test_packing_is_the_record_s(lengths, max_len, slot_tokens, slots):
    """Against the rule read aloud: documents one after another, each cut at max_len, the last cut to fit the slot."""
    tokens = lengths_to_tokens(np.array(lengths))
    documents = train_gpt.index_documents(tokens, BOS, max_len)
    ends = np.cumsum(documents.lengths)
    pointer, at = 0, 0
    while (taken := train_gpt.pack(ends, pointer, slots, slot_tokens)) is not None:
        for first, last, last_tokens in taken:
            expected = []
            while len(expected) < slot_tokens + 1:
                begin = sum(lengths[:at])
                expected += tokens[begin:begin + min(lengths[at], max_len, slot_tokens + 1 - len(expected))].tolist()
                at += 1
            slot = train_gpt.fill_slot(documents, BOS, first, last, last_tokens)
            assert slot.tolist() == expected and len(slot) == slot_tokens + 1 and slot[0] == BOS
            pointer = last + 1
            assert pointer == at
    fits = sum(min(n, max_len) for n in lengths[at:])
    assert fits < slots * (slot_tokens + 1 + max_len), "it stopped although another batch was there"


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=20), max_len=st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_split_documents_keep_every_token_but_those_that_a_bos_replaces(lengths, max_len):
    tokens = lengths_to_tokens(np.array(lengths))
    documents = train_gpt.index_documents(tokens, BOS, max_len, "split")
    assert documents.lengths.max() <= max_len
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(documents.starts, documents.lengths)])
    assert np.array_equal(covered, np.arange(len(tokens)))
    for i in range(len(documents.starts)):
        piece = train_gpt.fill_slot(documents, BOS, i, i, int(documents.lengths[i]))
        assert piece[0] == BOS and not (piece[1:] == BOS).any()


def make_stream(tmp_path, tiny, rank=0, ranks=1, shards=((1, 3000), (2, 3000)), **changes):
    for i, (seed, tokens) in enumerate(shards):
        write_shard(tmp_path / f"t_{i}.bin", some_documents(seed, tokens))
    config = dataclasses.replace(tiny, **changes)
    return train_gpt.Stream(train_gpt.find_shards(str(tmp_path / "t_*.bin")), config, rank, ranks)


def read_all(stream):
    batches = []
    with pytest.raises(train_gpt.RunError, match="ran out"):
        while True:
            batches.append(np.stack(stream.next_batch()))
    return batches


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_read_disjoint_parts_of_the_same_batches(tmp_path, tiny, ranks):
    alone = read_all(make_stream(tmp_path, tiny))
    together = [read_all(make_stream(tmp_path, tiny, rank, ranks)) for rank in range(ranks)]
    assert len(alone) > 5
    for step, batch in enumerate(alone):
        assert np.array_equal(np.concatenate([mine[step] for mine in together]), batch)


def test_no_document_is_read_twice_and_a_new_shard_begins_a_batch(tmp_path, tiny):
    documents = np.concatenate([np.full(7, BOS)[:1], np.arange(6)])  # BOS and six tokens, again and again, numbered below
    for i in range(2):
        tokens = np.tile(documents, 200).reshape(200, 7)
        tokens[:, 1:] = (np.arange(200) + 200 * i)[:, None] + 64
        write_shard(tmp_path / f"n_{i}.bin", tokens.ravel(), vocab_size=1000)
    stream = train_gpt.Stream(train_gpt.find_shards(str(tmp_path / "n_*.bin")), tiny)
    first_reads = []
    for batch in read_all(stream):
        numbers = [int(n) for slot in batch for n in slot[np.flatnonzero(slot == BOS)[:-1] + 1]]
        assert len({(n - 64) // 200 for n in numbers}) == 1, "a batch lies in one shard"
        first_reads += numbers
    assert len(first_reads) == len(set(first_reads))
    assert {(n - 64) // 200 for n in first_reads} == {0, 1}


def test_position_can_be_saved_and_sought(tmp_path, tiny):
    stream = make_stream(tmp_path, tiny)
    for _ in range(3):
        stream.next_batch()
    position = stream.position()
    following = [np.stack(stream.next_batch()) for _ in range(6)]
    other = make_stream(tmp_path, tiny)
    other.seek(position)
    assert other.position() == position
    for batch in following:
        assert np.array_equal(np.stack(other.next_batch()), batch)


def test_shuffled_order_is_decided_by_the_seed(tmp_path, tiny):
    def first(seed, shuffle=True):
        return np.stack(make_stream(tmp_path, tiny, shuffle=shuffle, seed=seed).next_batch())
    assert np.array_equal(first(1), first(1)) and not np.array_equal(first(1), first(2))
    assert np.array_equal(first(1, False), first(2, False))


def test_the_next_shard_is_loaded_in_the_background(tmp_path, tiny, monkeypatch):
    loads = []
    load = train_gpt.load_tokens
    monkeypatch.setattr(train_gpt, "load_tokens", lambda shard: loads.append((shard.path.name, threading.current_thread().name)) or load(shard))
    stream = make_stream(tmp_path, tiny)
    stream.next_batch()
    stream.loaded[1].result(timeout=5)
    assert [name for name, _ in loads] == ["t_0.bin", "t_1.bin"] and stream.position()[0] == 0
    assert all(thread.startswith("load-shard") for _, thread in loads)


def test_a_failure_in_the_background_reaches_the_reader(tmp_path, tiny):
    stream = make_stream(tmp_path, tiny)
    write_shard(tmp_path / "t_1.bin", [BOS, 64] + [1] * 2998)
    with pytest.raises(train_gpt.RunError, match=r"t_1\.bin: token 64 at position 1, but the vocabulary has 64"):
        while True:
            stream.next_batch()


def test_running_out_names_the_shards_and_what_they_hold(tmp_path, tiny):
    stream = make_stream(tmp_path, tiny)
    with pytest.raises(train_gpt.RunError, match=r"2 shard\(s\) like .*t_0\.bin hold 6000 tokens"):
        while True:
            stream.next_batch()
    stream = make_stream(tmp_path, tiny)
    stream.check_enough(10)
    assert stream.position() == (0, 0)
    with pytest.raises(train_gpt.RunError, match="add shards"):
        stream.check_enough(100)
    with pytest.raises(train_gpt.RunError, match="ran out"):
        stream.check_enough(15)  # 5,760 of 6,000 tokens, but cut documents give fewer


@pytest.mark.parametrize("damage,says", [
    (lambda path: path.unlink(), "no shard matches"),
    (lambda path: path.write_bytes(b"short"), "ends after 5 bytes, within its header of 1024"),
    (lambda path: path.write_bytes(b"no tokens" * 200), "begins with"),
    (lambda path: write_shard(path, [BOS, 1], magic=7), r"begins with \[7, 1\]"),
    (lambda path: write_shard(path, [BOS, 1], version=2), r"begins with \[20240520, 2\]"),
    (lambda path: write_shard(path, [BOS, 1], count=3), "promises 3 tokens"),
    (lambda path: path.write_bytes(path.read_bytes()[:-2]), "promises 3000 tokens"),
])
def test_a_bad_shard_is_named(tmp_path, damage, says):
    path = write_shard(tmp_path / "bad.bin", some_documents(0, 3000))
    damage(path)
    with pytest.raises(train_gpt.RunError, match=says) as error:
        train_gpt.find_shards(str(tmp_path / "*.bin"))
    assert str(tmp_path) in str(error.value)


def test_shards_of_two_encodings_are_refused(tmp_path):
    write_shard(tmp_path / "a.bin", [BOS, 1])
    write_shard(tmp_path / "b.bin", [256, 1], vocab_size=257, bos_id=256)
    with pytest.raises(train_gpt.RunError, match="share one encoding"):
        train_gpt.find_shards(str(tmp_path / "*.bin"))


def test_a_header_that_says_nothing_means_gpt2(tmp_path):
    shard = train_gpt.read_header(write_shard(tmp_path / "a.bin", [50256, 1], vocab_size=0, bos_id=0))
    assert (shard.vocab_size, shard.bos_id, shard.tokens) == (50257, 50256, 2)


def test_a_stream_without_bos_is_refused(tmp_path, tiny):
    write_shard(tmp_path / "t.bin", [1, 2, 3] * 500)
    shards = train_gpt.find_shards(str(tmp_path / "t.bin"))
    with pytest.raises(train_gpt.RunError, match="no token is BOS"):
        train_gpt.Stream(shards, tiny).next_batch()
    with pytest.raises(train_gpt.RunError, match="no token is BOS"):
        train_gpt.validation_sequences(shards, 0, 64)


def test_validation_reads_the_first_tokens_in_order_across_shards(tmp_path):
    whole = np.concatenate([some_documents(1, 100), some_documents(2, 100)])
    write_shard(tmp_path / "v_0.bin", whole[:100])
    write_shard(tmp_path / "v_1.bin", whole[100:])
    shards = train_gpt.find_shards(str(tmp_path / "v_*.bin"))
    some = train_gpt.validation_sequences(shards, 128, 32)
    assert some.shape == (4, 33) and np.array_equal(some[:, :-1].ravel(), whole[:128]) and np.array_equal(some[:, 1:].ravel(), whole[1:129])
    every = train_gpt.validation_sequences(shards, 0, 64)
    targets = every[:, 1:].ravel()
    assert every.shape == (4, 65) and np.array_equal(targets[:199], whole[1:]) and (targets[199:] == -1).all()
    with pytest.raises(train_gpt.RunError, match="needs 257 tokens, 2 .* hold 200"):
        train_gpt.validation_sequences(shards, 256, 64)


def test_a_header_may_say_nothing_of_its_encoding_or_all_of_it(tmp_path):
    assert train_gpt.read_header(write_shard(tmp_path / "a.bin", [BOS], vocab_size=0, bos_id=0))[2:] == (50257, 50256)
    assert train_gpt.read_header(write_shard(tmp_path / "b.bin", [0, 1], vocab_size=10, bos_id=0))[2:] == (10, 0)


def test_a_script_in_a_folder_with_signs_of_a_pattern_finds_its_shards(tmp_path, monkeypatch):
    folder = tmp_path / "mine [1] *x?"
    folder.mkdir()
    path = write_shard(folder / "t_0.bin", [BOS, 1])
    monkeypatch.setattr(train_gpt, "ROOT", folder)
    assert [shard.path for shard in train_gpt.find_shards("t_*.bin")] == [path]
