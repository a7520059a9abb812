"""Flags, presets, rows, impossible values; stages and the plan of a step."""

import argparse
import dataclasses
import io
import itertools
import hashlib
import inspect
import json
import re
import sys
import types

import pytest
import torch

import frontier
import train_gpt
from conftest import TINY
from train_gpt import AdamGroup, MuonGroup, Ngrams, Ramp, Stage

PROGRAMS = {"train_gpt": train_gpt.PRESETS, "frontier": frontier.PRESETS}
PRESETS = {name: config for presets in PROGRAMS.values() for name, config in presets.items()}


def parse(*argv, preset="laptop"):
    presets = frontier.PRESETS if preset in frontier.PRESETS else train_gpt.PRESETS
    return train_gpt.parse_config(argv, preset, presets)


def as_text(value):
    """Write a value as a flag takes it."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value))
    return str(value)


# flags


def test_the_preset_is_the_default_one_unless_named():
    assert parse(preset="laptop") == ("laptop", train_gpt.PRESETS["laptop"])
    changes = dict(seed=5, overlap_param_gather=True, update_order="forward")
    assert parse("--preset", "speedrun", "--seed", "5") == ("speedrun", train_gpt.Config(**changes))
    assert parse("--exact", "true")[1].world_size_invariant


def test_a_shorter_run_scales_the_step_counts_of_its_preset():
    counts = lambda config: (
        config.muon_momentum_rise,
        config.muon_momentum_fall,
        [s.extra_steps for s in config.stages if s.extra_steps],
    )
    for preset, whole in PRESETS.items():
        for steps in (*range(1, 20), whole.num_steps - 1, whole.num_steps, 2 * whole.num_steps):
            config = parse("--num_steps", str(steps), preset=preset)[1]
            train_gpt.check_config(config, 1)
            assert train_gpt.momentum_at(config, 0) == whole.muon_momentum_low
    assert counts(parse("--num_steps", "449", preset="speedrun")[1]) == (60, 10, [8])
    assert (
        parse("--num_steps", "50", preset="speedrun")[1].stages == train_gpt.Config().stages[:3]
    ), "a stage without a step is left out"
    assert (
        counts(parse("--num_steps", "4490", preset="speedrun")[1])
        == counts(train_gpt.Config())
        == (300, 50, [40])
    )
    flags = (
        "--num_steps",
        "449",
        "--muon_momentum_rise",
        "30",
        "--stages",
        "Stage(long_window=4), Stage(extra_steps=3, long_window=5)",
    )
    assert counts(parse(*flags, preset="speedrun")[1]) == (30, 10, [3]), "flags are not scaled"
    constant = dataclasses.replace(train_gpt.Config(), muon_momentum_rise=0, muon_momentum_fall=0)
    assert counts(dataclasses.replace(constant, **constant.shortened(449))) == (0, 0, [8])


@pytest.mark.parametrize(
    "argv,says",
    [
        (["--num_step", "3"], "unrecognized arguments: --num_step 3; did you mean --num_steps?"),
        (["--zzz"], "--help lists the flags"),
        (["--num_steps", "many"], "'many' is not a whole number such as 3: "),
        (["--num_steps", "3.0"], "3.0 has another type"),
        (["--seed", "1,2"], "'1,2' is not a whole number"),
        (["--lr_floor", "x"], "'x' is not a number such as .5: "),
        (["--ngrams", "Ngrams(2, 16384)"], "missing 1 required positional argument: 'width'"),
        (["--shuffle", "yes"], "'yes' is not true or false: "),
        (["--sync", "never"], "choose from"),
        (["--preset", "desktop"], "desktop"),
        (["stray"], "stray"),
        (["--preset", "frontier"], "argument --preset: invalid choice: 'frontier' (choose from"),
        (
            ["--stages", "Stage(unitl=1)"],
            "is not a list of rows such as Stage(until=1/3, long_window=3)",
        ),
    ],
)
def test_unknown_and_ill_typed_flags_are_refused(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    errors = capsys.readouterr().err
    assert (
        stop.value.code == 2 and says in errors and errors.count("\n") == 1 and "--help" in errors
    )


@pytest.mark.parametrize(
    "preset, titles, example",
    [("laptop", {}, "laptop: 36; bench: 200"), ("frontier", frontier.Config.help_groups, "1194")],
)
def test_help_names_every_flag_once_under_its_title(preset, titles, example, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help", preset=preset)
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert stop.value.code == 0
    for f in dataclasses.fields(PRESETS[preset]):
        assert (
            len(re.findall(rf"^  --{f.name}[ ,]", shown, re.M)) == 1
            and " ".join(f.metadata["meaning"].split())[:20] in words
        )
    found = [
        line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert found[1:] == list(dict.fromkeys((train_gpt.HELP_GROUPS | titles).values()))
    assert example in words


# rows


@pytest.mark.parametrize(
    "text, rows",
    [
        ("Stage()", (Stage(),)),
        ("Stage(until=1/3, long_window=3), Stage(),", (Stage(until=1 / 3, long_window=3), Stage())),
        ("[Stage(10, micro_batches=3)]", (Stage(until=10, micro_batches=3),)),
        ("(Stage(0.5),\n Stage(extra_steps=2))", (Stage(until=0.5), Stage(extra_steps=2))),
        (
            "Stage(peak_lr_factor=Ramp((1, -.5), [1, 0]))",
            (Stage(peak_lr_factor=Ramp((1, -0.5), (1, 0))),),
        ),
        (
            "AdamGroup('head', beta1=.5), MuonGroup(\"attn\", 2)",
            (AdamGroup("head", beta1=0.5), MuonGroup("attn", lr_mul=2)),
        ),
        ("", ()),
    ],
)
def test_parse_value_reads_what_repr_and_a_user_write(text, rows):
    assert train_gpt.parse_value(text) == rows == train_gpt.parse_value(as_text(rows))


@pytest.mark.parametrize(
    "text, says",
    [
        ("Stage(", "'(' was never closed"),
        ("Stage() Stage()", "invalid syntax"),
        ("Stage(unitl=1)", "Stage has no 'unitl', only until, extra_steps"),
        ("AdamGroup()", "missing 1 required positional argument: 'kind'"),
        ("Stage(until=1/0)", "division by zero"),
        ("Stage(until=-'x')", "bad operand type"),
        ("Stage(**'x')", "keywords must be strings"),
        *(
            (
                text,
                "is neither a number, a string, a tuple nor one of Stage, Ramp, AdamGroup,"
                " MuonGroup, Ngrams",
            )
            for text in (
                "__import__('os')",
                "os.system('x')",
                "Plan()",
                "Stage",
                "2 ** 9",
                "Stage(until=None)",
                "{1}",
                "[x for x in (1, 2)]",
                "Stage(*(1, 2))",
                "lambda: 1",
                "f'{1}'",
                "b'x'",
            )
        ),
    ],
)
def test_parse_value_refuses_everything_else(text, says):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        train_gpt.parse_value(text)
    message = str(error.value)
    assert (
        says in message
        and message.startswith(repr(text))
        and "is not a list of rows such as Stage(until=1/3, long_window=3)" in message
    )


def test_param_groups_replace_rows_of_the_same_kind():
    for preset, usual in PRESETS.items():
        base = train_gpt.groups_by_kind(usual)
        _, _, adam, muon, *_ = usual.row_types
        config = parse(
            "--param_groups", "AdamGroup('ngram_embeds', 7), MuonGroup('mlp_fc')", preset=preset
        )[1]
        assert train_gpt.groups_by_kind(config) == base | {
            "ngram_embeds": adam("ngram_embeds", 7),
            "mlp_fc": muon("mlp_fc"),
        }
    base = train_gpt.groups_by_kind(PRESETS["laptop"])
    assert (
        base["ngram_embeds"] == AdamGroup("ngram_embeds", 10.0) != base["head"] == AdamGroup("head")
    )


@pytest.mark.parametrize(
    "rows, says",
    [
        (
            "AdamGroup('tail')",
            "param_groups: unknown kinds 'tail'; the kinds are embed, value_embeds,"
            " ngram_embeds, head",
        ),
        ("AdamGroup(3)", "unknown kinds 3"),
        (
            "AdamGroup('head', beta1=1)",
            "AdamGroup('head', beta1=1): beta1 is 1; it must be a number, from 0 on, below 1",
        ),
        ("AdamGroup('head', 1e999)", "lr_mul is inf"),
        ("MuonGroup('attn', 'x')", "lr_mul is 'x'"),
        (
            "Stage()",
            "param_groups: Stage() is not a row of it; its type is tuple[AdamGroup | MuonGroup,"
            " ...]",
        ),
        ("3", "param_groups: 3 is not a row"),
    ],
)
def test_impossible_param_groups_are_refused(rows, says):
    with pytest.raises(train_gpt.RunError) as error:
        train_gpt.check_config(parse("--param_groups", rows)[1], 1)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "config", [*PRESETS.values(), train_gpt.Config(**TINY)], ids=[*PRESETS, "tiny"]
)
def test_a_config_survives_json_and_flags(config):
    assert (
        train_gpt.config_of(json.loads(json.dumps(train_gpt.json_of(config))), type(config))
        == config
    )
    fields = [f.name for f in dataclasses.fields(config) if f.name != "resume"]
    argv = itertools.chain.from_iterable(
        (f"--{name}", as_text(getattr(config, name))) for name in fields
    )
    assert (
        parse(*argv, preset="frontier89" if isinstance(config, frontier.Config) else "speedrun")[1]
        == config
    )


@pytest.mark.parametrize(
    "changes",
    [dict(stages="until long_window; 1 3"), dict(stages=None), dict(micro_tokens=1024)],
    ids=str,
)
def test_a_config_of_another_version_is_a_type_error(changes):
    with pytest.raises(TypeError):
        train_gpt.config_of({**train_gpt.json_of(train_gpt.Config()), **changes})


# the log


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_on_a_terminal_the_progress_line_stays_in_its_place(monkeypatch):
    monkeypatch.setattr(train_gpt.sys, "stdout", Terminal(shown := io.BytesIO()))
    log = train_gpt.Log(train_gpt.Config(num_steps=9), 0, "x")
    clock = train_gpt.Clock(torch.device("cpu"), 0.0)
    for step, loss in enumerate((None, 4.0, 3.0, 2.0), 1):
        clock.elapsed = 1000.0 * step
        log.last_line = 0.0
        log.progress(step, loss, clock, 10 * step)
    train_gpt.sys.stdout.flush()
    first, *_, last, end = shown.getvalue().decode().split("\x1b[A\n")
    assert (first, end) == ("\r\x1b[Kstep 1/9  10 tokens/s  8 s left", "")
    assert last == f"\r\x1b[Kstep 4/9  loss 2.0000  10 tokens/s  5 s left"


def test_messages_have_no_control_characters(capsys):
    log = train_gpt.Log(train_gpt.Config(), 0, "x")
    log.say("a shard named \x1b[2J\x9bA, or \x07")
    assert capsys.readouterr().out == "a shard named \\x1b[2J\\x9bA, or \\x07\n"


# impossible values


def refused(changes, ranks=1):
    """Return the message of check_config."""
    with pytest.raises(train_gpt.RunError) as error:
        train_gpt.check_config(train_gpt.Config(**{**TINY, **changes}), ranks)
    assert "\n" not in str(error.value)
    return str(error.value)


IMPOSSIBLE = (  # values, and ranks
    ({}, 3),
    ({"micro_batches": 12}, 8),
    *(
        (changes, 1)
        for changes in (
            {"num_heads": 3},
            {"layers": "S0M X"},
            {"layers": ""},
            {"layers": "S2M SM S0M"},
            {"backout_layer": 12},
            {"layers": "SM +0"},
            {"layers": "S0M SM+1"},
            {"seed": 2**64},
            {"val_tokens": 100},
            {"adam_beta1": 1.0},
            {"micro_batches": 0},
            {"micro_batch_splits": 5},
            {"run_id": "../x"},
            {"profile": "3:12"},
            {"profile": "3:2"},
            {"race": "2026:1"},
            {"world_size_invariant": True, "clip_norm": 1.0},
            {"world_size_invariant": True, "bf16_compress": True},
            {"world_size_invariant": True, "micro_batches": 6},
            {"attention": "flash"},
            {"attention": "flash", "dtype": "bfloat16", "world_size_invariant": True},
            {"ngrams": (Stage(),)},
            {"ngrams": (Ngrams(1, 64, 8),)},
            {"ngrams": (Ngrams(2, 64, 8), Ngrams(3, 64, 193))},
        )
    ),
    *(
        ({"stages": stages}, 2)
        for stages in (
            (),
            (3, Stage()),
            *(
                (Stage(until=until), Stage())
                for until in (0, -1 / 3, 1.5, "1/2", (1, 2), float("inf"), float("nan"))
            ),
            (Stage(until=2 / 3), Stage(until=1 / 3), Stage()),
            (Stage(until=13),),
            (Stage(until=1 / 2), Stage(until=10)),
            (Stage(extra_steps=2), Stage()),
            (Stage(extra_steps=12),),
            *((Stage(), Stage(extra_steps=extra)) for extra in (-1, 0.5, "x", (1, 2))),
            (Stage(long_window="three"),),
            (Stage(long_window=Ramp(3, 7)),),
            (Stage(peak_lr_factor=Ramp(1, -1)),),
            (Stage(until=1 / 2), Stage(micro_batches=3)),
        )
    ),
)


def test_impossible_values_are_refused_with_what_is_allowed(golden):
    lines = [f"{changes}, {ranks}: {refused(changes, ranks)}\n" for changes, ranks in IMPOSSIBLE]
    golden("impossible_values", "".join(lines))


def test_a_message_lists_each_mistake_once():
    assert refused({"adam_lr": float("nan")}) == "adam_lr is nan; it must be a number, from 0 on"
    both = refused({"adam_lr": float("nan"), "adam_every": 0})
    assert "adam_lr is nan" in both and "adam_every is 0" in both
    assert refused({}, 3).count("cannot share evenly") == 1, "not once for each stage"


def test_a_flag_that_every_stage_of_the_preset_overrides_is_refused():
    for preset, name in (
        ("frontier", "micro_batch_tokens"),
        ("frontier89", "long_window"),
        ("laptop", "long_window"),
    ):
        with pytest.raises(
            train_gpt.RunError,
            match=(
                rf"--{name} has no effect, because every stage sets .* change it in --stages"
                r" 'Stage\("
            ),
        ):
            parse(f"--{name}", "4", preset=preset)
    assert parse("--long_window", "4", "--stages", "Stage()")[1].long_window == 4
    assert parse("--micro_batch_tokens", "8192")[1].micro_batch_tokens == 8192


@pytest.mark.parametrize(
    "program, preset, flags, needed",
    [
        (train_gpt, "speedrun", ["--even_order", "true"], "shuffle"),
        (train_gpt, "speedrun", ["--lazy_tables", "true"], "ngrams"),
        (train_gpt, "laptop", ["--ngrams", "()", "--ngram_reset", "4"], "ngrams"),
        (train_gpt, "laptop", ["--fp8_weight_scale", "7"], "fp8_head"),
        (train_gpt, "laptop", ["--cooldown", "0", "--lr_floor", ".9"], "cooldown"),
        (
            train_gpt,
            "laptop",
            ["--muon_momentum_rise", "0", "--muon_momentum_fall", "0", "--muon_momentum_low", ".1"],
            "muon_momentum_rise or --muon_momentum_fall",
        ),
        (train_gpt, "laptop", ["--stages", "Stage(long_window=2)", "--long_window", "5"], "stages"),
        (frontier, "frontier", ["--adam_beta1", ".5"], "param_groups"),
    ],
)
def test_a_flag_without_effect_is_refused_and_says_what_it_needs(program, preset, flags, needed):
    with pytest.raises(train_gpt.RunError, match=f"{flags[-2]} has no effect.*--{needed}"):
        train_gpt.parse_config(["--preset", preset, *flags], preset, program.PRESETS)


@pytest.mark.parametrize("preset", ["laptop", "frontier"])
@pytest.mark.parametrize("steps", ["0", "-3"])
def test_a_run_without_steps_is_refused(preset, steps):
    config = parse("--num_steps", steps, preset=preset)[1]
    with pytest.raises(train_gpt.RunError, match=f"num_steps is {steps}"):
        train_gpt.check_config(config, 1)


def test_ablations_of_a_preset_need_no_second_flag_and_a_preset_s_own_idle_value_is_refused():
    for flags in (
        ["--ngrams", "()"],
        ["--shuffle", "false"],
        ["--cooldown", "0"],
        ["--adam_every", "2", "--ngram_reset", "0"],
    ):
        parse(*flags, preset="laptop")
    idle = {"laptop": dataclasses.replace(PRESETS["speedrun"], even_order=True)}
    with pytest.raises(train_gpt.RunError, match="--even_order has no effect without --shuffle"):
        train_gpt.parse_config([], "laptop", idle)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_presets_are_possible(preset, ranks):
    """With up to eight ranks; the presets for CPUs with up to two."""
    config = PRESETS[preset]
    train_gpt.check_config(config, min(ranks, 2) if preset in ("laptop", "bench") else ranks)
    train_gpt.check_config(train_gpt.Config(**{**TINY, "layers": "SM", "backout_layer": 0}), ranks)


@pytest.mark.parametrize(
    "micro_batches,possible", [(8, [1, 2, 4, 8]), (6, [1, 2, 3, 6]), (12, [1, 2, 3, 4, 6, 12])]
)
def test_ranks_must_divide_every_batch(micro_batches, possible):
    """check_config accepts exactly the divisors, and usable_ranks returns the largest one."""
    config = train_gpt.Config(**{**TINY, "micro_batches": micro_batches})
    for ranks in range(1, 14):
        assert train_gpt.usable_ranks(config, ranks) == max(n for n in possible if n <= ranks)
        if ranks in possible:
            train_gpt.check_config(config, ranks)
        else:
            assert "cannot share evenly" in refused({"micro_batches": micro_batches}, ranks)


# the plan


def with_stages(*stages, **changes):
    return train_gpt.Config(**{**TINY, "stages": stages, **changes})


def plans(config, name):
    """Return a value of the plan at every step."""
    return [getattr(train_gpt.plan_of(config, step), name) for step in range(config.num_steps + 1)]


def test_a_stage_s_value_precedes_the_flag():
    config = with_stages(
        Stage(until=1 / 4, micro_batches=2, max_document_tokens=16),
        Stage(until=9, micro_batches=4),
        Stage(max_document_tokens=30),
        num_steps=12,
        long_window=5,
    )
    assert plans(config, "micro_batches") == [2] * 3 + [4] * 6 + [8] * 4
    assert plans(config, "max_document_tokens") == [16] * 3 + [40] * 6 + [30] * 4
    assert {*plans(config, "windows")[:-1]} == {(20, 8)}
    counts = itertools.accumulate((48 * n for n in plans(config, "micro_batches")[:-1]), initial=0)
    assert [train_gpt.tokens_of_steps(config, steps) for steps in range(13)] == [*counts]


def test_stages_without_a_step_are_left_out():
    config = with_stages(
        Stage(until=1 / 3, long_window=3), Stage(until=1 / 3, long_window=9), Stage(long_window=5)
    )
    assert plans(config, "rotary_windows") == [(12,)] * 4 + [(12, 20)] * 9
    assert [stage.first["long_window"] for stage in train_gpt.stages_of(config)] == [3, 5]


@pytest.mark.parametrize(
    "until, scheduled, end",
    [
        (1 / 3, 2205, 735),
        (2 / 3, 2205, 1470),
        (1 / 3, 10, 4),
        (2 / 3, 10, 7),
        (1 / 2, 125, 63),
        (0.7, 10, 7),
        (0.29, 100, 29),
        (0.07, 100, 7),
        (1, 7, 7),
        (5.0, 7, 5),
    ],
)
def test_a_stage_ends_at_the_next_whole_step(until, scheduled, end):
    config = with_stages(
        Stage(until=until), Stage(long_window=4), Stage(extra_steps=5), num_steps=scheduled + 5
    )
    stages = train_gpt.stages_of(config)
    assert stages[0].end == end and stages[-2].end == scheduled and stages[-1].end == scheduled + 5


@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batch_splits_keep_the_tokens_of_a_step(preset):
    whole = PRESETS[preset]
    parts = dataclasses.replace(whole, micro_batch_splits=4)
    for step in range(whole.num_steps + 1):
        old = train_gpt.plan_of(whole, step)
        new = train_gpt.plan_of(parts, step)
        parted = {
            "micro_batches": 4 * old.micro_batches,
            "micro_batch_tokens": old.micro_batch_tokens // 4,
        }
        assert new == dataclasses.replace(old, **parted, values=old.values | parted)
    assert train_gpt.tokens_of_steps(whole, 100) == train_gpt.tokens_of_steps(parts, 100)
    assert train_gpt.micro_batch_lengths(parts) == {
        length // 4 for length in train_gpt.micro_batch_lengths(whole)
    }


# what depends on the GPU


def gpu_of(monkeypatch, capability, kib=227):
    """Let torch describe a GPU with so much shared memory per block."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda: types.SimpleNamespace(
            shared_memory_per_block_optin=kib << 10, major=capability[0]
        ),
    )


