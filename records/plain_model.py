"""How a plain model file rebuilds its model; export.py --to safetensors ends each file with this.

What stands below the line is copied. config.json describes the modules: their class, values,
shapes of tensors, and further modules. No constructor runs, so that nothing of a run is needed.
"""

# --------------------------------------------------------------------------------------------------
# from here on the same in all plain model files: modules from config.json, weights, transformers

import json
import sys
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


def named(name, start):
    """Return what a dotted name stands for, such as torch.nn.ModuleList of this file."""
    return reduce(getattr, name.split("."), start)


def decode(value, model):
    """Return the Python value of a value in config.json."""
    if isinstance(value, list):
        return [decode(one, model) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "part":  # a tensor or a module
        return named(content, model)
    if kind == "name":
        return named(content, sys.modules[__name__])
    if kind == "range":
        return range(*content)
    collections = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    if kind in collections:
        return collections[kind](decode(content, model))
    fields = {name: decode(one, model) for name, one in content.items()}
    made = named(kind, sys.modules[__name__])
    if issubclass(made, tuple):
        return made(**fields)
    made = object.__new__(made)
    vars(made).update(fields)
    return made


def build(description, late):
    """Build a module and those in it, with empty tensors.

    late: takes (module, attribute, value) of values, which may be tensors or modules.
    """
    kind = named(description["class"], sys.modules[__name__])
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, (dtype, *shape) in description["parameters"].items():
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        module.register_parameter(name, nn.Parameter(empty))
    for name, (dtype, *shape) in description["buffers"].items():
        module.register_buffer(name, torch.empty(shape, dtype=getattr(torch, dtype)))
    for name, inner in description["modules"].items():
        module.add_module(name, build(inner, late))
    late += [(module, name, value) for name, value in description["values"].items()]
    return module


class Logits:
    """Both models below: one document or packed sequence after another, without padding."""

    def set_up(self, config):
        self.late = []
        self.vocab_size = config["vocab_size"]
        self.longest = config["max_position_embeddings"]
        self.windows = config["windows"]
        self.model = build(config["model"], self.late)

    def train(self, mode=True):
        """Leave the model itself in evaluation mode: its own training uses kernels of GPUs."""
        super().train(mode)
        self.model.eval()
        return self

    def logits(self, tokens):
        """tokens [T], int64 -> logits [T, vocabulary], float32."""
        if len(tokens) > self.longest:
            raise ValueError(
                f"a sequence of {len(tokens)} tokens; this model has positions for"
                f" {self.longest}: give the last {self.longest}"
            )
        for module, name, value in self.late:
            vars(module)[name] = decode(value, self.model)
        x = self.model.trunk(tokens, decode(self.windows, self.model))
        return self.model.lm_head.logits(x)[:, : self.vocab_size]


class PlainModel(Logits, nn.Module):
    """tokens [B, T], int64 -> logits [B, T, vocabulary], float32."""

    def __init__(self, config):
        super().__init__()
        self.set_up(config)
        self.eval()

    def forward(self, tokens):
        return torch.stack([self.logits(row) for row in tokens])


def load(folder=None):
    """Load the model of a folder, by default this file's."""
    folder = Path(folder or Path(__file__).parent)
    model = PlainModel(json.loads((folder / "config.json").read_text("utf-8")))
    # copies: some are stored in bfloat16, where that loses nothing, and none is aligned in the file
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


if "transformers" in sys.modules:  # it imports this file, with trust_remote_code=True
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizer
    from transformers.modeling_outputs import CausalLMOutput

    class PlainConfig(PretrainedConfig):
        model_type = "gpt_speedrun"

    class PlainForCausalLM(Logits, PreTrainedModel, GenerationMixin):
        config_class = PlainConfig
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__(config)
            self.set_up(vars(config))
            self.post_init()

        def _init_weights(self, module):
            """Do nothing: all tensors are in the file."""

        def get_input_embeddings(self):
            return self.model.embed

        def forward(self, input_ids, attention_mask=None, **_):
            """Compute logits of tokens [B, T]. attention_mask: 0 where a row is padded."""
            rows = []
            for i, row in enumerate(input_ids):
                used = torch.ones_like(row).bool()
                if attention_mask is not None:
                    used = attention_mask[i].bool()
                logits = self.logits(row[used])
                rows.append(logits.new_zeros(len(row), self.vocab_size))
                rows[-1][used] = logits
            return CausalLMOutput(logits=torch.stack(rows))

    class ByteTokenizer(PreTrainedTokenizer):
        """Tokens 0 to 255 are bytes of UTF-8; <bos>, 256, begins and ends a document."""

        model_input_names = ["input_ids", "attention_mask"]

        def __init__(self, **named):
            named = {"bos_token": "<bos>", "eos_token": "<bos>", "pad_token": "<bos>", **named}
            super().__init__(**named)

        @property
        def vocab_size(self):
            return 256

        def get_vocab(self):
            return {chr(i): i for i in range(256)} | self.added_tokens_encoder

        def _tokenize(self, text, **_):
            return [chr(byte) for byte in text.encode("utf-8", "surrogateescape")]

        def _convert_token_to_id(self, token):
            return ord(token)

        def _convert_id_to_token(self, number):
            return chr(number)

        def convert_tokens_to_string(self, tokens):
            return "".join(tokens).encode("latin-1").decode("utf-8", "replace")

        def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
            return [self.bos_token_id, *token_ids_0, *(token_ids_1 or ())]

        def save_vocabulary(self, *_, **__):
            return ()
