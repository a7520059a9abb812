"""Shards, packing of documents, the stream of batches, and damaged input."""

import base64
import dataclasses
import hashlib
import os
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import train_gpt
from conftest import some_documents, write_shard
from train_gpt import Stage

BOS = 63


def lengths_to_tokens(lengths):
    """Make documents of BOS and numbers that occur once."""
    tokens = np.arange(sum(lengths)) + 100
    tokens[np.cumsum(lengths) - lengths] = BOS
    return tokens.astype(np.uint16)


def plain_documents(tokens, longest, split=False):
    """Limit documents to `longest` tokens in plain Python: drop the remaining tokens, or split
    them off with BOS as the first token."""
    documents = []
    for token in tokens.tolist():
        if token == BOS:
            documents.append([])
        if documents:
            documents[-1].append(token)
    if not split:
        return [document[:longest] for document in documents]
    return [
        [BOS, *document[i + 1 : i + longest]]
        for document in documents
        for i in range(0, len(document), longest)
    ]


def plain_batch(documents, at, micro_batches, tokens):
    """Pack documents in plain Python until each micro-batch holds tokens + 1; cut the last
    document of each to fit.

    Return the micro-batches and the next document; (None, at) if the documents run out.
    """
    batch = []
    pointer = at
    for _ in range(micro_batches):
        held = []
        while len(held) < tokens + 1:
            if pointer == len(documents):
                return None, at
            held += documents[pointer][: tokens + 1 - len(held)]
            pointer += 1
        batch.append(held)
    return batch, pointer


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=20, max_size=80),
    longest=st.integers(2, 20),
    tokens=st.integers(5, 40),
    micro_batches=st.sampled_from([1, 2, 3, 8]),
    split=st.booleans(),
)
def test_packing_equals_plain_python_to_the_last_batch(
    lengths, longest, tokens, micro_batches, split
):
    stream = lengths_to_tokens(np.array(lengths))
    documents, _ = train_gpt.limit_documents(train_gpt.index_documents(stream, BOS), longest, split)
    plain = plain_documents(stream, longest, split)
    offsets = np.append(0, np.cumsum(documents.lengths))
    first = 0
    at = 0
    while True:
        taken = train_gpt.pack(offsets, first, micro_batches, tokens)
        expected, at = plain_batch(plain, at, micro_batches, tokens)
        assert (taken is None) == (expected is None)
        if taken is None:
            break
        assert [
            train_gpt.fill_micro_batch(documents, BOS, *one).tolist() for one in taken
        ] == expected
        first = taken[-1][1] + 1
        assert first == at


def make_stream(tmp_path, tiny, rank=0, ranks=1, shards=((1, 3000), (2, 3000)), **changes):
    for i, (seed, tokens) in enumerate(shards):
        write_shard(tmp_path / f"t_{i}.bin", some_documents(seed, tokens))
    config = dataclasses.replace(tiny, **changes)
    return train_gpt.Stream(train_gpt.find_shards(str(tmp_path / "t_*.bin")), config, rank, ranks)


def read(stream, steps=None):
    """Read the batches of some steps, or all batches until the data run out."""
    batches = []
    try:
        for step in range(steps or 10**6):
            batches.append(np.stack(stream.next_batch(train_gpt.plan_of(stream.config, step))))
    except train_gpt.RunError as error:
        if steps or "ran out" not in str(error):
            raise
    return batches


def digest_of(batches):
    """Compute a run's digest a second time: sum the hashes of step, index and tokens of all
    micro-batches."""
    total = 0
    for step, batch in enumerate(batches):
        for place, tokens in enumerate(batch):
            text = struct.pack("<QQ", step, place) + np.asarray(tokens, dtype="<u2").tobytes()
            total += int(hashlib.sha256(text).hexdigest(), 16)
    return total % 2**256


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_read_disjoint_parts_of_the_same_batches_with_one_digest(tmp_path, tiny, ranks):
    growing = dict(
        stages=(Stage(until=3, micro_batches=12), Stage(micro_batches=24)), micro_batch_tokens=15
    )
    alone = make_stream(tmp_path, tiny, **growing)
    batches = read(alone, 6)
    assert [len(batch) for batch in batches] == [12] * 3 + [24] * 3 and alone.position.shard == 1
    streams = [make_stream(tmp_path, tiny, rank, ranks, **growing) for rank in range(ranks)]
    together = [read(stream, 6) for stream in streams]
    for step, batch in enumerate(batches):
        assert np.array_equal(np.concatenate([mine[step] for mine in together]), batch)
    assert alone.digest == digest_of(batches) == sum(stream.digest for stream in streams) % 2**256
    assert {stream.position for stream in streams} == {alone.position}