@pytest.mark.parametrize(
    "capability, kib, kernels",
    [
        ((9, 0), 227, "on"),
        ((10, 0), 227, "on"),
        ((12, 0), 99, "on"),
        ((12, 1), 99, "on"),
        ((12, 0), 64, "loss"),
        ((8, 0), 163, "loss"),
    ],
)
def test_the_mlp_s_kernel_needs_its_shared_memory(monkeypatch, capability, kib, kernels):
    """Consumer Blackwell has TMA, and shared memory for a tile of half the columns."""
    gpu_of(monkeypatch, capability, kib)
    monkeypatch.setattr(train_gpt, "triton", "installed")
    assert (
        train_gpt.resolve_auto(train_gpt.Config(attention="masked"), train_gpt.Comm())[0].kernels
        == kernels
    )


@pytest.mark.parametrize(
    "asked, changes, capability, installed, other_rank, chosen",
    [
        ("auto", {}, (9, 0), True, True, "flash"),
        ("auto", {}, (9, 0), False, False, "flash, torch's own"),
        ("auto", {}, (9, 0), True, False, "flash, torch's own"),
        ("auto", {}, (10, 0), False, False, "flash"),
        ("auto", {}, (8, 0), False, False, "flash"),
        ("auto", {}, (7, 5), False, False, "masked"),
        ("auto", {"dtype": "float32"}, (9, 0), True, True, "masked"),
        ("auto", {"world_size_invariant": True}, (9, 0), True, True, "masked"),
        ("masked", {}, (9, 0), False, False, "masked"),
        ("flash", {}, (9, 0), True, True, "flash"),
    ],
)
def test_gpus_with_bf16_use_flash_attention(
    asked, changes, capability, installed, other_rank, chosen, monkeypatch
):
    def find():
        assert finds
        train_gpt.flash_3 = "loaded" if installed else None
        return "" if installed else "kernels: No module named 'kernels'"

    monkeypatch.setattr(train_gpt, "flash_3", None)
    monkeypatch.setattr(train_gpt, "find_flash_3", find)
    gpu_of(monkeypatch, capability)
    comm = train_gpt.Comm()
    finds = capability[0] == 9 and "flash" in chosen
    other = {
        str: "no network" if finds and not other_rank else "",
        tuple: capability,
        int: 227 << 10,
    }
    comm.all_gather_json = lambda mine: json.loads(json.dumps([mine, other[type(mine)]]))
    config, messages = train_gpt.resolve_auto(train_gpt.Config(attention=asked, **changes), comm)
    assert config.attention == chosen.split(", ")[0]
    lines = [line for line in messages if "FlashAttention 3 is not used" in line]
    if "torch's own" in chosen:
        assert (
            len(lines) == 1
            and ("No module named 'kernels'" in lines[0] or "no network" in lines[0])
            and not train_gpt.flash_3
        )
    else:
        assert not lines and bool(train_gpt.flash_3) == finds


