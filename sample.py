#!/usr/bin/env python
"""Text from a trained model, as it says it.

    python sample.py                                  the latest model in logs/, from nothing on
    python sample.py --prompt "def read(" --tokens 500 --seed 3
    python sample.py logs/RUN.pt --temperature 0      the likeliest token each time; 1: as the model was trained

The model's own layers run on one token at a time; only the attention is another here. It keeps the keys and values that
each layer's window reaches, so a token costs the same however long the text has become.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # before torch, whose import takes its time
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that goes away ends this, as it ends cat

import argparse
import codecs
import itertools
import math
import sys
import unicodedata
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train_gpt import GPT, GPT2_VOCAB, ROOT, Encoding, Parser, Rotary, RunError, Windows, load_model, may_attend, printable

CHUNK = 256  # tokens of a prompt that are read at once
BORDER = "\n\n-----\n\n"  # what is shown where a document ends and the next begins

class Memory:
    """One layer's attention over what was read so far: stands in the place of a mask, see train_gpt.attend.

    Keeps the keys and values of one document. They lie in the order of their tokens in a buffer of twice the window;
    when it is full, what the window still reaches moves to its front.
    """

    def __init__(self, window: int):
        self.window, self.count = window, 0
        self.kept: Tensor | None = None  # [2, heads, 2 * window + 2 * CHUNK, head_dim]: keys and values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [1, heads, T, head_dim] of the next T places, at most two times CHUNK -> what they see, likewise."""
        new = k.size(2)
        if self.kept is None:
            self.kept = k.new_empty(2, k.size(1), 2 * (self.window + CHUNK), k.size(3))
        if self.count + new > self.kept.size(2):
            self.kept[:, :, :self.window] = self.kept[:, :, self.count - self.window:self.count]
            self.count = self.window
        begin, end = max(0, self.count - self.window), self.count + new  # the first new token's window, the last one
        self.kept[:, :, self.count:end] = torch.cat([k, v])
        keys, values = self.kept[:, :, begin:end].split(1)
        self.count = end
        mask = None  # one token sees all of them
        if new > 1:
            at = torch.arange(end - begin, device=k.device)
            mask = may_attend(torch.zeros_like(at), self.window)(None, None, at[-new:, None], at[None, :])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=1.0)

class Reader:
    """A model and what it has read: a text of any length, a few tokens at a time.

    The logits are those of GPT.logits on the whole text, but for the order of sums.
    """

    def __init__(self, model: GPT, windows: Windows):
        reach = {"L": windows.long, "S": windows.short, "P": windows.short}
        self.model, self.rotary = model, model.rotary
        self.memories = [Memory(reach[layer.window]) if layer.window else None for layer in model.layers]
        self.position, self.before = 0, []  # tokens read, and the last of them, as many as the opening of the stream reads
        self.reach = max([1, *(table.n - 1 for table in model.ngrams)])

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """The next tokens of the text, at least one -> of what follows the last, logits float32 [padded vocabulary]."""
        begin = 0
        for end in range(1, len(tokens) + 1):  # pieces that a BOS can only open
            if end == len(tokens) or end - begin == CHUNK or tokens[end] == self.model.bos_id:
                x = self._read(list(tokens[begin:end]))
                begin = end
        return self.model.lm_head.logits(x[-1:])[0]

    def _read(self, piece: list[int]) -> Tensor:
        """At most CHUNK tokens of one document -> the model's normed stream [T, dim]."""
        if piece[0] == self.model.bos_id:  # attention stays inside a document
            for memory in filter(None, self.memories):
                memory.count = 0
        now = slice(self.position, self.position + len(piece))
        if 2 * now.stop > len(self.rotary.cos):  # where heads are paired a token has two places
            longer = Rotary(2 * self.rotary.cos.size(1), 4 * now.stop, self.rotary.cos.dtype)
            longer.follow(self.rotary.windows)
            self.rotary = longer.to(self.rotary.cos.device)
        tokens = torch.tensor(self.before + piece, device=self.rotary.cos.device)
        x0 = self.model.open_stream(tokens)[len(self.before):]
        x = self.model.run_layers(tokens[len(self.before):], x0, self.rotary, self.memories, self.position)
        self.position, self.before = now.stop, (self.before + piece)[-self.reach:]
        return x

def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token by its chances: softmax(logits [vocabulary] / temperature) among the top_k likeliest (0: among all)."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.cpu().double()
    if 0 < top_k < len(logits):
        tokens = logits.topk(top_k).indices
        logits = torch.full_like(logits, -math.inf).index_copy(0, tokens, logits[tokens])
    chances = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(chances, 1, generator=generator))

def generate(model: GPT, windows: Windows, vocab_size: int, prompt: Sequence[int], count: int, temperature: float = 0.8,
             top_k: int = 0, seed: int = 0) -> Iterator[int]:
    """`count` tokens that the model says after BOS and the prompt. BOS among them begins another document."""
    reader, generator = Reader(model, windows), torch.Generator().manual_seed(seed)
    said = [model.bos_id, *prompt]
    for _ in range(count):
        said = [draw(reader.read(said)[:vocab_size], temperature, top_k, generator)]
        yield said[0]

