"""Shards, the files of tokens that training reads, and manifest.json, which says what lies beside it.

    header   256 int32: magic, version, number of tokens, size of the vocabulary, BOS id, then zeros
    tokens   uint16; every document opens with BOS

Everything is little-endian. Zero as size and as BOS id stands for GPT-2's: so the community's shards are made.
"""
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
TOKEN_BYTES = 2
SHARD_TOKENS = 100_000_000
MANIFEST = "manifest.json"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DataError(Exception):
    """What a user must hear, in one line: what was seen, what is wanted, what to do next."""


@dataclass(frozen=True)
class Encoding:
    name: str
    vocab_size: int
    bos_id: int


BYTES = Encoding("bytes", vocab_size=257, bos_id=256)
GPT2 = Encoding("gpt2", vocab_size=50257, bos_id=50256)


def sha256_of(path):
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_header(path):
    """Number of tokens in a shard. DataError unless its header is a shard's and its size is what the header says."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4", count=min(3, size // 4))
    if size < HEADER_BYTES or header[0] != MAGIC:
        raise DataError(f"{path}: not a shard of tokens (it does not open with the number {MAGIC})")
    if header[1] != VERSION:
        raise DataError(f"{path}: shard of version {header[1]}, this program reads version {VERSION}")
    tokens = int(header[2])
    if size != HEADER_BYTES + TOKEN_BYTES * tokens:
        raise DataError(f"{path}: {size} bytes, but its header promises {tokens} tokens, "
                        f"which is {HEADER_BYTES + TOKEN_BYTES * tokens} bytes")
    return tokens


def entry_of(path, name, bos_id, sha256=None):
    """What the manifest says of the shard that lies at `path` and is, or will be, called `name`, like x_val_000000.bin."""
    tokens = read_header(path)
    documents = int(np.count_nonzero(np.memmap(path, "<u2", "r", HEADER_BYTES) == bos_id))
    return {"name": name, "split": name.rsplit("_", 2)[1], "tokens": tokens, "documents": documents,
            "bytes": os.path.getsize(path), "sha256": sha256 or sha256_of(path)}


def write_manifest(directory, encoding, source, files, **about):
    """Puts manifest.json in its place whole, or not at all. `files`: entries as entry_of makes them."""
    manifest = {"encoding": encoding.name, "vocab_size": encoding.vocab_size, "bos_id": encoding.bos_id,
                "source": source, **about, "files": sorted(files, key=lambda entry: (entry["split"], entry["name"]))}
    path = partial(Path(directory) / MANIFEST)
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    path.replace(Path(directory) / MANIFEST)


def read_manifest(directory):
    """The manifest of a directory, or None where there is none. DataError if it cannot be understood."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        # What every reader needs; a missing one raises here, not later.
        for entry in manifest["files"]:
            entry["name"], entry["split"], entry["tokens"], entry["bytes"], entry["sha256"]
        return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: not a manifest of shards; remove it and run this again") from None


def is_intact(directory, entry):
    """Whether the shard that a manifest's entry describes is there with that size and that SHA-256."""
    path = Path(directory) / entry["name"]
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["sha256"]


def print_shards(directory, entries):
    for entry in entries:
        print(f"{Path(directory) / entry['name']}: {entry['documents']:,} documents, {entry['tokens']:,} tokens")


class ShardWriter:
    """Writes a directory of shards, all or nothing: NAME_val_000000.bin, NAME_train_000001.bin … and the manifest.

        with ShardWriter("data/mine", "mine", BYTES, source="my notes") as writer:
            writer.add("train", tokens)

    Until the block has ended well every file is called *.partial; when it ends in an exception all of them are removed.
    Shards that were there before are replaced, those of an earlier, longer set too.
    """

    def __init__(self, directory, name, encoding, source, shard_tokens=SHARD_TOKENS, **about):
        self.directory, self.name, self.encoding = Path(directory), name, encoding
        self.source, self.shard_tokens, self.about = source, shard_tokens, about
        self.paths = {"val": [], "train": []}
        self.open_shards = {}

    def __enter__(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def _shards_there(self, suffix=""):
        names = (glob.escape(f"{self.name}_{split}_") + "[0-9]" * 6 + ".bin" + suffix for split in self.paths)
        return [path for name in names for path in self.directory.glob(name)]

    def add(self, split, tokens, new_document=True):
        """Appends tokens (without BOS) to `split`: a document, or more of the last one.

        A document is kept in one shard; only one that is added piece by piece, or is longer than a shard, is cut
        where a shard ends, and goes on behind a BOS in the next.
        """
        shard = self.open_shards.get(split)
        if shard is None or (new_document and shard.room <= len(tokens)):
            shard = self._next_shard(split)
        while new_document or len(tokens):
            if shard.room <= new_document:
                shard, new_document = self._next_shard(split), True
            if new_document:
                shard.write([self.encoding.bos_id])
            piece, tokens = np.split(tokens, [shard.room])
            shard.write(piece)
            new_document = False

    def _next_shard(self, split):
        if split in self.open_shards:
            self.open_shards.pop(split).finish(self.encoding)
        number = len(self.paths[split]) + (split == "train")  # the community's numbering: val is 0, train starts at 1
        path = self.directory / f"{self.name}_{split}_{number:06d}.bin"
        self.paths[split].append(path)
        self.open_shards[split] = _Shard(partial(path), self.shard_tokens)
        return self.open_shards[split]

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self._commit()
        finally:
            for shard in self.open_shards.values():
                with contextlib.suppress(OSError):  # what is still buffered may not fit on the disk either
                    shard.file.close()
            for part in self._shards_there(".partial") + [partial(self.directory / MANIFEST)]:  # a killed process's too
                part.unlink(missing_ok=True)

    def _commit(self):
        while self.open_shards:
            self.open_shards.popitem()[1].finish(self.encoding)
        self.entries = [entry_of(partial(path), path.name, self.encoding.bos_id)
                        for paths in self.paths.values() for path in paths]
        # Between these lines the directory holds no manifest, so that a mix of old and new can't pass for either.
        (self.directory / MANIFEST).unlink(missing_ok=True)
        for stale in self._shards_there():
            stale.unlink()
        for paths in self.paths.values():
            for path in paths:
                partial(path).replace(path)
        write_manifest(self.directory, self.encoding, self.source, self.entries, **self.about)


class _Shard:
    """One shard being written; `room` is how many more tokens it takes."""

    def __init__(self, path, limit):
        self.file, self.room, self.tokens = open(path, "wb"), limit, 0
        self.file.write(bytes(HEADER_BYTES))

    def write(self, tokens):
        self.file.write(np.asarray(tokens, dtype="<u2").tobytes())
        self.tokens += len(tokens)
        self.room -= len(tokens)

    def finish(self, encoding):
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:5] = MAGIC, VERSION, self.tokens, encoding.vocab_size, encoding.bos_id
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.close()


def partial(path):
    """The name that a file has until it is whole."""
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def only_writer(directory):
    """Holds a directory (made if missing) against other processes that would write into it; waits for its turn."""
    os.makedirs(directory, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is writing to {directory}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks, such as some network ones: then it is the user who sees to it
        yield
    finally:
        os.close(handle)


def run(main):
    """Calls a script's main and turns what a user can mend into one line on stderr and an exit status."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # ./run.sh blocks it until here
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in DISK_FULL
        advice = "free some space, or give another --out" if full else "mend that, or give another path"
        sys.exit(f"error: {where}{error.strerror or error}; {advice}")
