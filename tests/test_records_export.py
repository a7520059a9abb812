"""Tests of records/export.py: with csv always, with TensorBoard where it is installed."""

import csv
import fcntl
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "records"))
import export  # noqa: E402

STEP = "step:{0}/6 train_time:{0}00ms step_avg:100.00ms train_loss:{1}"
VALIDATED = "step:6/6 val_loss:3.0000 train_time:600ms step_avg:100.00ms"


def write(path, *lines, rate=0.1):
    start = {
        "run_id": "x",
        "preset": "toy",
        "seed": 3,
        "config": {"muon_lr": rate, "exact": True, "layers": "AM AM", "seed": 3},
    }
    path.write_text(
        "\n".join(
            ["import torch", "=" * 100, "a machine", "=" * 100, json.dumps(start), *lines, ""]
        )
    )
    return str(path)


def whole(path, rate):
    return write(
        path, *(STEP.format(n, 5 - n / 4) for n in range(1, 7)), VALIDATED, '{"end": {}}', rate=rate
    )


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def sent(paths, follow=True, before=()):
    """Return {run: (config, [its steps], whether it was ended)}. before: functions, one of which
    is called before each look."""
    taken = {}
    pauses = iter(before)

    def open_run(name, config):
        taken[name] = [config, [], False]
        return taken[name][1].extend, lambda: taken[name].__setitem__(2, True)

    export.time.sleep = lambda seconds: seconds and next(pauses)()
    export.export(paths, open_run, follow)
    return taken


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(
        export,
        "time",
        type(
            "time",
            (),
            {"sleep": staticmethod(lambda seconds: None), "time": staticmethod(export.time.time)},
        ),
    )


def test_csv_has_a_row_for_each_step_and_one_with_the_config_for_each_run(tmp_path):
    paths = [whole(tmp_path / f"{rate}.txt", rate) for rate in (0.1, 0.2)]
    assert export.main([*paths, "--to", "csv", "--out", str(tmp_path / "out")]) == 0
    runs = table(tmp_path / "out/runs.csv")
    steps = table(tmp_path / "out/steps.csv")
    assert [
        (run["run"], run["muon_lr"], run["exact"], run["preset"], run["seed"], run["layers"])
        for run in runs
    ] == [("0.1", "0.1", "True", "toy", "3", "AM AM"), ("0.2", "0.2", "True", "toy", "3", "AM AM")]
    assert len(steps) == 14 and steps[0] == {
        "run": "0.1",
        "step": "1",
        "train_time_ms": "100.0",
        "train_loss": "4.75",
        "val_loss": "",
    }
    assert steps[-1] == {
        "run": "0.2",
        "step": "6",
        "train_time_ms": "600.0",
        "train_loss": "",
        "val_loss": "3.0",
    }


def test_an_idea_s_own_numbers_are_columns_of_the_csv(tmp_path):
    plain = whole(tmp_path / "plain.txt", 0.1)
    own = write(
        tmp_path / "own.txt",
        STEP.format(1, 5),
        STEP.format(2, 5) + " my_norm:0.25",
        STEP.format(6, 4),
        '{"end": {}}',
    )
    assert export.main([plain, own, "--to", "csv", "--out", str(tmp_path / "out")]) == 0
    steps = table(tmp_path / "out/steps.csv")
    assert (
        len(steps) == 10
        and [line["step"] for line in steps if line["my_norm"]] == ["2"]
        and steps[8]["my_norm"] == "0.25"
    )
    # as dashboards get them
    assert [
        line["my_norm"] for line in sent([own], follow=False)["own"][1] if "my_norm" in line
    ] == [0.25]


def test_growing_logs_are_followed_to_their_ends_with_the_steps_that_a_resumed_run_trains_again(
    tmp_path,
):
    short = whole(tmp_path / "short.txt", 0.1)
    long = write(tmp_path / "long.txt")
    parts = [
        [STEP.format(1, 5.5), STEP.format(2, 4.5), STEP.format(3, 4.25)],
        [
            '{"resumed": {"from_step": 1}}',
            STEP.format(2, 4.25),
            STEP.format(3, 3.5),
            '{"resumed": {"from_step": 2}}',
            STEP.format(3, 3.25),
        ],
        [STEP.format(4, 3), STEP.format(5, 3), STEP.format(6, 3), VALIDATED, '{"end": {}}'],
    ]

    def grow():
        with open(long, "a") as file:
            file.write("".join(line + "\n" for line in parts.pop(0)))

    taken = sent([short, long], before=[grow] * 3)
    assert [(line["step"], line.get("train_loss")) for line in taken["long"][1]] == [
        (1, 5.5),
        (2, 4.5),
        (3, 4.25),
        (2, 4.25),
        (3, 3.25),
        (4, 3),
        (5, 3),
        (6, 3),
        (6, None),
    ]
    assert taken["long"][1][-1] == {"step": 6, "train_time_ms": 600, "val_loss": 3.0}
    assert (
        len(taken["short"][1]) == 7
        and taken["short"][2]
        and taken["long"][2]
        and taken["long"][0]["muon_lr"] == 0.1
    )


