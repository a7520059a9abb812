"""Flags, presets, impossible values; the table of stages and the plan of a step."""

import ast
import dataclasses
import inspect
import io
import json
import os
import re
import typing

import pytest
import torch

import train_gpt
from conftest import TINY


def parse(*argv, preset="laptop"):
    return train_gpt.parse_config(argv, preset)


def test_every_value_is_a_flag_of_its_type():
    argv, wanted = [], {}
    for f in dataclasses.fields(train_gpt.Config):
        old = getattr(train_gpt.Config(), f.name)
        choices = f.metadata["choices"]
        new = choices[-1] if choices else {"int": 3, "float": 0.25, "str": "x", "bool": not old}.get(f.type, (1.0, 0.5))
        if f.name != "resume":  # which takes everything else from a checkpoint
            argv += [f"--{f.name}", "1,.5" if isinstance(new, tuple) else str(new)]
        wanted[f.name] = new
    assert dataclasses.asdict(parse(*argv)[1]) == {**wanted, "resume": ""}


def test_preset_is_the_hardware_s_unless_named():
    assert parse(preset="laptop") == ("laptop", train_gpt.PRESETS["laptop"])
    speedrun = train_gpt.Config(seed=5, overlap_param_gather=True, update_order="forward")  # which change no byte
    assert parse("--preset", "speedrun", "--seed", "5") == ("speedrun", speedrun)


def test_a_shorter_run_keeps_the_proportions_of_its_preset():
    counted = lambda config: (config.muon_momentum_rise, config.muon_momentum_fall, config.stages.rpartition("+")[2])
    for preset in train_gpt.PRESETS:
        whole = train_gpt.PRESETS[preset]
        for steps in (*range(1, 20), whole.num_steps - 1, whole.num_steps, 2 * whole.num_steps):
            config = parse("--num_steps", str(steps), preset=preset)[1]
            train_gpt.check_config(config, 1)
            assert train_gpt.momentum(config, 0) == whole.muon_momentum_low
    assert counted(parse("--num_steps", "449", preset="speedrun")[1]) == (60, 10, "8 13")
    assert counted(parse("--num_steps", "4490", preset="speedrun")[1]) == counted(train_gpt.Config()) == (300, 50, "40 13")
    given = ("--num_steps", "449", "--muon_momentum_rise", "30", "--stages", "until long_window; 1 4; +3 5")
    assert counted(parse(*given, preset="speedrun")[1]) == (30, 10, "3 5")


@pytest.mark.parametrize("argv,says", [
    (["--num_step", "3"], "did you mean --num_steps?"), (["--num_steps", "many"], "many"),
    (["--shuffle", "yes"], "write true or false"),
    (["--sync", "never"], "choose from"), (["--preset", "desktop"], "desktop"), (["stray"], "stray"),
    (["--loss_weights", "1;2"], "write them like 1,.5"), (["--bank_mb", "1"], "--bank_mb")])
