"""The public GPT speedrun's head, record 92's mechanisms, as the preset `frontier`.

    ./run.sh --preset frontier                set up, fetch the data and train on GPUs
    torchrun --nproc_per_node=8 frontier.py   train on eight GPUs, with data already fetched
    python frontier.py --help                 every flag

Ideas for it go into this file, which holds what the records add to record 44: config, model, update
rules. All else is train_gpt.py, which it imports: data, schedule, gradient sync, training loop,
attention, log. A run's log begins with the source of both files. `frontier` computes what record 92
does, on 1, 2, 4 or 8 GPUs of any kind, but with a smaller n-gram table and other scales of fp8.
Known further differences: the record rounds residual and post weights to bf16, and reads the first
shard on its clock; its gradient's normalizer counts further targets beyond a sequence's end; and
see Tail.keep_norm. `frontier89` is record 89, but for the MLPs' backward, which is in fp8 since
record 90: bench/public_record.py compares it, without fp8, with the record's own program, one file,
train_gpt.py of KellerJordan/modded-nanogpt. Record 92 is a package there:

    here                                     there, in track_1_short/
    RECORD_92                                config, schedule
    GPT, Group, Block, TokenWeights, Mudd    model/gpt
    Attention                                model/attention
    NgramTable, RowAdam                      ngram_table, perf/kernels/ngram_adam
    GPT.fill_prefixes                        model/prefix_prediction
    Anvil                                    optim/anvil
    TailAverages, Candidates                 tail_average, sampled_softmax
    ReluSquaredInFP8                         perf/kernels/mlp
    DocCopy, normalized_ids                  doc_copy, token_norm, which came after record 92

    section   contents                                               to start, search for
    config    stage values, kinds of parameters, fields, presets     class Config, Layer, RECORD_92
    model     groups, blocks, attention, MLP, weights per token      GPT, def trunk, class Mudd
              head, n-gram tables, DocCopy                           class Head, NgramTable, DocCopy
    rules     ANVIL; Adam with a cadence, and a moment per row       class Anvil, class RowAdam
    worker    tied embedding, fp8 scales, averages of the last       class Worker, TailAverages
              steps, candidates of the loss                          class Candidates
    kernels   DC's attention maps, the MLP and its backward in fp8   def mix_heads, ReluSquaredInFP8
"""

from __future__ import annotations

import sys
from pathlib import Path

# train_gpt.py then prepares the process before it imports torch
STARTS_A_RUN = __name__ == "__main__"
sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -I leaves it out

import base64
import math
import re
import unicodedata
from dataclasses import MISSING, dataclass, replace
from functools import reduce
from itertools import chain, pairwise
from math import sqrt
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt
from train_gpt import (
    GATE_DIM,
    GPT2_VOCAB,
    TILE_K,
    TILE_M,
    Comm,
    DistributedOptimizer,
    DocumentTable,
    Encoding,
    FP8Linear,
    FP8Scales,
    HandleGroup,
    HeadLoss,
    Mask,
    Masks,
    Ngrams,
    NorMuon,
    Pair,
    Plan,
    Ramp,
    Rotary,
    Shard,
    Softcap,
    Tensors,
    Values,
    Windows,
    attend,
    compiled,
    cut_in_pieces,
    embedding,
    fp8_product,
    frozen,
    groups_by_kind,
    is_edited,
    kernel_grid,
    mask_in_pieces,
    norm,
    option,
    parameter,
    polar,
    positive,
    require,
    rotary_frequencies,
    rotate,
    scheduled_steps,
    seen_by_pieces,
    sha256_of,
    stage_type,
    stages_of,
    start,
    to_device,
    triton,
    uniform,
    wide_dtype,
)

Outputs = dict[int, Tensor]  # by layer

if triton is not None:
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

# --------------------------------------------------------------------------------------------------
# config


@frozen
class StageValues(train_gpt.StageValues):
    """Values that a stage may set: also the weights of further targets, which GPT.loss reads."""

    second_token_weight: float = option(0.0, "weight in the objective of the token after the next")
    third_token_weight: float = option(
        0.0, "weight in the objective of the token two after the next"
    )
    prefix_weight: float = option(
        0.0, "weight of a further target: the longest token that begins the next"
    )
    attended_tokens: int = option(
        0,
        "attention treats every so many tokens of a document as a document of its own; 0: "
        "it sees whole documents",
    )
    candidates: int = option(
        0,
        "classes of the training loss, drawn for each micro-batch (0: all). The log's train_loss"
        " is then too low by up to ln(vocabulary / candidates), with their mean number beside it",
    )


Stage = stage_type(StageValues)
Stage.__module__ = __name__  # Python 3.12 and newer name the module that made it


@dataclass(frozen=True, repr=False)
class AdamGroup(train_gpt.AdamGroup):
    """How Adam updates one kind of parameters, with moments in float32."""

    slow_from: int | None = option(
        None,
        "step from which the kind is updated half as often, with squared betas and "
        "twice the weight decay (None: never)",
    )
    row_moment: bool = option(
        False, "of n-gram tables: one second moment per row, and no first one"
    )
    by_rows: bool = option(
        False, "of value tables: gradients of the rows that were read are sent, not of all"
    )

    def rule(self, config: Config) -> Adam:
        rule = vars(super().rule(config)) | {"fp32_moments": True, "slow_from": self.slow_from}
        if self.by_rows:
            rule |= {"rows": True, "lazy": False}
        return (RowAdam if self.row_moment else Adam)(**rule)


@frozen
class Tail:
    """An average of weights over the last steps. After the last step the weights move towards it.

    Then all weights of a kind are scaled by one factor, to the norm that they had, if keep_norm.
    Record 92's norm of the MLPs also counts a matrix that its model does not use and that never
    changes; ours does not, which is at most 5e-5 nats.
    """

    # of parameters, divided by spaces; mlp: all that begin with mlp_; also the last part of names,
    # as qk
    kinds: str
    last_steps: int = positive(MISSING, "the average starts as the weights after the first of them")
    period: int = positive(1, "it moves after each later step s with s % period = phase")
    phase: int = option(0, "see period")
    rate: float = positive(1.0, "how it moves: average += rate * (weights - average)", max=1)
    last_rate: float | None = positive(None, "rate after the last step; None: rate", max=1)
    final_steps: int = option(0, "it moves after these last steps in any case")
    blend: float = positive(1.0, "at the end: weights += blend * (average - weights)", max=1)
    keep_norm: bool = True
    __repr__ = train_gpt.show_row


@dataclass(frozen=True, repr=False)
class MuonGroup(train_gpt.MuonGroup):
    """How NorMuon or, with anvil_from, ANVIL updates one kind of matrices."""

    anvil_from: int | None = option(
        None, "step from which ANVIL adds its slow momentum (None: NorMuon)"
    )

    def rule(self, config: Config) -> NorMuon:
        rule = super().rule(config)
        return rule if self.anvil_from is None else Anvil(**vars(rule), blend_from=self.anvil_from)


TIED = {"beta1": 0.5, "weight_decay": 0.75}
SLOW = {"beta1": 0.9, "beta2": 0.99}
OF_TABLES = {"beta1": 0.75, "beta2": 0.95, "weight_decay": 0.025}


@dataclass(frozen=True)
class Layer:
    """The contents of one layer, a row of Config.layers. Read Block and Attention first."""

    # removed: none, but the residual stream is weighted as in a layer with attention. paired: the
    # short window, and heads j and num_heads / 2 + j attend to each other's keys
    attention: str = option(
        "none", "the attention's window, or none", ("none", "removed", "short", "long", "paired")
    )
    narrow: str = option(
        "", "what has half the width: queries and keys, or also values", ("", "qk", "qkv")
    )
    value_table: int | None = option(None, "values add this table's row of the token")
    xsa: bool = option(False, "heads remove a token's own value (XSA, arXiv:2603.09078)")
    gated: bool = option(False, "a gate per head and token")
    dc: bool = option(False, "attention maps are mixed over heads (DC, arXiv:2405.08553)")
    reads_backout: bool = option(False, "attention reads the output of backout_layer")
    adds: str = option("", "what the residual stream adds", ("", "x0", "ngrams", "x0 ngrams"))
    mlp: int = option(1, "number of MLPs, whose outputs are summed", max=2)
    skip_from: int | None = option(None, "skip connection from this layer")
    __repr__ = train_gpt.show_row

    @property
    def window(self) -> str | None:
        """Return the attention's key in GPT.masks, None without attention."""
        return {"short": "S", "long": "L", "paired": "P"}.get(self.attention)

    @property
    def weights_residual(self) -> bool:
        return self.attention != "none"


# One row per kind of parameters, each with the public records that its values are from
PARAM_GROUPS = (
    AdamGroup("head", **TIED),  # 51, 55, 57
    AdamGroup("embed", **TIED),  # once untied it continues as the head did: 53
    AdamGroup("value_embeds", 75.0, **OF_TABLES),  # 55, 57
    AdamGroup("ngram_embeds", 75.0, **OF_TABLES),  # 62
    AdamGroup("scalars", 5.0, **SLOW),  # 52
    AdamGroup("resid_lambdas", 5.0, beta1=0.9),  # 73
    AdamGroup("post_lambdas", beta1=0.9),  # 73
    AdamGroup("gates", **SLOW, weight_decay=0.005),  # 56
    AdamGroup("smear_gate", 0.01, **SLOW),  # 52
    # outputs weight whole residual streams
    AdamGroup("token_gates", 0.1, **SLOW, weight_decay=0.005),  # 85
    AdamGroup("token_gates_biases", 0.1, **SLOW),  # 85
    AdamGroup("mudd", 0.25, **SLOW, weight_decay=0.005),  # 81
    AdamGroup("mudd_biases", 0.25, **SLOW),  # 81
    AdamGroup("doc_copy", **SLOW),  # DocCopy's program, after record 92
    MuonGroup("attn"),  # 61
    MuonGroup("mlp_fc", lr_mul=2.0),  # 48
    MuonGroup("mlp_proj", lr_mul=4.0),  # 48
)


