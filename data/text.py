"""Encode any text as shards. Each text file is one document, and so is each line of a JSON lines
file.

    .venv/bin/python data/text.py book.txt --out data/book                      # GPT-2 tokens
    .venv/bin/python data/text.py a.txt b.txt --out data/both --encoding bytes  # bytes
    .venv/bin/python data/text.py web-*.jsonl --out data/web --field content    # JSON lines
    .venv/bin/python data/text.py notes/ --out data/notes                       # a folder's texts

The last part of each file, by bytes, is for validation. A text file is split at the end of a line
(without one, after a space), so it gives one document to each split. JSON lines stay whole; their
files end in .jsonl, .ndjson or .jsonlines, or in .json if the first line has a text in the field.
Files packed by gzip, bzip2 or xz are read as they are, those of zstd with Python 3.14 or the
package zstandard. The shards do not depend on the number of threads. In a folder, hidden files,
files that are not UTF-8 text and links to folders are left out, and everywhere copies of files
named before; the output names them. GPT-2's vocabulary is downloaded to gpt2.tiktoken in the output
folder, unless it is there (1 MB).
"""

import argparse
import bz2
import codecs
import functools
import gzip
import hashlib
import json
import lzma
import math
import re
import tempfile
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import gpt2
from shards import (
    BYTES,
    GPT2,
    MANIFEST,
    SHARD_TOKENS,
    TOKEN_BYTES,
    DataError,
    ShardWriter,
    in_one_line,
    only_writer,
    print_shards,
    run,
    verified_manifest,
    usable_cores,
)

VAL_FRACTION = 0.1
MAX_VAL_BYTES = 64 * 2**20  # enough text for a validation on ten million tokens
PIECE_CHARS = 2**20  # per work item; this and the number of threads limit the memory
CUT_BYTES = 16 * 2**20  # before the validation part, searched for the end of a line
NAMED = 5  # files named of those that are left out for one reason
ENCODINGS = {"gpt2": GPT2, "bytes": BYTES}
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
NOT_TEXT = {  # how the file begins: what it is; what to do
    rb"%PDF-": "a PDF; export its text first, for example with pdftotext",
    rb"PK\x03\x04": "a zip archive, as .docx and .epub files are; unpack it, or export its text",
    rb"PAR1": "a Parquet file; write its texts to a .jsonl file first, one object per line",
    rb"\xd0\xcf\x11\xe0": "an old Office document; export its text first",
    rb"(?s).{257}ustar": "a tar archive; unpack it and name the folder",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32 text; convert it first: iconv -f UTF-32 -t UTF-8",
    rb"\xff\xfe|\xfe\xff": "UTF-16 text; convert it first: iconv -f UTF-16 -t UTF-8",
}


def open_zst(path, mode):
    try:
        from compression import zstd

        return zstd.open(path, mode)
    except ImportError:  # before Python 3.14
        pass
    try:
        from zstandard import ZstdDecompressor
    except ImportError:
        raise DataError(
            f"{path}: packed by zstd, which this Python cannot unpack; unpack it first (zstd -d),"
            " or install a package: .venv/bin/python -m pip install zstandard"
        ) from None
    # the package's own reader does not notice that the end is missing
    unpacked = tempfile.TemporaryFile()
    frame = None
    with open(path, mode) as file:
        while chunk := file.read(PIECE_CHARS):
            while chunk:
                if not frame or frame.eof:
                    frame = ZstdDecompressor(max_window_size=2**31).decompressobj()
                unpacked.write(frame.decompress(chunk))
                chunk = frame.unused_data
    if not frame.eof:
        raise EOFError("its end is missing")
    unpacked.seek(0)
    return unpacked


PACKED = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
    rb"\(\xb5/\xfd": open_zst,
}


def opener(path):
    """Return the function that opens a file to read its bytes, unpacked."""
    with open(path, "rb") as file:
        head = file.read(10)
    return next((unpack for magic, unpack in PACKED.items() if re.match(magic, head)), open)


def open_text(path):
    return opener(path)(path, "rb")


def size_of(path):
    """Return the size of a text in bytes, unpacked. Raise DataError if it cannot be unpacked."""
    if opener(path) is open:
        return path.stat().st_size
    try:
        with open_text(path) as file:
            return sum(map(len, iter(lambda: file.read(PIECE_CHARS), b"")))
    except DataError:
        raise
    except Exception as error:  # the errors of four libraries
        raise DataError(
            f"{path}: cannot be unpacked ({in_one_line(error)}); get the whole file again"
        ) from None