def test_unknown_and_ill_typed_flags_are_refused(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and says in errors and errors.count("\n") == 1 and "--help" in errors


def test_help_names_every_flag_and_its_reason(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for f in dataclasses.fields(train_gpt.Config):
        assert f"--{f.name}" in text and f.metadata["why"][:20] in text


def test_help_short_names_what_a_first_look_needs_and_nothing_else(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help", "short")
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and {*re.findall(r"^  --(\w+)", shown, re.M)} == {*train_gpt.FIRST_FLAGS}
    assert f"(2245; frontier: 1480; laptop: {train_gpt.PRESETS['laptop'].num_steps})" in " ".join(shown.split())
    assert "\noptimizers:" not in shown
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert [*train_gpt.SECTIONS.values()] == re.findall(r"^([a-z].*):$", shown, re.M)[1:]


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize("encoding, curve", [("utf-8", "█▅▁  "), ("ascii", "")])
def test_on_a_terminal_the_progress_line_stays_in_its_place(encoding, curve, monkeypatch):
    monkeypatch.setattr(train_gpt.sys, "stdout", Terminal(shown := io.BytesIO(), encoding=encoding))
    log, clock = train_gpt.Log(train_gpt.Config(num_steps=9), 0, "x"), train_gpt.Clock(torch.device("cpu"), 0.0)
    for step, loss in enumerate((None, 4.0, 3.0, 2.0), 1):
        clock.elapsed, log.last_line = 1000.0 * step, 0.0
        log.progress(step, loss, clock, 10 * step)
    train_gpt.sys.stdout.flush()
    first, *_, last, end = shown.getvalue().decode().split("\x1b[A\n")
    assert (first, end) == ("\r\x1b[Kstep 1/9  10 tokens/s  8 s left", "")
    assert last == f"\r\x1b[Kstep 4/9  loss 2.0000  {curve}10 tokens/s  5 s left"


def test_what_a_run_says_obeys_no_terminal_s_commands(capsys):
    log = train_gpt.Log(train_gpt.Config(), 0, "x")
    log.say("a shard named \x1b[2J\x9bA, or \x07")
    assert capsys.readouterr().out == "a shard named \\x1b[2J\\x9bA, or \\x07\n"


@pytest.mark.parametrize("losses, drawn", [([3.0], "▁"), ([4.0, 2.0, 1.0, 1.0], "█▃▁▁"), (range(160, 0, -1), "██▇▇▆▆▅▅▄▄▃▃▂▂▁▁")])
def test_the_curve_of_the_progress_line(losses, drawn):
    assert train_gpt.curve(losses) == drawn


def test_depth_is_said_in_layers():
    """So that a log has one way to say it."""
    for depth, words, back in ((1, "LM", 0), (2, "SM LM", 0), (5, "SM SM SM LM+1 LM", 3),
                               (12, "SM SM SM LM SM SM SM+5 LM+4 SM+3 SM+2 SM+1 LM", 8)):
        config = parse("--depth", str(depth))[1]
        train_gpt.check_config(config, 1)
        assert config == dataclasses.replace(parse()[1], layers=words.strip(), backout_layer=back)
    with pytest.raises(train_gpt.RunError, match="--depth says what --layers and --backout_layer say; leave it out, or them"):
        parse("--depth", "3", "--layers", "SM")
    with pytest.raises(train_gpt.RunError, match="layers is empty; give at least one layer"):
        train_gpt.check_config(parse("--depth", "0")[1], 1)


def test_a_config_survives_json():
    config = train_gpt.Config(**{**TINY, "loss_weights": (1.0, 0.5)})
    assert train_gpt.config_of(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def refused(changes, ranks):
    """What check_config says of these values."""
    with pytest.raises(train_gpt.RunError) as error:
        train_gpt.check_config(train_gpt.Config(**{**TINY, **changes}), ranks)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("changes,ranks,says", [
    ({}, 3, "3 ranks; the stage from step 0 on has 8 micro-batches, which they cannot share evenly: start 2 ranks"),
    ({"micro_batches": 12}, 8, "12 micro-batches, which they cannot share evenly: start 6 ranks"),
    ({"num_heads": 3}, 1, "3 * 16; it must be model_dim, 32"),
    ({"layers": "S0M X"}, 1, "'X' is not a layer"),
    ({"layers": "0M"}, 1, "'0M' is not a layer"),
    ({"layers": ""}, 1, "give at least one layer"),
    ({"layers": "S2M SM S0M"}, 1, "value tables [0, 2]; number them from 0 on"),
    ({"backout_layer": -1}, 1, "backout_layer is -1; it must be 0 or more"),
    ({"backout_layer": 12}, 1, "layers has 0 to 11"),
    ({"layers": "cM"}, 1, "'cM' is not a layer"),
    ({"layers": "SM -+0"}, 1, "'-+0' is not a layer"),
    ({"layers": "SM +0"}, 1, "'+0' is not a layer"),
    ({"layers": "S0M SM+1"}, 1, "layer 1 takes in the output of layer 1; write + and an earlier one"),
    ({"layers": "S0M SM", "skip_gates": True, "backout_layer": 0}, 1, "skip_gates is for layers that take in another's output"),
    ({"layers": "S0M cSM LM", "backout_layer": 1}, 1, "stands before or at backout_layer 1, whose output it would read"),
    ({"layers": "P0M SM", "backout_layer": 1, "num_heads": 1, "head_dim": 32}, 1, "num_heads is 1; make it even, or write S"),
    ({"untie_at": 1.5}, 1, "untie_at is 1.5; it must be 0 or more, at most 1"),
    ({"untie_at": 0.5}, 1, "untie_at is 0.5 and head_init 0: as the embedding too, a head of zeros learns nothing"),
    ({"untie_at": float("nan")}, 1, "untie_at is nan"),
    ({"layers": "SM LM", "value_gates": True}, 1, "value_gates is for layers with a value table, and layers has none"),
    ({"loss_weights": (1.0,) * 200, "micro_batch_tokens": 128}, 1, "looks 200 tokens ahead from step 0 on, and a micro-batch has 128"),
    ({"logit_shift": float("inf")}, 1, "logit_shift is inf; it must be a number, and finite"),
    ({"seed": 2 ** 64}, 1, "seed is 18446744073709551616; it must be 0 or more, at most"),
    ({"timeout_s": 10 ** 14}, 2, "timeout_s is 100000000000000; it must be more than 0, at most"),
    ({"val_tokens": 100}, 1, "val_tokens 100 is not a multiple of val_len 64"),
    ({"adam_beta1": 1.0}, 1, "adam_beta1 is 1.0; it must be 0 or more, less than 1"),
    ({"muon_lr": -1.0}, 1, "muon_lr is -1.0; it must be 0 or more"),
    ({"adam_lr": float("nan")}, 1, "adam_lr is nan"),
    ({"adam_every": 0}, 1, "adam_every is 0"),
    ({"micro_batches": 0}, 1, "micro_batches is 0; it must be more than 0"),
    ({"keep_checkpoints": 0}, 1, "keep_checkpoints is 0"),
    ({"loss_weights": (0.0, 0.0)}, 1, "loss_weights is (0.0, 0.0)"),
    ({"loss_weights": (1.0, float("inf"))}, 1, "loss_weights is (1.0, inf)"),
    ({"num_steps": 0}, 1, "num_steps is 0; it must be more than 0"),
    ({"run_id": "../x"}, 1, "leave out '/'"),
    ({"max_document_tokens": 1}, 1, "max_document_tokens is 1; it must be 2 or more"),
    ({"profile": "3"}, 1, "profile is '3'"),
    ({"profile": "3:12"}, 1, "below num_steps 12"),
    ({"profile": "3:2"}, 1, "profile is '3:2'"),
    ({"race": "2026:1"}, 1, "race is '2026:1'"),
    ({"world_size_invariant": True, "clip_norm": 1.0}, 1, "exact and clip_norm 1.0 exclude each other"),
    ({"world_size_invariant": True, "find_unused_parameters": True}, 1, "exact and find_unused_parameters True exclude each other"),
    ({"world_size_invariant": True, "micro_batches": 6}, 1, "has 6 micro-batches on 1 ranks: make both powers of two"),
    ({"world_size_invariant": True, "bf16_compress": True}, 1, "exact and bf16_compress True exclude each other"),
])
def test_impossible_values_are_refused_with_what_is_allowed(changes, ranks, says):
    assert says in refused(changes, ranks)


def test_one_finding_is_one_clause_and_all_are_told():
    assert refused({"adam_lr": float("nan")}, 1) == "adam_lr is nan; it must be 0 or more, and finite"
    both = refused({"adam_lr": float("nan"), "adam_every": 0}, 1)
    assert "adam_lr is nan" in both and "adam_every is 0" in both
    stages = {"stages": "until long_window; 1/2 3; 1 4", "num_steps": 12}
    assert refused(stages, 3).count("which they cannot share evenly") == 1


def test_a_model_of_one_layer_is_possible():
    train_gpt.check_config(train_gpt.Config(**{**TINY, "layers": "SM", "backout_layer": 0}), 1)


@pytest.mark.parametrize("preset", train_gpt.PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_presets_are_possible(monkeypatch, preset, ranks):
    """On eight GPUs with eight ranks, on any number of cores with two."""
    config = train_gpt.PRESETS[preset]
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2 ** 12, "SC_PHYS_PAGES": 2 ** 24}[name])
    train_gpt.check_config(config, min(ranks, 2) if preset == "laptop" else ranks)


@pytest.mark.parametrize("micro_batches,possible", [(8, [1, 2, 4, 8]), (6, [1, 2, 3, 6]), (12, [1, 2, 3, 4, 6, 12])])
def test_any_ranks_that_divide_every_batch_may_run(micro_batches, possible):
    """usable_ranks names the most of them, and check_config lets exactly those start."""
    config = train_gpt.Config(**{**TINY, "micro_batches": micro_batches})
    for ranks in range(1, 14):
        assert train_gpt.usable_ranks(config, ranks) == max(n for n in possible if n <= ranks)
        if ranks in possible:
            train_gpt.check_config(config, ranks)
        else:
            assert "cannot share evenly" in refused({"micro_batches": micro_batches}, ranks)


def test_layers_of_the_record():
    layers = train_gpt.parse_layers(train_gpt.Config().layers)
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [0, 7]
    assert [i for i, layer in enumerate(layers) if layer.window == "L"] == [4, 11]
    assert [i for i, layer in enumerate(layers) if not layer.mlp] == [0]
    tables = {i: layer.value_table for i, layer in enumerate(layers) if layer.value_table is not None}
    assert tables == {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}


# the plan


def record_s_plan(step):
    """Of record 44, in formulas: (long window, short window, learning-rate factor, momentum), windows in blocks."""
    blocks = 13 if step >= 2205 else (3, 7, 11)[3 * step // 2205]
    x = min(0.9999, step / 2205)
    factor = 1.0 if x < 0.5 else (1 - x) / 0.5 + (1 - (1 - x) / 0.5) * 0.1
    momentum = 0.95
    if step < 300:
        momentum = 0.85 + 0.10 * step / 300
    elif step > 2195:
        momentum = 0.95 - 0.10 * (step - 2195) / 50
    return 20 if step == 2245 else blocks, blocks // 2, factor, momentum


def test_speedrun_is_the_record_at_every_step():
    config, seen = train_gpt.Config(), []
    for step in range(2246):
        plan = train_gpt.plan_of(config, step)
        long, short, factor, momentum = record_s_plan(step)
        assert plan.step == step and plan.windows == (128 * long, 128 * short), step
        assert plan.lr_factor == pytest.approx(factor, rel=1e-12) and plan.momentum == pytest.approx(momentum, rel=1e-12), step
        assert (plan.micro_batches, plan.max_document_tokens, plan.loss_weights) == (8, 2048, (1.0,))
        if step < 2245 and 128 * long not in seen:
            seen.append(128 * long)
        assert plan.rotary_windows == tuple(seen), step
    assert seen == [384, 896, 1408, 1664]
    assert train_gpt.tokens_of_steps(config, 2245) == 2245 * 262144
    assert config.micro_batches * config.micro_batch_tokens == 262144


def with_stages(stages, **changes):
    return train_gpt.Config(**{**TINY, "stages": stages, **changes})


def columns(config, name):
    return [getattr(train_gpt.plan_of(config, step), name) for step in range(config.num_steps + 1)]


def test_a_column_of_the_table_goes_before_the_flag_and_the_rest_is_the_flag_s():
    config = with_stages("until micro_batches max_document_tokens; 1/4 2 16; 9 4 24; 1 8 40\n", num_steps=12, long_window=5)
    assert columns(config, "micro_batches") == [2] * 3 + [4] * 6 + [8] * 4
    assert columns(config, "max_document_tokens") == [16] * 3 + [24] * 6 + [40] * 4
    assert {plan.windows for plan in map(lambda step: train_gpt.plan_of(config, step), range(12))} == {(20, 8)}
    counted = [0]
    for step in range(12):
        counted.append(counted[-1] + 48 * train_gpt.plan_of(config, step).micro_batches)
    assert [train_gpt.tokens_of_steps(config, steps) for steps in range(13)] == counted


def test_rows_may_stand_on_lines_and_stages_without_a_step_are_left_out():
    lines = with_stages("until long_window\n 1/3 3\n 1/3 9\n 1 5\n")
    assert columns(lines, "rotary_windows") == [(12,)] * 4 + [(12, 20)] * 9
    assert [stage.first["long_window"] for stage in train_gpt.stages_of(lines)] == [3, 5]


def test_a_value_moves_in_a_line_within_its_stage():
    config = with_stages("until peak_lr_factor loss_weights; 4 .5>1 1,.5>0; 1 1 1,0; +2 2 1,0", cooldown=0)
    assert columns(config, "peak_lr_factor") == pytest.approx([0.5, 0.625, 0.75, 0.875] + [1.0] * 6 + [2.0] * 3)
    assert columns(config, "lr_factor") == columns(config, "peak_lr_factor")
    assert columns(config, "loss_weights") == [(1.0, 0.5), (1.0, 0.375), (1.0, 0.25), (1.0, 0.125)] + [(1.0, 0.0)] * 9


def test_the_cooldown_takes_down_what_the_stage_says():
    config = with_stages("until peak_lr_factor; 1/2 1; 1 2", num_steps=20, cooldown=0.5, lr_floor=0.1)
    factors = columns(config, "lr_factor")
    assert factors[:10] == [1.0] * 10
    for step in range(10, 20):
        left = (1 - step / 20) / 0.5
        assert factors[step] == pytest.approx(2 * left + 0.1 * (1 - left))


def test_steps_after_the_schedule_keep_the_floor():
    assert columns(with_stages("until long_window; 1 3; +2 3"), "lr_factor")[10:] == pytest.approx([0.1 + 0.9 * 0.0002] * 3)


@pytest.mark.parametrize("stages,says", [
    ("", "write a head that begins with `until`"),
    ("until long_window", "then a row per stage"),
    ("long_window until; 3 1", "write a head that begins with `until` and names some of micro_batches, micro_batch_tokens, max_document_tokens"),
    ("until bank_mb; 1 3", "names some of micro_batches, micro_batch_tokens, max_document_tokens, long_window"),
    ("until seed; 1 3", "names some of micro_batches"),
    ("until long_window long_window; 1 3 3", "names some of"),
    ("until long_window; 1 3 4", "'1 3 4' under 'until long_window'"),
    ("until long_window; 1", "give one value per column"),
    ("until long_window; half 3; 1 4", "'half 3' under 'until long_window'"),
    ("until long_window; 1/0 3; 1 4", "'1/0 3' under"),
    ("until long_window; 0 2; 1 3", "let stages follow one another"),
    ("until long_window; -1/3 2; 1 3", "'-1/3' is no end of a stage"),
    ("until long_window; 4/3 3", "'4/3' is no end of a stage"),
    ("until long_window; 4/2 3; 1 3", "'4/2' is no end of a stage"),
    ("until long_window; 1.5 3; 1 4", "'1.5' is no end of a stage"),
    ("until long_window; 1 3; +1e3 4", "'+1e3' is no end of a stage"),
    ("until long_window; \u0661 3", "is no end of a stage"),
    ("until long_window; 2/3 3; 1/3 7; 1 11", "under 'until long_window' ends before step 4, the one before it before step 8"),
    ("until long_window; 13 3", "ends before step 13"),
    ("until long_window; 1/2 3; 10 7", "the last ends before step 10 of num_steps 12; let its `until` be 1"),
    ("until long_window; +2 3; 1 7", "let stages follow one another, those with + last"),
    ("until long_window; +12 3", "0 of num_steps 12 are scheduled"),
    ("until long_window; 1 3; +1/2 4", "'+1/2 4' under"),
    ("until long_window; 1 three", "'1 three' under 'until long_window': 'three' is no value of long_window, a whole number; "),
    ("until loss_weights; 1 1,b", "'1,b' is no value of loss_weights, a number"),
    ("until long_window; 1 0", "long_window is 0; it must be more than 0"),
    ("until long_window; 1 3>7", "'3>7' is no value of long_window"),
    ("until long_window; 1 3,4", "'3,4' is no value of long_window"),
    ("until loss_weights; 1 1>.5>0", "'1>.5>0' is no value of loss_weights"),
    ("until loss_weights; 1 0,0", "loss_weights is (0.0, 0.0)"),
    ("until loss_weights; 1 1,nan", "loss_weights is (1.0, nan)"),
    ("until peak_lr_factor; 1 -1", "peak_lr_factor is -1.0"),
    ("until micro_batches; 1/2 8; 1 3", "from step 6 on has 3 micro-batches, which they cannot share evenly: start 1 ranks"),
    ("until max_document_tokens; 1/2 8; 1 1",
     "'1 1' under 'until max_document_tokens': max_document_tokens is 1; it must be 2 or more"),
])
def test_a_table_that_is_wrong_is_one_line_that_says_what_to_write(stages, says):
    assert says in refused({"stages": stages}, 2)


def test_rotary_is_stretched_once_a_window_and_not_for_the_last_validation():
    config = with_stages("until long_window; 1/3 3; 2/3 7; 1 11; +10 13", num_steps=40, window_block=128)
    rotary = train_gpt.Rotary(16, 32, torch.float32)
    frequencies, scale = train_gpt.rotary_frequencies(16), 0.1
    for step, old, new in ((0, 3, 3), (10, 3, 7), (20, 7, 11), (30, 11, 13), (39, 13, 13), (40, 13, 13)):
        if new != old:
            frequencies, scale = train_gpt.stretch(frequencies, scale, old * 128, new * 128)
        rotary.follow(train_gpt.plan_of(config, step).rotary_windows)
        angles = torch.outer(torch.arange(32), frequencies)
        assert torch.equal(rotary.cos, angles.cos()) and torch.equal(rotary.sin, angles.sin()), step
        assert rotary.scale.item() == pytest.approx(scale)
    assert scale > 0.1 and train_gpt.plan_of(config, 40).windows == (20 * 128, 6 * 128)
    rotary.follow(train_gpt.plan_of(config, 0).rotary_windows)
    assert rotary.scale.item() == pytest.approx(0.1) and torch.equal(rotary.cos[1], train_gpt.rotary_frequencies(16).cos())


# what fits a GPU


class SmallGpus(train_gpt.Comm):
    """Two ranks, of which the second has the older GPU with less memory."""

    def __init__(self):
        super().__init__()
        self.ranks = 2

    def all_gather_json(self, mine):
        return [json.loads(json.dumps(mine)), [[8, 0], 12 * 2 ** 30, False]]


def test_what_the_smallest_gpu_cannot_do_is_left_out_on_all(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (79 * 2 ** 30, 80 * 2 ** 30))
    monkeypatch.setattr(train_gpt, "triton", "is there")
    record = train_gpt.Config()
    assert train_gpt.fit_to_gpus(record, 50257, train_gpt.Comm(0, 1))[0] == dataclasses.replace(record, attention="flex")
    config, changes = train_gpt.fit_to_gpus(record, 50257, SmallGpus())
    assert not config.fp8_head and config.kernels == "off" and config.micro_batch_tokens == 16384 and config.micro_batches == 16
    assert changes[0] == "this GPU has no fp8: the head's product stays in bf16"
    assert changes[1].startswith("too little memory for micro-batches of 32768 tokens: they have 16384")


@pytest.mark.parametrize("asked, changes, capability, installed, other_rank, chosen", [
    ("auto", {}, (9, 0), True, True, "flash"),
    ("auto", {}, (9, 0), False, False, "flex"),
    ("auto", {}, (9, 0), True, False, "flex"),
    ("auto", {}, (10, 0), True, True, "flex"),
    ("auto", {"dtype": "float32"}, (9, 0), True, True, "flex"),
    ("auto", {"world_size_invariant": True}, (9, 0), True, True, "flex"),
    ("flex", {}, (9, 0), True, True, "flex"),
    ("flash", {}, (9, 0), True, True, "flash"),
    ("flash", {}, (8, 9), True, True, "flash, by torch's own"),
    ("flash", {}, (9, 0), False, True, "flash, by torch's own"),
])
def test_flash_attention_3_is_taken_where_all_ranks_have_it(asked, changes, capability, installed, other_rank, chosen, monkeypatch):
    def activate(name):
        assert capability[0] == 9, "it would be taken there too"
        if not installed:
            raise ModuleNotFoundError(name)
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (79 * 2 ** 30, 80 * 2 ** 30))
    comm = train_gpt.Comm()
    comm.all_gather_json = lambda mine: json.loads(json.dumps([mine, [*mine[:2], mine[2] and other_rank]]))
    config, said = train_gpt.fit_to_gpus(dataclasses.replace(train_gpt.Config(), attention=asked, **changes), 50257, comm)
    chosen, *others_instead = chosen.split(", by ")
    assert config.attention == chosen and any("FlashAttention 3 wants" in line for line in said) == bool(others_instead)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"world_size_invariant": True, "micro_batches": 8}])