class Vocabulary(NamedTuple):
    encode: Callable[[str], list[int]]
    bytes_of: Callable[[int], bytes]  # of one token that is not BOS

def vocabulary_of(encoding: Encoding) -> Vocabulary:
    """Bytes, or GPT-2's. RunError if it is neither, or if GPT-2's cannot be had."""
    if encoding.vocab_size <= 257:
        return Vocabulary(lambda text: list(text.encode("utf-8", "surrogateescape")), lambda token: bytes([token]))
    if encoding.vocab_size != GPT2_VOCAB:
        raise RunError(f"the model's vocabulary has {encoding.vocab_size} tokens; only those of bytes (at most 257) and of "
                       f"GPT-2 ({GPT2_VOCAB}) can be read here")
    sys.path.insert(0, str(ROOT / "data"))
    import text as text_to_shards
    try:
        gpt2 = text_to_shards.gpt2_vocabulary()
    except text_to_shards.DataError as error:
        raise RunError(str(error)) from None

    def encode(text: str) -> list[int]:
        text.encode()  # UnicodeEncodeError; tiktoken would put U+FFFD for what is no text
        return gpt2.encode_ordinary(text)
    return Vocabulary(encode, gpt2.decode_single_token_bytes)

def encode_prompt(text: str, vocabulary: Vocabulary, encoding: Encoding) -> list[int]:
    try:
        tokens = vocabulary.encode(text)
    except UnicodeEncodeError as error:
        raise RunError(f"--prompt: {error.object[error.start:error.end]!a} at character {error.start} is no text in UTF-8; "
                       "leave it out") from None
    for token in tokens:
        if token >= encoding.vocab_size or token == encoding.bos_id:
            raise RunError(f"--prompt: the model's vocabulary has no token for {vocabulary.bytes_of(token)!r}; leave it out")
    return tokens

def visible(text: str) -> str:
    """What a terminal would obey, spelled out; newline and tab may stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode()
                   for c in text)

def show(tokens: Iterable[int], vocabulary: Vocabulary, bos_id: int) -> Iterator[str]:
    """The text of each token; the bytes of a character that is not whole yet are held back until it is."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        ends = token == bos_id
        yield visible(decoder.decode(b"" if ends else vocabulary.bytes_of(token), final=ends)) + BORDER * ends
    yield visible(decoder.decode(b"", final=True))

def number(kind: type, most: float = math.inf) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not 0 <= (value := kind(text)) <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {most}")
        return value
    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse

def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a .pt that --save_model left, or a .ckpt "
                        "(the latest .pt in logs/)")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--tokens", type=number(int), default=300, metavar="N", help="to say after it (%(default)s)")
    parser.add_argument("--temperature", type=number(float), default=0.8, metavar="T", help="0: the likeliest token "
                        "each time; higher is more varied (%(default)s)")
    parser.add_argument("--top_k", type=number(int), default=0, metavar="K", help="draw among the K likeliest (0: all)")
    parser.add_argument("--seed", type=number(int, 2 ** 63 - 1), default=0, metavar="S", help="another one, another text "
                        "(%(default)s)")
    return parser

def latest_model(folder: Path) -> Path:
    found = sorted(folder.rglob("*.pt"), key=lambda path: (path.stat().st_mtime, path.name))
    if not found:
        raise RunError(f"no model in {folder}; ./run.sh trains one on a machine without a GPU, elsewhere --save_model true "
                       "keeps one; or name a .pt")
    print(f"sample.py: {found[-1]}", file=sys.stderr)
    return found[-1]

def main(argv: Sequence[str] | None = None) -> int:
    flags = make_parser().parse_args(argv)
    try:
        model, saved = load_model(flags.model or latest_model(ROOT / "logs"), "cuda" if torch.cuda.is_available() else "cpu")
        encoding, windows = Encoding(saved["vocab_size"], saved["bos_id"]), Windows(*saved["windows"])
        for param in model.parameters():  # matrices as the activations are, once and not for each token
            if param.dim() == 2:
                param.data = param.data.type_as(model.embed.weight)
        if model.embed.embedding_dim <= 512:
            torch.set_num_threads(1)  # with less to do, several wait for one another longer than they work
        vocabulary = vocabulary_of(encoding)
        prompt = encode_prompt(flags.prompt, vocabulary, encoding)
        said = generate(model, windows, encoding.vocab_size, prompt, flags.tokens, flags.temperature, flags.top_k, flags.seed)
        for text in show(itertools.chain(prompt, said), vocabulary, encoding.bos_id):
            print(text, end="", flush=True)
        print()
        return 0
    except (RunError, OSError) as error:
        message = f"{error.filename or 'the output'}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"sample.py: error: {printable(message)}", file=sys.stderr)
        return 1

if __name__ == "__main__":
    if sys.stdout is None:
        sys.exit("sample.py: error: there is no output to write to; leave it open")
    sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that does not speak UTF-8
    sys.exit(main())