@pytest.mark.parametrize("split", ["cut", "split"])
@pytest.mark.parametrize(
    "stages",
    [
        (Stage(until=2, micro_batches=2), Stage(until=4, micro_batches=4), Stage(micro_batches=8)),
        (
            Stage(until=3, max_document_tokens=9),
            Stage(until=5, max_document_tokens=40),
            Stage(max_document_tokens=20),
        ),
        (
            Stage(until=5, max_document_tokens=30, micro_batches=3),
            Stage(max_document_tokens=9, micro_batches=5),
        ),
    ],
    ids=["batches", "lengths", "both"],
)
def test_batches_and_lengths_that_change_by_stage_equal_plain_python(tmp_path, tiny, stages, split):
    """The first batch of a new length begins with the first document that no batch has read;
    unread pieces of a split document are skipped. Documents are first split at the longest length
    of all stages."""
    stream = make_stream(
        tmp_path, tiny, stages=stages, long_documents=split, shards=((4, 2500), (5, 9000))
    )
    tokens = [train_gpt.load_tokens(shard) for shard in stream.shards]
    longest = max(train_gpt.plan_of(stream.config, step).max_document_tokens for step in range(12))

    def documents(shard, at):
        """List the shard's documents as lists of pieces of at most `at` tokens."""
        whole = plain_documents(
            tokens[shard], longest if split == "split" else 10**6, split == "split"
        )
        return [plain_documents(np.array(document), at, split == "split") for document in whole]

    # begun: documents of the shard that batches have read from; `at` counts pieces of one length
    shard = 0
    begun = 0
    at = 0
    pieces = None
    length = None
    for step in range(12):
        plan = train_gpt.plan_of(stream.config, step)
        if plan.max_document_tokens != length:
            length = plan.max_document_tokens
            groups = documents(shard, length)
            pieces = [piece for group in groups for piece in group]
            owner = [i for i, group in enumerate(groups) for _ in group]
            at = owner.index(begun) if begun else 0
        expected, after = plain_batch(pieces, at, plan.micro_batches, 48)
        if expected is None:
            shard = shard + 1
            begun = 0
            groups = documents(shard, length)
            pieces = [piece for group in groups for piece in group]
            owner = [i for i, group in enumerate(groups) for _ in group]
            expected, after = plain_batch(pieces, 0, plan.micro_batches, 48)
        at = after
        begun = owner[after - 1] + 1
        assert [list(map(int, one)) for one in stream.next_batch(plan)] == expected, step


def test_a_stream_continues_from_a_saved_position(tmp_path, tiny):
    """Within a length, and just before the length changes."""
    for stages in (
        (Stage(),),
        (Stage(until=3, max_document_tokens=12), Stage(max_document_tokens=30)),
    ):
        stream = make_stream(tmp_path, tiny, stages=stages, long_documents="split")
        read(stream, 3)
        position = train_gpt.Position(*stream.position)
        following = [
            stream.next_batch(train_gpt.plan_of(stream.config, step)) for step in range(3, 9)
        ]
        other = make_stream(tmp_path, tiny, stages=stages, long_documents="split")
        other.position = position
        for step, batch in enumerate(following, 3):
            assert np.array_equal(
                np.stack(other.next_batch(train_gpt.plan_of(stream.config, step))), np.stack(batch)
            )
        assert other.position == stream.position != position


def test_the_seed_decides_the_shuffled_order(tmp_path, tiny):
    def first(seed, shuffle=True):
        return read(make_stream(tmp_path, tiny, shuffle=shuffle, seed=seed), 1)[0]

    assert np.array_equal(first(1), first(1)) and not np.array_equal(first(1), first(2))
    assert np.array_equal(first(1, False), first(2, False)) and not np.array_equal(
        first(1), first(1, False)
    )


