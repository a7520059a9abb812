#!/usr/bin/env python
"""Generate text with a trained model.

    .venv/bin/python sample.py                  the latest model in logs/, without a prompt
    .venv/bin/python sample.py --prompt "def read(" --tokens 500 --seed 3
    .venv/bin/python sample.py logs/RUN.pt --temperature 0    greedy; 1: the model's distribution

The logits are those of the model's own program, train_gpt.py or frontier.py, computed anew for each
token from all tokens before it. There is no KV cache, so a new mechanism of the model needs no
second implementation here.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # before torch, whose import takes seconds
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    # ./run.sh sample blocks it until here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # end without a traceback when the reader of the output is gone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

import argparse
import codecs
import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import train_gpt  # before numpy and torch: it says where they are if this Python lacks them
import numpy as np
import torch

import frontier

sys.path.append(str(train_gpt.ROOT / "records"))
import logs
from train_gpt import (
    GPT,
    GPT2_VOCAB,
    ROOT,
    Config,
    Encoding,
    Parser,
    RunError,
    Windows,
    printable,
    require,
)

BORDER = "\n\n-----\n\n"  # printed between two documents


class Trained(NamedTuple):
    """A saved model: in float32 on the CPU, in evaluation mode."""

    model: GPT
    config: Config
    windows: Windows


def load_model(path: str | Path) -> Trained:
    """Load a saved model or checkpoint. RunError if the file does not describe a model."""
    require(Path(path).suffix != ".txt", f"{path} is a log; name a model, which ends in .pt")
    saved = train_gpt.load_file(path)
    try:
        program = {"train_gpt.py": train_gpt, "frontier.py": frontier}[saved["program"]]
        config = train_gpt.config_of(saved["config"], program.Config)
        config = dataclasses.replace(config, dtype="float32")  # bf16 is slow on CPUs
        model = train_gpt.build_model(config, Encoding(saved["vocab_size"], saved["bos_id"]))
        train_gpt.load_parameters(model, saved)
        plan = train_gpt.plan_of(config, saved["step"])
        model.apply_schedule(plan)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    except Exception as error:
        raise RunError(
            f"{path}: does not describe a model of this version of"
            f" {saved.get('program', 'train_gpt.py')} ({type(error).__name__}: {error}); name"
            " another".partition("\n")[0]
        ) from error
    return Trained(model.eval(), config, plan.windows)


def longest_context(config: Config) -> int:
    """The largest number of tokens that the model's rotary tables allow."""
    return max(config.val_len, *train_gpt.micro_batch_lengths(config))


@torch.inference_mode()
def next_logits(trained: Trained, tokens: Sequence[int]) -> np.ndarray:
    """Compute the logits of the token after `tokens` -> float32 [padded vocabulary].

    Only the latest tokens are read if the text is longer than the model's longest context.
    """
    model = trained.model
    context = torch.tensor(tokens[-longest_context(trained.config) :])
    return model.lm_head.logits(model.trunk(context, trained.windows)[-1:])[0].numpy()


def draw(logits: np.ndarray, temperature: float, top_k: int, random: np.random.Generator) -> int:
    """Sample from softmax(logits [vocabulary] / temperature), of the top_k largest (0: of all)."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a temperature close to zero
        weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    if 0 < top_k < len(logits):
        weights[np.argpartition(logits, -top_k)[:-top_k]] = 0
    cumulative = weights.cumsum()
    return int(cumulative.searchsorted(random.random() * cumulative[-1], side="right"))


def generate(
    trained: Trained,
    prompt: Sequence[int],
    count: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Generate `count` tokens after BOS and the prompt. A generated BOS starts another document."""
    random = np.random.default_rng(seed)
    tokens = [trained.model.bos_id, *prompt]
    for _ in range(count):
        logits = next_logits(trained, tokens)[: trained.model.lm_head.classes]
        require(
            np.isfinite(logits).all(),
            "the model's logits are not finite, so its training diverged; name another model",
        )
        tokens.append(draw(logits, temperature, top_k, random))
        yield tokens[-1]


class Vocabulary(NamedTuple):
    encode: Callable[[str], list[int]]
    bytes_of: Callable[[int], bytes]  # of a token other than BOS


