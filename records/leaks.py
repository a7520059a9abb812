"""Check the data of a run: does it match the log, did the run train on it, and does training
contain validation text?

records/verify.py calls these rules for --data. They return why they hold, or raise Broken or
CannotJudge."""

import contextlib
import dataclasses
import functools
import importlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

import logs
from logs import UserError as CannotJudge, plural

ROOT = Path(__file__).resolve().parent.parent
PASS = "pass"
FAIL = "fail"
UNKNOWN = "not checkable"
STOPPED = "the rule's own code stopped"
SHOWN = 3  # findings of one rule that are printed
# Validation text in training is found by hashes of 32 tokens in a row, at no more than this many
# positions
FINGERPRINT = 32
MOST_PRINTS = 1 << 20
LEAST_PRINTS = 8
# tokens of a shard that are read at a time, and at most
CHUNK = 1 << 22
FURTHEST = 1 << 40
# part of a document's hashes: in total (some tokens changed); in a row (a part copied)
SHARED = 0.8
UNBROKEN = 0.5
# one in so many documents may be a duplicate
COINCIDENCES = 1000
NUMBER = (int, float)
SHA256 = re.compile("[0-9a-f]{64}")


class Broken(Exception):
    """A rule is broken; the message says how. CannotJudge: it cannot be checked."""


require = functools.partial(logs.require, error=Broken)
checkable = logs.require


def judged(check, *arguments):
    """Return (verdict, reason) of a check. Another exception, which an untrusted log may cause,
    accuses nobody: STOPPED."""
    try:
        return PASS, check(*arguments)
    except CannotJudge as reason:
        return UNKNOWN, str(reason)
    except Broken as reason:
        return FAIL, str(reason)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return UNKNOWN, (
            f"out of memory: check it on a larger machine ({text})"
            if ran_out(error)
            else f"{STOPPED} ({text})"
        )