def test_any_stretch_of_an_even_order_samples_the_whole_shard(tmp_path, tiny):
    write_shard(tmp_path / "t_0.bin", np.tile([BOS, 1, 2], 1000))

    def order(seed, even):
        config = dataclasses.replace(tiny, shuffle=True, even_order=even, seed=seed)
        return (
            train_gpt.Stream(train_gpt.find_shards(str(tmp_path / "t_0.bin")), config)
            ._load(0)
            .starts
            // 3
        )

    # of 100 consecutive documents, 10 should come from each tenth of the shard
    def unevenness(order):
        return max(
            np.abs(np.bincount(order[i : i + 100] // 100, minlength=10) - 10).max()
            for i in range(0, 901, 50)
        )

    for seed in (1, 2):
        assert sorted(order(seed, True)) == sorted(order(seed, False)) == list(range(1000))
        assert unevenness(order(seed, True)) <= 2 and unevenness(order(seed, False)) > 5
    assert not np.array_equal(order(1, True)[:10], order(2, True)[:10]), (
        "the seed decides the phase"
    )


def test_the_next_shard_is_loaded_in_the_background(tmp_path, tiny, monkeypatch):
    loads = []
    load = train_gpt.load_tokens

    def noted(shard):
        if shard.path.parent == tmp_path:  # a stream of an earlier test may still be loading
            loads.append((shard.path.name, threading.current_thread().name))
        return load(shard)

    monkeypatch.setattr(train_gpt, "load_tokens", noted)
    stream = make_stream(tmp_path, tiny)
    read(stream, 1)
    stream.loaded[1].result(timeout=600)
    assert [name for name, _ in loads] == ["t_0.bin", "t_1.bin"] and stream.position.shard == 0
    assert all(thread.startswith("load-shard") for _, thread in loads)


def test_an_error_of_the_loading_thread_reaches_the_reader(tmp_path, tiny):
    stream = make_stream(tmp_path, tiny)
    write_shard(tmp_path / "t_1.bin", [BOS, 64] + [1] * 2998)
    with pytest.raises(train_gpt.RunError, match=r"t_1\.bin: token 64, but the vocabulary has 64"):
        read(stream)


def test_a_shard_that_changes_during_the_run_is_refused(tmp_path, tiny):
    """Also if its size stays the same."""
    make_stream(tmp_path, tiny)
    shards = train_gpt.with_digests(
        train_gpt.find_shards(str(tmp_path / "t_*.bin")), train_gpt.Comm(), 0
    )
    assert [shard.sha256 for shard in shards] == [
        hashlib.sha256(shard.path.read_bytes()).hexdigest() for shard in shards
    ]
    for other in ((9, 3000), (2, 3001)):
        write_shard(tmp_path / "t_1.bin", some_documents(*other))
        with pytest.raises(
            train_gpt.RunError, match="t_1.bin: the file has changed since the run began"
        ):
            read(train_gpt.Stream(shards, tiny))
    write_shard(tmp_path / "t_1.bin", some_documents(2, 3000))
    assert len(read(train_gpt.Stream(shards, tiny))) == 10


def hashing(comm, pattern):
    """Return the names of the files that this rank hashes, and the shards' digests."""
    done = []
    file_sha256 = train_gpt.file_sha256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_gpt, "file_sha256", lambda path: done.append(path.name) or file_sha256(path)
        )
        shards = train_gpt.with_digests(train_gpt.find_shards(pattern), comm, comm.rank)
    return sorted(done), [shard.sha256 for shard in shards]


def test_one_rank_of_a_host_hashes_the_shards(tmp_path, on_ranks):
    for i in range(5):
        write_shard(tmp_path / f"t_{i}.bin", some_documents(i, 300))
    (first, digests), (second, same) = on_ranks(2, hashing, str(tmp_path / "t_*.bin"))
    assert first == [f"t_{i}.bin" for i in range(5)] and second == []
    assert (
        digests
        == same
        == [
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(tmp_path.glob("t_*.bin"))
        ]
    )


def test_each_epoch_reads_the_shards_in_another_order(tmp_path, tiny):
    """With three epochs the first is as with one epoch."""
    changes = dict(
        shuffle=True,
        long_documents="split",
        max_document_tokens=49,
        micro_batch_tokens=48,
        micro_batches=1,
    )
    shards = ((1, 2000), (2, 2000))
    once, thrice = (
        read(make_stream(tmp_path, tiny, shards=shards, epochs=epochs, **changes))
        for epochs in (1, 3)
    )
    assert all(np.array_equal(a, b) for a, b in zip(once, thrice)) and 2.8 * len(once) < len(
        thrice
    ) < 3.2 * len(once)
    again = thrice[len(once) : 2 * len(once)]
    assert not any(np.array_equal(a, b) for a, b in zip(once, again))


@pytest.mark.parametrize(
    "steps, changes, says",
    [
        (10, {}, ""),
        (100, {}, "t_0.bin hold 6000 tokens, and 100 steps read at least 38400; add shards"),
        (15, {}, "ran out"),  # 5,760 of 6,000 tokens, but cut documents lose some
        (20, {}, "20 steps read at least 7680; add shards"),
        (20, dict(epochs=2), ""),
        (
            31,
            dict(epochs=2),
            r"ran out: 2 shard\(s\) like .*t_0\.bin, read 2 times, hold 12000 tokens",
        ),
        (20, dict(stages=(Stage(micro_batches=4),)), ""),
        (18, dict(stages=(Stage(until=1 / 2, micro_batches=1), Stage(micro_batches=8))), ""),
        (
            28,
            dict(stages=(Stage(until=1 / 2, micro_batches=1), Stage(micro_batches=8))),
            "28 steps read at least 6048",
        ),
        (
            10,
            dict(stages=(Stage(until=1 / 2, max_document_tokens=40), Stage(max_document_tokens=6))),
            "ran out",
        ),
    ],
)
def test_too_few_data_are_refused_before_the_run(tmp_path, tiny, steps, changes, says):
    stream = make_stream(tmp_path, tiny, num_steps=steps, **changes)
    if says:
        with pytest.raises(train_gpt.RunError, match=says):
            stream.check_enough()
        return
    stream.check_enough()
    assert stream.position == train_gpt.Position() and stream.digest == 0
    assert len(read(stream, steps)) == steps


@pytest.mark.parametrize(
    "damage,says",
    [
        (lambda path: path.unlink(), "no shard matches"),
        (
            lambda path: path.write_bytes(b"short"),
            r"bad.bin: not a complete shard: 5 bytes that .* Delete it, then fetch or create it"
            r" again",
        ),
        (lambda path: path.write_bytes(b"no tokens" * 200), "not a complete shard"),
        (lambda path: write_shard(path, [BOS, 1], magic=7), r"begin with \[7, 1, "),
        (lambda path: write_shard(path, [BOS, 1], version=2), r"begin with \[20240520, 2, "),
        (
            lambda path: write_shard(path, [BOS, 1], count=3),
            r"1028 bytes that begin with \[20240520, 1, 3\].* has 1030 bytes",
        ),
        (
            lambda path: write_shard(path, [BOS, 1], vocab_size=2**31 - 1),
            r"vocab_size=2147483647, bos_id=63\); a shard",
        ),
        (
            lambda path: write_shard(path, [BOS, 1], vocab_size=-1),
            r"vocab_size=-1, bos_id=63\); a shard",
        ),
        (
            lambda path: write_shard(path, [BOS, 1], bos_id=64),
            r"vocab_size=64, bos_id=64\); a shard",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-2]),
            r"7022 bytes that .* has 7024 bytes",
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), "bad.bin: not a regular file; delete it"),
        (lambda path: (path.unlink(), path.mkdir()), "bad.bin: not a regular file; delete it"),
    ],
)
def test_the_error_names_a_damaged_shard(tmp_path, damage, says):
    path = write_shard(tmp_path / "bad.bin", some_documents(0, 3000))
    damage(path)
    with pytest.raises(train_gpt.RunError, match=says) as error:
        train_gpt.find_shards(str(tmp_path / "*.bin"))
    assert str(tmp_path) in str(error.value)