@functools.cache
def content_digest(path):
    """Return the SHA-256 of a text's bytes, unpacked."""
    digest = hashlib.sha256()
    with open_text(path) as file:
        while chunk := file.read(PIECE_CHARS):
            digest.update(chunk)
    return digest.digest()


def is_jsonl(path, field):
    """Return whether a file has a JSON object in each line: by its name; a .json only if its first
    line has a text."""
    name = re.sub(r"\.(gz|bz2|xz|zst)$", "", path.name.lower())
    if not name.endswith(".json"):
        return name.endswith(JSON_LINES)
    try:
        next(read_jsonl(path, field), None)
        return True
    except DataError:
        return False


def encoder(encoding, directory):
    """Return a function that encodes a text -> tokens, uint16. GPT-2's tokens are read from
    `directory`."""
    if encoding is BYTES:
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    tokens = gpt2.read_encoding(directory)
    return lambda text: tokens.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)


def read_text(path, begin, end):
    """Yield the text between two byte positions of a UTF-8 file, in chunks, without a byte-order
    mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_text(path) as file:
        file.seek(begin)
        while begin < end:
            chunk = file.read(min(PIECE_CHARS, end - begin))
            if not chunk:
                raise DataError(f"{path}: became shorter while it was read; run this command again")
            # bytes of a character that is split between two chunks
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=begin + len(chunk) == end)
            except UnicodeDecodeError as error:
                raise not_utf8(path, begin - held + error.start) from None
            if b"\0" in chunk:
                raise not_utf8(path, begin + chunk.index(b"\0"))
            yield text if begin else text.removeprefix("\ufeff")
            begin += len(chunk)


def read_jsonl(path, field):
    """Yield (byte position, text in its `field`) of every line that is not blank."""
    begin = 0
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield begin, text_of(line, path, number, begin, field)
            begin += len(line)


def text_of(line, path, number, begin, field):
    try:
        record = json.loads(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise not_utf8(path, begin + error.start) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{number}: not a line of JSON ({error}); write one object per line"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        seen = (
            f"the fields {', '.join(record) or '(none)'}"
            if isinstance(record, dict)
            else type(record).__name__
        )
        seen = (
            f"{json.dumps(record[field])[:20]} in it"
            if isinstance(record, dict) and field in record
            else seen
        )
        raise DataError(
            f'{path}:{number}: no text in a field "{field}", but {seen}; choose the right one with'
            " --field"
        )
    # JSON can contain lone surrogates, which UTF-8 cannot. Replace them with U+FFFD, as tiktoken
    # does.
    return record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def not_utf8(path, byte):
    with open_text(path) as file:
        head = file.read(512)
    what = next((what for magic, what in NOT_TEXT.items() if re.match(magic, head)), None)
    return DataError(
        f"{path}: "
        + (
            what
            or f"not UTF-8 text at byte {byte}; convert it first, for example with iconv -f"
            " WINDOWS-1252 -t UTF-8, if that is its encoding"
        )
    )


def split_text(chunks):
    """Regroup the chunks of a document into pieces whose tokens, concatenated, are the tokens of
    the whole document.

    GPT-2's pattern always starts a token at the space or newline before a word, so pieces are cut
    there. If a whole piece has no such place, it is cut at its end, which may change one or two
    tokens.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE_CHARS:
            cut = next(
                (
                    i
                    for i in range(PIECE_CHARS - 1, 0, -1)
                    if held[i] in " \n" and not held[i + 1].isspace()
                ),
                PIECE_CHARS,
            )
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def cut_position(path, before, size):
    """Return the byte position after the last newline in a file's first `before` bytes; the last
    CUT_BYTES of them are searched. Without a newline, return the position after the last space;
    without a space, the last position between characters; at 0, the file's size."""
    start = max(0, before - CUT_BYTES)
    end = before - start
    with open_text(path) as file:
        file.seek(start)
        content = file.read(end + 1)
    cut = content.rfind(b"\n", 0, end) + 1 or content.rfind(b" ", 0, end) + 1 or end
    while cut < len(content) and content[cut] & 0xC0 == 0x80:  # within a character of several bytes
        cut -= 1
    return start + cut or size


