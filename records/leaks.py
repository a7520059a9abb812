"""The data of a run: is it what the log says, was it what the run trained on, and is validation text in training?

Rules that read the shards; records/verify.py calls them where --data names their folder. A rule returns what shows that
it is kept, and raises Broken or CannotJudge.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

import logs
from stats import CannotJudge

ROOT = Path(__file__).resolve().parent.parent
PASS, FAIL, UNKNOWN = "pass", "fail", "not checkable"
SHOWN = 3  # findings of one rule that are spelled out
# Validation text in training is sought by what so many tokens in a row hash to, in so many places at most
FINGERPRINT, MOST_PRINTS, LEAST_PRINTS = 32, 1 << 20, 8
CHUNK, FURTHEST = 1 << 22, 1 << 40  # tokens of a shard that are read at a time, and that it may have
SHARED, UNBROKEN = 0.8, 0.5  # of a document's prints: with tokens changed; in a row, as where it was cut
THROUGHOUT = 0.25  # of the prints of each of its quarters: with many tokens changed; a licence stands at its head alone
COINCIDENCES, LIKENESSES = 1000, 20  # in so many documents one may be: the web holds some pages twice, more in forms
NUMBER = (int, float)
SHA256 = re.compile("[0-9a-f]{64}")


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
    except CannotJudge as reason:
        return UNKNOWN, str(reason)
    except Broken as reason:
        return FAIL, str(reason)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return (UNKNOWN, f"memory ran out: check it where there is more ({text})") if ran_out(error) else (FAIL, text)


def ran_out(error):
    """Whether an error is one of memory, of which torch has kinds of its own."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error)


def is_number(x):
    return isinstance(x, NUMBER) and not isinstance(x, bool) and abs(x) < 1e15  # nan and inf are not


def several(findings):
    more = f"; and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    return "; ".join(findings[:SHOWN]) + more


def trainer():
    """This checkout's train_gpt.py. torch takes seconds to import, and most rules need none of it."""
    sys.path.append(str(ROOT))
    import train_gpt
    return train_gpt


def open_shard(path):
    """(uint16 [tokens], not yet read; their Encoding) of a shard."""
    shard = trainer().read_header(Path(path))
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * trainer().HEADER_INTS), shard.encoding


def shards_of(e):
    """{split: its shards}, each with what the log of the run e must state of it."""
    lists = {split: e.get(f"start.shards.{split}", list) for split in ("train", "val")}
    for split, shards in lists.items():
        for shard in shards or [None]:
            stated = isinstance(shard, dict) and SHA256.fullmatch(str(shard.get("sha256"))) and \
                isinstance(shard.get("name"), str) and is_number(shard.get("tokens"))
            demand(stated, f"a {split} shard is stated without name, tokens and SHA-256: {json.dumps(shard)[:80]}")
    return lists


def find_shard(shard, folder):
    """The file of a shard that a log states. CannotJudge if it is not there, Broken if it holds something else."""
    path, digest = Path(folder) / os.path.basename(shard["name"]), hashlib.sha256()
    try:
        if not path.is_file() and path.exists():
            raise ValueError("no regular file")
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:  # a name may be none that a file can have
        raise CannotJudge(f"{logs.printable(path)}: {getattr(error, 'strerror', None) or error}; name the folder of "
                          "the shards with --data") from None
    demand(digest.hexdigest() == shard["sha256"],
           f"{path} has SHA-256 {digest.hexdigest()[:8]}..., the log states {shard['sha256'][:8]}...")
    held = len(open_shard(path)[0])
    demand(held == shard["tokens"], f"{path} holds {held:,} tokens, the log states {shard['tokens']:,}")
    return path


def find_shards(e, split, folder):
    return [find_shard(shard, folder) for shard in shards_of(e)[split]]


