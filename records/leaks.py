"""The data of a run: is it what the log says, was it what the run trained on, and is validation text in training?

Rules that read the shards; records/verify.py calls them where --data names their folder. A rule returns what shows that
it is kept, and raises Broken or NotCheckable.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

import numpy as np

import logs
import stats

ROOT = Path(__file__).resolve().parent.parent
PASS, FAIL, UNKNOWN = "pass", "fail", "not checkable"
SHOWN = 3  # findings of one rule that are spelled out
HEADER_BYTES, MAGIC = 1024, 20240520
# Validation text in training is sought by what so many tokens in a row hash to, in so many places at most
FINGERPRINT, MOST_PRINTS, LEAST_PRINTS = 32, 1 << 20, 8
CHUNK = 1 << 22
SHARED, UNBROKEN = 0.8, 0.5  # of a document's prints: with tokens changed; in a row, as where it was cut
COINCIDENCES = 1000  # in so many documents one may be: the web holds some pages twice
SHA256 = re.compile("[0-9a-f]{64}")


class NotCheckable(Exception):
    """The evidence for a rule is not there; the message says which."""


class Broken(Exception):
    """A rule is broken; the message says by what."""


def demand(holds, otherwise):
    """Broken, with what is otherwise, unless something holds."""
    if not holds:
        raise Broken(otherwise)


def judged(check, *arguments):
    """(verdict, reason) of a check. Whatever a stranger's log or model makes it raise is a finding too."""
    try:
        return PASS, check(*arguments)
    except (NotCheckable, stats.CannotJudge) as reason:
        return UNKNOWN, str(reason)
    except Broken as reason:
        return FAIL, str(reason)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return (UNKNOWN, f"memory ran out: check it where there is more ({text})") if ran_out(error) else (FAIL, text)


def ran_out(error):
    """Whether an error is one of memory, of which torch has kinds of its own."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error)


def several(findings):
    more = f"; and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    return "; ".join(findings[:SHOWN]) + more


def open_shard(path):
    """(uint16 [tokens], not yet read; vocabulary, BOS) of a shard. Broken if it is none."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    size = os.path.getsize(path)
    if len(header) < HEADER_BYTES // 4 or header[0] != MAGIC or size != HEADER_BYTES + 2 * int(header[2]) or \
            size == HEADER_BYTES:
        raise Broken(f"{logs.printable(path)} is no shard of tokens")
    encoding = header[3:5].tolist() if header[3] else (50257, 50256)  # as train_gpt.py reads it: GPT-2's, unless stated
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES), *encoding


def find_shard(shard, folder):
    """The file of a shard that a log states. NotCheckable if it is not there, Broken if it holds something else."""
    path, digest = Path(folder) / os.path.basename(shard["name"]), hashlib.sha256()
    try:
        if not path.is_file() and path.exists():
            raise ValueError("no regular file")
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:  # a name may be none that a file can have
        raise NotCheckable(f"{logs.printable(path)}: {getattr(error, 'strerror', None) or error}; name the folder of "
                           "the shards with --data") from None
    if digest.hexdigest() != shard["sha256"]:
        raise Broken(f"{path} has SHA-256 {digest.hexdigest()[:8]}..., the log states {shard['sha256'][:8]}...")
    if open_shard(path)[0].size != shard["tokens"]:
        raise Broken(f"{path} holds {open_shard(path)[0].size:,} tokens, the log states {shard['tokens']:,}")
    return path


def find_shards(shards, folder):
    """{split: files} of the shards that a log states, as {split: list of them}."""
    return {split: [find_shard(shard, folder) for shard in of_split] for split, of_split in shards.items()}