def ran_out(error):
    """Return whether an error means out of memory; torch has several kinds."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "allocate memory" in str(error)
    )


def is_number(x):
    """Return whether x is a finite number of moderate size, and no bool."""
    return isinstance(x, NUMBER) and not isinstance(x, bool) and abs(x) < 1e15


join_findings = functools.partial(logs.some, most=SHOWN, between="; ")


def trainer(program="train_gpt.py"):
    """Import a program of this checkout when needed: importing torch takes seconds."""
    sys.path.append(str(ROOT))
    try:
        return importlib.import_module(program.removesuffix(".py"))
    except Exception as error:  # no rule is broken by it
        sys.exit(
            logs.refuse(
                "verify.py",
                f"{ROOT / program} cannot be imported ({type(error).__name__}: {error}), "
                "and the rules need it; mend it, or use another checkout",
            )
        )


@functools.cache
def source_of_checkout(program="train_gpt.py"):
    """Return the source of a program of this checkout, as its log has it. "" if there is no such
    program."""
    return logs.source_in(ROOT, program) if (ROOT / program).exists() else ""


def program_of(source):
    """Return the name of the file that a source runs."""
    return next(iter(logs.files_of(source)))


def write_files(folder, source):
    """Write the files of a source; return the path of the program."""
    for name, text in logs.files_of(source).items():
        Path(folder, name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return Path(folder, program_of(source))


def open_shard(path):
    """Return (memory-mapped uint16 [tokens], Encoding) of a shard."""
    shard = trainer().read_header(Path(path))
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * trainer().HEADER_INTS), shard.encoding


def shards_of(e):
    """Return {split: shards} from the log of run e. Raise Broken unless each states name, tokens
    and SHA-256."""
    lists = {split: e.get(f"start.shards.{split}", list) for split in ("train", "val")}
    for split, shards in lists.items():
        for shard in shards or [None]:
            stated = (
                isinstance(shard, dict)
                and SHA256.fullmatch(str(shard.get("sha256")))
                and isinstance(shard.get("name"), str)
                and is_number(shard.get("tokens"))
            )
            require(
                stated,
                f"a {split} shard is stated without name, tokens and SHA-256:"
                f" {json.dumps(shard)[:80]}",
            )
    return lists


def find_shard(shard, folder):
    """Return the file of a shard that a log states. Raise CannotJudge if the reader has another
    file or none."""
    path = Path(folder) / os.path.basename(shard["name"])
    digest = hashlib.sha256()
    stated = shard["sha256"]
    try:
        if not path.is_file() and path.exists():
            raise ValueError("no regular file")
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:  # the name in the log may be invalid
        raise CannotJudge(
            f"{logs.printable(path)}: {getattr(error, 'strerror', None) or error}; name the folder"
            " of the shards with --data"
        ) from None
    if digest.hexdigest() != stated:
        raise CannotJudge(
            f"{path} has SHA-256 {digest.hexdigest()[:8]}..., the log states {stated[:8]}...: not"
            " the run's data; fetch or create the shards as the run did, and name their folder"
            " with --data"
        )
    held = len(open_shard(path)[0])
    require(
        held == shard["tokens"], f"{path} holds {held:,} tokens, the log states {shard['tokens']:,}"
    )
    return path


def find_shards(e, split, folder):
    return [find_shard(shard, folder) for shard in shards_of(e)[split]]


def check_leaks(e, folder):
    """Check that no validation document is in the training data: complete or in part."""
    paths = find_shards(e, "train", folder)
    val = [open_shard(path) for path in find_shards(e, "val", folder)]
    tokens = np.concatenate([tokens for tokens, _ in val])[: e.get("end.val_tokens", int) + 1]
    opens = tokens == val[0][1].bos_id
    prints = fingerprints(tokens)
    document = np.cumsum(opens) - 1
    first = document[: len(prints)]
    last = document[FINGERPRINT - 1 :]
    asked = np.flatnonzero((first == last) & (first >= 0) & ~opens[: len(prints)])
    # samples the same part of every text
    limit = np.uint64(2**64 // max(1, -(-len(asked) // MOST_PRINTS)) - 1)
    asked = asked[prints[asked] <= limit]
    values, which = np.unique(prints[asked], return_inverse=True)
    places = first_places(values, limit, paths)[which]
    owners = first[asked]
    number = 0
    leaked = []
    for of_document in np.split(np.arange(len(asked)), np.flatnonzero(np.diff(owners)) + 1):
        if len(of_document) >= LEAST_PRINTS:
            number += 1
            found = places[of_document] >= 0
            gaps = np.flatnonzero(np.concatenate([[True], ~found, [True]]))
            if found.mean() >= SHARED or np.diff(gaps).max() - 1 >= UNBROKEN * len(found):
                shard, at = divmod(int(places[of_document][found][0]), FURTHEST)
                leaked.append(
                    f"{found.mean():.0%} of document {owners[of_document[0]]} is in "
                    f"{paths[shard].name} from token {at} on"
                )
    text = (
        f"the shards are those of the log; {len(leaked) or 'none'} of"
        f" {plural(number, 'validation document')} {'are' if len(leaked) > 1 else 'is'} in"
        f" training ({opens.sum() - number} were too short"
        f" to check, and a document with one token in {FINGERPRINT / (1 - SHARED):.0f} changed is not found)"
    )
    require(
        len(leaked) <= number // COINCIDENCES,
        f"{text}; {join_findings(leaked)}",
    )
    return f"{text}; no more than chance allows: {join_findings(leaked)}" if leaked else text


def first_places(values, limit, paths):
    """Return the first position of each hash in these shards, as number of the shard * FURTHEST +
    offset, or -1.

    values: sorted hashes, none above limit. Shards are read in chunks."""
    place = np.full(len(values), -1)
    for number, path in enumerate(paths if len(values) else ()):
        shard, _ = open_shard(path)
        for begin in range(0, len(shard), CHUNK):
            prints = fingerprints(shard[begin : begin + CHUNK + FINGERPRINT - 1])
            at = np.flatnonzero(prints <= limit)
            _, known, met = np.intersect1d(values, prints[at], return_indices=True)
            new = place[known] < 0
            place[known[new]] = number * FURTHEST + begin + at[met[new]]
    return place


def fingerprints(tokens):
    """Hash every FINGERPRINT tokens in a row: [n] -> uint64 [n - FINGERPRINT + 1]. Each turn
    doubles the length."""
    prints = tokens.astype(np.uint64) + np.uint64(1)
    length = 1
    factor = 0x9E3779B97F4A7C15
    while length < FINGERPRINT:
        prints = prints[:-length] * np.uint64(factor) + prints[length:]
        length = 2 * length
        factor = factor * factor % 2**64
    return prints


# The batches of the run


def check_replay(e, folder):
    """Check that the declared shards, packed by this checkout's train_gpt.py, give the token
    digest in the log.

    Where the log's source packs batches by other code, another digest is not checkable."""
    steps = e.get("start.planned.steps", int)
    stated = e.digest("end.train_digest")
    config = e.get("start.config", dict)
    paths = find_shards(e, "train", folder)
    train_gpt = trainer()
    name = program_of(e.run.script)
    checkout = source_of_checkout()
    count = plural(steps, "batch")
    checkable(
        (ROOT / name).exists(),
        f"this checkout has no {name}; verify from a checkout with the source in the log",
    )
    program = trainer(name)
    try:
        # the fields that decide batches; a log may have others that this checkout lacks
        stage, fields = (
            {f.name for f in dataclasses.fields(of)} for of in (program.StageValues, program.Config)
        )
        needed = stage | fields.intersection(
            re.findall(r"\b(?:c|config)\.(\w+)", code_of_batches(checkout))
        )
        config = train_gpt.config_of(
            {name: config[name] for name in needed & config.keys()}, program.Config
        )
        with contextlib.closing(
            train_gpt.Stream([*map(train_gpt.read_header, paths)], config)
        ) as stream:
            for step in range(steps):
                stream.next_batch(train_gpt.plan_of(config, step))
        seen = f"{stream.digest:064x}"  # of all training tokens, the same for any number of ranks
        wrong = seen != stated and (
            f"the digest of {count} of the declared shards is {seen[:8]}..., the log states "
            f"{stated[:8]}..."
        )
    except train_gpt.RunError as error:
        wrong = f"the declared shards do not give {count}: {error}"
    except (TypeError, KeyError) as error:
        raise CannotJudge(
            f"this checkout's train_gpt.py cannot read the log's config ({error}); verify from a "
            "checkout with the source in the log"
        ) from None
    if wrong and code_of_batches(e.run.script) != code_of_batches(checkout):
        raise CannotJudge(
            f"{wrong}; TrainingLoop or the sections `schedule` and `data` of the source in the log"
            " are not this checkout's: see --diff, verify from a checkout with that source, or use"
            " --replay SEED"
        )
    require(
        not wrong,
        f"{wrong}: it trained on something else, or code outside of `schedule`, `data` and"
        " TrainingLoop chooses its batches",
    )
    return (
        f"the digest of {count} of the declared shards, rebuilt here, is the log's: {stated[:8]}..."
    )


def code_of_batches(source):
    """Return the parts of a train_gpt.py that decide its batches, or all of another source."""
    parts = ("\n# schedule\n", "\n# model\n"), ("\nclass TrainingLoop:\n", "\nclass ")
    found = [source.partition(begin)[2].partition(end)[0] for begin, end in parts]
    return "".join(found) if all(found) else source
