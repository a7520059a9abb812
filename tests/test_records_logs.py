"""Tests of records/logs.py: every form of log and every pitfall found in public logs, on logs that
the tests write."""

import dataclasses
import gzip
import hashlib
import importlib
import json
import os
import random
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

RECORDS = Path(__file__).resolve().parent.parent / "records"
sys.path.insert(0, str(RECORDS))
import logs  # noqa: E402

SEPARATOR = "=" * 100
GPU_TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.158.01             Driver Version: 570.158.01     CUDA Version: 12.8     |
|=========================================+========================+======================|
{rows}
|=========================================================================================|
|    0   N/A  N/A           48189      C   /usr/local/bin/python                  1510MiB |
+-----------------------------------------------------------------------------------------+
"""


def gpu_table(gpus):
    row = (
        "|   {0}  NVIDIA H100 80GB HBM3          On  |   00000000:6{0}:00.0 Off |                  "
        "  0 |"
    )
    return GPU_TABLE.format(rows="\n".join(row.format(i) for i in range(gpus)))


def common(loss="3.2775", total=20, every=5, time_ms=2000, seed=0):
    """Return the lines of one run in the common form, with this loss and time in its last
    validation."""
    draw = random.Random(f"{loss} {time_ms} {seed}")
    lines = []
    clock = 0
    for step in range(total + 1):
        if step == total:
            lines.append(
                f"step:{step}/{total} val_loss:{loss} train_time:{time_ms}ms"
                f" step_avg:{time_ms / total:.2f}ms"
            )
        elif step % every == 0:
            shown = f"{10 - 6 * step / total + draw.random() / 9:.4f}"
            average = clock / max(step, 1)
            lines.append(
                f"step:{step}/{total} val_loss:{shown} train_time:{clock}ms"
                f" step_avg:{average:.2f}ms"
            )
        if step < total:
            clock = time_ms * (step + 1) // total - draw.randrange(3)
            lines.append(
                f"step:{step + 1}/{total} train_time:{clock}ms step_avg:{clock / (step + 1):.2f}ms"
            )
    return lines


def text(
    lines, source="import torch\n", environment="Running PyTorch 2.10\n" + gpu_table(8), ending="\n"
):
    parts = [
        source.rstrip("\n"),
        SEPARATOR,
        environment,
        SEPARATOR,
        *lines,
        "peak memory allocated: 29244 MiB reserved: 44256 MiB",
    ]
    return ending.join("\n".join(parts).split("\n")) + ending


@pytest.fixture
def write(tmp_path):
    def write(content, name="log.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def only_run(path):
    found = logs.read([path])
    assert not found.rejected and not found.duplicates and len(found.runs) == 1, found
    return found.runs[0]


def only_rejection(path):
    found = logs.read([path])
    assert not found.runs and not found.duplicates and len(found.rejected) == 1, found
    return found.rejected[0]


# One log, and what is read of it

# Python refuses to parse an int of so many digits, and a float of a fifteenth of them
COMMON = common()
MANY = "9" * 5000
OWN = '{"run_id": "x"}'
GOES_ON = [f"step:{step}/20 train_time:{100 * step}ms step_avg:100.00ms" for step in (21, 22)]
WORLD = {
    "on NVIDIA H100 NVL with world_size 2": 2,
    "config={'seed': 5, 'world_size': 2, 'x': 1}": 2,
    "world_size=4": 4,
    f"world_size={MANY}": 8,
}
FALLS = [
    f"step:{i}/30 train_time:{t}ms step_avg:nanms"
    for i, t in enumerate([*range(900, 910), *range(20)], 1)
]
FALLS.append("step:30/30 val_loss:3.2 train_time:25ms step_avg:1ms")
LLM_C = "s:0 tel:11.0092\ns:1 trl:9.1 lr:0.1 norm:2\ns:2 tel:3.0366\n"
BARS = [
    "step    0/1840 | time: 0ms | step avg: 0.04ms | val loss: 10.8312",
    "step    1/1840 | time: 63ms | step avg: 63.54ms",
    "step 1840/1840 | time: 112,789ms | step avg: 61.30ms | val loss: 3.2791",
]


def resumed(lines, at, again):
    """Return the lines of a run that was killed after `at` lines and resumed from step `again`."""
    told = {"resumed": {"from_step": again, "ranks": 2, "checkpoint": "c", "lost_steps": 3}}
    from_there = next(i for i, line in enumerate(lines) if line.startswith(f"step:{again + 1}/"))
    return [
        '{"run_id": "x"}',
        *lines[:at],
        "step:1",
        "error: terminated",
        json.dumps(told),
        *lines[from_there:],
        '{"end": {}}',
    ]


# What tests/golden/logs.txt shows of each
FORMS = {
    "the common form": text(common("3.2754", 2245, 250, 137554)),
    "train_loss": text(
        [
            "step:0/3 val_loss:10.9264 train_time:285ms step_avg:nanms",
            *(f"step:{i}/3 train_loss:9.1 train_time:{70 + i}ms step_avg:nanms" for i in (1, 2, 3)),
            "step:3/3 val_loss:3.2785 train_time:80ms step_avg:26.67ms",
        ]
    ),
    "seconds and further fields": text(
        [
            "step:125/250 val_loss:4.51874 train_time:24.082s step_avg:192.66ms",
            "step:250/250 val_loss:3.512345 val_ema_loss:3.4 ema_beta:0.99 mode:fast train_time:541.343s step_avg:1ms final_eval",
        ]
    ),
    "bars": text(
        [
            "step:   0/20 | val_loss:9.1 | train_time:0.0s | step_avg:nanms",
            "step:  20/20 | val_loss:3.2 | train_time:57.1s",
        ]
    ),
    "commas": text(
        [
            "step:0/20, tokens seen: 0.00M, val_loss:9.1 train_time:0.20s",
            "step:20/20, tokens seen: 6.54M, val_loss:3.2 train_time:57.1s step_avg:100ms",
        ]
    ),
    "fields in another order": text(
        [*COMMON[:-1], "step:20/20 train_time:2000ms step_avg:100.00ms val_loss:3.2775"]
    ),
    "llm.c, without total and time": "s:0 tel:10.968871\ns:0 trl:10.9\ns:1 trl:9.5\ns:2 tel:3.2950\n",
    "llm.c, cut off": "s:0 tel:11.0\ns:250 tel:6.1\ns:250 trl:6.1818 lr:0.0",
    "llm.c, not trained": "s:0 tel:11.0092\n",
    "llm.c, trained further": "s:0 tel:10.9\ns:0 trl:10.9\ns:1 trl:9.5\n",
    "llm.c and another metric": LLM_C + "s:2 eval:0.3044\n",
    "llm.c, another metric, trained further": f"{LLM_C}s:2 eval:0.3044\ns:2 trl:3.1 lr:0.1\n",
    "another metric": text([*COMMON, "step:20 cplm_diag nll:3.2742 lm_nll:3.3572 alpha:0.0568"]),
    "training behind the stated total": text([*COMMON, *GOES_ON]),
    "our own": text(
        [
            '{"run_id": "x", "seed": 7, "ranks": 2, "target_val_loss": 3.28}',
            *COMMON,
            '{"end": {"final_val_loss": 3.27752, "peak_memory_mib": 12}}',
        ]
    ),
    "our own, failed": text([OWN, *COMMON[:9], "error: out of memory"]),
    "our own, without a step": text([OWN]),
    "our own, stopped before its end": "\n".join([OWN, *COMMON, "error: interrupted", ""]),
    "our own, killed before its end": "\n".join([OWN, *COMMON, ""]),
    "our own, interrupted at its end": "\n".join(
        [OWN, *COMMON, "error: interrupted", '{"end": {"final_val_loss": 3.2775}}', ""]
    ),
    "a long time": text([*COMMON[:3], f"step:3/20 train_time:{MANY}ms step_avg:1ms", *COMMON[3:]]),
    "a long last time": text([*COMMON[:-1], COMMON[-1].replace("2000", MANY)]),
    **{
        f"JSON with {len(digits)} digits": text(
            [
                '{"run_id": "x", "ranks": %s}' % digits,
                *COMMON,
                '{"end": {"final_val_loss": %s}}' % digits,
            ]
        )
        for digits in ("1" + "0" * 400, MANY)
    },
    "a space that only Unicode knows": text(
        [*COMMON[:-1], "step:20/20 note\x1cval_loss:3.1 train_time:2000ms"]
    ),
    "look-alikes in the source": text(
        COMMON,
        source="'''\n"
        + "\n".join(common("9.9999"))
        + f"\n{OWN}\n{gpu_table(3)}world_size=3\n'''\n",
    ),
    "a run before the last separator": text(common("3.1000")) + text(common("3.2000")),
    "a separator at the end": "\n".join(COMMON) + "\n" + SEPARATOR,
    **{
        f"GPUs by {words[:40]}": text(COMMON, environment=f"{words}\n{gpu_table(8)}")
        for words, gpus in WORLD.items()
    },
    "one GPU in the table": text(COMMON, environment=gpu_table(1)),
    "the table twice": text(COMMON, environment=gpu_table(8) * 2),
    "no GPU": text(COMMON, environment="a CPU\n"),
    "no validation at step 0": text([line for line in COMMON if "val_loss" in line][1:]),
    "resumed in a file of its own": text([line for line in COMMON if "val_loss" in line][2:]),
    "two validations of a step": text(
        [*COMMON, "step:20/20 val_loss:3.2701 train_time:2000ms step_avg:1ms"]
    ),
    "text between the lines": text(
        [
            "Compiling model",
            "Resetting Model",
            "0%|   | 0/8\r" + COMMON[0],
            *COMMON[1:5],
            "W0727 a warning",
            "",
            *COMMON[5:],
        ]
    ),
    "a clock that falls": text(FALLS),
    "a clock that falls twice": text(
        [*FALLS[:25], "step:26/30 train_time:3ms step_avg:1ms", *FALLS[26:]]
    ),
    "an early last validation": text(
        COMMON[:6] + ["step:5/20 val_loss:5.0 train_time:500ms step_avg:1ms"]
    ),
    "no last step": text(COMMON[:14]),
    "no last validation": text(COMMON[:-1]),
    "no validation": text(COMMON[1:3]),
    "a last loss of nan": text(common("nan")),
    "a first loss of nan": text([COMMON[0].replace("val_loss:10.", "val_loss:nan "), *COMMON[1:]]),
    "no line end": text(COMMON).rstrip("\n"),
    "no line end, llm.c": "s:0 tel:10.9688\ns:1 tel:3.2950",
    "fewer digits in the last line, llm.c": "s:0 tel:10.9688\ns:1 tel:3.29",
    "one line": "step:9/9 val_loss:3.2 train_time:5ms step_avg:1ms",
    "one line, cut off": "step:9/9 val_loss:3.2",
    **{
        f"cut off behind {end}": text(COMMON).partition("step:20/20 val_loss")[0] + end
        for end in ("step:20/2", "step:20/20 val_loss:3.2775 train_time:2000ms step_avg:100.0")
    },
    "a card in the table": text(
        COMMON, environment=gpu_table(8).replace("H100 80GB HBM3 ", "A100-SXM4-80GB ")
    ),
    "a card and torch in a sentence": text(
        COMMON,
        environment="Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8 on NVIDIA GH200 120GB with world_size 4",
    ),
    "a card of AMD": text(
        COMMON, environment="GPU[0]: Card Series: AMD Instinct MI300X\ntorch version: 2.9.1"
    ),
    "a card as a setting": text(COMMON, environment="device_name=NVIDIA L40S with world_size=8"),
    "a seed": text(COMMON, environment="Using seed=10\n"),
    "words that are no seed": text(COMMON, environment="num_seeds: 3\nseed_everything\n"),
    "settings above the script": f"Namespace(lr=0.02, seed=3, log_dir='a')\n{SEPARATOR}\n{text(COMMON)}",
    **{
        f"an end line with another {key}": text([OWN, *COMMON, json.dumps({"end": {key: value}})])
        for key, value in (("final_val_loss", 3.3), ("train_time_ms", 3000), ("steps", 30))
    },
    "spaces and bars, repeated": text(
        [
            *BARS,
            "Loss N(3.2791, nan), time N(112789.1172, nan) ",
            "=" * 50,
            "Repeat 2/2",
            *BARS[:2],
            BARS[2].replace("789", "929"),
        ]
    ),
    "a counter that falls back": text(COMMON + common("3.2779", time_ms=2002) + common("3.3")[:13]),
    "two of our own": text(['{"run_id": "a"}', *common("3.3")[:9], OWN, *COMMON, '{"end": {}}']),
    "a start that came to nothing and another": text([COMMON[0].replace("10.", "10.9"), *COMMON]),
    "resumed in the same file": text(COMMON[:19] + COMMON[13:]),
    "our own, resumed and ended again": text(resumed(COMMON, 19, 12)[:-7]),
    "our own, resumed before a validation": text(
        [OWN, *COMMON[:16], '{"resumed": {"from_step": 10}}', *COMMON[13:], '{"end": {}}']
    ),
    **{
        f"resumed at {at}": text([OWN, *COMMON[:9], '{"resumed": %s}' % at, *COMMON[5:]])
        for at in ("5", '{"from_step": "x"}', '{"from_step": -1}')
    },
    "our own, from saved parameters": text(
        ['{"run_id": "x", "init_from": {"path": "m.pt"}}', *COMMON, '{"end": {}}']
    ),
    **{
        f"JSON nested {depth} deep": text(
            ['{"run_id": "x", "config": %s}' % ("[" * depth + "]" * depth), *COMMON, '{"end": {}}']
        )
        for depth in (10, 600, 100000)
    },
    "lines that cannot be read": text(
        [
            *COMMON[:9],
            "step:5/20 val_loss:oops train_time:1ms",
            "step:5/20 val_loss:3.1 val_loss:3.2",
            f"step:{MANY}/20 val_loss:3.1",
            '{"end": ',
            "step:6/20",
            *COMMON[9:],
        ]
    ),
    "many lines that cannot be read": text([*(f"step:{i}/20 oops" for i in range(100)), *COMMON]),
    "line ends of Windows": text(COMMON, ending="\r\n"),
    **{
        f"our own with {odd[:40]}": text([OWN, *COMMON[:3], odd, *COMMON[3:], '{"end": {}}'])
        for odd in (
            COMMON[3],
            "a remark",
            "step:2/3 train_time:9ms step_avg:4.50ms",
            "step:2/2 train_time:9ms",
            "x" * (3 << 20),
        )
    },
    "trials with seeds": text(
        [line for i in (4, 5) for line in (f"trial:{i}/9 seed:{i}", *common(f"3.27{i}", seed=i))]
    ),
    "lines of several ranks": text([line for line in COMMON for _ in range(4)]),
}


def described(run):
    """What is known of a run, but for its lines."""
    values = {
        field.name: getattr(run, field.name)
        for field in dataclasses.fields(run)
        if field.name not in ("path", "validations", "steps", "source", "resumed")
    }
    values["validated"] = [validation.step for validation in run.validations]
    values["extras"] = run.validations[-1].extras if run.validations else None
    values |= {"contradiction": run.contradiction, "over": run.over}
    values |= {"resumed": len(run.resumed), "config": logs.config_of(run)}
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in UNKNOWN)


UNKNOWN = None, "", (), [], {}, 0


def test_what_is_read_of_a_log_is_what_its_golden_file_holds(write, capsys, golden):
    shown = []
    for name, content in FORMS.items():
        found = logs.read([write(content)])
        assert not found.duplicates
        for run in (*found.runs, *found.rejected):
            shown.append(f"{name}: {'rejected' if run.reason else 'used'}: {described(run)}")
    golden("logs", "\n".join(shown) + "\n")


# Separators and the source


@pytest.mark.parametrize(
    "content, source",
    [
        ("{lines}", None),
        ("{bar}{lines}", None),
        ("import a\n{bar}{lines}", "import a\n"),
        ("import a\n{bar}env\n{bar}{lines}", "import a\n"),
        ("{bar}import a\n{bar}env\n{bar}{lines}", "import a\n"),
        ("\n \n{bar}import a\n{bar}env\n{bar}{lines}", "import a\n"),
        ("{bar}import a\n{bar}env\n{bar}more\n{bar}{lines}", "import a\n"),
        ("import a\n{bar}env\n{bar}more\n{bar}and more\n{bar}{lines}", "import a\n"),
        ("Namespace(lr=0.02)\n{bar}import a\n{bar}env\n{bar}{lines}", "import a\n"),
        (
            "logs/1.txt\n{bar}\n# 1\nimport a\n{bar}def b(): 0\n{bar}env\n{bar}{lines}",
            "\n# 1\nimport a\n{bar}def b(): 0\n",
        ),
        ("logs/1.txt\nimport a\n{bar}env\n{bar}{lines}", "import a\n"),
        ("import a\n{bar}env\n{bar}lr=1\n{bar}import b\n{bar}env\n{bar}{lines}", "import b\n"),
        ("src\n{bar}env\n{bar}more\n{bar}{lines}", "src\n"),
        ("Namespace(lr=0.02)\n{bar}env\n{bar}{lines}", None),
        ("{bar}Sat Feb 21\nNVIDIA-SMI 570.1\n{bar}{lines}", None),
        (
            "print('=' * 100) #{bar}x = 1\n {bar}={bar}|{bar}import a\n{bar}env\n{bar}{lines}",
            "print('=' * 100) #{bar}x = 1\n {bar}={bar}|{bar}import a\n",
        ),
    ],
)
def test_the_source_is_the_text_that_is_python(write, content, source):
    bar = SEPARATOR + "\n"
    run = only_run(write(content.format(bar=bar, lines="\n".join(common()) + "\n")))
    assert run.source_sha256 == (
        source and hashlib.sha256(source.format(bar=bar).encode()).hexdigest()
    )
    assert run.final_loss == 3.2775 and run.notes == ()


# Several runs in a file, and the clock


# What is kept of a run


def test_the_step_lines_and_the_source_are_kept(write):
    run = only_run(
        write(
            text(
                [
                    "step:0/2 val_loss:9.1 train_time:0ms step_avg:nanms",
                    "step:1/2 train_time:70ms step_avg:70.00ms train_loss:8.5",
                    "step:2/2 train_loss:7 train_time:2s",
                    "step:2/2 val_loss:3.2785 train_time:150ms step_avg:75.00ms",
                ]
            )
        )
    )
    assert [step[:5] for step in run.steps] == [
        (0, 0, None, None, True),
        (1, 70, 70, 8.5, False),
        (2, 2000, None, 7, False),
        (2, 150, 75, None, True),
    ]
    assert run.source == "import torch\n"
    one, two = logs.read([write(text(common()), "a.txt"), write(text(common("3.2")), "b.txt")]).runs
    assert one.source is two.source  # kept once


# Resumed runs


def test_a_resumed_run_is_one_run_without_what_was_trained_again(write):
    lines = common()
    whole = only_run(write(text(['{"run_id": "x"}', *lines, '{"end": {}}'])))
    run = only_run(write(text(resumed(lines, 19, 12)), "b.txt"))
    assert (run.validations, run.steps, run.clock_falls) == (whole.validations, whole.steps, ())
    assert run.resumed[0]["lost_steps"] == 3 and run.complete
    assert run.disqualified.startswith("resumed at step 12") and whole.disqualified is None
    assert any("before the run was resumed: error: terminated" in note for note in run.notes)
    assert any("counts for no record" in note for note in run.notes)
    far = only_run(write(text(resumed(lines, 22, 7)), "d.txt"))  # two validations are repeated
    assert (far.validations, far.steps) == (whole.validations, whole.steps)
    twice = [
        *resumed(lines, 19, 12)[:-4],
        '{"resumed": {"from_step": 15}}',
        *lines[-6:],
        '{"end": {}}',
    ]
    twice = only_run(write(text(twice), "c.txt"))
    assert twice.steps == whole.steps and twice.disqualified.startswith("resumed at step 12, 15")


# Cut-off ends


def test_every_cut_gives_the_whole_final_line_or_none_of_it(write):
    """Cut a log after every byte: its run is rejected unless the last validation line is complete."""
    whole = text(common("3.27", 10, 5, 1000)).encode()
    final = whole.index(b"step:10/10 val_loss")
    enough = whole.index(b"ms\n", whole.index(b"step_avg", final)) + 2
    for length in range(whole.index(b"step:9"), len(whole)):
        found = logs.read([write(whole[:length])])
        assert len(found.runs) + len(found.rejected) == 1
        assert bool(found.runs) == (length >= enough), whole[:length][-60:]
        if found.runs:
            assert (found.runs[0].final_loss, found.runs[0].train_time_ms) == (3.27, 1000)


# Files that are no logs, and files in odd clothes


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("empty.txt", "", "not a log: an empty file"),
        ("README.md", "\n".join(common()), "not a log: a document by its name"),
        ("readme.txt", "\n".join(common()), "not a log: a document by its name"),
        ("hardware.txt", gpu_table(8), "not a log: no line 'step:N/TOTAL val_loss:X'"),
        ("only_source.txt", "\n".join(common()) + f"\n{SEPARATOR}\n", "not a log: no line"),
        ("core.txt", b"\x7fELF\0\0step:1/1 val_loss:3.2\n", "not a log: a binary file"),
        (
            "wide.txt",
            "\n".join(common()).encode("utf-16"),
            "unreadable: UTF-16 text; convert it to UTF-8",
        ),
        (
            "cut.txt.gz",
            gzip.compress(text(common()).encode())[:-20],
            "unreadable: broken gzip file",
        ),
        ("bad.gz", b"\x1f\x8b but no gzip", "unreadable: broken gzip file"),
    ],
)
def test_a_file_that_is_no_log_is_named_with_its_reason(write, name, content, reason):
    rejection = only_rejection(write(content, name))
    assert rejection.reason.startswith(reason) and rejection.index_in_file is None


def test_paths_that_cannot_be_read(tmp_path, write):
    assert (
        "cannot be read (No such file or directory)"
        in only_rejection(str(tmp_path / "none" / "*.txt")).reason
    )
    (tmp_path / "folder").mkdir()
    assert "a folder without files" in only_rejection(str(tmp_path / "folder")).reason
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in only_rejection(str(tmp_path / "pipe")).reason
    os.symlink("nowhere", tmp_path / "link.txt")
    assert only_rejection(str(tmp_path / "link.txt")).kind == logs.UNREADABLE
    locked = write(text(common()), "locked.txt")
    os.chmod(locked, 0)
    if not os.access(locked, os.R_OK):  # root may read anything
        assert "Permission denied" in only_rejection(locked).reason


# Duplicates


def test_a_file_named_twice_counts_once(tmp_path, write):
    path = write(text(common()))
    found = logs.read([path, tmp_path, path])
    assert (
        len(found.runs) == 1
        and [item.reason for item in found.duplicates] == ["byte-identical"] * 2
    )


def lone(step_0="", start=""):
    """Return a run that only its last lines distinguish from others."""
    lines = [
        start,
        step_0,
        "step:1/20 train_time:7500ms",
        "step:20/20 val_loss:3.2775 train_time:151200ms",
        '{"end": {}}' if start else "",
    ]
    return "\n".join(line for line in lines if line) + "\n"


BEFORE = "step:0/20 val_loss:10.8258 train_time:0.0s"  # every run begins so
ONE = "import torch, one\n"
TWO = "import torch, two\n"
FOLDERS = {  # what tests/golden/log_folders.txt shows of each
    "byte-identical": [text(COMMON), text(COMMON), gzip.compress(text(COMMON).encode())],
    # a log, its console capture without source, and the summary that a driver script printed of it
    "one run in four files, and another": [
        "\n".join(line for line in COMMON if "val_loss" in line) + "\n",
        "\n".join(COMMON[-8:]) + "\n",
        "warming up\n" + "\n".join(COMMON) + "\n",
        text(COMMON),
        text(common("3.2775", seed=1)),
    ],
    "an aborted run in two files": [
        text(COMMON[:14]),
        "\n".join(COMMON[:14]) + "\nTraceback\n",
        text([]),
    ],
    **{
        f"a lone line, after '{step_0}'": [
            text([lone(step_0, '{"run_id": "x"}')], source=ONE),
            text([lone(step_0, '{"run_id": "y"}')], source=ONE),
            text([lone(step_0)], source=ONE),
            text([lone(step_0)], source=TWO),
            lone(step_0) + "done",
        ]
        for step_0 in ("", BEFORE)
    },
    "stopped before their first step": [
        text([COMMON[0].replace("val_loss:", "val_loss:10.8258 x:")], environment=name)
        for name in "ab"
    ],
    "a copy whose source was edited": [
        text(COMMON),
        text(COMMON, source="import torch  # copied\n"),
    ],
    "a lone loss": ["step:9/9 val_loss:3.2775\n", "step:9/9 val_loss:3.2775\n\n"],
    "parts of a run, and an aborted one": [
        text(COMMON),
        "\n".join(text(COMMON).split("\n")[:24]) + "\n",
        next(line for line in COMMON if line.startswith("step:15/20 val")) + "\n",
        text(common("3.3", time_ms=2100)[:12]),
    ],
}


def test_what_counts_once_is_what_its_golden_file_holds(tmp_path, write, golden):
    shown = []
    for name, contents in FOLDERS.items():
        folder = tmp_path / str(len(shown))
        for number, content in enumerate(contents):
            write(content, f"{folder.name}/{number}.txt")
        write(text(common("3.9")), f"{folder.name}/.git/x.txt")  # is not read
        found = logs.read([folder])
        shown += [f"{name}: {Path(run.path).name}: used" for run in found.runs]
        for item in found.rejected:
            shown.append(f"{name}: {Path(item.path).name}: {item.reason}")
        for item in found.duplicates:
            original = Path(item.original_path).name
            shown.append(f"{name}: {Path(item.path).name}: {item.reason}: {original}")
    golden("log_folders", "\n".join(shown) + "\n")


def test_links_to_folders_are_named_and_not_followed(tmp_path, write):
    write(text(common("3.1")), "logs/1.txt")
    write(text(common("3.2")), "elsewhere/2.txt")
    for name, target in (("linked", tmp_path / "elsewhere"), ("up", tmp_path)):
        os.symlink(target, tmp_path / "logs" / name)
    os.symlink(tmp_path / "logs", tmp_path / "named")
    found = logs.read([tmp_path / "named"])
    assert [run.final_loss for run in found.runs] == [3.1]
    assert {os.path.basename(item.path): item.reason for item in found.rejected} == dict.fromkeys(
        ("linked", "up"), "not a log: a link to a folder; name that folder too"
    )


# Size


def limited(code, megabytes):
    """Run code in a process with limited memory."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    code = f"import sys; sys.path.insert(0, {str(RECORDS)!r}); import logs\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit, timeout=600
    )


