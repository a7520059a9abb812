"""Flags, presets, impossible values; schedules."""

import dataclasses

import pytest

import train_gpt
from conftest import TINY


def parse(*argv, preset="laptop"):
    return train_gpt.parse_config(argv, preset)


def test_every_value_is_a_flag_of_its_type():
    argv, wanted = [], {}
    for f in dataclasses.fields(train_gpt.Config):
        old = getattr(train_gpt.Config(), f.name)
        choices = f.metadata["choices"]
        new = choices[-1] if choices else {"int": 3, "float": 0.25, "str": "x", "bool": not old}[f.type]
        argv += [f"--{f.name}", str(new)]
        wanted[f.name] = new
    assert dataclasses.asdict(parse(*argv)[1]) == wanted


def test_preset_is_the_hardware_s_unless_named():
    assert parse(preset="laptop") == ("laptop", train_gpt.PRESETS["laptop"])
    assert parse("--preset", "speedrun", "--seed", "5") == ("speedrun", train_gpt.Config(seed=5))


@pytest.mark.parametrize("argv,says", [
    (["--num_step", "3"], "did you mean --num_steps?"), (["--num_steps", "many"], "many"), (["--shuffle", "yes"], "write true or false"),
    (["--sync", "never"], "choose from"), (["--preset", "desktop"], "desktop"), (["stray"], "stray")])
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


@pytest.mark.parametrize("changes,ranks,says", [
    ({}, 3, "3 ranks; .* 1, 2, 4 or 8"),
    ({"num_heads": 3}, 1, r"3 \* 16; it must be model_dim, 32"),
    ({"micro_tokens": 50}, 1, "batch_tokens 384 is not a whole number of micro_tokens 50"),
    ({"micro_tokens": 96}, 8, "make batch_tokens a multiple of 768"),
    ({"extension_steps": 12}, 1, "extension_steps is 12 of num_steps 12"),
    ({"layers": "S0M X"}, 1, "'X' is not a layer"),
    ({"layers": "0M"}, 1, "'0M' is not a layer"),
    ({"layers": "S2M SM S0M"}, 1, r"value tables \[0, 2\]; number them from 0 on"),
    ({"backout_layer": -1}, 1, "backout_layer is -1; it must be 0 or more"),
    ({"seed": 2 ** 64}, 1, "seed is 18446744073709551616; it must be at most"),
    ({"timeout_s": 10 ** 14}, 2, "timeout_s is 100000000000000; it must be at most"),
    ({"backout_layer": 12}, 1, "layers has 0 to 11"),
    ({"windows": "3 a"}, 1, "windows is '3 a'"),
    ({"windows": ""}, 1, "windows is ''"),
    ({"val_tokens": 100}, 1, "val_tokens 100 is not a multiple of val_len 64"),
    ({"adam_beta1": 1.0}, 1, "adam_beta1 is 1.0; it must be less than 1"),
    ({"muon_lr": -1.0}, 1, "muon_lr is -1.0; it must be 0 or more"),
    ({"adam_lr": float("nan")}, 1, "adam_lr is nan"),
    ({"num_steps": 0, "extension_steps": 0}, 1, "num_steps is 0; it must be more than 0"),
    ({"adam_every": 0}, 1, "adam_every is 0"),
    ({"run_id": "../x"}, 1, "leave out '/'"),
    ({"max_len": 1}, 1, "max_len is 1"),
    ({"profile": "3"}, 1, "profile is '3'"),
    ({"profile": "3:12"}, 1, "below num_steps 12"),
    ({"profile": "3:2"}, 1, "profile is '3:2'"),
    ({"exact": True, "clip_norm": 1.0}, 1, "exact and clip_norm 1.0 exclude each other"),
    ({"exact": True, "unused": True}, 1, "exact and unused True exclude each other"),
    ({"exact": True, "batch_tokens": 6 * 48}, 1, "has 6 slots of micro_tokens 48: make it a power of two"),
    ({"exact": True, "compress_grads": True}, 1, "exact and compress_grads True exclude each other"),
])
def test_impossible_values_are_refused_with_what_is_allowed(changes, ranks, says):
    with pytest.raises(train_gpt.RunError, match=says):
        train_gpt.check_config(train_gpt.Config(**{**TINY, **changes}), ranks)