@frozen
class Config(train_gpt.Config, StageValues):
    """Every value that decides a run. The defaults, with RECORD_89, are the public record 89."""

    row_types = Stage, Ramp, AdamGroup, MuonGroup, Ngrams, Tail, Layer
    base_groups = PARAM_GROUPS
    model_type = property(lambda self: GPT)
    worker_type = property(lambda self: Worker)
    help_groups = {
        "second_token_weight": "values that stages may set",
        "ngram_hash": "model of records 89 and 92",
    }
    logged_stage_values = ("candidates",)

    # Narrow queries, keys and values use a part of matrices of full size, so that updates treat all
    # layers alike
    layers: tuple[Layer, ...] = option(
        (), 'one row per layer, such as Layer("short", value_table=0, xsa=true, adds="x0 ngrams")'
    )
    # Records that brought the defaults below: 45 resid_lambda_init, 51 head_init, 53 untie_at, 54
    # logit_shift, 64 output_init, 70 value_init, 80 muon_qk_heads, 83 signs of n-grams, 84 and 89
    # fp8_mlp, 85 token_gates and the size of the table
    mlp_dim: int = option(0, "hidden width of the MLPs; 0: 4 * model_dim")
    softmax_scale: float = positive(
        0.1, "factor on attention's logits in heads of full width, for the first window"
    )
    narrow_softmax_scale: float = positive(0.13, "the same for narrow queries and keys")
    mudd_groups: int = option(
        0,
        "groups of channels with weights of their own when the head mixes earlier outputs; it "
        "then also reads all value tables, the last MLP's input and backout_layer's normed "
        "output. 0: none of these",
    )
    ngrams: tuple[Ngrams, ...] = option(
        (Ngrams(2, 377280, 768),),
        "n-gram embedding tables, Ngrams(N, ROWS, WIDTH) "
        "each; N is 2, or with the hash of record 92 also 3",
    )
    ngram_hash: str = option(
        "record89", "which hashes assign n-grams to rows and signs", ("record89", "record92")
    )
    normalized_ids: bool = option(
        False, "n-grams and doc_copy compare GPT-2's tokens without case, accents and spaces"
    )
    doc_copy: bool = option(
        False,
        "add the embedding of the token that followed the longest repeated context of the "
        "document; see DocCopy",
    )
    token_gates: tuple[int, ...] = option(
        (0, 4),
        "layers that begin a small network's range. Per token it computes gates of x0, "
        "bigram embeddings, skip connections, x, g and d for the layers up to the next one",
    )
    output_init: float = option(1.0, "scale of the initial attention output matrices")
    # a tied head of zeros learns nothing
    head_init: float = positive(0.005, "standard deviation of the head's initialization")
    value_init: float = option(0.01, "standard deviation of the value tables' initialization")
    resid_lambda_init: float = positive(
        1.1, "initial weight of the residual stream; above 1 favours later layers"
    )
    untie_at: float = option(
        2 / 3,
        "fraction of the schedule in which head and embedding are one matrix; then the "
        "embedding becomes a copy with its own updates (0: never tied)",
        max=1,
    )
    # a lower cap than record 44's; logits have more room below x = 0 than above
    logit_shift: float = option(
        5.0, "logits = logit_cap * sigmoid((x + logit_shift) / 7.5)", min=-math.inf
    )
    log_q_share: float = option(
        0.0,
        "s of the sampled loss: s * ln((V - U) / (P - U)) is added to the logits of candidates "
        "that are no target (V classes, P candidates, U different targets). 1 makes up for the "
        "classes that were not drawn. Above 0 the loss is computed without its kernel",
        max=1,
    )
    fp8_mlp: bool = option(
        True, "compute the MLPs in fp8 during training, where fp8_head is on and GPUs have fp8"
    )
    fp8_qkv: bool = option(
        False,
        "compute queries, keys and values in fp8 during training; off on GPUs without fp8",
        needs="fp8_head",
    )
    fp8_logits: bool = option(
        False, "round the logits to fp8 during training, before their soft cap", needs="fp8_head"
    )
    muon_qk_heads: int = positive(
        2, "heads per matrix of queries or keys that NorMuon orthogonalizes"
    )
    tails: tuple[Tail, ...] = option(
        (),
        'averages over the last steps, such as Tail("head embed", 298, rate=.01, blend=.65). The'
        " weights move to them, row after row, before the last validation; earlier validations are"
        " of the weights as trained",
    )

    def parse_layers(self) -> tuple[Layer, ...]:
        require(self.layers, "layers is empty; give at least one layer")
        return self.layers

    def saved_layers(self) -> set[int]:
        """Return the layers whose outputs are read later. -1: the input of the first one."""
        return super().saved_layers() | {-1, len(self.layers) - 2}

    def shortened(self, num_steps: int) -> Values:
        """Scale also the steps in which rules change, and tails: averages move as far as before."""
        part = num_steps / self.num_steps
        if part >= 1:
            return super().shortened(num_steps)

        def scaled(row: Any) -> Any:
            if isinstance(row, Tail):
                rates = (row.rate, row.rate if row.last_rate is None else row.last_rate)
                rate, last_rate = (1 - (1 - rate) ** (1 / part) for rate in rates)
                return replace(
                    row,
                    last_steps=max(1, int(part * row.last_steps)),
                    rate=rate,
                    last_rate=last_rate,
                )
            name = "slow_from" if isinstance(row, AdamGroup) else "anvil_from"
            steps = getattr(row, name)
            if steps is None:
                return row
            cycle = 2 * self.adam_every if name == "slow_from" else 1
            return replace(row, **{name: int(part * steps) // cycle * cycle})

        return super().shortened(num_steps) | {
            "tails": tuple(map(scaled, self.tails)),
            "param_groups": tuple(map(scaled, self.param_groups)),
        }

    def conditions(self, ranks: int) -> Iterator[tuple[Any, str]]:
        yield from super().conditions(ranks)
        c = self
        layers = self.parse_layers()
        begins = [*c.token_gates]
        yield from (
            (
                begins[:1] == [0] and begins[-1] < len(layers) and begins == sorted({*begins}),
                f"token_gates is {begins}; give numbers of layers, 0 and later ones up"
                f" to {len(layers) - 1}, such as 0,4",
            ),
            (
                all(
                    gates_of(c, numbers)
                    for numbers in gated_layers(c)
                    if numbers.stop <= len(layers)
                ),
                f"token_gates is {begins}, but the layers from one of these to the"
                " next have no adds, xsa, gated, dc or skip_from; add one, or begin elsewhere",
            ),
            (
                c.backout_layer != len(layers) - 1,
                f"backout_layer is {c.backout_layer}; the last layer reads it, so give an"
                " earlier one",
            ),
            (
                layers[0].window
                and layers[-1].window
                and any(layer.value_table is not None for layer in layers),
                "layers: the first and the last layer need attention, and one layer a"
                ' value table, such as Layer("short", value_table=0)',
            ),
            (
                not any(layer.reads_backout for layer in layers[: c.backout_layer + 1]),
                f"layers: reads_backout reads the output of layer {c.backout_layer},"
                " backout_layer; write it only in later layers",
            ),
            (
                c.num_heads % 2 == 0,
                f"num_heads is {c.num_heads}; paired and the last layer need an even number",
            ),
            (
                c.num_heads % c.muon_qk_heads == 0,
                f"muon_qk_heads is {c.muon_qk_heads}; it must divide num_heads, {c.num_heads}",
            ),
            (
                c.ngrams
                and all(
                    table.n in SIGN_FACTORS[c.ngram_hash] and table.rows > 1 for table in c.ngrams
                ),
                f"ngrams: with ngram_hash {c.ngram_hash} give tables of 2 rows and more and of"
                f" n in {', '.join(map(str, SIGN_FACTORS[c.ngram_hash]))}, such as Ngrams(2,"
                f" 3000, {c.model_dim})",
            ),
            (
                not c.mudd_groups or c.model_dim % c.mudd_groups == 0 and layers[-1].mlp,
                f"mudd_groups is {c.mudd_groups}; it must divide model_dim, {c.model_dim}, and"
                " the last layer needs an MLP",
            ),
        )
        for tail in c.tails:
            yield (
                isinstance(tail.kinds, str) and tail.phase < tail.period,
                f'tails: {tail}: give kinds as a text such as "qk vo", and a phase below the'
                " period",
            )
        for n in {stage.first["candidates"] for stage in stages_of(c)}:
            yield n % 16 == 0, f"candidates is {n}; products in fp8 need a multiple of 16"
        cycle = 2 * c.adam_every
        untied = first_untied_step(c)
        for group in groups_by_kind(c).values():
            if isinstance(group, AdamGroup):
                slow_from = group.slow_from or 0
                yield (
                    slow_from % cycle == 0,
                    f"param_groups: {group} has slow_from {slow_from}; it must be a "
                    f"multiple of {cycle}, 2 * adam_every",
                )
                yield (
                    group.kind != "head"
                    or group.slow_from is None
                    or slow_from >= untied
                    or untied % cycle == 0,
                    f"param_groups: {group}: its gradients would wait in step {untied}, in"
                    " which the embedding becomes a copy of the head; change untie_at",
                )
                yield (
                    (not group.row_moment or group.kind == "ngram_embeds" and c.lazy_tables)
                    and (not group.by_rows or group.kind == "value_embeds"),
                    f"param_groups: {group}: row_moment is for ngram_embeds with --lazy_tables"
                    " true, and by_rows for value_embeds; leave it out",
                )
        for i, layer in enumerate(layers):
            where = f"layers: layer {i}, {layer!r}"
            yield (
                layer.attention != "paired" or not (layer.xsa or layer.dc),
                f"{where}: xsa and dc need unpaired heads; write short or long",
            )
            yield (
                not layer.narrow or layer.attention != "long" and not layer.dc,
                f"{where}: long and dc need queries and keys of full width; leave out narrow",
            )
            parts = (layer.narrow, layer.xsa, layer.gated, layer.dc, layer.reads_backout)
            yield (
                layer.window or layer.value_table is None and not any(parts),
                f"{where}: narrow, value_table, xsa, gated, dc and reads_backout are parts of"
                " attention; add short, long or paired, or leave them out",
            )
            yield (
                layer.weights_residual or not layer.adds,
                f"{where}: a layer without attention adds nothing; write removed, or leave out"
                " adds",
            )
        yield (
            not layers[-1].adds,
            "layers: the token weights of Mudd add x0 and n-grams to the last layer; leave out"
            " adds",
        )


# Record 89 of the public speedrun. Numbers beside values are of the records, 45 and later, that
# brought them. The record's first layer has neither attention nor MLP; it has no number here
RECORD_89 = Config(
    # paired heads: 58. Five value tables, in these layers: 63, 70. XSA: 82, in these layers: 85.
    # Adds of x0 and n-grams: 62, after attention: 73, by token: 85
    layers=(
        Layer("paired", adds="x0 ngrams"),
        Layer("short", value_table=0, xsa=True, adds="x0 ngrams"),
        Layer("paired", value_table=1, adds="x0 ngrams"),
        Layer("long", xsa=True, gated=True, adds="x0 ngrams"),  # offset of keys: 49, gates: 85
        Layer("short", xsa=True, adds="x0 ngrams"),
        Layer("paired", adds="x0 ngrams"),
        Layer(skip_from=3),  # no attention, one skip connection: 45
        Layer("short", xsa=True, adds="x0 ngrams"),
        Layer("short", value_table=2, reads_backout=True, adds="x0 ngrams"),  # reads backout: 77
        Layer("paired", value_table=3, reads_backout=True, adds="x0 ngrams"),
        Layer("long", value_table=4, gated=True, dc=True, reads_backout=True),  # Mudd: 81, DC: 85
    ),
    backout_layer=7,  # 77
    overlap_param_gather=True,
    update_order="forward",
    logit_cap=23.0,  # 54
    fp8_x_scale=100 / 448,  # 51
    fp8_weight_scale=1.6 / 448,  # 55
    fp8_grad_scale=0.75 / 448,  # 51
    num_steps=1285,  # 88
    cooldown=0.6,  # 73
    lr_floor=0.15,  # 72
    muon_lr=0.023,  # 46
    muon_beta2=0.9,  # 78
    adam_eps=1e-10,  # 57
    # Batches grow, and with them rates: 46. Documents grow: 72. At first several tokens are
    # predicted: 53, and a prefix: 88
    stages=(
        Stage(
            until=0.333,  # step 423; 1/3 would be 424
            micro_batch_tokens=16384,
            max_document_tokens=896,
            long_window=3,
            second_token_weight=0.5,
            third_token_weight=Ramp(0.25, 0.0),
            prefix_weight=0.25,
        ),
        Stage(
            until=2 / 3,  # step 847
            micro_batch_tokens=32768,
            max_document_tokens=2048,
            long_window=7,
            peak_lr_factor=1.52,  # 53
            second_token_weight=Ramp(0.5, 0.0),
            prefix_weight=Ramp(0.25, 0.0),
        ),
        Stage(  # to step 1270
            micro_batch_tokens=49152,
            max_document_tokens=2048,
            long_window=11,
            peak_lr_factor=1.73,  # 53
        ),
        Stage(
            extra_steps=15,  # 85
            micro_batch_tokens=49152,
            max_document_tokens=2048,
            long_window=13,
            peak_lr_factor=0.15,  # below lr_floor, which decides here
        ),
    ),
)


def second_stage(begin: int, end: int, prefix_weight: float) -> Stage:
    """Return a part of record 92's second stage, steps 320 to 681, with its own prefix_weight."""
    return Stage(
        until=end / 1174,
        micro_batch_tokens=32768,
        max_document_tokens=2048,
        long_window=7,
        peak_lr_factor=1.52,
        candidates=10240,
        second_token_weight=Ramp(0.5 * (681 - begin) / 361, 0.5 * (681 - end) / 361),
        prefix_weight=prefix_weight,
    )


def late_stage(micro_batch_tokens: int, long_window: int = 11, **values: Any) -> Stage:
    """Return a stage of record 92 after step 681: attention sees pieces of long documents."""
    return Stage(
        micro_batch_tokens=micro_batch_tokens,
        max_document_tokens=3072,
        attended_tokens=2560,
        long_window=long_window,
        **values,
    )


# Record 92. All that differs from record 89 here came with its pull request, 360, but where another
# is named. A comment before a row names the file of the record's package that holds it
RECORD_92 = replace(
    RECORD_89,
    layers=(  # model/gpt; widths: model/attention
        Layer("paired", narrow="qk", adds="x0 ngrams"),
        Layer("short", narrow="qkv", value_table=0, xsa=True, adds="x0 ngrams"),
        Layer("paired", narrow="qk", value_table=1, adds="x0"),
        Layer("long", xsa=True, gated=True),
        Layer("removed", adds="x0 ngrams"),
        Layer("paired", narrow="qk", adds="x0 ngrams"),
        Layer(skip_from=3),  # record 45
        # layer 7, without attention and MLP: layers 8 and 10 read its output (backout_layer, 77)
        Layer("removed", adds="x0", mlp=0),
        Layer("short", narrow="qkv", value_table=2, reads_backout=True, mlp=2),
        Layer("removed", adds="ngrams"),
        Layer("long", value_table=3, gated=True, reads_backout=True),
    ),
    # model/gpt, model/attention
    mlp_dim=2816,
    softmax_scale=0.085,
    mudd_groups=12,
    # config, schedule
    untie_at=1.0,
    num_steps=1194,
    cooldown=940 / 1174,  # starts at step 234
    lr_floor=0.3,  # as in its code and log; its README says 0.20
    val_every=0,
    # optim/anvil, schedule
    muon_weight_decay=2.25,  # as in its code; its README says 1.5 times record 89's 1.2
    muon_momentum=0.93,
    muon_momentum_rise=240,
    # perf/kernels/cross_entropy
    fp8_weight_scale=2 / 448,
    fp8_grad_scale=0.75 / 8 / 448,
    fp8_qkv=True,
    fp8_logits=True,
    # ngram_table. The record has 84,602,880 rows, on eight GPUs; another number is another
    # experiment
    ngrams=(Ngrams(2, 5287680, 768), Ngrams(3, 5287680, 768)),
    ngram_hash="record92",
    lazy_tables=True,
    param_groups=(  # ngram_table and schedule; optim/anvil
        AdamGroup("value_embeds", 70.0, **OF_TABLES, slow_from=336),
        AdamGroup(
            "ngram_embeds",
            70.0,
            beta1=0.0,
            beta2=0.95,
            weight_decay=0.025,
            slow_from=336,
            row_moment=True,
        ),
        MuonGroup("attn", anvil_from=514),
        MuonGroup("mlp_fc", sqrt(2816 / 768), anvil_from=514),
        MuonGroup("mlp_proj", 2 * sqrt(2816 / 768), anvil_from=514),
    ),
    tails=(  # tail_average, in the order in which the weights move to them
        Tail(  # pull request 347
            "head embed",
            last_steps=298,
            period=2,
            phase=1,
            rate=1 - (1 - 2 / 299) ** 2,
            last_rate=2 / 299,
            blend=0.65,
        ),
        Tail("vo mlp", last_steps=249, period=4, phase=1, rate=4 / 53),
        Tail("value_embeds", last_steps=247, period=4, phase=3, rate=4 / 53, keep_norm=False),
        Tail("qk", last_steps=297, period=4, phase=1, rate=2 / 75, final_steps=2, blend=0.55),
        Tail(
            "vo mlp",
            last_steps=297,
            period=4,
            phase=1,
            rate=2 / 75,
            final_steps=2,
            # Richardson extrapolation from the average before, behind which this one lags
            blend=0.55 - 0.2007,
        ),
    ),
    stages=(  # schedule; candidates: sampled_softmax
        Stage(
            until=320 / 1174,
            micro_batch_tokens=16384,
            max_document_tokens=896,
            long_window=3,
            candidates=10240,
            second_token_weight=0.5,
            third_token_weight=Ramp(0.25, 0.0),
            prefix_weight=0.25,
        ),
        second_stage(320, 411, prefix_weight=0.2),
        second_stage(411, 501, prefix_weight=0.15),
        second_stage(501, 591, prefix_weight=0.1),
        second_stage(591, 681, prefix_weight=0.05),
        late_stage(49152, until=965 / 1174, peak_lr_factor=1.73, candidates=14336),
        late_stage(49152, until=1107 / 1174, peak_lr_factor=1.73, candidates=24576),
        late_stage(40960, peak_lr_factor=1.73 * sqrt(20 / 24)),  # to step 1174
        late_stage(16384, long_window=13, extra_steps=20, peak_lr_factor=0.3),
    ),
)
PRESETS = {"frontier": RECORD_92, "frontier89": RECORD_89}


def gated_layers(config: Config) -> list[range]:
    """Return the layers that each network of token gates computes gates for."""
    return [range(*ends) for ends in pairwise([*config.token_gates, len(config.layers)])]


def first_untied_step(config: Config) -> int:
    """Return the first step with an untied embedding, after Adam's first update since untie_at.

    0: the two are not tied at all. A step beyond the last: they stay tied.
    """
    cycles = math.ceil(scheduled_steps(config) * config.untie_at) // config.adam_every + 1
    return cycles * config.adam_every if config.untie_at else 0


# --------------------------------------------------------------------------------------------------
# model


class GPT(nn.Module):
    """The model of records 89 and 92. Processes one packed sequence [T] at a time."""

    def __init__(self, config: Config, encoding: Encoding):
        super().__init__()
        self.config = config
        self.bos_id = encoding.bos_id
        self.layers = config.layers
        lengths = train_gpt.micro_batch_lengths(config)
        dtype = config.torch_dtype
        # tokens per call of the head: one size for one graph, and less memory
        self.loss_tokens = min(lengths)
        count = len(self.layers)
        vocab = -(-encoding.vocab_size // 128) * 128
        tables = len({layer.value_table for layer in self.layers} - {None})
        self.embed = embedding(vocab, config.model_dim, "embed", dtype)
        self.untied_step = self.embed.weight.first_step = first_untied_step(config)
        self.value_embeds = nn.ModuleList(
            embedding(vocab, config.model_dim, "value_embeds", dtype) for _ in range(tables)
        )
        for table in self.value_embeds:
            table.weight.data.mul_(config.value_init)
            table.sparse = getattr(groups_by_kind(config)["value_embeds"], "by_rows", False)
        self.ngrams = nn.ModuleList(NgramTable(config, table) for table in config.ngrams)
        self.smear_gate = parameter(torch.zeros(1, GATE_DIM, dtype=dtype), "smear_gate")
        self.blocks = nn.ModuleList(Block(config, layer, i) for i, layer in enumerate(self.layers))
        self.lm_head = Head(config, vocab, encoding.vocab_size)
        self.token_gates = nn.ModuleList(
            TokenWeights(config, "token_gates", gates_of(config, layers))
            for layers in gated_layers(config)
        )
        self.gate_scale = parameter(torch.tensor(TokenWeights.SCALE), "token_gates_biases")
        self.mudd = Mudd(config)
        groups = train_gpt.layer_groups(config, config.token_gates)
        self.groups = nn.ModuleList(Group(self, config, numbers) for numbers in groups)
        # weights of skip connections, of values and outputs of each layer (value_mix in Attention),
        # and of smear
        self.skips = [i for i, layer in enumerate(self.layers) if layer.skip_from is not None]
        self.scalars = parameter(
            torch.tensor([-1.5] * len(self.skips) + [0.5, 1.0] * count + [0.0]), "scalars"
        )
        self.scalar_sizes = len(self.skips), 2 * count, 1
        # a layer has two weights of its residual stream (see Block), so each is the root of the
        # layer's weight
        self.resid_lambdas = parameter(
            torch.full((count, 2), sqrt(config.resid_lambda_init)), "resid_lambdas"
        )
        self.post_lambdas = parameter(torch.ones(count, 2), "post_lambdas")
        # the longest other token that begins each token, or -1; the last entry is for the target
        # -1. See fill_prefixes
        self.register_buffer("prefixes", torch.full((vocab + 1,), -1), persistent=False)
        positions = 2 * max(config.val_len, *lengths)  # paired heads have two per token
        self.rotary = Rotary(
            rotary_frequencies(config.head_dim), positions, dtype, config.softmax_scale
        )
        # all entries of narrow heads rotate, as the first half of the others
        self.narrow_rotary = None
        if any(layer.narrow for layer in self.layers):
            frequencies = rotary_frequencies(config.head_dim)[: config.head_dim // 4]
            self.narrow_rotary = Rotary(frequencies, positions, dtype, config.narrow_softmax_scale)
        self.attended_tokens = 0  # in this step's training
        self.doc_copy = DocCopy(config) if config.doc_copy else None
        # class of each token, see normalized: the host's copy for rows_read, and the device's
        self.host_token_classes = None
        if (
            config.normalized_ids and encoding.vocab_size == GPT2_VOCAB
        ):  # other encodings are of bytes
            folder = (train_gpt.ROOT / config.train_files).parent
            classes = torch.arange(vocab, device="cpu", dtype=torch.int32)
            of_gpt2 = normalized_ids(gpt2_token_bytes(folder))
            classes[: len(of_gpt2)] = torch.tensor(of_gpt2)
            self.host_token_classes = classes
            on_device = classes.to(self.smear_gate.device)
            self.register_buffer("token_classes", on_device, persistent=False)
        self.tied = False  # head and embedding are one matrix
        self.further_weights: dict[str, float] = {}  # of this step's further targets
        self.scheduled = {}  # the same as tensors, see apply_schedule
        # of the next forwards, see Candidates; None or empty: all classes
        self.candidates: list[Tensor | None] = []
        # above 0: all masks in pieces have one shape, for windows up to `reach` tokens
        self.reach = 0
        # counted: of the next sequence, by train_gpt.count_documents
        self.flash = False
        self.counted = None

    # the loss of what trunk returns; further targets beyond the sequence are not counted
    forward = train_gpt.GPT.forward

    def trunk(self, tokens: Tensor, windows: Windows) -> Tensor:
        """Tokens [T] -> the normed residual stream before the head [T, dim]."""
        masks = self.masks(tokens, windows)
        x0, bigram_embeds, copied = self.embed_tokens(tokens)
        context = self.context(x0, bigram_embeds, masks, copied)
        # a new object: with x0 itself torch.compile would build a further graph
        x = x0.view_as(x0)
        gates = None
        saved = {}  # outputs of the layers that later layers read
        # looked up just before the first group that reads them, so that their gradients can be sent
        # after that group
        values = {}
        for group in self.groups:
            for table in group.tables:
                if table not in values:
                    values[table] = self.value_embeds[table](tokens)
            x, outputs, gates = group(x, context, saved, values, gates)
            saved |= outputs
        return x

    def masks(self, tokens: Tensor, windows: Windows) -> Masks:
        """Build the mask of each kind of attention, by Layer.window, for tokens [T]."""
        # counted is valid for one sequence
        counted = self.counted
        self.counted = None
        dtype = self.embed.weight.dtype
        has_dc = any(layer.dc for layer in self.layers)
        docs = None if counted and not has_dc else self.begins(tokens).cumsum(0)

        def make(window: int, positions: int = 1) -> Mask:
            if not counted:
                return mask_in_pieces(
                    docs.repeat_interleave(positions), window, self.reach or window, dtype
                )
            starts, longest, count = counted
            return DocumentTable(
                positions * starts, torch.tensor([window, positions * longest, count])
            )

        masks = {"L": make(windows.long), "S": make(windows.short), None: None}
        if any(layer.attention == "paired" for layer in self.layers):
            masks["P"] = make(windows.short, 2)
        if has_dc:
            masks["dc"] = self.dc_mask(docs, dtype)
        return masks

    def begins(self, tokens: Tensor) -> Tensor:
        """Find where documents, or parts of attended_tokens, begin in tokens [T]: bool [T]."""
        begins = tokens == self.bos_id
        longest = self.attended_tokens if self.training else 0
        if longest:
            position = torch.arange(len(tokens), device=tokens.device)
            begins = begins | ((position - (position * begins).cummax(0).values) % longest == 0)
        return begins

    # A graph of its own, as smear: uncompiled it is 20 small kernels
    @staticmethod
    @compiled
    def dc_mask(docs: Tensor, dtype: torch.dtype) -> Tensor:
        return mask_in_pieces(docs, *[DC_WINDOW - 1] * 2, dtype, DC_PIECE)

    def embed_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [T] -> x0, the stream before layer 0; the n-gram embeddings; Context.copied."""
        looked_up = tokens
        copied = (None, None)
        if self.doc_copy is not None:  # one lookup, and so one gradient, of tokens and candidates
            candidates, kinds = self.doc_copy.find(tokens, self.normalized(tokens), self.bos_id)
            looked_up = torch.cat([tokens, candidates])
        e = F.embedding(looked_up, self.lm_head.weight) if self.tied else self.embed(looked_up)
        if self.doc_copy is not None:
            e, of_candidates = e.chunk(2)
            copied = self.doc_copy(of_candidates, kinds)
        x0 = self.smear(e, self.smear_gate, self.scalars.split(self.scalar_sizes)[2][0], copied[0])
        embeds = (table(*rows) for table, rows in zip(self.ngrams, self.ngram_rows(tokens)))
        # a narrow table: the first entries. The sum of two tables in bf16 is rounded once
        padded = (F.pad(embed, (0, x0.size(1) - embed.size(1))) for embed in embeds)
        return x0, reduce(torch.add, padded), copied[1]

    def normalized(self, tokens: Tensor) -> Tensor:
        """Return what n-grams and DocCopy compare: tokens or, with normalized_ids, classes."""
        if self.host_token_classes is None:
            return tokens
        on_host = tokens.device.type == "cpu"
        return (self.host_token_classes if on_host else self.token_classes)[tokens]

    smear = staticmethod(train_gpt.GPT.smear)

    @compiled
    def ngram_rows(self, tokens: Tensor) -> list[Pair]:
        """Return each table's rows and sign rows, of the n-grams that end at tokens [T]."""
        return [table.row_and_sign(self.normalized(tokens)) for table in self.ngrams]

    def rows_read(self, tokens: Tensor) -> dict[nn.Parameter, Tensor]:
        """Find the rows that a forward of tokens [..., T] reads, of tables that send rows."""
        ids = self.normalized(tokens)
        return {table.weight: tokens for table in self.value_embeds if table.sparse} | {
            table.weight: table.row_and_sign(ids)[0] for table in self.ngrams
        }

    def context(
        self,
        x0: Tensor,
        bigram_embeds: Tensor,
        masks: Masks,
        copied: Tensor | None = None,
    ) -> Context:
        # unbound at once: backward of many single selections would pad each gradient with zeros and
        # add them up
        skip_weights, value_mixes, _ = self.scalars.split(self.scalar_sizes)
        mixes = torch.cat([self.resid_lambdas, self.post_lambdas], 1)
        rotaries = [
            rotary and (rotary.cos, rotary.sin, rotary.scale)
            for rotary in (self.rotary, self.narrow_rotary)
        ]
        return Context(
            x0,
            bigram_embeds,
            *rotaries,
            masks,
            dict(zip(self.skips, skip_weights.unbind())),
            mixes.unbind(),
            value_mixes.view(-1, 2).unbind(),
            self.gate_scale,
            copied,
            self.scheduled,
            {},
        )

    def loss(self, x: Tensor, targets: Tensor) -> Pair:
        """Compute the losses of `forward` from the normed residual stream [T, dim]."""
        targets_by_row = [targets]
        row_weights = [1.0]
        further = self.further_weights if self.training else {}
        for ahead, name in ((1, "second_token_weight"), (2, "third_token_weight")):
            if further.get(name):
                targets_by_row.append(F.pad(targets[ahead:], (0, ahead), value=-1))
                row_weights.append(further[name])
        if further.get("prefix_weight"):
            targets_by_row.append(self.prefixes[targets])
            row_weights.append(further["prefix_weight"])
        all_targets = torch.stack(targets_by_row)
        weights = to_device(torch.tensor(row_weights), x.device)
        head_weight = None
        further_logits = None
        classes = self.candidates.pop(0) if self.training and self.candidates else None
        if classes is not None:  # a target becomes its position among them, or -1 if it is none
            positions = torch.full_like(self.prefixes, -1)
            positions[classes] = torch.arange(len(classes), device=x.device)
            all_targets = positions[all_targets]
            head_weight = self.lm_head.weight.index_select(0, classes)
            if self.config.log_q_share:
                further_logits = self.log_q(targets, classes)
        pieces = zip(x.split(self.loss_tokens), all_targets.split(self.loss_tokens, dim=1))
        losses = [self.lm_head(*piece, weights, head_weight, further_logits) for piece in pieces]
        return tuple(torch.stack(terms).sum() for terms in zip(*losses))

    def log_q(self, targets: Tensor, classes: Tensor) -> Tensor:
        """Compute what Config.log_q_share adds to the logits of candidates `classes` [P] -> [P]."""
        weight = self.lm_head.weight
        # the last entry is of the target -1
        is_target = torch.zeros_like(self.prefixes, dtype=torch.bool)
        is_target[targets] = True
        is_target = is_target[classes]
        count = is_target.sum().to(wide_dtype(weight))
        share = (len(weight) - count) / (len(classes) - count).clamp_min(1)
        correction = self.config.log_q_share * share.log()
        return torch.where(is_target, 0.0, correction)

    def fill_prefixes(self, tokens: Sequence[bytes]) -> None:
        """Find each token's prefix, the longest other token that begins it. tokens: their bytes."""
        # begun: tokens that begin one another
        prefixes = torch.full((len(self.prefixes),), -1)
        begun = []
        for token, number in sorted((token, number) for number, token in enumerate(tokens)):
            while begun and not token.startswith(begun[-1][0]):
                begun.pop()
            prefixes[number] = begun[-1][1] if begun else -1
            begun.append((token, number))
        self.prefixes.copy_(prefixes)

    def apply_schedule(self, plan: Plan) -> None:
        """Set the model's state of this step. In the step that unties, Worker ends `tied`."""
        train_gpt.GPT.apply_schedule(self, plan)
        if self.narrow_rotary is not None:
            block = self.config.window_block
            self.narrow_rotary.set_windows(
                tuple(long // block // 2 * block for long in plan.rotary_windows)
            )
        self.attended_tokens = plan.values.get("attended_tokens", 0)
        self.tied = self.untied_step > 0 and plan.step <= self.untied_step
        self.further_weights = plan.scheduled


class Context(NamedTuple):
    """Inputs that all layers of one forward share.

    x0, bigram_embeds: [T, dim]. rotary: cosines, sines, softmax scale; narrow_rotary: of narrow
    heads. masks: see GPT.masks. skip_weights: of skip connections, by layer. mixes: see Block.
    value_mixes: see Attention. gate_scale: see TokenWeights. copied [T, dim]: what DocCopy adds
    before the final norm. scheduled, shared: see train_gpt.Context.
    """

    x0: Tensor
    bigram_embeds: Tensor
    rotary: tuple[Tensor, Tensor, Tensor]
    narrow_rotary: tuple[Tensor, Tensor, Tensor] | None
    masks: Masks
    skip_weights: dict[int, Tensor]
    mixes: Sequence[Tensor]
    value_mixes: Sequence[Tensor]
    gate_scale: Tensor
    copied: Tensor | None
    scheduled: Tensors
    shared: Tensors


class Group(train_gpt.Group):
    """Consecutive layers that are compiled together; the last group also prepares the head's input.

    Modules are in tuples, so that nn.Module does not register them twice.
    """

    def __init__(self, model: GPT, config: Config, numbers: range):
        super().__init__(model, config, numbers)
        by_network = zip(gated_layers(config), model.token_gates)
        layers, gates = next(pair for pair in by_network if numbers.start in pair[0])
        self.token_gates = (gates,)
        self.computes_gates = numbers.start == layers.start
        self.mudd = (model.mudd,) if self.last else ()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        modules = *self.blocks, *self.token_gates, *self.mudd
        return chain(*(module.parameters() for module in modules))

    @compiled
    def forward(
        self, x: Tensor, context: Context, saved: Outputs, values: Outputs, gates: Tensor | None
    ) -> tuple[Tensor, Outputs, Tensor]:
        """Map the residual stream x [T, dim] to the next group's, or to the head's normed input.

        saved: outputs of earlier layers. values: rows of the value tables. gates: those of the
        group before. Return also this group's outputs to be saved, and its gates.
        """
        if self.computes_gates:
            gates = self.token_gates[0].compute(x, context.gate_scale)
        by_layer = self.token_gates[0].by_name(gates)
        outputs = dict(saved)
        if self.numbers.start == 0:
            x = x + by_layer.get((-1, "bigrams"), 0.0) * context.bigram_embeds
            outputs[-1] = x
        for i, block in zip(self.numbers, self.blocks):
            layer = block.layer
            layer_context = context
            mix = context.mixes[i]
            layer_gates = {name: gate for (number, name), gate in by_layer.items() if number == i}
            if layer.skip_from is not None:
                weight = torch.sigmoid(context.skip_weights[i])
                x = x + weight * layer_gates["skip"] * outputs[layer.skip_from]
            value_embeds = values.get(layer.value_table)
            if self.mudd and i == self.numbers[-1]:
                x, value_embeds, mix, further = self.mudd[0].layer_inputs(x, outputs, value_embeds)
                layer_gates = layer_gates | further
                layer_context = context._replace(x0=outputs[-1])
            attn_input = outputs[self.backout] if layer.reads_backout else None
            x, mlp_input = block.forward(
                x, layer_context, mix, value_embeds, context.value_mixes[i], attn_input, layer_gates
            )
            outputs[i] = x
        if self.last:
            x = self.mudd[0].head_input(x, outputs, values, mlp_input)
            x = norm(x if context.copied is None else x + context.copied)
        new = {i: output for i, output in outputs.items() if i in self.saves and i not in saved}
        return x, new, gates


class Block(nn.Module):
    """A layer: attention and MLPs, if it has them, add their output to the residual stream.

    mix [4]: weights of the residual stream at attention and at the MLP, and of their outputs;
    learned, or in the last layer computed for each token [T, 1].
    """

    def __init__(self, config: Config, layer: Layer, number: int):
        super().__init__()
        self.config = config
        self.layer = layer
        self.number = number
        self.attn = Attention(config, layer, number) if layer.window else None
        self.mlp, self.second_mlp = (MLP(config) if layer.mlp > i else None for i in range(2))

    def forward(
        self,
        x: Tensor,
        context: Context,
        mix: Sequence[Tensor],
        value_embeds: Tensor | None,
        value_mix: Tensor,
        attn_input: Tensor | None,
        gates: Tensors,
    ) -> tuple[Tensor, Tensor | None]:
        """Map the residual stream x [T, dim] to the next layer's. Return also the MLPs' input.

        attn_input [T, dim]: attention reads it in place of x. gates: see gates_of.
        """
        resid_lambda_attn, resid_lambda_mlp, post_lambda_attn, post_lambda_mlp = mix
        if self.attn is not None:
            y = self.attn(
                norm(x if attn_input is None else attn_input),
                value_embeds,
                value_mix,
                context,
                gates,
            )
            x = resid_lambda_attn * x + post_lambda_attn * y
        elif self.layer.weights_residual:
            x = resid_lambda_attn * x
        for name, source in (("x0", context.x0), ("bigrams", context.bigram_embeds)):
            if name in gates:
                x = x + gates[name] * source
        if self.mlp is None:
            return (resid_lambda_mlp * x if self.layer.weights_residual else x), None
        h = norm(x)
        y = self.mlp(h) if self.second_mlp is None else self.mlp(h) + self.second_mlp(h)
        return resid_lambda_mlp * x + post_lambda_mlp * y, h


class Attention(nn.Module):
    """Causal attention. Weights: qk [dim, 2 dim], vo [2 dim, dim], value_gate [heads, GATE_DIM]."""

    def __init__(self, config: Config, layer: Layer, number: int):
        super().__init__()
        dim = config.model_dim
        self.heads = config.num_heads
        self.layer = layer
        self.number = number
        self.fp8 = config.fp8_qkv and config.fp8_head
        self.qk_dim = config.head_dim // 2 if layer.narrow else config.head_dim
        self.v_dim = config.head_dim // 2 if layer.narrow == "qkv" else config.head_dim
        # The query, key, value and output matrices [dim, dim]. Queries and keys are apart, as
        # NorMuon treats them differently. The shapes decide its second moments (finish_spec): [dim,
        # 2 dim] per column, [2 dim, dim] per row
        qkvo = uniform(4 * dim, dim, dim)
        qkvo[3 * dim :] *= config.output_init
        qkvo = qkvo.to(config.torch_dtype)
        self.qk = parameter(
            qkvo[: 2 * dim].reshape(dim, 2 * dim),
            "attn",
            (config.muon_qk_heads * config.head_dim, dim),
        )
        self.vo = parameter(qkvo[2 * dim :].clone(), "attn", (dim, dim))
        self.value_gate = None
        is_last = number == len(config.layers) - 1  # its gate is computed by Mudd
        if layer.value_table is not None and not is_last:
            gate = torch.zeros(config.num_heads, GATE_DIM, dtype=config.torch_dtype)
            self.value_gate = parameter(gate, "gates", tuple(gate.shape))

    def forward(
        self,
        x: Tensor,
        value_embeds: Tensor | None,
        value_mix: Tensor,
        context: Context,
        gates: Tensors,
    ) -> Tensor:
        """x, value_embeds [T, dim] -> [T, dim].

        value_mix [2]: weights of the layer's values and of its output. gates: of heads, see
        gates_of.
        """
        tokens, dim = x.shape
        paired = self.layer.attention == "paired"
        cos, sin, scale = context.narrow_rotary if self.layer.narrow else context.rotary
        # narrow heads use the first half of their rows, and of the output's columns
        qk_weight = self.qk.view(2 * self.heads, -1, dim)[:, : self.qk_dim].flatten(0, 1)
        v_weight = self.vo[:dim].view(self.heads, -1, dim)[:, : self.v_dim].flatten(0, 1)
        o_weight = self.vo[dim:].view(dim, self.heads, -1)[..., : self.v_dim].flatten(1)
        # cheaper on the weights; queries and keys are normed
        qkv_weight = value_mix[0] * torch.cat([qk_weight, v_weight])
        o_weight = value_mix[1] * o_weight
        if self.fp8 and self.training:
            scales = FP8Scales(input_scale(x), WEIGHT_SCALE, QKV_GRAD_SCALE)
            qkv = FP8Linear.apply(x, qkv_weight, scales).type_as(x)
        else:
            qkv = F.linear(x, qkv_weight)
        qk, v = qkv.split((len(qk_weight), len(v_weight)), dim=1)
        qk = norm(qk.reshape(tokens, 2 * self.heads, -1))
        v = v.reshape(tokens, self.heads, -1)
        if value_embeds is not None:
            v = v + self.gate_values(x, value_embeds)[..., : self.v_dim]
        if paired:
            # the rotary has two positions per token: one for even heads, one for odd ones
            cos, sin = (table[: 2 * tokens].view(tokens, 1, 2, -1) for table in (cos, sin))
            q, k = rotate(qk.unflatten(1, (-1, 2)), cos, sin).flatten(1, 2).chunk(2, dim=1)
        else:
            q, k = rotate(qk, cos[:tokens, None], sin[:tokens, None]).chunk(2, dim=1)
        if self.layer.attention == "long":
            k = offset_keys(k)
        if paired:  # one sequence of twice the length: head j of a token, then head j + H / 2
            q, k, v = (x.reshape(2 * tokens, self.heads // 2, -1) for x in (q, k, v))
        mask = context.masks[self.layer.window]
        missing = self.v_dim - self.qk_dim
        if isinstance(mask, DocumentTable) and missing:  # FlashAttention needs equal widths
            q, k = (F.pad(x, (0, missing)) for x in (q, k))
        y = attend(q * scale, k, v, mask)
        if self.layer.dc:
            y = y + mix_heads(
                q * scale, k, v, gates["dc_read"], gates["dc_write"], context.masks["dc"]
            )
        if paired:
            y = y.reshape(tokens, self.heads, -1)
        if self.layer.xsa:
            y = exclude_own_value(y, v, gates["xsa"])
        if self.layer.gated:
            y = y * gates["gate"][..., None]
        return F.linear(y.reshape(tokens, -1), o_weight)

    def gate_values(self, x: Tensor, value_embeds: Tensor) -> Tensor:
        """Multiply each head's value embeddings by a gate from 0 to 2 -> [T, H, D].

        Half of the gate's inputs are entries of x, half are entries of the embedding.
        """
        if self.value_gate is None:
            return value_embeds.view(len(x), self.heads, -1)
        inputs = self.value_gate.size(1)
        gate_input = torch.cat(
            [x[:, : inputs // 2], value_embeds[:, : inputs - inputs // 2]], dim=1
        )
        gate = 2 * torch.sigmoid(F.linear(gate_input, self.value_gate))
        return gate[..., None] * value_embeds.view(*gate.shape, -1)


def offset_keys(k_THD: Tensor) -> Tensor:
    """Replace each key's unrotated entries, quarters 1 and 3, by those of the previous token.

    It enables induction heads. As in the record, the first token of a document takes them from the
    document before.
    """
    quarters = torch.arange(k_THD.size(-1), device=k_THD.device) // (k_THD.size(-1) // 4)
    return torch.where(quarters % 2 == 1, torch.cat([k_THD[:1], k_THD[:-1]]), k_THD)


class MLP(train_gpt.MLP):
    """train_gpt's MLP. With fp8_mlp it is computed by ReluSquaredInFP8 in training, if unedited."""

    def __init__(self, config: Config):
        super().__init__(config, config.mlp_dim or 4 * config.model_dim)
        # ReluSquaredInFP8 would ignore an edit of the plain code
        self.fp8 = (
            config.fp8_mlp and config.fp8_head and not is_edited(*train_gpt.PLAIN_FORMS["MLP"])
        )
        if self.fp8:
            for name, scale in DelayedScales.FIRST.items():
                self.register_buffer(f"{name}_scale", torch.tensor(scale), persistent=False)
                self.register_buffer(f"{name}_max", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 and self.training:
            delayed = self.h_scale, self.h_max, self.grad_scale, self.grad_max
            return ReluSquaredInFP8.apply(x, self.fc, self.proj, *delayed, self.kernels)
        return super().forward(x)


class DelayedScales:
    """Scales of what is rounded to fp8 where it is computed, so they must be known before it is.

    Of each MLP: its squared activations h (e4m3), and the gradient of x @ fc (e5m2). A scale is
    HEADROOM times the largest value of the step before, over all micro-batches and ranks, divided
    by the largest number of the type: so it is the same for any number of ranks. Larger values
    saturate. FIRST: used until a largest value above 0 was seen. h_max, grad_max: the largest
    values of this step so far, raised in place. The record's ranks each have their own scales, 1.03
    times for h and 1.25 for the gradient.
    """

    FIRST = {"h": 1.0, "grad": 2.0**-6}
    HEADROOM = 1.8

    def __init__(self, model: nn.Module, comm: Comm):
        mlps = {name: m for name, m in model.named_modules() if isinstance(m, MLP) and m.fp8}
        self.comm = comm
        self.named = {}
        self.maxima = []
        for name, mlp in mlps.items():
            for of in self.FIRST:
                self.named[f"{name}.proj/{of}_scale"] = getattr(mlp, f"{of}_scale")
                self.maxima.append(getattr(mlp, f"{of}_max"))
        if mlps:
            largest_of_types = self.maxima[0].new_tensor([largest_of(E4M3), largest_of(E5M2)])
            self.to_scales = self.HEADROOM / largest_of_types.repeat(len(mlps))

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather all ranks' maxima, after the last backward of a step."""
        if self.maxima:
            self.local_maxima = torch.stack(self.maxima)
            self.gathered = self.local_maxima.new_empty(self.comm.ranks * len(self.local_maxima))
            self.handle = self.comm.all_gather(self.gathered, self.local_maxima)

    @torch.no_grad()
    def update(self) -> None:
        """Set the scales of the next step."""
        if self.maxima:
            self.handle.wait()
            scales = self.gathered.view(-1, len(self.local_maxima)).amax(0) * self.to_scales
            before = torch.stack([*self.named.values()])
            scales = torch.where(scales > 0, scales, before)
            torch._foreach_copy_([*self.named.values()], scales.unbind())
            torch._foreach_zero_(self.maxima)


class Head(train_gpt.Head):
    """Map the normed residual stream to logits and the loss.

    weight [V, dim]: of `classes` tokens, then padding.
    """

    def __init__(self, config: Config, vocab: int, classes: int | None = None):
        super().__init__(config, vocab, classes)
        self.weight.data = config.head_init * torch.randn_like(self.weight)
        self.softcap = Softcap(config.logit_cap, config.logit_shift)
        if config.fp8_logits:
            self.fp8_scales = self.fp8_scales._replace(out=E4M3)

    @compiled
    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        weights: Tensor,
        weight: Tensor | None = None,
        further: Tensor | None = None,
    ) -> Pair:
        """Compute (objective, to minimize; cross entropy of the next token), in nats, summed.

        x [T, dim]; targets [n, T]: the next token, then further targets, -1 is not counted; weights
        [n] of the rows. weight [classes, dim]: in place of the head's own. further [classes]: added
        to the logits.
        """
        weight = self.weight if weight is None else weight
        # an edit of this method turns the kernel off: see PLAIN_FORMS
        if self.kernels and self.training and further is None:
            scales = self.fp8_scales if self.fp8 else None
            objective, entropies = HeadLoss.apply(x, weight, targets, weights, self.softcap, scales)
            return objective, entropies[0]
        x = self.uncapped_logits(x, weight)

        def logits() -> Tensor:
            return self.softcap(x) if further is None else self.softcap(x) + further

        entropies = torch.stack(
            [F.cross_entropy(logits(), row, ignore_index=-1, reduction="sum") for row in targets]
        )
        objective = (entropies * weights).sum()
        return objective, entropies[0].detach()


# Factors of an n-gram's tokens, the latest first. A hash is the XOR of the products in int32, which
# wrap
ROW_FACTORS = {2: (36313, 27191), 3: (17351, 60961, 45259)}
SIGN_FACTORS = {"record89": {2: (1, 1)}, "record92": {2: (48271, 30011), 3: (58699, 39779, 26801)}}


class NgramTable(train_gpt.NgramTable):
    """An embedding of the n tokens that end at each position, also across documents.

    All tables have the same signs.
    """

    def __init__(self, config: Config, ngrams: Ngrams):
        super().__init__(config, ngrams)
        self.sign_factors = SIGN_FACTORS[config.ngram_hash][self.n]

    def row_and_sign(self, tokens: Tensor) -> Pair:
        """Hash the n-grams that end at tokens [..., T] -> rows of the table, rows of the signs.

        The first n - 1 tokens have the last row. In the pair of the second token, the hash has the
        number of that row in place of the first token.
        """

        def mix(factors: Sequence[int]) -> Tensor:
            return reduce(
                torch.bitwise_xor, (factor * token for factor, token in zip(factors, window))
            )

        last_row = self.num_embeddings - 1
        incomplete = self.n - 1
        window = [F.pad(tokens.int(), (k, 0))[..., : tokens.size(-1)] for k in range(self.n)]
        sign = mix(self.sign_factors) % self.SIGNS
        # of use to pairs only. By fill_ and zero_: an assignment of a number would make the host
        # wait for the GPU
        window[1][..., 1:2].fill_(last_row)
        row = mix(ROW_FACTORS[self.n]) % last_row
        row[..., :incomplete].fill_(last_row)
        sign[..., :incomplete].zero_()
        return row.long(), sign.long()


class TokenWeights(nn.Module):
    """A small network that computes weights per token: scale * (out @ gelu(hidden @ x) + bias).

    `init` names the weights and gives their initial values; out starts at 0, so the tokens begin
    with equal weights.
    """

    WIDTH = 64
    SCALE = 0.1

    def __init__(self, config: Config, kind: str, init: dict[Any, list[float]]):
        super().__init__()
        dim = config.model_dim
        dtype = config.torch_dtype
        self.sizes = {name: len(v) for name, v in init.items()}
        bound = 1 / sqrt(dim)
        values = torch.tensor([*chain(*init.values())])
        self.hidden = parameter(
            torch.empty(self.WIDTH, dim).uniform_(-bound, bound).to(dtype), kind
        )
        self.out = parameter(torch.zeros(len(values), self.WIDTH, dtype=dtype), kind)
        self.bias = parameter((values / self.SCALE).to(dtype), f"{kind}_biases")

    def compute(self, x: Tensor, scale: Tensor | float = SCALE) -> Tensor:
        """x [T, dim] -> all weights [T, n]."""
        scale = scale.type_as(x) if isinstance(scale, Tensor) else scale
        return self.unscaled(self.inner(x)) * scale

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.hidden))

    def unscaled(self, inner: Tensor) -> Tensor:
        return F.linear(inner, self.out) + self.bias

    def by_name(self, weights: Tensor) -> dict[Any, Tensor]:
        """Split all weights [T, n] into those of each name [T, size]."""
        return dict(zip(self.sizes, weights.split([*self.sizes.values()], dim=1)))


BIGRAM_GATE_INIT = 0.05


def gates_of(config: Config, layers: range) -> dict[tuple[int, str], list[float]]:
    """Return initial values of these layers' token gates by (layer, name); -1: before the first."""
    heads = config.num_heads
    init = {}
    for i in layers:
        layer = config.layers[i]
        present = {
            "x0": "x0" in layer.adds and [0.0],
            "bigrams": "ngrams" in layer.adds and [BIGRAM_GATE_INIT],
            "skip": layer.skip_from is not None and [0.5],
            "xsa": layer.xsa and [0.0] * heads,
            "gate": layer.gated and [0.25] * heads,
            "dc_read": layer.dc and [1.0] * heads,
            "dc_write": layer.dc and [0.0] * heads,
        }
        # the first layer's bigram embeddings are added before it
        init |= {
            (-1 if name == "bigrams" and i == 0 else i, name): v for name, v in present.items() if v
        }
    return init


class Mudd(nn.Module):
    """Multiway dynamic dense connections (arXiv:2502.12170): last layer and head mix outputs.

    Sources of the last layer: the input of the first layer, the output of backout_layer, and the
    residual stream. Sources of the head: the saved outputs (see saved_layers) and the embeddings of
    the first value table. For groups, see Config.mudd_groups.
    """

    def __init__(self, config: Config):
        super().__init__()
        last_layer = config.layers[-1]
        scale = sqrt(config.resid_lambda_init)
        self.backout = config.backout_layer
        self.heads = config.num_heads
        self.sources = sorted(config.saved_layers())
        init = {
            "values": [0.0] * 3,
            "residual": [0.0] * 3,
            "mix": [scale, scale, 1.0, 1.0],
            "x0": [0.0],
            "bigrams": [BIGRAM_GATE_INIT],
        }
        if last_layer.value_table is not None:
            init["value_gates"] = [2.0, 2.0]
        self.layer = TokenWeights(config, "mudd", init)
        tables = len({layer.value_table for layer in config.layers} - {None})
        sources = [-0.5 if i == config.backout_layer else 0.0 for i in self.sources]
        sources += [0.0] * (tables + 2 if config.mudd_groups else 1)
        self.head = TokenWeights(config, "mudd", {"sources": sources})
        self.groups = config.mudd_groups
        # further weights of each source in each group, by the hidden values of the token
        self.by_group = None
        if config.mudd_groups:
            shape = len(sources), config.mudd_groups, TokenWeights.WIDTH
            self.by_group = parameter(torch.zeros(shape, dtype=config.torch_dtype), "mudd")

    def layer_inputs(
        self, x: Tensor, saved: Outputs, value_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensors]:
        """Compute what the last layer reads: x, value embeddings, mix and gates of Block."""
        weights = self.layer.by_name(self.layer.compute(x))
        sources = saved[-1], saved[self.backout], x
        mixed = weighted_sum(weights["values"], sources)
        if value_embeds is not None:  # a gate for each half of the heads
            gate = weights["value_gates"].repeat_interleave(self.heads // 2, dim=1)
            mixed = mixed + (gate[..., None] * value_embeds.view(len(x), self.heads, -1)).view_as(x)
        gates = {name: weights[name] for name in ("x0", "bigrams")}
        x = x + weighted_sum(weights["residual"], sources)
        return x, mixed, weights["mix"].split(1, dim=1), gates

    def head_input(self, x: Tensor, saved: Outputs, values: Outputs, mlp_input: Tensor) -> Tensor:
        sources = [saved[i] for i in self.sources]
        if self.by_group is None:
            return x + weighted_sum(self.head.compute(x), [*sources, values[0]])
        inner = self.head.inner(x)
        of_groups = F.linear(inner, self.by_group.flatten(0, 1)).view(len(x), -1, self.groups)
        weights = (self.head.unscaled(inner)[..., None] + of_groups) * TokenWeights.SCALE
        sources += [*(values[i] for i in sorted(values)), mlp_input, norm(saved[self.backout])]
        mixed = sum(
            weight[..., None] * source.view(len(x), self.groups, -1)
            for weight, source in zip(weights.unbind(1), sources)
        )
        return x + mixed.view_as(x)


def exclude_own_value(y_THD: Tensor, v_THD: Tensor, weights: Tensor) -> Tensor:
    """Subtract tanh(weights) times y's part along the token's own value: XSA, arXiv:2603.09078.

    weights: [H] or [T, H].
    """
    products = (y_THD * v_THD).sum(-1, keepdim=True)
    squares = v_THD.square().sum(-1, keepdim=True)
    projection = products / squares.clamp_min(1e-8)
    return y_THD - torch.tanh(weights)[..., None] * projection * v_THD


def weighted_sum(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """weights [T, n], n sources [T, dim] -> [T, dim]."""
    return sum(weight * source for weight, source in zip(weights.split(1, dim=1), sources))


class DocCopy(train_gpt.DocCopy):
    """train_gpt's DocCopy, which is added at the input and before the final norm."""

    def __init__(self, config: Config):
        super().__init__(config.model_dim)
        self.weights = parameter(torch.tensor([0.5, 1.0]), "doc_copy")  # of the two places

    @staticmethod
    @compiled
    def find(tokens: Tensor, ids: Tensor, bos_id: int) -> Pair:
        """Tokens [T], ids [T] to compare -> candidates, kinds of their contexts (0: tokens[0])."""
        places, kinds = train_gpt.DocCopy.find(ids.long(), tokens == bos_id)
        return tokens[places], kinds

    @compiled
    def forward(self, e: Tensor, kinds: Tensor) -> Pair:
        """Candidates' embeddings, kinds [T] -> what to add at the input and before the norm."""
        copied = self.weigh(e, kinds)
        return tuple(weight * copied for weight in self.weights.unbind())


def normalized_ids(tokens: Sequence[bytes]) -> list[int]:
    """Map GPT-2's tokens to the first of the same text but for case, accents, outer spaces.

    A token that is no text, or has none left, is mapped to itself.
    """

    def text_of(token: bytes) -> str | bytes:
        try:
            text = unicodedata.normalize("NFKD", token.decode())
        except UnicodeDecodeError:
            return token
        text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
        text = re.sub(r"[ \t\r\n]+", " ", text)
        return text.strip(" ") or text or token

    first_of = {}  # by text
    ids = [first_of.setdefault(text_of(token), number) for number, token in enumerate(tokens)]
    digest = sha256_of(b"".join(number.to_bytes(4, "little") for number in [*ids, len(ids)]))
    require(
        digest == "79fb57ac259495ba36f1afb9b0d5da35f3048b5067fa59c101d5a3c1ed15c2a2",
        f"Unicode {unicodedata.unidata_version} of this Python gives other normalized_ids than 14.0"
        " of Python 3.11; use that, or leave normalized_ids out",
    )
    return ids


# --------------------------------------------------------------------------------------------------
# update rules

# (a, b, c) of the six steps of ANVIL's polar: singular values from 0.003 on end in [0.995, 1.0005]
ANVIL_STEPS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


@frozen
class Anvil(NorMuon):
    """NorMuon with a second, slow momentum.

    It decides where weights decay and, from blend_from on, is blended in. From blend_from on the
    fast momentum decays by FAST; before, and in the Nesterov step, momenta are the schedule's.
    """

    blend_from: int = 0
    # decays; share of the fast momentum in the blend
    FAST = 0.85
    SLOW = 0.98
    SHARE = 0.4385

    def init_state(self, shard: Tensor) -> Tensors:
        state = super().init_state(shard)
        return state | {"slow": torch.zeros_like(state["m"])}

    def hyper(self, plan: Plan, t: int) -> Values:
        fast = {"fast": plan.momentum, "share": 1.0}
        if plan.step >= self.blend_from:
            fast = {"fast": self.FAST, "share": self.SHARE}
        return super().hyper(plan, t) | fast

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Tensors, hyper: Values) -> None:
        """Update param [n, rows, columns] and its state in place; see NorMuon.update."""
        m = state["m"]
        slow = state["slow"]
        fast = hyper["fast"]
        share = hyper["share"]
        momentum = hyper["momentum"]
        grad = grad.to(m.dtype)
        m.copy_(fast * m + (1 - fast) * grad)
        slow.copy_(Anvil.SLOW * slow + (1 - Anvil.SLOW) * grad)
        u = momentum * (share * m + (1 - share) * slow) + (1 - momentum) * grad
        # as the record. A matrix of rank 1 stands at the edge of where the steps converge, and in
        # bf16 rounding may lift it over
        update = polar(u, hyper["dtype"], ANVIL_STEPS, 1.05).to(m.dtype)
        NorMuon.move(param, update, state, hyper, slow)


@frozen
class Adam(train_gpt.Adam):
    """Adam, from step slow_from on half as often, with squared betas and twice the weight decay."""

    slow_from: int | None = None

    def is_slow(self, step: int) -> bool:
        return self.slow_from is not None and step >= self.slow_from

    def updates_in(self, step: int) -> bool:
        return (step + 1) % (self.every * (1 + self.is_slow(step))) == 0

    def hyper(self, plan: Plan, t: int) -> Values:
        slow = dict(beta1=self.beta1**2, beta2=self.beta2**2, weight_decay=2 * self.weight_decay)
        rule = replace(self, **slow) if self.is_slow(plan.step) else self
        return train_gpt.Adam.hyper(rule, plan, t)


@frozen
class RowAdam(Adam):
    """Adam for tables, with one second moment per row and no first moment.

    Bias correction counts updates, not a row's. An update leaves out the rows without a gradient.
    Their moments decay nevertheless: the next update that touches a row multiplies its moment by
    the decay of all steps since `last`. It is not compiled: Config asks for lazy tables.
    """

    def init_state(self, shard: Tensor) -> Tensors:
        """Create each row's moment and step of its last update, both [rows, 1]."""
        v = torch.zeros_like(shard[:, :1], dtype=wide_dtype(shard))
        return {"v": v, "last": torch.zeros_like(v)}

    def hyper(self, plan: Plan, t: int) -> Values:
        return super().hyper(plan, t) | {
            "step": plan.step,
            "cycle": self.every,
            "beta2_of_cycle": self.beta2,
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Tensors, hyper: Values) -> None:
        """Update param [rows, width] and its state in place, as Adam.update but for the moments."""
        v = state["v"]
        beta2 = hyper["beta2"]
        step = hyper["step"]
        cycle = hyper["cycle"]
        p = param.to(v.dtype)
        g = grad.to(v.dtype)
        # powers of all numbers of cycles, since the last bit of a power depends on its place in a
        # vector
        powers = torch.arange(step // cycle + 1, dtype=v.dtype, device=v.device)
        decays = hyper["beta2_of_cycle"] ** powers
        cycles = (step - state["last"]).clamp_min(0).long() // cycle  # the warm-up also goes back
        v.mul_(decays[cycles]).add_((1 - beta2) * g.square().mean(1, keepdim=True))
        change = hyper["lr"] * (1 - beta2 ** hyper["t"]) ** 0.5 * g / (v.sqrt() + hyper["eps"])
        if "decay" in hyper:
            change = change + torch.where(change * p > 0, hyper["decay"] * p, 0)
        param.copy_(p - change)
        state["last"].fill_(step)


# --------------------------------------------------------------------------------------------------
# worker


class Worker(train_gpt.Worker):
    """What one rank trains. Besides train_gpt's step: tied embedding, prefixes, scales of fp8."""

    def __init__(self, config: Config, comm: Comm, device: torch.device, train_shards: list[Shard]):
        super().__init__(config, comm, device, train_shards)
        self.scales = DelayedScales(self.model, comm)
        self.tails = TailAverages(config, self.optimizer)
        self.candidates = Candidates(config, self.model, comm)
        self.optimizer.further |= self.scales.named | self.candidates.named
        # other encodings are of bytes, which have no prefixes
        stages = stages_of(config)
        of_gpt2 = train_shards[0].encoding.vocab_size == GPT2_VOCAB
        wanted = of_gpt2 and any(
            stage.first["prefix_weight"] or stage.last["prefix_weight"] for stage in stages
        )
        self.token_bytes = gpt2_token_bytes(train_shards[0].path.parent) if wanted else []

    def step(self, plan: Plan, batch: list[np.ndarray]) -> list[Tensor]:
        self.candidates.draw(plan.values["candidates"], batch)
        return super().step(plan, batch)

    def before_training(self) -> None:
        # on the clock, as in the record; the warm-up runs without
        self.model.fill_prefixes(self.token_bytes)

    def before_step(self, plan: Plan) -> None:
        model = self.model
        optimizer = self.optimizer
        if model.tied or model.candidates:
            # the head's weights are read before its own forward would wait
            optimizer.wait_for(model.lm_head.weight)
        if plan.step == model.untied_step > 0:
            copy_parameter(optimizer, "lm_head.weight", "embed.weight")
            model.tied = False

    def before_update(self, plan: Plan) -> None:
        self.scales.start_gather()

    def after_step(self, plan: Plan) -> None:
        self.scales.update()
        self.candidates.handle.wait()
        if plan.values["candidates"]:
            # the log states how many were used, the mean of the step's micro-batches
            used = self.candidates.used[: plan.micro_batches].sum().item()
            plan.values["candidates"] = used // plan.micro_batches
        self.tails.move(plan.step)

    def after_training(self) -> None:
        self.tails.apply()

    def kinds_of_steps(self) -> list[int]:
        rules = [bucket.rule for bucket in self.optimizer.buckets if isinstance(bucket.rule, Adam)]
        # with the next, an update
        slow = {rule.slow_from + rule.every for rule in rules if rule.slow_from is not None}
        further = [self.model.untied_step, *sorted(slow)]
        return super().kinds_of_steps() + [step for step in further if step < self.config.num_steps]


def copy_parameter(optimizer: DistributedOptimizer, source: str, target: str) -> None:
    """Copy a parameter and its state to another, such as a head to the embedding.

    No gradients of the two may wait for an update; Config.conditions sees to it.
    """
    buckets = {slot.name: bucket for bucket in optimizer.buckets for slot in bucket.slots}
    optimizer.finish_all_gathers()
    copied, state = (
        train_gpt.gather_state(buckets[name], optimizer.comm) for name in (source, target)
    )
    for name, x in copied.items():
        if name.partition("/")[0] == source:
            state[target + name.removeprefix(source)] = x
    bucket = buckets[target]
    train_gpt.write_state(bucket, train_gpt.take_state(bucket, state), optimizer.comm)


class TailAverages:
    """The averages of Config.tails, in float32, of this rank's shards of the weights as stored.

    Average i is tail<i> of the rules' state. So checkpoints keep it, the end of the warm-up
    restores it, and an embedding that is untied gets the head's.
    """

    def __init__(self, config: Config, optimizer: DistributedOptimizer):
        self.tails = config.tails
        self.steps = config.num_steps
        self.optimizer = optimizer
        pairs = [(bucket, slot) for bucket in optimizer.buckets for slot in bucket.slots]
        # one order of the sums in `norms`, whatever the buckets
        pairs.sort(key=lambda pair: pair[1].name)
        self.of_kind = {
            kind: [
                (bucket, slot)
                for bucket, slot in pairs
                if slot.name.endswith(f".{kind}") or f"{slot.param.kind}_".startswith(f"{kind}_")
            ]
            for tail in self.tails
            for kind in tail.kinds.split()
        }
        averaged = [*chain(*self.of_kind.values())]
        self.buckets = dict.fromkeys(bucket for bucket, _ in averaged)
        require(
            all(self.of_kind.values()) and len(averaged) == len({*averaged}),
            "tails: of the kinds "
            f"{', '.join(self.of_kind)} one has no parameter, or two have the same; see Tail",
        )
        # of each tail
        self.slots = [
            [*chain(*(self.of_kind[kind] for kind in tail.kinds.split()))] for tail in self.tails
        ]
        for i, slots in enumerate(self.slots):
            for bucket in {bucket for bucket, _ in slots}:
                dtype = wide_dtype(bucket.param_shard)
                bucket.state[f"tail{i}"] = torch.zeros_like(bucket.param_shard, dtype=dtype)

    def parts(self, i: int) -> Iterator[Pair]:
        """Yield the parts of average i on this rank, each with its weights."""
        for bucket, slot in self.slots[i]:
            average = bucket.state[f"tail{i}"]
            weights = bucket.param_shard
            yield bucket.view_of(slot, average, True), bucket.view_of(slot, weights, True)

    @torch.no_grad()
    def move(self, step: int) -> None:
        """Move the averages after a step. They read own shards, which no gather changes."""
        for i, tail in enumerate(self.tails):
            age = step - max(0, self.steps - tail.last_steps)
            is_last = step == self.steps - 1
            rate = tail.last_rate if is_last and tail.last_rate is not None else tail.rate
            due = step % tail.period == tail.phase or step >= self.steps - tail.final_steps
            if age == 0 or age > 0 and due:
                for average, weights in self.parts(i):
                    average.lerp_(weights.to(average.dtype), rate if age else 1.0)

    @torch.no_grad()
    def apply(self) -> None:
        """Move the weights to the averages, and restore the norms."""
        before = self.norms()
        for i, tail in enumerate(self.tails):
            for average, weights in self.parts(i):
                weights.copy_(torch.lerp(weights.to(average.dtype), average, tail.blend))
        for bucket in self.buckets:
            # a RowBucket's would send few rows
            train_gpt.Bucket.start_all_gather(bucket, self.optimizer.comm)
        self.optimizer.finish_all_gathers(self.buckets)
        after = self.norms()
        for kind in {kind for tail in self.tails if tail.keep_norm for kind in tail.kinds.split()}:
            for _, slot in self.of_kind[kind]:
                if after[kind]:
                    slot.param.mul_(before[kind] / after[kind])

    def norms(self) -> dict[str, float]:
        """Compute the norm over all weights of each kind, the same for any number of ranks."""

        def norm_of(x: Tensor) -> float:
            return torch.linalg.vector_norm(x, dtype=wide_dtype(x)).item()

        return {
            kind: math.hypot(*(norm_of(slot.param) for _, slot in pairs))
            for kind, pairs in self.of_kind.items()
        }


class Candidates:
    """The classes of a micro-batch's training loss, where a stage sets `candidates`, to save time.

    They are its targets and, up to that number, the next other classes of a fixed permutation. Each
    of a step's micro-batches has its own offset in it, so the offsets depend on no number of ranks;
    checkpoints keep them. A micro-batch with more targets uses all classes.
    """

    STRIDE = 20011  # a prime. Entry k of the permutation of n classes is STRIDE * k % n

    def __init__(self, config: Config, model: GPT, comm: Comm):
        self.model = model
        self.comm = comm
        self.classes = len(model.lm_head.weight)
        most, count = (
            max(stage.first[name] for stage in stages_of(config))
            for name in ("candidates", "micro_batches")
        )
        require(
            most <= self.classes, f"candidates is {most}; the head has only {self.classes} classes"
        )
        self.offsets = torch.arange(count) * self.classes // count
        self.used = torch.zeros_like(self.offsets)  # classes of each micro-batch
        self.named = {"lm_head.weight/offsets": self.offsets} if most else {}

    def draw(self, number: int, batch: list[np.ndarray]) -> None:
        """Draw candidates of this rank's micro-batches, and start to exchange next offsets."""
        self.model.candidates.clear()
        self.handle = HandleGroup()
        if number:
            comm = self.comm
            of_ranks = [
                x[: comm.ranks * len(batch)].view(comm.ranks, -1) for x in (self.offsets, self.used)
            ]
            offsets, used = (x[comm.rank] for x in of_ranks)
            for i, micro_batch in enumerate(batch):
                drawn, offsets[i] = self.draw_one(micro_batch[1:], number, offsets[i].item())
                used[i] = self.classes if drawn is None else number
                if drawn is not None:
                    drawn = to_device(torch.from_numpy(drawn), self.model.prefixes.device)
                self.model.candidates.append(drawn)
            self.handle = HandleGroup(
                *(comm.exchange([x[comm.rank]] * comm.ranks, x) for x in of_ranks)
            )

    def draw_one(
        self, targets: np.ndarray, number: int, offset: int
    ) -> tuple[np.ndarray | None, int]:
        """Return the candidates of a micro-batch, sorted, and its next offset."""
        chosen = np.zeros(self.classes, bool)
        chosen[targets] = True
        need = number - np.count_nonzero(chosen)
        if need < 0:
            return None, offset
        if need:
            count = min(self.classes, int(1.7 * need) + 256)
            drawn = (offset + np.arange(count)) % self.classes * self.STRIDE % self.classes
            offset = (offset + count) % self.classes
            drawn = drawn[~chosen[drawn]]
            if len(drawn) < need:
                drawn = np.flatnonzero(~chosen)
                drawn = drawn[:: max(1, len(drawn) // need)]
            chosen[drawn[:need]] = True
        return np.flatnonzero(chosen), offset


def gpt2_token_bytes(folder: Path) -> list[bytes]:
    """Read the bytes of GPT-2's tokens, but the special one; data/ writes them beside shards."""
    path = folder / "gpt2.tiktoken"
    expected = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    content = path.read_bytes() if path.is_file() else b""
    require(
        sha256_of(content) == expected,
        f"{path}, the bytes of GPT-2's tokens for prefix_weight and sample.py,"
        f" {'is damaged' if content else 'is missing'}; write it by .venv/bin/python data/gpt2.py"
        f" {folder} on a host with a network, or copy it there",
    )
    return [base64.b64decode(line.split()[0]) for line in content.splitlines()]


# --------------------------------------------------------------------------------------------------
# kernels

# tokens that d looks at, see mix_heads; queries per piece
DC_WINDOW = 112
DC_PIECE = 128


def mix_heads(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, read: Tensor, write: Tensor, mask: Tensor
) -> Tensor:
    """Compute what dynamically composable heads add to attention [T, H, D].

    All heads attend by one further map. The map is the sum over heads of their softmax maps within
    `mask`, weighted by norm(read). Head h adds its values under this map times write_h. read, write
    [T, H]. q must contain the softmax scale. mask: of mask_in_pieces.
    """
    tokens, heads, dim = q_THD.shape
    q = cut_in_pieces(q_THD, mask)
    k = seen_by_pieces(k_THD, mask)
    read = F.rms_norm(read.to(wide_dtype(read)), (heads,), eps=1e-6).type_as(q)
    maps = (q @ k + mask[:, None]).softmax(-1)
    attention_map = (cut_in_pieces(read, mask)[..., None] * maps).sum(1)
    # one product for all heads' values
    out = attention_map @ seen_by_pieces(v_THD.flatten(1), mask).mT
    return write[..., None] * out.view(-1, heads, dim)[:tokens]


# Fixed scales of fp8, powers of two: its exponents cover what is far below the largest value
WEIGHT_SCALE = 2.0**-7  # entries of matrices up to 3.5
QKV_GRAD_SCALE = 2.0**-9
MLP_GRAD_SCALE = 2.0**-6
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def input_scale(x: Tensor) -> float:
    """Return the scale of x [T, dim] whose rows have the norm sqrt(dim): no entry is larger."""
    return 2.0 ** math.ceil(math.log2(sqrt(x.size(1)) / largest_of(E4M3)))


def largest_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max  # 448 of E4M3, 57,344 of E5M2


def to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Round x / scale to an fp8 type. What is larger than its largest number saturates."""
    most = largest_of(dtype)
    return (x.float() / scale).clamp(-most, most).to(dtype)


class ReluSquaredInFP8(torch.autograd.Function):
    """MLP.forward with all products in fp8, also backward's. Besides scales it saves fp8 alone.

    x [T, dim], of a norm; fc and proj [dim, hidden]. For the others see DelayedScales.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        fc: Tensor,
        proj: Tensor,
        h_scale: Tensor,
        h_max: Tensor,
        grad_scale: Tensor,
        grad_max: Tensor,
        kernels: bool,
    ) -> Tensor:
        x8 = to_fp8(x, input_scale(x), E4M3)
        fc8, proj8 = (to_fp8(weight, WEIGHT_SCALE, E4M3) for weight in (fc, proj))
        y_scale = input_scale(x) * WEIGHT_SCALE
        by_column = fc8.T.contiguous().T
        ctx.kernels = kernels
        h8, h8_T = relu_squared_in_fp8(x8, by_column, y_scale, h_scale, h_max, x.dtype, kernels)
        ctx.save_for_backward(x8, fc8, proj8, h8, h8_T, h_scale, grad_scale, grad_max)
        return fp8_product(h8, proj8.T, h_scale, WEIGHT_SCALE, True, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, fc8, proj8, h8, h8_T, h_scale, grad_scale, grad_max = ctx.saved_tensors
        dtype = grad.dtype
        grad8 = to_fp8(grad, MLP_GRAD_SCALE, E5M2)
        y_scale = MLP_GRAD_SCALE * WEIGHT_SCALE
        by_column = proj8.T.contiguous().T
        grad_y8, grad_y8_T = relu_squared_in_fp8(
            grad8, by_column, y_scale, grad_scale, grad_max, dtype, ctx.kernels, h8, h_scale
        )
        grad_x = fp8_product(grad_y8, fc8.T, grad_scale, WEIGHT_SCALE, False, dtype)
        x8_T = x8.T.contiguous()
        grad_fc = fp8_product(x8_T, grad_y8_T.T, input_scale(x8), grad_scale, False, dtype)
        grad8_T = grad8.T.contiguous()
        grad_proj = fp8_product(grad8_T, h8_T.T, MLP_GRAD_SCALE, h_scale, False, dtype)
        return grad_x, grad_fc, grad_proj, None, None, None, None, None


def relu_squared_in_fp8(
    a: Tensor,
    b: Tensor,
    scale: float,
    out_scale: Tensor,
    out_max: Tensor,
    dtype: torch.dtype,
    kernels: bool,
    h: Tensor | None = None,
    h_scale: Tensor | None = None,
) -> Pair:
    """Compute out / out_scale [m, n] in fp8 and its transpose. Raise out_max to max(abs(out)).

    out = relu(y) ** 2 in e4m3, where y = a @ b * scale, or, if its result h is given, the backward
    of that in e5m2: y * 2 sqrt(h * h_scale). a [m, k], row-major; b [k, n], column-major; both in
    fp8. h_scale, out_scale and out_max have no dimensions. dtype: of the model; without `kernels` y
    is rounded to it.
    """
    out_dtype = E4M3 if h is None else E5M2
    programs, tile_n = kernel_grid(a, b, dtype)
    if not (kernels and tile_n):
        y = fp8_product(a, b, scale, 1.0, h is None, dtype)
        out = y.relu() * y if h is None else 2 * y * (h.float() * h_scale).sqrt()
        out_max.copy_(torch.maximum(out_max, out.abs().amax()))
        out = to_fp8(out, out_scale, out_dtype)
        return out, out.T.contiguous()
    m, k = a.shape
    n = b.size(1)
    half = [TILE_M, tile_n // 2]
    inner = 2 * TILE_K  # as many bytes as in bf16
    out = a.new_empty(m, n, dtype=out_dtype)
    out_T = a.new_empty(n, m, dtype=out_dtype)
    # Tensor cores read the inner dimension of b contiguously in fp8. Forward reads no h, and gets
    # out in its place
    tiles = (
        (a, [TILE_M, inner]),
        (b.T, [tile_n, inner]),
        (out if h is None else h, half),
        (out, half),
        (out_T, half[::-1]),
    )
    relu_squared_in_fp8_kernel[(programs,)](
        *(TensorDescriptor.from_tensor(x.contiguous(), tile) for x, tile in tiles),
        out_scale if h is None else h_scale,
        out_scale,
        out_max,
        m,
        n,
        k,
        TILE_M,
        tile_n,
        inner,
        programs,
        scale,
        h is not None,
        largest_of(out_dtype),
        num_warps=8,
        num_stages=3,
    )
    return out, out_T


if triton is not None:

    @triton.jit
    def relu_squared_in_fp8_kernel(
        a,
        b,
        h,
        out,
        out_T,
        h_scale,
        out_scale,
        out_max,
        M,
        N,
        K,
        TILE_M: tl.constexpr,
        TILE_N: tl.constexpr,
        TILE_K: tl.constexpr,
        PROGRAMS: tl.constexpr,
        SCALE: tl.constexpr,
        BACKWARD: tl.constexpr,
        MOST: tl.constexpr,
    ):
        """relu_squared_in_fp8 on a GPU. SCALE: of a @ b. MOST: the largest number of out's type.

        Persistent: a program starts its next tile while it stores one by halves.
        """
        HALF: tl.constexpr = TILE_N // 2
        columns = N // TILE_N
        largest = 0.0
        of_h = tl.load(h_scale)
        to_out = 1 / tl.load(out_scale)
        for tile in tl.range(tl.program_id(0), M // TILE_M * columns, PROGRAMS, flatten=True):
            row = tile // columns * TILE_M
            column = tile % columns * TILE_N
            y = tl.zeros((TILE_M, TILE_N), tl.float32)
            for k in range(0, K, TILE_K):
                y = tl.dot(a.load([row, k]), b.load([column, k]).T, y)
            halves = (y * SCALE).reshape(TILE_M, 2, HALF).permute(0, 2, 1).split()
            for i in tl.static_range(2):
                y = halves[i]
                if BACKWARD:
                    y = 2 * y * tl.sqrt(h.load([row, column + i * HALF]).to(tl.float32) * of_h)
                else:
                    y = tl.maximum(y, 0) * y
                rounded = tl.clamp(y * to_out, -MOST, MOST).to(out.dtype)
                out.store([row, column + i * HALF], rounded)
                out_T.store([column + i * HALF, row], rounded.T)
                largest = tl.maximum(largest, tl.max(tl.abs(y)))
        tl.atomic_max(out_max, largest)


# See train_gpt.PLAIN_FORMS
PLAIN_FORMS = {
    "MLP": ((MLP.forward, train_gpt.MLP.forward), "58ba4335"),
    "loss": ((Head.forward, Head.uncapped_logits, Softcap.__call__), "640dacee"),
    "attention": train_gpt.PLAIN_FORMS["attention"],
}

if __name__ == "__main__":
    start(PRESETS)