def read_documents(sizes, field, fraction):
    """Yield (split, chunks of text) of every document. `fraction`: the part of each file for val,
    by bytes."""
    for path, size in sizes.items():
        val_start = size - math.ceil(size * fraction)
        if is_jsonl(path, field):
            for begin, text in read_jsonl(path, field):
                yield ("train" if begin < val_start else "val"), [text]
            continue
        cut = cut_position(path, val_start, size)
        yield "train", read_text(path, 0, cut)
        if cut < size:
            yield "val", read_text(path, cut, size)


def make_batches(documents):
    """Yield lists of (split, whether a new document begins, text), each with about PIECE_CHARS
    characters."""
    batch = []
    chars = 0
    for split, chunks in documents:
        for index, text in enumerate(split_text(chunks)):
            batch.append((split, index == 0, text))
            chars += len(text)
            if chars >= PIECE_CHARS:
                yield batch
                batch = []
                chars = 0
    if batch:
        yield batch


def encode(batches, encoding, directory, threads):
    """Encode batches in threads: tiktoken works without Python's lock. Yield (split, whether a new
    document begins, tokens) in order."""
    encode_text = encoder(encoding, directory)
    pending = deque()
    pool = ThreadPoolExecutor(threads)

    def collect():
        batch, future = pending.popleft()
        for (split, new_document, _), tokens in zip(batch, future.result()):
            yield split, new_document, tokens

    try:
        for batch in batches:
            pending.append(
                (
                    batch,
                    pool.submit(lambda batch: [encode_text(text) for _, _, text in batch], batch),
                )
            )
            if len(pending) > 2 * threads:
                yield from collect()
        while pending:
            yield from collect()
    finally:
        pool.shutdown(cancel_futures=True)


def texts_in(folder, left_out):
    """Return the text files in a folder and its subfolders, sorted by name. Add the others to
    {reason: names}."""
    texts = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = next((i for i, part in enumerate(parts) if part.startswith(".")), None)
        if hidden is not None:
            # a hidden folder is named once
            left_out["hidden"][str(folder.joinpath(*parts[: hidden + 1]))] = None
        elif path.is_file():
            try:
                for _ in read_text(path, 0, size_of(path)):
                    pass
                texts.append(path)
            except DataError as error:
                left_out[re.split("; | at byte | \\(", str(error).removeprefix(f"{path}: "))[0]][
                    str(path)
                ] = None
        elif path.is_symlink():
            left_out["links that lead to no file"][str(path)] = None
    return texts


def measure(paths, field):
    """Return {path: size in bytes} of the files, and of the files in folders, that are not empty.
    Name the others."""
    sizes = {}
    left_out = defaultdict(dict)
    plain = {}
    by_size = defaultdict(list)  # only files of one size can be copies
    for path in paths:
        if not path.is_file() and not path.is_dir():
            missing = (
                not path.exists() and path.name != "-" and path.parts[:3] != ("/", "dev", "fd")
            )
            raise DataError(
                f"{path}: "
                + (
                    "no such file or folder"
                    if missing
                    else (
                        "standard input, a pipe or a "
                        "device, which can be read only once; save the text in a file and name that"
                    )
                )
            )
        for file in texts_in(path, left_out) if path.is_dir() else [path]:
            size = size_of(file)  # an unreadable file is an error now, not after an hour
            if not size:
                left_out["empty"][str(file)] = None
                continue
            if any(content_digest(other) == content_digest(file) for other in by_size[size]):
                left_out["copies of files named before"][str(file)] = None
                continue
            sizes[file] = size
            by_size[size].append(file)
            if re.search(r"\.json(\.\w+)?$", file.name.lower()) and not is_jsonl(file, field):
                plain[str(file)] = None
    said = {f"left out, {reason}": names for reason, names in left_out.items()}
    if plain:
        said[f'taken as plain text, because the first line has no "{field}" with a text'] = plain
    for reason, names in said.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        print(f"{reason}: {', '.join([*names][:NAMED])}{more}", flush=True)
    if not sizes:
        raise DataError(
            f"no text in {', '.join(map(str, paths))}: give at least one file that is not empty"
        )
    return sizes