def check_leaks(e, folder):
    """Is a scored document in training, whole, in part, or with tokens changed?"""
    paths, val = find_shards(e, "train", folder), [open_shard(path) for path in find_shards(e, "val", folder)]
    tokens = np.concatenate([tokens for tokens, _ in val])[:e.get("end.val_tokens", int) + 1]
    opens, prints = tokens == val[0][1].bos_id, fingerprints(tokens)
    document = np.cumsum(opens) - 1
    first, last = document[:len(prints)], document[FINGERPRINT - 1:]
    asked = np.flatnonzero((first == last) & (first >= 0) & ~opens[:len(prints)])
    limit = np.uint64(2 ** 64 // max(1, -(-len(asked) // MOST_PRINTS)) - 1)  # the same part of every text
    asked = asked[prints[asked] <= limit]
    values, which = np.unique(prints[asked], return_inverse=True)
    places, owners = first_places(values, limit, paths)[which], first[asked]
    number, leaked, alike = 0, [], []
    for of_document in np.split(np.arange(len(asked)), np.flatnonzero(np.diff(owners)) + 1):
        if len(of_document) >= LEAST_PRINTS:
            number += 1
            found = places[of_document] >= 0
            gaps = np.flatnonzero(np.concatenate([[True], ~found, [True]]))
            whole = found.mean() >= SHARED or np.diff(gaps).max() - 1 >= UNBROKEN * len(found)
            if whole or min(part.mean() for part in np.array_split(found, 4)) >= THROUGHOUT:
                shard, at = divmod(int(places[of_document][found][0]), FURTHEST)
                (leaked if whole else alike).append(f"{found.mean():.0%} of document {owners[of_document[0]]} is in "
                                                    f"{paths[shard].name} from token {at} on")
    text = (f"the shards are those of the log; {len(leaked) or 'none'} of {number} validation documents "
            f"{'are' if leaked else 'is'} in training, {len(alike)} with many tokens changed ({opens.sum() - number} "
            f"short ones were not sought, and none is found where one token in {FINGERPRINT} is another)")
    demand(len(leaked) <= number // COINCIDENCES and len(alike) <= max(1, number // LIKENESSES),
           f"{text}; {several(leaked + alike)}")
    return f"{text}; not more than chance may bring: {several(leaked + alike)}" if leaked + alike else text


def first_places(values, limit, paths):
    """Where each of these prints, sorted ones, stands first in these shards: number of the shard * FURTHEST + position;
    -1: nowhere. limit: none is greater. Reads piece by piece."""
    place = np.full(len(values), -1)
    for number, path in enumerate(paths if len(values) else ()):
        shard, _ = open_shard(path)
        for begin in range(0, len(shard), CHUNK):
            prints = fingerprints(shard[begin:begin + CHUNK + FINGERPRINT - 1])
            at = np.flatnonzero(prints <= limit)
            _, known, met = np.intersect1d(values, prints[at], return_indices=True)
            new = place[known] < 0
            place[known[new]] = number * FURTHEST + begin + at[met[new]]
    return place


def fingerprints(tokens):
    """uint64 hash of every FINGERPRINT tokens in a row: [n] -> [n - FINGERPRINT + 1]. Each turn doubles the length."""
    prints, length, factor = tokens.astype(np.uint64) + np.uint64(1), 1, 0x9E3779B97F4A7C15
    while length < FINGERPRINT:
        prints = prints[:-length] * np.uint64(factor) + prints[length:]
        length, factor = 2 * length, factor * factor % 2 ** 64
    return prints


# What the run read

def check_replay(e, folder):
    """Do the declared shards, packed by this checkout's train_gpt.py, give the digest of tokens that the log states?"""
    (steps, _), stated, config, end = e.planned(), e.train_digest(), e.get("start.config", dict), e.get("end", dict)
    paths, train_gpt = find_shards(e, "train", folder), trainer()
    try:
        old = "train_digest" not in end
        config = train_gpt.config_of(in_new_words(config) if old else config)
        seen = digest_of_batches(train_gpt, config, paths, steps, old)
    except train_gpt.RunError as error:
        raise Broken(f"the declared shards do not give {steps} batches: {error}") from None
    except (TypeError, KeyError) as error:
        raise CannotJudge(f"this checkout's train_gpt.py does not take the log's config ({error}); check out the "
                          "revision that the log states, and verify there") from None
    demand(seen == stated, f"{steps} batches of the declared shards have digest {seen[:8]}..., the log states "
           f"{stated[:8]}...: it trained on something else, or packs its batches in another way than this train_gpt.py")
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