def test_flash_attention_3_is_a_wheel_or_the_hub_s_build_or_says_why_not(monkeypatch):
    def get_kernel(name, version):
        assert (name, version) == ("kernels-community/flash-attn3", 1)
        return types.SimpleNamespace(flash_attn_interface=of_hub)

    of_hub = types.SimpleNamespace(flash_attn_varlen_func=None, _flash_attn_backward=None)
    monkeypatch.setattr(train_gpt, "flash_3", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # no such module
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=get_kernel))
    assert train_gpt.find_flash_3() == "" and train_gpt.flash_3 is of_hub
    monkeypatch.setattr(train_gpt, "flash_3", None)
    del of_hub._flash_attn_backward
    why = train_gpt.find_flash_3()
    assert (
        why.startswith("flash_attn_interface: ")
        and "; kernels: " in why
        and "_flash_attn_backward" in why
    )
    assert train_gpt.flash_3 is None


def test_all_ranks_leave_out_what_the_oldest_gpu_lacks(monkeypatch):
    gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(train_gpt, "triton", "installed")
    monkeypatch.setattr(train_gpt, "find_flash_3", lambda: "")
    comm = train_gpt.Comm()
    comm.all_gather_json = lambda mine: json.loads(json.dumps([mine, mine]))
    known = train_gpt.Config(attention="masked", kernels="on")
    assert train_gpt.resolve_auto(train_gpt.Config(attention="masked"), comm) == (known, [])
    comm.all_gather_json = lambda mine: json.loads(
        json.dumps([mine, {str: "", tuple: (8, 0), int: 0}[type(mine)]])
    )
    config, messages = train_gpt.resolve_auto(train_gpt.Config(), comm)
    assert not config.fp8_head and config.kernels == "loss"
    assert messages == ["this GPU has no fp8: products stay in bf16"]