def check_leaks(shards, val_tokens, folder):
    """Is a scored document in training, whole, in part, or with tokens changed? Reads the shards piece by piece."""
    paths = find_shards(shards, folder)
    val = [open_shard(path) for path in paths["val"]]
    tokens = np.concatenate([tokens for tokens, _, _ in val])[:val_tokens + 1]
    opens = tokens == val[0][2]
    document = np.cumsum(opens) - 1
    last = document[FINGERPRINT - 1:]
    hashes, first = fingerprints(tokens), document[:len(last)]
    within = (first == last) & (first >= 0) & ~opens[:len(last)]
    limit = np.uint64(2 ** 64 // max(1, -(-int(within.sum()) // MOST_PRINTS)) - 1)  # the same part of every text
    asked = np.flatnonzero(within & (hashes <= limit))
    values, which = np.unique(hashes[asked], return_inverse=True)
    count = np.bincount(first[asked], minlength=int(opens.sum()))
    place = np.full(len(values), -1)  # of the first occurrence: shard and position in one number
    for i, path in enumerate(paths["train"] if len(values) else ()):
        shard, _, _ = open_shard(path)
        for begin in range(0, len(shard), CHUNK):
            prints = fingerprints(shard[begin:begin + CHUNK + FINGERPRINT - 1])
            at = np.flatnonzero(prints <= limit)[::-1]
            near = np.minimum(np.searchsorted(values, prints[at]), len(values) - 1)
            new = (values[near] == prints[at]) & (place[near] < 0)
            place[near[new]] = (i << 40) + begin + at[new]
    owner, found = first[asked], place[which] >= 0
    row = np.cumsum(~found | (np.diff(owner, prepend=-1) > 0))  # the same for prints found one after another
    longest = np.zeros(len(count))
    np.maximum.at(longest, owner, np.bincount(row, weights=found)[row])
    share = np.bincount(owner, weights=found, minlength=len(count)) / np.maximum(count, 1)
    sought = count >= LEAST_PRINTS
    leaked = np.flatnonzero(sought & ((share >= SHARED) | (longest >= UNBROKEN * count)))
    text, number = "the shards are those of the log; ", int(sought.sum())
    if len(leaked):
        there = place[which[found & (owner == leaked[0])][0]]
        text += (f"{len(leaked)} of {number} validation documents are in the training data; {share[leaked[0]]:.0%} of "
                 f"document {leaked[0]} is in {paths['train'][there >> 40].name} from token {there & (1 << 40) - 1} on")
    if len(leaked) > number // COINCIDENCES:
        raise Broken(text)
    none = f"none of {number} validation documents is in training ({len(sought) - number} short ones were not sought)"
    return text + (": not more than chance may bring" if len(leaked) else none)


def fingerprints(tokens):
    """uint64 hash of every FINGERPRINT tokens in a row: [n] -> [n - FINGERPRINT + 1]. Each turn doubles the length."""
    prints, length, factor = tokens.astype(np.uint64) + np.uint64(1), 1, 0x9E3779B97F4A7C15
    while length < FINGERPRINT:
        prints = prints[:-length] * np.uint64(factor) + prints[length:]
        length, factor = 2 * length, factor * factor % 2 ** 64
    return prints


# What the run read

def check_replay(config, shards, steps, end, folder):
    """Do the declared shards, packed by this checkout's train_gpt.py, give the digest of tokens that the log states?"""
    stated = end.get("train_digest") or end.get("train_sha256")
    paths = find_shards({"train": shards["train"]}, folder)["train"]
    sys.path.append(str(ROOT))
    import train_gpt
    try:
        old = "train_digest" not in end
        config = train_gpt.config_of(in_new_words(config) if old else config)
        seen = digest_of_batches(train_gpt, config, paths, steps, old)
    except train_gpt.RunError as error:
        raise Broken(f"the declared shards do not give {steps} batches: {error}") from None
    except (TypeError, KeyError) as error:
        raise NotCheckable(f"this checkout's train_gpt.py does not take the log's config ({error}); check out the "
                           "revision that the log states, and verify there") from None
    if seen != stated:
        raise Broken(f"{steps} batches of the declared shards have digest {seen[:8]}..., the log states "
                     f"{stated[:8]}...: it trained on something else, or packs its batches in another way than this "
                     "train_gpt.py")
    return f"{steps} batches of the declared shards, packed anew, have the digest {stated[:8]}... of the log"


def in_new_words(config):
    """What decides the batches in a config of November 2026, when its names were others."""
    same = {name: config[name] for name in ("seed", "long_documents", "shuffle", "num_steps")}
    return {**same, "micro_batch_tokens": config["micro_tokens"], "max_document_tokens": config["max_len"],
            "micro_batches": config["batch_tokens"] // config["micro_tokens"], "stages": "until long_window; 1 3"}


def digest_of_batches(train_gpt, config, paths, steps, by_place):
    """A run's train_digest, which the stream keeps: that of one rank is that of any number. by_place: an older run's
    train_sha256, where each place in a batch has a digest over all steps, and they are hashed together."""
    stream = train_gpt.Stream([train_gpt.read_header(path) for path in paths], config)
    places = [hashlib.sha256() for _ in range(config.micro_batches)]
    try:
        for step in range(steps):
            for place, tokens in zip(places, stream.next_batch(train_gpt.plan_of(config, step))):
                place.update(tokens)
    finally:
        stream.close()
    joined = b"".join(place.digest() for place in places)
    return hashlib.sha256(joined).hexdigest() if by_place else f"{stream.digest:064x}"