def digest_of(sizes, *options):
    """Return a digest of texts, of what else decides the shards, and of the rules in this file, in
    hex."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(options).encode())
    for path, size in sizes.items():
        digest.update(f"\n{size} {path.suffix}\n".encode())
        for text in read_text(path, 0, size):
            digest.update(text.encode())
    return digest.hexdigest()[:12]


def last_document(sizes, field):
    """Return where the last document of a file begins: the largest part of its file over all
    files, from 0 to 1."""
    return max(
        (
            begin / size
            for path, size in sizes.items()
            if is_jsonl(path, field)
            for begin, _ in read_jsonl(path, field)
        ),
        default=0.0,
    )


def parse_arguments():
    def fraction(text):
        if not 0 < float(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
        return float(text)

    def at_least(low):
        def number(text):
            if int(text) < low:
                raise argparse.ArgumentTypeError(f"{text} is less than {low}")
            return int(text)

        return number

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PATH", help="UTF-8 text, JSON lines, or a folder"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="output folder; the shards are named after it",
    )
    parser.add_argument(
        "--encoding", choices=ENCODINGS, default="gpt2", help="default: %(default)s"
    )
    parser.add_argument(
        "--field", default="text", help="JSON field that contains the text (default: %(default)s)"
    )
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        metavar="X",
        help=(
            f"part of each file, by bytes, for validation (default: {VAL_FRACTION}, "
            f"but at most {MAX_VAL_BYTES // 2**20} MiB in total)"
        ),
    )
    parser.add_argument(
        "--shard-tokens",
        type=at_least(2),
        default=SHARD_TOKENS,
        metavar="N",
        help="maximum tokens per shard (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=usable_cores(),
        metavar="N",
        help="encoding threads (default: one per core, here %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace existing shards in --out")
    parser.add_argument(
        "--by-content",
        action="store_true",
        help=(
            "add a digest of the texts to the name of --out, "
            "print the name, and keep the shards that are there"
        ),
    )
    return parser.parse_args()


def main():
    args = parse_arguments()
    encoding = ENCODINGS[args.encoding]
    sizes = measure(args.files, args.field)
    total = sum(sizes.values())
    fraction = args.val_fraction or min(VAL_FRACTION, MAX_VAL_BYTES / total)
    if args.by_content:
        digest = digest_of(sizes, fraction, args.field, args.encoding, args.shard_tokens)
        args.out = args.out.with_name(f"{args.out.name}-{digest}")
    with only_writer(args.out):
        if args.by_content and verified_manifest(args.out):
            print(f"the shards of this text exist and are verified\n{args.out}")
            return
        if not args.force and (any(args.out.glob("*.bin")) or (args.out / MANIFEST).exists()):
            raise DataError(
                f"{args.out}: already contains shards; choose another --out, or replace them with"
                " --force"
            )
        if encoding is GPT2:
            gpt2.download_tokens(args.out)
        # about 4 bytes of text make a token of GPT-2
        token_bytes = TOKEN_BYTES / (1 if encoding is BYTES else 4)
        print(
            f"encoding {total:,} bytes of text from {len(sizes)} file(s) as {encoding.name}: about "
            f"{total * token_bytes / 1e6:,.1f} MB of shards in {args.out}",
            flush=True,
        )
        with (
            ShardWriter(
                args.out,
                args.out.resolve().name,
                encoding,
                source=", ".join(path.name for path in sizes),
                shard_tokens=args.shard_tokens,
            ) as writer,
            tqdm(unit=" tokens", unit_scale=True, disable=None) as bar,
        ):
            documents = read_documents(sizes, args.field, fraction)
            for split, new_document, tokens in encode(
                make_batches(documents), encoding, args.out, args.threads
            ):
                writer.add(split, tokens, new_document)
                bar.update(len(tokens))
            if not any(writer.paths.values()):
                raise DataError(f"no text in {', '.join(map(str, sizes))}: every line is blank")
            if not writer.paths["train"]:
                raise DataError(
                    f"the last {fraction:.0%} of each file leave no document for training; give a"
                    " smaller --val-fraction"
                )
            if not writer.paths["val"]:
                begin = last_document(sizes, args.field)
                helps = (
                    f"--val-fraction {math.ceil(1000 * (1 - begin)) / 1000}"
                    if begin
                    else "a second document"
                )
                raise DataError(
                    f"no document begins in the last {fraction:.2%} of a file, so none is left for "
                    f"validation; give {helps}"
                )
    print_shards(args.out, writer.entries)
    if args.by_content:
        print(args.out)


if __name__ == "__main__":
    run(main)
