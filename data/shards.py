"""Write and read shards, the token files for training, and manifest.json, which describes the
shards in its folder.

    header   256 int32: magic, version, number of tokens, vocabulary size, BOS id, then zeros
    tokens   uint16; every document begins with BOS

All numbers are little-endian. The community's shards have 0 as vocabulary size and BOS id, which
stands for GPT-2's.
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

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
TOKEN_BYTES = 2
SHARD_TOKENS = 100_000_000
MANIFEST = "manifest.json"
# of the validation text
SAMPLES = 40
SAMPLE_TOKENS = 128
SHARED = 0.1  # part of the samples in the training text: honest collections have less
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DataError(Exception):
    """An error for the user, in one line: what was seen, what was expected, what to do next."""


def usable_cores():
    """Count the cores that this process may use: Slurm or a container may give it fewer than the
    machine has."""
    cores = os.cpu_count() or 1
    # not Linux; or "max 100000", without a quota
    with contextlib.suppress(AttributeError, OSError, ValueError):
        cores = len(os.sched_getaffinity(0))
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, -(-quota // period))
    return cores


@dataclass(frozen=True)
class Encoding:
    name: str
    vocab_size: int
    bos_id: int


BYTES = Encoding("bytes", vocab_size=257, bos_id=256)
GPT2 = Encoding("gpt2", vocab_size=50257, bos_id=50256)


def sha256_of(path):
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_header(path):
    """Return the number of tokens in a shard. Raise DataError if its header is invalid or
    contradicts its size."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4", count=min(3, size // 4))
    if size < HEADER_BYTES or header[0] != MAGIC:
        raise DataError(f"{path}: not a shard; its first number is not {MAGIC}")
    if header[1] != VERSION:
        raise DataError(
            f"{path}: shard of version {header[1]}; this program reads version {VERSION}"
        )
    tokens = int(header[2])
    if size != HEADER_BYTES + TOKEN_BYTES * tokens:
        raise DataError(
            f"{path}: {size} bytes, but its header states {tokens} tokens, "
            f"which take {HEADER_BYTES + TOKEN_BYTES * tokens} bytes; create it again"
        )
    return tokens


def entry_of(path, name, bos_id, sha256=None):
    """Return the manifest's entry of the shard at `path`. `name` is its final name, like
    x_val_000000.bin."""
    tokens = read_header(path)
    documents = int(np.count_nonzero(np.memmap(path, "<u2", "r", HEADER_BYTES) == bos_id))
    return {
        "name": name,
        "split": name.rsplit("_", 2)[1],
        "tokens": tokens,
        "documents": documents,
        "bytes": os.path.getsize(path),
        "sha256": sha256 or sha256_of(path),
    }


def write_manifest(directory, encoding, source, files, **about):
    """Write manifest.json atomically. `files`: entries of entry_of."""
    manifest = {
        "encoding": encoding.name,
        "vocab_size": encoding.vocab_size,
        "bos_id": encoding.bos_id,
        "source": source,
        **about,
        "files": sorted(files, key=lambda entry: (entry["split"], entry["name"])),
    }
    path = partial(Path(directory) / MANIFEST)
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    path.replace(Path(directory) / MANIFEST)


def read_manifest(directory):
    """Read the manifest of a directory -> a dict, or None if there is none. Raise DataError if it
    is invalid."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        # Missing keys raise here, not in a reader.
        for entry in manifest["files"]:
            entry["name"], entry["split"], entry["tokens"], entry["bytes"], entry["sha256"]
        return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{path}: not a manifest of shards; remove it and run this command again"
        ) from None


def is_intact(directory, entry):
    """Return whether a shard exists with the size and SHA-256 of its manifest entry."""
    path = Path(directory) / entry["name"]
    return (
        path.is_file()
        and path.stat().st_size == entry["bytes"]
        and sha256_of(path) == entry["sha256"]
    )


def verified_manifest(directory):
    """Return the manifest of a directory if it has shards and all of them are intact, else None."""
    try:
        manifest = read_manifest(directory)
    except DataError:
        return None  # the shards can be made again
    if (
        manifest
        and manifest["files"]
        and all(is_intact(directory, entry) for entry in manifest["files"])
    ):
        return manifest


def print_shards(directory, entries):
    for entry in entries:
        print(
            f"{Path(directory) / entry['name']}: {entry['documents']:,} documents,"
            f" {entry['tokens']:,} tokens"
        )


def check_apart(train, val, bos_id):
    """Raise DataError if the training shards hold the validation text, and say how much of it if
    that is a part.

    Samples are looked for, each from within a document. Those that recur in the validation text or
    in a shard, such as a licence, show nothing.
    """
    texts = [path.read_bytes()[HEADER_BYTES:] for path in val]
    tokens = np.frombuffer(b"".join(texts), dtype="<u2")
    rows = tokens[: len(tokens) // SAMPLE_TOKENS * SAMPLE_TOKENS].reshape(-1, SAMPLE_TOKENS)
    rows = rows[(rows != bos_id).all(1)]
    samples = [row.tobytes() for row in rows[:: len(rows) // SAMPLES + 1]]
    samples = [sample for sample in samples if sum(text.count(sample) for text in texts) == 1]
    missing = samples
    for path in train:
        text = path.read_bytes()
        missing = [sample for sample in missing if text.count(sample) != 1]
    found = len(samples) - len(missing)
    said = (
        f"{found} of {len(samples)} samples of the validation text are also in the training text,"
        " so the loss on them means little; give each text once"
    )
    if samples and not missing:
        raise DataError(said)
    if found > len(samples) * SHARED:
        print(said, flush=True)


class ShardWriter:
    """Write shards and their manifest into a directory, all or none: NAME_val_000000.bin,
    NAME_train_000001.bin, ...

        with ShardWriter("data/mine", "mine", BYTES, source="my notes") as writer:
            writer.add("train", tokens)

    Files are named *.partial until the block ends. An exception in the block removes them. At the
    end of the block the new files replace all earlier shards of the same name.
    """

    def __init__(self, directory, name, encoding, source, shard_tokens=SHARD_TOKENS, **about):
        self.directory = Path(directory)
        self.name = name
        self.encoding = encoding
        self.source = source
        self.shard_tokens = shard_tokens
        self.about = about
        self.paths = {"val": [], "train": []}
        self.open_shards = {}

    def __enter__(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def _existing_shards(self, suffix=""):
        names = (
            glob.escape(f"{self.name}_{split}_") + "[0-9]" * 6 + ".bin" + suffix
            for split in self.paths
        )
        return [path for name in names for path in self.directory.glob(name)]

    def add(self, split, tokens, new_document=True):
        """Append tokens (without BOS) to `split`: a new document, or the next piece of the last
        one.

        A document stays in one shard, unless it is longer than a shard or added in pieces. Then it
        is cut at the end of the shard, and continues after a BOS in the next one.
        """
        shard = self.open_shards.get(split)
        if shard is None or (new_document and shard.room <= len(tokens)):
            shard = self._next_shard(split)
        while new_document or len(tokens):
            if shard.room <= new_document:
                shard = self._next_shard(split)
                new_document = True
            if new_document:
                shard.write([self.encoding.bos_id])
            piece, tokens = np.split(tokens, [shard.room])
            shard.write(piece)
            new_document = False

    def _next_shard(self, split):
        if split in self.open_shards:
            self.open_shards.pop(split).finish(self.encoding)
        # the community's numbers: val 0, train from 1
        number = len(self.paths[split]) + (split == "train")
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
                # close flushes its buffer, and the disk may be full
                with contextlib.suppress(OSError):
                    shard.file.close()
            # this also removes partial files of a process that was killed
            for part in self._existing_shards(".partial") + [partial(self.directory / MANIFEST)]:
                part.unlink(missing_ok=True)

    def _commit(self):
        while self.open_shards:
            self.open_shards.popitem()[1].finish(self.encoding)
        check_apart(
            *([partial(path) for path in self.paths[split]] for split in ("train", "val")),
            self.encoding.bos_id,
        )
        self.entries = [
            entry_of(partial(path), path.name, self.encoding.bos_id)
            for paths in self.paths.values()
            for path in paths
        ]
        # While old and new shards are mixed, the directory has no manifest, so the mix is never
        # taken for a complete set.
        (self.directory / MANIFEST).unlink(missing_ok=True)
        for stale in self._existing_shards():
            stale.unlink()
        for paths in self.paths.values():
            for path in paths:
                partial(path).replace(path)
        write_manifest(self.directory, self.encoding, self.source, self.entries, **self.about)


class _Shard:
    """A shard that is being written. `room`: tokens that still fit."""

    def __init__(self, path, limit):
        self.file = open(path, "wb")
        self.room = limit
        self.tokens = 0
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
    """Return the name that a file has until it is complete."""
    return path.with_name(path.name + ".partial")


def in_one_line(error):
    """Return the message of an error, or of the one that caused it."""
    error = error.__cause__ or error
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def only_writer(directory):
    """Create a directory and lock it against other writers. Wait while another process holds the
    lock."""
    os.makedirs(directory, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is writing to {directory}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks, such as some network file systems
        yield
    finally:
        os.close(handle)
        # it fails unless the folder is empty: no shards, an error
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def run(main):
    """Run a script's main. Print errors that the user can fix in one line on stderr, and exit with
    a status."""
    try:
        # ./run.sh starts its children with SIGINT blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may not be UTF-8
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in DISK_FULL
        advice = (
            "free some space, or choose another --out"
            if full
            else "fix that, or choose another path"
        )
        sys.exit(f"error: {where}{error.strerror or error}; {advice}")