def test_a_run_under_way_is_sent_as_far_as_it_is_without_follow(tmp_path):
    (steps,) = [
        taken[1]
        for taken in sent([write(tmp_path / "run.txt", STEP.format(1, 5.5))], follow=False).values()
    ]
    assert steps == [{"step": 1, "train_time_ms": 100, "train_loss": 5.5}]


@pytest.mark.parametrize("last", ["error: interrupted", '{"end": {"steps": 1}}'])
def test_following_ends_where_a_run_broke_off(tmp_path, last):
    (taken,) = sent([write(tmp_path / "run.txt", STEP.format(1, "nan"), last)]).values()
    assert len(taken[1]) == 1 and taken[2]


def test_following_waits_while_the_process_of_a_silent_run_lives_and_says_that_it_was_killed(
    tmp_path, capsys
):
    path = write(tmp_path / "run.txt", STEP.format(1, 5.5))
    os.utime(path, (0, 0))  # last written long ago
    with open(path, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waited = []
        with pytest.raises(TimeoutError, match="no process writes this log: the run was killed"):
            sent([path], before=[lambda: waited.append(1)] * 3 + [held.close])
    assert len(waited) == 3
    assert export.main([path, "--to", "csv", "--out", str(tmp_path / "out"), "--follow"]) == 2
    said = capsys.readouterr().err
    assert (
        "run.txt: no new line for" in said
        and said.count("\n") == 1
        and len(table(tmp_path / "out/steps.csv")) == 1
    )


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_what_is_missing_is_said_in_a_line(tmp_path, capsys, monkeypatch, to):
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "README.md").write_text("no log")
    for path, wanted in (
        (
            whole(tmp_path / "run.txt", 0.1),
            f"install it: .venv/bin/pip install {to}, or use --to csv",
        ),
        (str(tmp_path / "none"), "No such file or directory"),
    ):
        assert export.main([path, "--to", to]) == 2
        said = capsys.readouterr().err
        assert said.startswith("export.py: error: ") and wanted in said and said.count("\n") == 1
    assert (
        export.main([str(tmp_path / "README.md"), "--to", "csv", "--out", str(tmp_path / "out")])
        == 2
    )
    assert "no step with a train_time (not a log" in capsys.readouterr().err


def test_tensorboard_reads_what_was_sent(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    paths = [whole(tmp_path / f"{rate}.txt", rate) for rate in (0.1, 0.2)]
    assert export.main([*paths, "--to", "tensorboard", "--out", str(tmp_path / "out")]) == 0
    for rate in (0.1, 0.2):
        events = EventAccumulator(str(tmp_path / f"out/{rate}")).Reload()
        assert [(one.step, one.value) for one in events.Scalars("train_loss")] == [
            (n, 5 - n / 4) for n in range(1, 7)
        ]
        assert [(one.step, one.value) for one in events.Scalars("val_loss")] == [(6, 3.0)]
        data = plugin_data_pb2.HParamsPluginData.FromString(
            events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        )
        found = data.session_start_info.hparams
        assert (
            found["muon_lr"].number_value == rate
            and found["exact"].number_value == 1
            and found["preset"].string_value == "toy"
        )


def test_wandb_gets_what_is_sent(tmp_path, monkeypatch):
    """From a stand-in, since the tests install no wandb."""
    found = {}

    def init(project, name, config, reinit):
        lines = []
        found[name] = config["muon_lr"], lines
        return SimpleNamespace(
            define_metric=lambda name, step_metric: lines.append((name, step_metric)),
            log=lines.append,
            finish=lambda: lines.append(None),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    paths = [whole(tmp_path / f"{rate}.txt", rate) for rate in (0.1, 0.2)]
    assert export.main([*paths, "--to", "wandb", "--follow"]) == 0
    for rate in (0.1, 0.2):
        config, (metric, *lines, last, end) = found[str(rate)]
        assert (config, metric, end) == (rate, ("*", "step"), None) and last["val_loss"] == 3.0
        steps = [(line["step"], line["train_loss"]) for line in lines]
        assert steps == [(n, 5 - n / 4) for n in range(1, 7)]