def test_one_finding_is_one_clause():
    with pytest.raises(train_gpt.RunError) as error:
        train_gpt.check_config(train_gpt.Config(**{**TINY, "adam_lr": float("nan")}), 1)
    assert str(error.value) == "adam_lr is nan; it must be 0 or more, and finite"


def test_a_model_of_one_layer_is_possible():
    train_gpt.check_config(train_gpt.Config(**{**TINY, "layers": "SM", "backout_layer": 0}), 1)


@pytest.mark.parametrize("preset", train_gpt.PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_presets_are_possible(preset, ranks):
    train_gpt.check_config(train_gpt.PRESETS[preset], ranks)


def test_layers_of_the_record():
    layers = train_gpt.parse_layers(train_gpt.Config().layers)
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [0, 7]
    assert [i for i, layer in enumerate(layers) if layer.window == "L"] == [4, 11]
    assert [i for i, layer in enumerate(layers) if not layer.mlp] == [0]
    assert {i: layer.value_table for i, layer in enumerate(layers) if layer.value_table is not None} == {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}


def test_schedules_of_the_record():
    c = train_gpt.Config()
    values = {step: train_gpt.step_values(c, step) for step in (0, 150, 300, 1000, 1102, 1103, 2204, 2205, 2244)}
    assert values[0].lr_factor == values[1102].lr_factor == 1
    assert values[1103].lr_factor == pytest.approx(1 - 0.9 * (1103 / 2205 - 0.5) / 0.5)
    assert values[2204].lr_factor == pytest.approx(0.1 + 0.9 * (1 - 2204 / 2205) / 0.5, abs=1e-12)
    assert values[2205].lr_factor == values[2244].lr_factor == pytest.approx(0.1 + 0.9 * 0.0001 / 0.5, abs=1e-12)
    assert values[0].momentum == 0.85 and values[150].momentum == pytest.approx(0.9) and values[300].momentum == pytest.approx(0.95)
    assert values[2205].momentum == pytest.approx(0.95 - 0.1 * 10 / 50) and values[2244].momentum == pytest.approx(0.95 - 0.1 * 49 / 50)
    assert [train_gpt.long_window(c, s) for s in (0, 734, 735, 1469, 1470, 2204, 2205, 2245)] == [3, 3, 7, 7, 11, 11, 13, 13]


def test_rotary_is_stretched_once_a_window_and_not_for_the_last_validation(tiny):
    c = dataclasses.replace(tiny, num_steps=40, extension_steps=10, windows="3 7 11", window_block=128)
    rotary = train_gpt.Rotary(16, 32, __import__("torch").float32)
    schedule = train_gpt.WindowSchedule(c, rotary)
    assert schedule.advance_to(0) == (384, 128)
    frequencies, scale = train_gpt.rotary_frequencies(16), 0.1
    for step, old, new, short in ((10, 3, 7, 3), (20, 7, 11, 5), (30, 11, 13, 6)):
        assert schedule.advance_to(step) == (new * 128, short * 128) == schedule.advance_to(step + 1)
        frequencies, scale = train_gpt.stretch(frequencies, scale, old * 128, new * 128)
        assert rotary.frequencies.tolist() == pytest.approx(frequencies.tolist()) and rotary.scale.item() == pytest.approx(scale)
    assert schedule.advance_to(40) == (20 * 128, 6 * 128)
    assert rotary.scale.item() == pytest.approx(scale)
    schedule.restart()
    assert rotary.scale.item() == pytest.approx(0.1) and schedule.advance_to(0) == (384, 128)


class SmallGpus(train_gpt.Comm):
    """Ranks of which the second has the older GPU with less memory."""

    def all_objects(self, mine):
        return [mine, ((8, 0), 24 * 2 ** 30)]


def test_what_the_smallest_gpu_cannot_do_is_left_out_on_all(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (79 * 2 ** 30, 80 * 2 ** 30))
    record = train_gpt.Config()
    assert train_gpt.fit_to_gpus(record, 50257, train_gpt.Comm(0, 1))[0] == record
    config, changes = train_gpt.fit_to_gpus(record, 50257, SmallGpus(0, 2))
    assert not config.fp8_head and config.micro_tokens == 16384 and config.batch_tokens == record.batch_tokens
    assert changes == ["this GPU has no fp8: the head's product stays in bf16", "too little memory for micro-batches of 32768 tokens: 8 of 16384 a rank"]