def test_shards_of_two_encodings_are_refused(tmp_path):
    write_shard(tmp_path / "a.bin", [BOS, 1])
    write_shard(tmp_path / "b.bin", [256, 1], vocab_size=257, bos_id=256)
    with pytest.raises(train_gpt.RunError, match="use shards of one encoding"):
        train_gpt.find_shards(str(tmp_path / "*.bin"))


def test_a_stream_without_bos_is_refused(tmp_path, tiny):
    write_shard(tmp_path / "t.bin", [1, 2, 3] * 500)
    shards = train_gpt.find_shards(str(tmp_path / "t.bin"))
    with pytest.raises(train_gpt.RunError, match="no BOS"):
        train_gpt.Stream(shards, tiny).next_batch(train_gpt.plan_of(tiny, 0))
    with pytest.raises(train_gpt.RunError, match="no BOS"):
        train_gpt.validation_sequences(shards, 0, 64)


def test_validation_reads_the_first_tokens_in_order_across_shards(tmp_path):
    whole = np.concatenate([some_documents(1, 100), some_documents(2, 100)])
    write_shard(tmp_path / "v_0.bin", whole[:100])
    write_shard(tmp_path / "v_1.bin", whole[100:])
    shards = train_gpt.find_shards(str(tmp_path / "v_*.bin"))
    some = train_gpt.validation_sequences(shards, 128, 32)
    assert some.shape == (4, 33)
    assert np.array_equal(some[:, :-1].ravel(), whole[:128]) and np.array_equal(
        some[:, 1:].ravel(), whole[1:129]
    )
    held_out = train_gpt.validation_sequences(shards, 64, 32, skip=128)
    assert np.array_equal(held_out[:, :-1].ravel(), whole[128:192])
    every = train_gpt.validation_sequences(shards, 0, 64)
    targets = every[:, 1:].ravel()
    assert (
        every.shape == (4, 65)
        and np.array_equal(targets[:199], whole[1:])
        and (targets[199:] == -1).all()
    )
    with pytest.raises(train_gpt.RunError, match="needs 257 tokens, and 2 .* hold 200"):
        train_gpt.validation_sequences(shards, 256, 64)
    with pytest.raises(train_gpt.RunError, match="needs 257 tokens, and 2 .* hold 200"):
        train_gpt.validation_sequences(shards, 128, 64, skip=128)
    write_shard(tmp_path / "empty.bin", [])
    with pytest.raises(train_gpt.RunError, match="needs 2 tokens, and 1 .* hold 0"):
        train_gpt.validation_sequences(train_gpt.find_shards(str(tmp_path / "empty.bin")), 0, 64)