def vocabulary_of(encoding: Encoding, train_files: str) -> Vocabulary:
    """Find an encoding's vocabulary: bytes, or GPT-2's beside the training shards."""
    if encoding.vocab_size <= 257:
        return Vocabulary(
            lambda text: list(text.encode("utf-8", "surrogateescape")), lambda token: bytes([token])
        )
    require(
        encoding.vocab_size == GPT2_VOCAB,
        f"the model's vocabulary has {encoding.vocab_size} tokens; sample.py "
        f"knows bytes (at most 257 tokens) and GPT-2's ({GPT2_VOCAB})",
    )
    tokens = frontier.gpt2_token_bytes((ROOT / train_files).parent)
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    gpt2 = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        special_tokens={},
        mergeable_ranks={token: number for number, token in enumerate(tokens)},
    )

    def encode(text: str) -> list[int]:
        # raises UnicodeEncodeError; tiktoken would replace invalid characters by U+FFFD
        text.encode()
        return gpt2.encode_ordinary(text)

    return Vocabulary(encode, tokens.__getitem__)


def encode_prompt(text: str, vocabulary: Vocabulary, encoding: Encoding) -> list[int]:
    """Encode the prompt. RunError if it is not valid UTF-8 or has a character without a token."""
    try:
        tokens = vocabulary.encode(text)
    except UnicodeEncodeError as error:
        raise RunError(
            f"--prompt: {error.object[error.start : error.end]!a} at character {error.start} is not"
            " valid UTF-8; leave it out"
        ) from None
    for token in tokens:
        require(
            token < encoding.vocab_size and token != encoding.bos_id,
            "--prompt: the model's vocabulary has no "
            f"token for {vocabulary.bytes_of(token)!r}; leave it out",
        )
    return tokens


def show(tokens: Iterable[int], vocabulary: Vocabulary, bos_id: int) -> Iterator[str]:
    """Decode each token to printable text.

    Bytes of an incomplete character wait for the rest; at the end they are dropped.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        ends = token == bos_id
        yield (
            printable(decoder.decode(b"" if ends else vocabulary.bytes_of(token), final=ends))
            + BORDER * ends
        )


def number(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not 0 <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sample.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="latest",
        type=logs.or_latest(logs.MODEL),
        metavar="MODEL",
        help="a .pt written by --save_model, or a .ckpt (default: latest, the newest .pt in logs/)",
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="start of the text")
    parser.add_argument(
        "--tokens",
        type=number(int),
        default=300,
        metavar="N",
        help="tokens to generate (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=number(float),
        default=0.8,
        metavar="T",
        help="higher is more varied; 0: the most likely token (%(default)s)",
    )
    parser.add_argument(
        "--top_k",
        type=number(int),
        default=0,
        metavar="K",
        help="sample among the K most likely tokens (0: all)",
    )
    parser.add_argument(
        "--seed",
        type=number(int),
        default=0,
        metavar="S",
        help="seed of the sampling (%(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = make_parser().parse_args(argv)
    try:
        trained = load_model(flags.model)
        encoding = Encoding(trained.model.lm_head.classes, trained.model.bos_id)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(train_gpt.cpu_threads(trained.config, 1))
        vocabulary = vocabulary_of(encoding, trained.config.train_files)
        prompt = encode_prompt(flags.prompt, vocabulary, encoding)
        # its documents may be pieces that begin inside a word
        of_bytes = encoding.vocab_size == 257
        generated = generate(
            trained,
            prompt or vocabulary.encode("\n") * of_bytes,
            flags.tokens,
            flags.temperature,
            flags.top_k,
            flags.seed,
        )
        for text in show(itertools.chain(prompt, generated), vocabulary, encoding.bos_id):
            print(text, end="", flush=True)
        print()
        return 0
    except (RunError, OSError) as error:
        message = (
            f"{error.filename or 'the output'}: {error.strerror}"
            if isinstance(error, OSError)
            else str(error)
        )
        print(f"sample.py: error: {printable(message)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if sys.stdout is None:
        sys.exit("sample.py: error: standard output is closed; leave it open")
    sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
    sys.exit(main())