def test_flash_attention_is_refused_where_it_cannot_be(changes):
    with pytest.raises(train_gpt.RunError, match="take --attention auto"):
        train_gpt.check_config(dataclasses.replace(train_gpt.Config(), attention="flash", **changes), 1)


def test_micro_batches_that_do_not_fit_are_halved_in_every_stage():
    config = train_gpt.Config(stages="until micro_batches long_window micro_batch_tokens; 1/2 4 3 1024; 1 8 7 2048; +40 16 7 512",
                              micro_batches=3)
    halved = train_gpt.halve_micro_batches(config)
    assert halved.micro_batch_tokens == config.micro_batch_tokens // 2 and halved.micro_batches == 6
    for step in (0, 1500, 2230, 2245):
        old, new = train_gpt.plan_of(config, step), train_gpt.plan_of(halved, step)
        assert new == dataclasses.replace(old, micro_batches=2 * old.micro_batches, micro_batch_tokens=old.micro_batch_tokens // 2)
    assert train_gpt.tokens_of_steps(config, 2245) == train_gpt.tokens_of_steps(halved, 2245)
    plain = train_gpt.halve_micro_batches(train_gpt.Config())
    assert plain.micro_batches == 16 and train_gpt.plan_of(plain, 0).micro_batches == 16


@pytest.mark.parametrize("layers,dim", [("SM LM M", 256), ("S0M SM", 64), ("S S L", 256), ("M M M M", 256)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_needed_counts_at_least_what_the_run_keeps(tiny, layers, dim, ranks):
    """Parameters, gradients and this rank's state, counted in bytes.
    A kind of parameter that the guess leaves out would be missed in one of these models."""
    config = dataclasses.replace(tiny, layers=layers, backout_layer=1, model_dim=dim, head_dim=dim // 2, bucket_mb=1000,
                                 dtype="bfloat16", ngrams="2:20000:16", adam_fp32_moments=ranks == 2)
    encoding = train_gpt.Encoding(1024, 1023)
    model = train_gpt.build_model(config, encoding)
    specs = train_gpt.assign(model, train_gpt.assignments(config))
    buckets = train_gpt.fill_buckets(specs, 2 ** 40, 0, ranks)
    kept = sum(x.numel() * x.element_size() for bucket in buckets
               for x in (bucket.param_data, bucket.grad_data, *bucket.state.values()))
    guess = train_gpt.memory_needed(config, encoding.vocab_size, ranks)[0]
    assert 0.95 * kept <= guess <= 1.6 * kept, (kept, guess)


FRONTIER = dataclasses.asdict(train_gpt.PRESETS["frontier"])


@pytest.mark.parametrize("ranks, changes, training, validation", [
    (8, dict(), 16937, 9399),
    (8, FRONTIER, 23865, 10380),
    (8, dict(kernels="off"), 19049, 9399),
    (1, dict(kernels="off"), 19920, 10271),
    (8, dict(kernels="off", micro_batch_tokens=8192), 6083, 9399),
    (8, dict(kernels="off", fp8_head=False), 16002, 9399),
    (1, dict(kernels="off", fp8_head=False, micro_batch_tokens=8192), 6248, 10271),
    (8, dict(kernels="off", layers="S0M LM S0M SM", backout_layer=2), 11492, 5956),
    (8, dict(FRONTIER, kernels="off"), 27033, 10380),
    (8, dict(attention="masked"), 16980, 13632),
    (8, dict(attention="masked", micro_batch_tokens=8192), 5623, 13633),
    (8, dict(kernels="off", compile="off"), 40555, 23978),
    (8, dict(kernels="off", compile="off", micro_batch_tokens=8192), 11458, 11323),
    (8, dict(compile="off", attention="masked", fp8_head=False), 36362, 23978),
])
def test_memory_needed_is_what_runs_allocate(ranks, changes, training, validation):
    """MiB that the dry GPU counted (bench/dry_gpu, an H100), within a tenth."""
    _, *guesses = train_gpt.memory_needed(dataclasses.replace(train_gpt.Config(), **changes), 50257, ranks)
    assert [guess / 2 ** 20 for guess in guesses] == [pytest.approx(training, rel=0.1), pytest.approx(validation, rel=0.1)]


@pytest.mark.parametrize("free, changes, says", [
    (2, dict(), "take more ranks, fewer rows in --ngrams, or a smaller model"),
    (2, dict(ngrams="2:9000000:768", val_len=128), r"allocate about \d{5} in .* take more ranks, fewer rows"),
    (8, dict(), r"8192 MiB free, .* and 1\d{4} in validation: take a --val_len below 262144; its losses compare only"),
    (16, dict(world_size_invariant=True), r"16384 MiB free, .* take smaller --micro_batch_tokens, and as many more --micro_batches"),
    (3, dict(layers="M " * 60, val_len=128, model_dim=192, num_heads=3, head_dim=64, backout_layer=3, micro_batch_tokens=128 * 81),
     "take a smaller model")])
def test_a_gpu_that_is_too_small_is_told_what_would_fit(monkeypatch, free, changes, says):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free * 2 ** 30, free * 2 ** 30))
    with pytest.raises(train_gpt.RunError, match=says):
        train_gpt.fit_to_gpus(dataclasses.replace(train_gpt.Config(), **changes), 50257, train_gpt.Comm())


@pytest.mark.parametrize("words, says", [
    ("2:16384", "'2:16384' is no table; write N:ROWS:WIDTH"), ("1:64:8", "'1:64:8' is no table"), ("2:0:8", "'2:0:8' is no table"),
    ("2:64:0", "is no table"), ("1000000:64:8", "with 2 to 9 tokens"), ("2:64:8x", "is no table"),
    ("2:64:8 3:64:193", "a table is 193 wide, and model_dim is 64; a width is at most that"),
    (f"2:{10 ** 10}:64 3:{10 ** 10}:64", r"ngrams: the tables take \d+ GiB to train, and this machine has \d+; give them fewer rows")])
def test_tables_of_ngrams_that_cannot_be_are_named(words, says):
    with pytest.raises(train_gpt.RunError, match=says):
        train_gpt.check_config(dataclasses.replace(train_gpt.PRESETS["laptop"], ngrams=words), 1)


def test_every_rank_of_a_machine_holds_the_tables(monkeypatch):
    """One rank of 2 million rows of 64 takes 3.9 GB (measured: 3,898 MiB); two take 7."""
    config = dataclasses.replace(train_gpt.PRESETS["laptop"], ngrams="2:2000000:64")
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2 ** 20, "SC_PHYS_PAGES": 5000}[name])
    train_gpt.check_config(config, 1)
    with pytest.raises(train_gpt.RunError, match="the tables take 6 GiB to train, and this machine has 4"):
        train_gpt.check_config(config, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of two hosts
    train_gpt.check_config(config, 2)


@pytest.mark.parametrize("table, says", [
    ("of beta1; tail .9", "'tail .9' under 'of beta1'; write a head, of and some of lr_mul, beta1, beta2, weight_decay"),
    ("of beta1; head 1", "'head 1' under .* betas below 1"), ("of lr_mul; head nan", "'head nan' under"),
    ("of lr_mul; head -1", "'head -1' under"), ("of lr; head 1", "'head 1' under 'of lr'"), ("head .9 .95", "'no row' under 'head .9 .95'"),
    ("of lr_mul beta1; head 1", "'head 1' under"), ("of lr_mul; head 1; head 2", "'head 2' under"), ("of lr_mul; head x", "'head x' under"),
    ("of lr_mul; embed 3", "adam_groups has a row for embed, which with untie_at has that of head; leave it out"), (";", "'no row' under 'of'")])
def test_groups_of_adam_that_cannot_be_are_named(table, says):
    config = dataclasses.replace(train_gpt.PRESETS["frontier"], adam_groups=table)
    with pytest.raises(train_gpt.RunError, match=says):
        train_gpt.check_config(config, 1)


@pytest.mark.parametrize("changes, says", [
    (dict(ngram_mix=0.1, ngrams=""), "ngram_mix is 0.1 without tables; give --ngrams, or leave it out"),
    (dict(ngram_mix=-0.1), "ngram_mix is -0.1; it must be 0 or more"),
    (dict(key_offset=True, layers="S0M SM"), "key_offset is for layers with the long window, and layers has none; write L for one"),
    (dict(muon_qk_heads=4), "muon_qk_heads is 4, and num_heads 2; give a divisor of it, or 0"),
    (dict(muon_qk_heads=-1), "muon_qk_heads is -1; it must be 0 or more")])
def test_mechanisms_that_cannot_be_are_named(changes, says):
    with pytest.raises(train_gpt.RunError, match=says):
        train_gpt.check_config(dataclasses.replace(train_gpt.PRESETS["laptop"], **changes), 1)


def test_tables_of_ngrams_have_a_learning_rate_of_their_own(tiny):
    config = dataclasses.replace(tiny, ngrams="2:50:8", ngram_lr_mul=7.0)
    specs = train_gpt.assign(train_gpt.build_model(config, train_gpt.Encoding(64, 63)), train_gpt.assignments(config))
    [rule] = [spec.rule for spec in specs if spec.name == "ngrams.0.weight"]
    assert isinstance(rule, train_gpt.Adam) and rule.lr == config.adam_lr * 7


def test_no_class_and_no_line_is_too_long_to_read():
    source = open(train_gpt.__file__, encoding="utf-8").read()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes if node.end_lineno - node.lineno >= 150} == set() != {node.name for node in classes}
    assert max(map(len, source.splitlines())) <= 120


def test_what_annotations_name_is_there():
    """They are read by nobody while a run goes on."""
    ours = [x for x in vars(train_gpt).values() if getattr(x, "__module__", "") == train_gpt.__name__]
    within = [x for of in filter(inspect.isclass, ours) for x in vars(of).values()]
    for x in (*ours, *within):
        if inspect.isclass(x) or inspect.isfunction(x):
            typing.get_type_hints(x)


def test_a_flag_that_the_preset_s_table_overrides_is_refused():
    for flags, name in ((("--preset", "frontier", "--micro_batch_tokens", "8192"), "micro_batch_tokens"), (("--long_window", "4"), "long_window")):
        with pytest.raises(train_gpt.RunError, match=f"--{name} would do nothing: .* table of stages has a column of that name"):
            parse(*flags)
    assert parse("--long_window", "4", "--stages", "until peak_lr_factor; 1 1")[1].long_window == 4
    assert parse("--micro_batch_tokens", "8192")[1].micro_batch_tokens == 8192
