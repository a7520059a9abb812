"""data/stdlib.py: the corpus from this Python's library, and from small libraries that the tests
write."""

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA))

import stdlib  # noqa: E402
from shards import BYTES, HEADER_BYTES, read_header, sha256_of  # noqa: E402

VAL = "stdlib_val_000000.bin"
TRAIN = "stdlib_train_000001.bin"


def make(out, **options):
    return subprocess.run(
        [sys.executable, DATA / "stdlib.py", "--out", out],
        text=True,
        capture_output=True,
        timeout=600,
        **options,
    )


def documents_of(path):
    """Read the documents of a shard of bytes."""
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES)
    assert len(tokens) == read_header(path) and tokens[0] == BYTES.bos_id
    starts = np.flatnonzero(tokens == BYTES.bos_id)
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, starts[1:])]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "out"
    done = make(out)
    assert done.returncode == 0, done.stderr
    return out


def test_the_shards_hold_the_library_in_the_order_of_the_shuffle(corpus):
    documents = stdlib.find_documents()
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    val = documents_of(corpus / VAL)
    train = documents_of(corpus / TRAIN)
    assert sorted(val + train) == sorted(documents.values())
    in_val = set(val)
    assert val == [documents[name] for name in names if documents[name] in in_val]
    assert train == [documents[name] for name in names if documents[name] not in in_val]


def test_val_is_large_enough_and_no_file_dominates_it(corpus):
    sizes = [len(document) for document in documents_of(corpus / VAL)]
    assert stdlib.VAL_BYTES <= sum(sizes) < stdlib.VAL_BYTES + stdlib.MAX_VAL_DOCUMENT
    assert max(sizes) <= stdlib.MAX_VAL_DOCUMENT
    assert read_header(corpus / TRAIN) > 10 * read_header(corpus / VAL)


def test_source_and_documentation_are_in_and_tests_are_not(corpus):
    documents = stdlib.find_documents()
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/yield"} <= documents.keys()
    parts = {part for name in documents for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "__pycache__", "LICENSE.txt", "topics.py"}


def test_the_manifest_describes_the_shards(corpus):
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert (manifest["encoding"], manifest["vocab_size"], manifest["bos_id"]) == ("bytes", 257, 256)
    assert manifest["python"] == platform.python_version()
    assert [(entry["name"], entry["split"]) for entry in manifest["files"]] == [
        (TRAIN, "train"),
        (VAL, "val"),
    ]
    for entry in manifest["files"]:
        path = corpus / entry["name"]
        header = np.fromfile(path, dtype="<i4", count=256)
        assert list(header[:5]) == [20240520, 1, entry["tokens"], 257, 256] and not header[5:].any()
        assert entry["documents"] == len(documents_of(path))
        assert (entry["bytes"], entry["sha256"]) == (path.stat().st_size, sha256_of(path))


def test_a_second_call_only_verifies_from_any_directory(corpus, tmp_path):
    before = (corpus / TRAIN).stat().st_mtime_ns
    done = make(corpus, cwd=tmp_path)
    assert done.returncode == 0 and "verified" in done.stdout and len(done.stdout.splitlines()) == 1
    assert (corpus / TRAIN).stat().st_mtime_ns == before


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def damage_a_byte(out):
    content = bytearray((out / TRAIN).read_bytes())
    content[5000] ^= 1
    (out / TRAIN).write_bytes(content)


def change_the_version(out):
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"python": "2.7.18"}))


def cut_the_manifest(out):
    (out / "manifest.json").write_text("{")


def test_two_processes_at_once_end_with_one_corpus(tmp_path):
    command = [sys.executable, DATA / "stdlib.py", "--out", tmp_path / "out"]
    both = [
        subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("exist and are verified" in text for text in said) == 1


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An empty library; write(name, bytes) adds a file."""
    root = tmp_path / "lib"
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # this library has no documentation

    def write(name, content):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

    return write


@pytest.mark.parametrize("harm", [damage_a_byte, change_the_version, cut_the_manifest])
def test_a_damaged_corpus_is_created_again_and_is_equal(
    library, tmp_path, monkeypatch, capsys, harm
):
    for name in "os.py", *(f"{i}.py" for i in range(90)):
        library(name, name.encode() * 99)
    out = tmp_path / "out"
    monkeypatch.setattr(stdlib, "VAL_BYTES", 999)
    monkeypatch.setattr(sys, "argv", ["stdlib.py", "--out", str(out)])
    stdlib.main()
    before = contents(out)
    harm(out)
    assert contents(out) != before
    stdlib.main()
    assert "verified" not in capsys.readouterr().out and contents(out) == before


def test_other_files_are_left_out(library):
    text = b"x = 1  # a line of source that is long enough\n" * 10
    library("os.py", text)
    library("a/copy.py", text)
    names = "test/t.py a/tests/t.py site-packages/s.py _sysconfigdata_x.py config-3/c.py a.so"
    for name in names.split():
        library(name, text + name.encode())
    library("latin.py", text + b"\xe9")
    library("small.py", b"pass\n")
    library("doc.rst", text + b"doc")
    assert stdlib.find_documents().keys() == {"a/copy.py", "doc.rst"}


def test_the_split_skips_large_documents_for_val():
    documents = {f"{i}.py": b"x" * (stdlib.MAX_VAL_DOCUMENT + i % 2) for i in range(40)}
    val, train = stdlib.split_documents(documents)
    assert len(val) == 4 and all(len(documents[name]) == stdlib.MAX_VAL_DOCUMENT for name in val)
    assert sorted(val + train) == sorted(documents)


def test_a_python_without_sources_is_an_error(library, tmp_path, monkeypatch):
    library("abc.txt", b"")
    monkeypatch.setattr(sys, "argv", ["stdlib.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no library sources in .*data/text.py"):
        stdlib.run(stdlib.main)
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_an_error_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = make(tmp_path / "file" / "out")
    assert (
        done.returncode == 1
        and len(done.stderr.splitlines()) == 1
        and str(tmp_path / "file") in done.stderr
    )