@pytest.mark.parametrize(
    "piece, megabytes, memory, wanted",
    [("=" * 100 + "\n", 60, 50, "not a log: more than")],  # Python alone takes 23
)
def test_a_huge_file_takes_little_memory(tmp_path, piece, megabytes, memory, wanted):
    path = tmp_path / "huge.txt"
    with open(path, "w") as file:
        for _ in range(megabytes):
            file.write(piece * (1_000_000 // len(piece)))
    done = limited(f"print(logs.read([{str(path)!r}]).rejected[0].reason)", memory)
    assert done.stdout.startswith(wanted), (done.stdout, done.stderr[-500:])


# What is printed


def test_what_is_no_number_is_null_for_programs(write):
    path = write(text(['{"run_id": "x", "lr": NaN}', *common("nan")]))
    (rejected,) = logs.read([path]).rejected
    shown = logs.show_json([rejected.start, rejected.validations])
    start, validations = json.loads(shown, parse_constant=pytest.fail)
    assert start == {"run_id": "x", "lr": None} and validations[-1]["loss"] is None


def test_nothing_in_a_log_steers_a_terminal(write):
    evil = "\x1b]0;owned\x07\x1b[2J\x9b\u202e"
    lines = [
        *common(),
        f"step:20/20 val_loss:oops{evil}",
        f"error: {evil}",
        f"step:20 val_{evil}loss:1",
        f'{{"end": {evil}',
    ]
    path = write(text(lines, environment="env"), "a\x1b[2J.txt")
    assert all(note.isprintable() for note in only_run(path).notes)
    shown = logs.columns([[path, *only_run(path).notes]])
    assert "\\x1b[2J.txt" in shown and shown.isprintable()


def test_a_log_that_changes_is_parsed_again(tmp_path):
    for loss in ("3.1000", "3.2000", "3.1000"):  # of equal length
        (tmp_path / "a").write_text(text(common(loss)))
        assert [logs.read_file(str(tmp_path / "a"))[0][0].final_loss for _ in range(2)] == [
            float(loss)
        ] * 2


LONG = ("n" * 200 + "/") * 10


@pytest.mark.parametrize(
    "tool, words",
    [
        ("export", [LONG, "--to", "csv"]),
        ("picture", [LONG]),
        ("trace", [f"{LONG}{i}" for i in range(300)]),
        ("stats", [LONG]),
        ("verify", [LONG]),
        ("board", ["add", LONG, "x", "y"]),
        ("board", []),
    ],
)
def test_a_refusal_is_one_line_whatever_the_names_are_and_however_many(
    tmp_path, capsys, monkeypatch, tool, words
):
    module = importlib.import_module(tool)
    if tool == "board":  # a record without a readable log
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "README.md").write_text("# Bad\n")
        for i in range(300):
            (tmp_path / "bad" / f"{i}.txt").write_bytes(b"\x1f\x8b none")
        monkeypatch.setattr(module, "HERE", tmp_path)
    assert module.main(words) == 2
    said = capsys.readouterr().err
    assert said.endswith("\n") and said.count("\n") == 1 and len(said) <= 301
    assert said.startswith((f"{tool}.py: error: ", "The claim cannot be judged: "))


def test_a_long_message_keeps_what_was_seen_and_what_to_do():
    words = logs.brief(f"seen {LONG}; do this").split()
    assert (words[0], words[-1]) == ("seen", "this")


def test_ctrl_c_in_a_tool_is_a_word_and_130(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        logs.run_main(interrupted)
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "sides, names",
    [
        (
            {
                "a": {"revision": None, "flags": ["--preset", "laptop", "--muon_lr", "0.05"]},
                "b": {"revision": None, "flags": ["--preset", "laptop"]},
            },
            ["--muon_lr 0.05", "base"],
        ),
        (
            {
                "a": {"revision": None, "flags": []},
                "b": {"revision": None, "flags": ["--sync", "step"]},
            },
            ["without these flags", "--sync step"],
        ),
        (
            {
                "a": {"revision": None, "flags": []},
                "b": {"revision": "47dd0f51" + 32 * "0", "flags": []},
            },
            ["this checkout", "revision 47dd0f51"],
        ),
        (
            {
                "a": {"revision": None, "flags": []},
                "b": {"revision": None, "flags": ["torchrun", "x.py"], "folder": "../nanogpt/"},
            },
            ["this checkout", "nanogpt"],
        ),
        ({"": {"revision": None, "flags": ["--preset", "laptop"]}}, ["this checkout"]),
    ],
)
def test_sides_are_named_by_what_they_are(sides, names):
    assert list(logs.side_names({"sides": sides}).values()) == names


# What public logs state, and parts of runs


def test_an_archive_is_read_like_files_beside_it(tmp_path, write):
    files = {
        "a.txt": text(common()).encode(),
        "race-1/b.txt": gzip.compress(text(common("3.1000")).encode()),
        "race.jsonl": b"{}",
    }
    logs.pack(files, tmp_path / "logs.tar.xz")
    first = (tmp_path / "logs.tar.xz").read_bytes()
    logs.pack(dict(reversed(files.items())), tmp_path / "logs.tar.xz")
    assert (tmp_path / "logs.tar.xz").read_bytes() == first
    packed = logs.read([str(tmp_path)])
    assert logs.read([str(tmp_path / "logs.tar.xz")]) == packed and os.listdir(tmp_path) == [
        "logs.tar.xz"
    ]
    assert (
        not logs.exists(tmp_path / "c.txt")
        and logs.open_file(tmp_path / "race.jsonl").read() == b"{}"
    )
    os.remove(tmp_path / "logs.tar.xz")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    beside = logs.read([str(tmp_path)])
    assert (
        beside.runs == packed.runs and len(packed.runs) == 2 and beside.rejected == packed.rejected
    )
    # a file on disk does not hide it
    logs.pack({"a.txt": text(common("3.2000")).encode()}, tmp_path / "logs.tar.xz")
    assert sorted(run.path for run in logs.read([str(tmp_path)]).runs) == [
        str(tmp_path / name) for name in ("a.txt", "logs.tar.xz/a.txt", "race-1/b.txt")
    ]


def test_nothing_in_an_archive_leaves_it(tmp_path, write):
    write(text(common()), "a.txt")
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for name in ("../out.txt", "/out.txt", "c/../../out.txt", "./c/a.txt"):
            packed = tarfile.TarInfo(name)
            packed.size = (tmp_path / "a.txt").stat().st_size
            archive.addfile(packed, open(tmp_path / "a.txt", "rb"))
        packed = tarfile.TarInfo("d.txt")
        packed.type = tarfile.SYMTYPE
        packed.linkname = str(tmp_path / "a.txt")
        archive.addfile(packed)
    named = ["c/a.txt", "c/out.txt", "out.txt"]
    assert logs.listing(str(tmp_path / "b.tar")) == [
        str(tmp_path / "b.tar" / name) for name in named
    ]
    assert (
        only_run(str(tmp_path / "b.tar/c/a.txt")).final_loss == 3.2775
        and not (tmp_path.parent / "out.txt").exists()
    )


def test_an_idea_s_own_numbers_belong_to_the_log(write):
    start = '{"run_id": "x"}'
    end = '{"end": {}}'
    step = "step:{0}/2 train_time:{0}00ms step_avg:100.00ms train_loss:4.5000 "
    last = "step:2/2 val_loss:3.0000 train_time:200ms step_avg:100.00ms"

    def read(numbers):
        return logs.last_run(
            write(text([start, step.format(1) + numbers, step.format(2) + numbers, last, end]))
        )

    run = read("grad_norm:3.5 candidates:9 my_norm:-1e-05 Spread2:nan")
    assert run.steps[0].others == {
        "grad_norm": 3.5,
        "candidates": 9,
        "my_norm": -1e-05,
        "Spread2": None,
    }


def test_an_archive_that_cannot_be_read_is_no_archive_without_logs(tmp_path, monkeypatch):
    logs.pack({"a.txt": text(common()).encode(), "b.txt": b"\1" * 2**20}, tmp_path / "logs.tar.xz")
    whole = (tmp_path / "logs.tar.xz").read_bytes()
    for content, most in ((whole[:400], 1), (b"", 1), (b"x", 1), (whole, 0)):
        (tmp_path / "logs.tar.xz").write_bytes(content)
        monkeypatch.setattr(logs, "MAX_ARCHIVE_MIB", most * 256)
        logs._members.cache_clear()
        (rejected,) = logs.read([str(tmp_path)]).rejected
        assert rejected.kind == logs.UNREADABLE and "an archive that is broken" in rejected.reason
    with pytest.raises(OSError, match="more than 0 MiB"):
        logs.pack({"a.txt": b"1"}, tmp_path / "logs.tar.xz")
    assert os.listdir(tmp_path) == []
