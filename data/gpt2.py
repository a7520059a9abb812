"""Write gpt2.tiktoken, the bytes of GPT-2's tokens, beside shards, so that runs on them need no
network.

    .venv/bin/python data/gpt2.py data/mine    # data/fineweb.py and data/text.py do so, too

The preset `frontier` and sample.py read it. The format is tiktoken's, the content that of its
r50k_base.tiktoken: in each line a token's bytes in base64, a space and its number, from 0 to 50255,
without the special token at the end.
"""

import argparse
import base64
import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from shards import DataError, in_one_line, only_writer, partial, run

FILE = "gpt2.tiktoken"
# the one that tiktoken states
SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
REPO = "openai-community/gpt2"
VOCABULARY = "vocab.json"
CONNECT = "set HTTPS_PROXY if there is a proxy, or HF_ENDPOINT to a mirror"


def token_lines(vocabulary):
    """Convert the text of vocab.json, {token: number}, to the content of gpt2.tiktoken."""
    # GPT-2 spells a byte that is not printable in Latin-1 as one of the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    numbers = json.loads(vocabulary)
    tokens = [token for token in sorted(numbers, key=numbers.get) if token != "<|endoftext|>"]
    return b"".join(
        b"%s %d\n" % (base64.b64encode(bytes(bytes_of[character] for character in token)), number)
        for number, token in enumerate(tokens)
    )


def is_right(content):
    return hashlib.sha256(content).hexdigest() == SHA256


def write_tokens(directory, vocabulary):
    """Write gpt2.tiktoken. Raise DataError if `vocabulary`, the text of vocab.json, is not
    GPT-2's."""
    try:
        content = token_lines(vocabulary)
    except (ValueError, KeyError, TypeError, AttributeError):
        content = b""
    if not is_right(content):
        raise DataError(
            f"{VOCABULARY} of {REPO} is not GPT-2's vocabulary; the tokens' SHA-256 should be"
            f" {SHA256}; copy {FILE} into {directory} from a machine that has it"
        )
    path = Path(directory) / FILE
    partial(path).write_bytes(content)
    partial(path).replace(path)


def has_tokens(directory):
    path = Path(directory) / FILE
    return path.is_file() and is_right(path.read_bytes())


def download_tokens(directory):
    """Download GPT-2's vocabulary and write gpt2.tiktoken, unless it is there. Raise DataError
    without a network."""
    if has_tokens(directory):
        return
    # here: encoding processes of text.py do without
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    with TemporaryDirectory() as folder:
        try:
            get_hf_file_metadata(hf_hub_url(REPO, VOCABULARY))  # fails at once without a network
            vocabulary = Path(hf_hub_download(REPO, VOCABULARY, local_dir=folder)).read_text(
                encoding="utf-8"
            )
        except Exception as error:  # the client's errors have no common class
            raise DataError(
                f"{Path(directory) / FILE} is missing, and {VOCABULARY} of {REPO} cannot be"
                f" downloaded from {constants.ENDPOINT} ({in_one_line(error)}); {CONNECT}, or copy"
                f" {FILE} there from a machine that has it"
            ) from None
    write_tokens(directory, vocabulary)


def read_encoding(directory):
    """Return tiktoken's encoding of the tokens in a directory, without special tokens."""
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")  # no cache: the file is already on this machine
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = load_tiktoken_bpe(str(Path(directory) / FILE))
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the shards")
    directory = parser.parse_args().directory
    with only_writer(directory):
        download_tokens(directory)
    print(f"{directory / FILE}: exists and is verified")


if __name__ == "__main__":
    run(main)
