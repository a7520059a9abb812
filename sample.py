#!/usr/bin/env python
"""Text from a trained model, as it says it.

    python sample.py                                  the latest model in logs/, from nothing on
    python sample.py --prompt "def read(" --tokens 500 --seed 3
    python sample.py logs/RUN.pt --temperature 0      the likeliest token each time; 1: as the model was trained

One token is read after another. The keys and values that each layer's window reaches are kept, so a token costs the same
however long the text has become.
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
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
from torch import nn

import train_gpt
from train_gpt import GPT, GPT2_VOCAB, ROOT, Encoding, Parser, RunError, Windows, load_model, printable

EPS = float(np.finfo(np.float32).eps)
BORDER = "\n\n-----\n\n"  # what is shown where a document ends and the next begins

def norm(x: np.ndarray) -> np.ndarray:
    """Of a vector, by numbers of Python, which cost less than arrays of one."""
    return x * (float(x @ x) / len(x) + EPS) ** -0.5

def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))

def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Its own parameters, not those of the modules in it, in float32."""
    return {name: p.detach().float().numpy() for name, p in module.named_parameters(recurse=False)}

class Attention:
    """A layer's attention, for one token after another. Of the document it keeps the keys and values that the window
    reaches, [heads, 2 * window + 2, head_dim], in their order; where there is no more room, these move to the front.

    Paired heads follow one another in each other's keys and values: a token has two places there. Of queries and keys
    what the rotary turns together lies side by side, a complex number each; values end in a 1, which sums chances up.
    """

    def __init__(self, layer: train_gpt.Attention, window: int, scale: float):
        """scale: the softmax's."""
        self.weights, self.window, self.places = weights_of(layer), window, 1 + layer.paired
        matrices = [self.weights[name] for name in ("qkvo", "qk", "vo") if name in self.weights]
        qkvo = np.concatenate([some.reshape(-1, len(matrices[0])) for some in matrices])
        width, gate = qkvo.shape[1], self.weights["gate"]
        self.heads, dim = layer.heads, width // layer.heads
        in_pairs = np.arange(dim).reshape(2, -1).T.ravel()
        qk = qkvo[:2 * width].reshape(-1, dim, width)[:, in_pairs].reshape(2 * width, width)
        gate = np.pad(gate, ((0, 0), (0, width - gate.shape[1])))
        self.inner, self.out = np.concatenate([qk, qkvo[2 * width:3 * width], gate]), qkvo[3 * width:]
        kept = layer.heads // self.places, 2 * window + 2
        self.keys, self.values = np.empty((*kept, dim), np.float32), np.ones((*kept, dim + 1), np.float32)
        # of vectors with a norm of sqrt(dim), or, with an offset, up to sqrt(2 dim): no score's exponential overflows
        self.count, self.bounded, self.scales_output = 0, 2 * scale * dim < 80, layer.scales_output
        # of a key what the rotary leaves alone, where that is of the token before; and its last key
        self.stands, self.last = (in_pairs // (dim // 4) % 2 == 1 if layer.key_offset else None), None
        self.self_share = np.tanh(self.weights["self_share"])[:, None] if "self_share" in self.weights else None
        # by which place's factors the rotary turns each head, and which heads then stand in it
        self.turned_by = np.arange(self.heads) % self.places
        self.standing = [slice(place, None, self.places) for place in range(self.places)]
        if layer.by_halves and layer.paired:
            self.standing = [slice(self.heads // 2), slice(self.heads // 2, None)]

    def __call__(self, x: np.ndarray, values: np.ndarray | None, value_mix: Sequence[float],
                 turns: np.ndarray) -> np.ndarray:
        """The normed stream [dim] and the value table's vector, see train_gpt.Attention.forward -> [dim]. turns: of each
        place the rotary's factors, complex [places, head_dim / 2]."""
        inner = self.inner @ x
        opening, qkv = sigmoid(inner[-self.heads:, None]), inner[:-self.heads].reshape(3, self.heads, -1)
        qk, v = qkv[:2], value_mix[0] * qkv[2]
        size = (np.vecdot(qk, qk) / v.shape[1] + EPS)[..., None] ** -0.5
        if values is not None:
            given = self.gated(x, values.reshape(v.shape))
            v += given if self.scales_output else value_mix[1] * given
        y, (q, k) = np.empty_like(v), ((qk * size).view(np.complex64) * turns[self.turned_by]).view(np.float32)
        if self.stands is not None:
            k, self.last = np.where(self.stands, k if self.last is None else self.last, k), k
        for of in self.standing:
            y[of] = self.attend(q[of], k[of], v[of])
        if self.self_share is not None:
            y -= self.self_share * (np.vecdot(y, v) / np.maximum(np.vecdot(v, v), 1e-8))[:, None] * v
        y *= opening * value_mix[1] if self.scales_output else opening
        return self.out @ y.ravel()

    def gated(self, x: np.ndarray, values: np.ndarray) -> np.ndarray:
        if "value_gate" not in self.weights:
            return values
        gate = self.weights["value_gate"]
        entries = gate.shape[1]
        of_stream = entries if self.places > 1 else entries // 2
        seen = np.concatenate([x[:of_stream], values.ravel()[:entries - of_stream]])
        return 2 * sigmoid(gate @ seen)[:, None] * values

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """q, k, v [heads, head_dim] of the next place -> what it sees, likewise."""
        if self.count == self.keys.shape[1]:
            for kept in (self.keys, self.values):
                kept[:, :self.window] = kept[:, self.count - self.window:]
            self.count = self.window
        begin, self.count = max(0, self.count - self.window), self.count + 1
        self.keys[:, self.count - 1], self.values[:, self.count - 1, :-1] = k, v
        scores = self.keys[:, begin:self.count] @ q[:, :, None]
        chances = np.exp(scores if self.bounded else scores - scores.max(1, keepdims=True))
        seen = (chances.mT @ self.values[:, begin:self.count])[:, 0]
        return seen[:, :-1] / seen[:, -1:]

class Reader:
    """A model and what it has read: the forward of train_gpt.GPT once more, for one token after another.

    In NumPy, a call of which takes a fraction of torch's time, and in float32. The logits are those of GPT.logits on the
    whole text, but for rounding.
    """

    def __init__(self, model: GPT, windows: Windows):
        reach = {"L": windows.long, "S": windows.short, "P": windows.short}
        self.model, self.weights = model, weights_of(model)
        self.head = weights_of(model.lm_head)["weight"]
        self.embed = self.head if model.tied else weights_of(model.embed)["weight"]
        self.value_tables = [weights_of(table)["weight"] for table in model.value_embeds]
        self.ngram_tables = [weights_of(table)["weight"] for table in model.ngrams]
        self.signs = [table.signs.float().numpy() if table.shared else None for table in model.ngrams]
        frequencies, scale = model.rotary.frequencies()
        self.attention = [layer.window and Attention(block.attn, reach[layer.window], scale)
                          for layer, block in zip(model.layers, model.blocks)]
        self.mlps = [layer.mlp and weights_of(block.mlp) for layer, block in zip(model.layers, model.blocks)]
        mixing_weights = (weights.tolist() for weights in model.mixing_weights())
        skips, self.mixes, self.value_mixes, (self.smear,), (self.backout,) = mixing_weights
        gates = self.weights.get("skip_gates", [None] * len(skips))
        self.skips = dict(zip(model.skips, zip(sigmoid(np.array(skips)).tolist(), gates)))
        # queries and keys are both turned, so each takes a root of the scale
        self.angles, self.root = -1j * frequencies.double().numpy(), scale ** 0.5
        self.position, self.before = 0, np.zeros_like(self.embed[0])  # before: the last token's embedding
        self.lasts = [model.bos_id] * max((table.n for table in model.ngrams), default=0)  # tokens, the latest first

    @np.errstate(over="ignore")  # of sigmoids
    def read(self, token: int) -> np.ndarray:
        """The next token of the text -> of what follows it, logits float32 [padded vocabulary]."""
        if token == self.model.bos_id:  # attention and n-grams stay inside a document
            self.lasts = [token] * len(self.lasts)
            for attention in filter(None, self.attention):
                attention.count = 0
        self.lasts = [token, *self.lasts][:len(self.lasts)]
        x = self.trunk(token)
        self.position += 1
        cap, shift, softness = self.model.lm_head.softcap
        return cap * sigmoid((self.head @ x + shift) / softness)

    def embed_tokens(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """-> the stream before the first layer [dim], and the tables' vectors, if layers take them in."""
        e, before, gate = self.embed[token], self.before, self.weights["smear_gate"][0]
        x, self.before = norm(e + self.smear * sigmoid(gate @ e[:len(gate)]) * before), e
        total = np.zeros_like(x) if self.model.ngram_mix else x
        for number, rows, signs in zip(self.model.numbers_of(self.lasts), self.ngram_tables, self.signs):
            further, row = divmod(number, len(rows))
            total[:rows.shape[1]] += rows[row] if signs is None else rows[row] * signs[further % len(signs)]
        return x, total

    def trunk(self, token: int) -> np.ndarray:
        """-> the normed stream before the head [dim]."""
        model, saved = self.model, {}
        x, ngrams = self.embed_tokens(token)
        x0 = x
        turns = {}  # the rotary's factors of the places that a token has, complex [places, head_dim / 2]
        for places in range(1, 2 + model.pairs):
            at = places * self.position + np.arange(places)
            turns[places] = (self.root * np.exp(at[:, None] * self.angles)).astype(np.complex64)
        scaled = model.resid_lambdas is not None  # see train_gpt.ScaledBlock
        if model.tables_first:
            x = x + self.mixes[0][3] * ngrams
        for i, (layer, attention, mlp, mix) in enumerate(zip(model.layers, self.attention, self.mlps, self.mixes)):
            if i in self.skips:
                opening, gate = self.skips[i]
                if gate is not None:
                    opening *= 2 * sigmoid(gate @ x0[:len(gate)])
                x = x + opening * saved[layer.skip_from]
            if not scaled and (attention or mlp):
                x = mix[0] * x + mix[1] * x0
                if model.ngram_mix:
                    x += mix[2] * ngrams
            if attention:
                values = None if layer.value_table is None else self.value_tables[layer.value_table][token]
                read = norm(saved[model.backout_layer] if layer.reads_back else x)
                y = attention(read, values, self.value_mixes[i], turns[attention.places])
                x = mix[0] * x + mix[4] * y + mix[2] * x0 if scaled else x + y
                if scaled and model.takes_ngrams[i]:
                    x += mix[3] * ngrams
            if mlp:
                h = np.maximum(norm(x) @ mlp["fc"], 0)
                y = mlp["proj"] @ (h * h)
                x = mix[1] * x + mix[5] * y if scaled else x + y
            saved[i] = x
        return norm(x - self.backout * saved[model.backout_layer])

def draw(logits: np.ndarray, temperature: float, top_k: int, random: np.random.Generator) -> int:
    """A token by its chances: softmax(logits [vocabulary] / temperature) among the top_k likeliest (0: among all)."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # of a temperature next to zero
        chances = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    if 0 < top_k < len(logits):
        chances[np.argpartition(logits, -top_k)[:-top_k]] = 0
    chances = chances.cumsum()
    return int(chances.searchsorted(random.random() * chances[-1], side="right"))

def generate(model: GPT, windows: Windows, vocab_size: int, prompt: Sequence[int], count: int, temperature: float = 0.8,
             top_k: int = 0, seed: int = 0) -> Iterator[int]:
    """`count` tokens that the model says after BOS and the prompt. BOS among them begins another document."""
    reader, random = Reader(model, windows), np.random.default_rng(seed)
    said = [model.bos_id, *prompt]
    for _ in range(count):
        for token in said:
            logits = reader.read(token)[:vocab_size]
        said = [draw(logits, temperature, top_k, random)]
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

def show(tokens: Iterable[int], vocabulary: Vocabulary, bos_id: int) -> Iterator[str]:
    """The text of each token; the bytes of a character that is not whole yet are held back until it is."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        ends = token == bos_id
        yield printable(decoder.decode(b"" if ends else vocabulary.bytes_of(token), final=ends)) + BORDER * ends
    yield printable(decoder.decode(b"", final=True))

def number(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not 0 <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
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
    parser.add_argument("--seed", type=number(int), default=0, metavar="S", help="another one, another text (%(default)s)")
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
        model, saved = load_model(flags.model or latest_model(ROOT / "logs"))
        encoding, windows = Encoding(saved["vocab_size"], saved["bos_id"]), Windows(*saved["windows"])
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