@pytest.mark.parametrize("program", [train_gpt, frontier], ids=PROGRAMS)
def test_an_edit_of_what_a_kernel_replaces_is_not_ignored(program, monkeypatch):
    """A kernel computes what it was written for, so an edited plain form must be used in its
    place."""
    gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(train_gpt, "triton", "installed")
    monkeypatch.setattr(train_gpt, "find_flash_3", lambda: "")
    auto = [*program.PRESETS.values()][0]
    comm = train_gpt.Comm()
    config, messages = train_gpt.resolve_auto(auto, comm)
    digests = {
        name: (
            hashlib.sha256(
                "".join(train_gpt.code_of(inspect.getsource(form)) for form in forms).encode()
            ).hexdigest()[:8]
        )
        for name, (forms, _) in program.PLAIN_FORMS.items()
    }
    assert (config.kernels, config.attention, messages) == (
        "on",
        "flash",
        [],
    ), f"a plain form was changed; PLAIN_FORMS with {digests}?"

    source = inspect.getsource
    with monkeypatch.context() as patch:  # words and formatting are no edit
        patch.setattr(
            inspect,
            "getsource",
            lambda form: re.sub(
                r'"""(.|\n)*?"""', '"""Words."""\n\n        # remark', source(form)
            ),
        )
        assert train_gpt.resolve_auto(auto, comm) == (config, [])
    for form, kernels, attention, kernel in (
        (program.MLP.forward, "loss", "flash", "MLP"),
        (train_gpt.Softcap.__call__, "off", "flash", "loss"),
        (program.Head.forward, "off", "flash", "loss"),
        (train_gpt.attend, "on", "masked", "attention"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                inspect, "getsource", lambda of: "def edited(): pass" if of is form else source(of)
            )
            config, (message, *_) = train_gpt.resolve_auto(auto, comm)
            assert (config.kernels, config.attention) == (
                kernels,
                attention,
            ) and f"plain form of {kernel} was edited" in message
            own = dataclasses.replace(auto, kernels="on", attention="flash")  # as the user says
            config, (message,) = train_gpt.resolve_auto(own, comm)
            assert (
                config == own
                and f"plain form of {kernel} was edited" in message
                and "ignores the edit" in message
            )
