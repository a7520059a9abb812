"""The embedded corpus: this Python's standard library, its source and documentation, as shards of bytes.

    python data/stdlib.py               # data/stdlib/: made in seconds, without a network; a second call only checks
    python data/stdlib.py --out DIR     # the same somewhere else

Another version of Python gives another corpus: losses compare only between runs whose shards have the same SHA-256.
"""
import argparse
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from shards import BYTES, DataError, ShardWriter, is_intact, only_writer, print_shards, read_manifest, run

VAL_BYTES = 256 * 1024
MAX_VAL_DOCUMENT = VAL_BYTES // 4  # so that no single file decides the validation loss
MIN_DOCUMENT = 128                 # bytes; below it lie empty __init__.py and one-line stubs
TEXT_SUFFIXES = {".py", ".txt", ".rst"}
EXCLUDED = {
    "site-packages", "dist-packages", "__pycache__",                              # not the standard library
    "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip",  # often packaged apart
    "encodings",                                                                  # a hundred near-equal tables
    "pydoc_data",                                                                 # comes in below, topic by topic
    "LICENSE.txt",
}
BUILD_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")                   # names and paths of one machine


def find_documents():
    """Name → bytes of every document: files by their path within the library, help topics by their name.

    Left out: what EXCLUDED names, text that is not UTF-8, near-empty files, and exact copies (the first name stays).
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise DataError(f"no library sources in {root}: this Python keeps them zipped or ships none; "
                        "use a full installation of Python, or make shards of your own text with data/text.py")
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = filter(is_wanted, folders)  # site-packages may be many times larger: not even entered
        for path in (Path(folder, name) for name in filter(is_wanted, files)):
            if path.suffix in TEXT_SUFFIXES:
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    try:
        from pydoc_data.topics import topics
        found |= {f"pydoc_data/topics/{topic}": text.encode() for topic, text in topics.items()}
    except ImportError:
        print(f"this Python ships no help topics (pydoc_data): the corpus is made of {root} alone")
    documents, seen = {}, set()
    for name in sorted(found):
        content = found[name]
        if len(content) >= MIN_DOCUMENT and content not in seen and is_utf8(content):
            documents[name] = content
            seen.add(content)
    return documents


def is_wanted(name):
    return name not in EXCLUDED and not name.startswith(BUILD_PREFIXES)


def is_utf8(content):
    try:
        content.decode()
        return True
    except UnicodeDecodeError:
        return False


def split_documents(documents):
    """(val, train): names in one fixed shuffle; from its front documents go to val until that holds VAL_BYTES."""
    val, train, val_bytes = [], [], 0
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        size = len(documents[name])
        if val_bytes < VAL_BYTES and size <= MAX_VAL_DOCUMENT:
            val.append(name)
            val_bytes += size
        else:
            train.append(name)
    return val, train


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "stdlib", metavar="DIR",
                        help="where the shards go (default: %(default)s)")
    out = parser.parse_args().out
    # What decides the corpus: the library's version, and the rules above.
    made_by = {"python": platform.python_version(),
               "rules_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    with only_writer(out):
        try:
            manifest = read_manifest(out)
        except DataError:
            manifest = None  # everything here can be made anew
        if manifest and all(manifest.get(key) == value for key, value in made_by.items()) \
                and manifest["files"] and all(is_intact(out, entry) for entry in manifest["files"]):
            print(f"{out}: the standard library of Python {made_by['python']} is there and verified")
            return
        documents = find_documents()
        val, train = split_documents(documents)
        with ShardWriter(out, "stdlib", BYTES, source="Python standard library", **made_by) as writer:
            for split, names in ("val", val), ("train", train):
                for name in names:
                    writer.add(split, np.frombuffer(documents[name], dtype=np.uint8))
    print_shards(out, writer.entries)


if __name__ == "__main__":
    run(main)
