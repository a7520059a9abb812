"""Create the embedded corpus: source and documentation of this Python's standard library, as
shards of bytes.

    .venv/bin/python data/stdlib.py               # into data/stdlib/, in seconds, without a network
    .venv/bin/python data/stdlib.py --out DIR     # into another folder

Another Python version has another library. Compare losses only between runs whose shards have the
same SHA-256.
"""

import argparse
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from shards import BYTES, DataError, ShardWriter, only_writer, print_shards, run, verified_manifest

VAL_BYTES = 256 * 1024
MAX_VAL_DOCUMENT = VAL_BYTES // 4  # no single file dominates the validation loss
MIN_DOCUMENT = 128  # bytes; excludes empty __init__.py and one-line stubs
TEXT_SUFFIXES = {".py", ".txt", ".rst"}
EXCLUDED = {
    # not the standard library
    "site-packages",
    "dist-packages",
    "__pycache__",
    # often packaged separately
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "distutils",
    "ensurepip",
    # a hundred similar tables
    "encodings",
    # find_documents adds its topics
    "pydoc_data",
    "LICENSE.txt",
}
# these contain paths of one machine
BUILD_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


def find_documents():
    """Return {name: bytes} of every document: files by their path in the library, and help topics.

    Excluded: the names in EXCLUDED, text that is not UTF-8, tiny files, and copies (the first name
    is kept).
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise DataError(
            f"no library sources in {root}: this Python has them in a zip file, or not at all; "
            "use a full installation of Python, or make shards of your own text with data/text.py"
        )
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = filter(is_wanted, folders)  # do not enter site-packages, which may be large
        for path in (Path(folder, name) for name in filter(is_wanted, files)):
            if path.suffix in TEXT_SUFFIXES:
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    try:
        from pydoc_data.topics import topics

        found |= {f"pydoc_data/topics/{topic}": text.encode() for topic, text in topics.items()}
    except ImportError:
        print(f"this Python has no help topics (pydoc_data); the corpus contains only {root}")
    documents = {}
    seen = set()
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
    """Return (val, train) names, in a fixed random order. The first documents go to val until it
    has VAL_BYTES."""
    val = []
    train = []
    val_bytes = 0
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        size = len(documents[name])
        if val_bytes < VAL_BYTES and size <= MAX_VAL_DOCUMENT:
            val.append(name)
            val_bytes += size
        else:
            train.append(name)
    return val, train


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "stdlib",
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )
    out = parser.parse_args().out
    # The corpus depends on the library's version and on the rules in this file.
    made_by = {
        "python": platform.python_version(),
        "rules_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    with only_writer(out):
        manifest = verified_manifest(out)
        if manifest and all(manifest.get(key) == value for key, value in made_by.items()):
            print(
                f"{out}: the shards of Python {made_by['python']}'s standard library exist and are"
                " verified"
            )
            return
        documents = find_documents()
        val, train = split_documents(documents)
        with ShardWriter(
            out, "stdlib", BYTES, source="Python standard library", **made_by
        ) as writer:
            for split, names in ("val", val), ("train", train):
                for name in names:
                    writer.add(split, np.frombuffer(documents[name], dtype=np.uint8))
    print_shards(out, writer.entries)


if __name__ == "__main__":
    run(main)