def test_a_header_may_lack_an_encoding(tmp_path):
    assert train_gpt.read_header(
        write_shard(tmp_path / "a.bin", [BOS], vocab_size=0, bos_id=0)
    ).encoding == (50257, 50256)
    assert train_gpt.read_header(
        write_shard(tmp_path / "b.bin", [0, 1], vocab_size=10, bos_id=0)
    ).encoding == (10, 0)


def test_the_script_s_folder_may_have_wildcards_in_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "mine [1] *x?"
    folder.mkdir()
    path = write_shard(folder / "t_0.bin", [BOS, 1])
    monkeypatch.setattr(train_gpt, "ROOT", folder)
    assert [shard.path for shard in train_gpt.find_shards("t_*.bin")] == [path]


def test_bits_per_byte_count_the_text_of_targets_alone(tmp_path):
    """BOS and padding are no text; GPT-2's tokens have the lengths that data/ writes."""
    targets = np.array([[0, 65, 255, 256, -1]])
    path = tmp_path / "v.bin"
    of_bytes = train_gpt.Shard(path, 5, train_gpt.Encoding(257, 256))
    assert train_gpt.count_bytes(of_bytes, targets) == 3
    of_gpt2 = train_gpt.Shard(path, 5, train_gpt.Encoding(50257, 50256))
    assert train_gpt.count_bytes(of_gpt2, targets) == 0
    words = (base64.b64encode(b"x" * (1 + i % 3)).decode() for i in range(300))
    (tmp_path / "gpt2.tiktoken").write_text(
        "".join(f"{word} {i}\n" for i, word in enumerate(words))
    )
    assert train_gpt.count_bytes(of_gpt2, targets) == 1 + 3 + 1 + 2
