"""run.sh, test.sh, launch/start.py and launch/ranks.py, started as a user starts them, from
another directory."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import frontier
import logs
import race
import ranks
import sample
import start
import train_gpt
from conftest import TINY, as_flags, some_documents, wait_until, write_corpus, write_shard

ROOT = Path(train_gpt.__file__).parent
READY = (ROOT / ".venv" / "ready").exists()
needs_venv = pytest.mark.skipif(
    not READY, reason="run.sh has not set up .venv here; ./test.sh does it first"
)


# Set-up, in a copy of the tree whose base Python only plays

BASE = """#!/bin/sh
# python3, for which -m venv and -m pip only write down that they were called; pip waits for the file `go`
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m pip --version"|"-m ensurepip") [ -z "$WITHOUT_PIP" ] ;;
    "-m venv "*) echo venv >> "$PLAY/calls"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip install "*)
        trap 'echo "ERROR: Operation cancelled by user" >&2; exit 1' INT
        echo begins >> "$PLAY/calls"; echo "$*" >> "$PLAY/pip"
        env | grep -E "^(PIP_(USER|TARGET|PREFIX|ROOT)|PYTHONPATH|PYTHONHOME)=" > "$PLAY/settings"
        while [ ! -e "$PLAY/go" ]; do sleep 0.02; done
        echo ends >> "$PLAY/calls" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Tree:
    """A copy of the scripts in a folder with a space; the environment puts the playing Python
    first."""

    def __init__(self, folder):
        self.root = folder / "my copy"
        self.play = folder / "play"
        for made in (self.root, self.play):
            made.mkdir()
        names = "run.sh test.sh requirements.txt tests/requirements.txt launch/start.py"
        for name in f"{names} launch/ranks.py records/logs.py data/shards.py".split():
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.environment = {
            **os.environ,
            "PLAY": str(self.play),
            "REAL_PYTHON": sys.executable,
            "PATH": f"{self.play}:{os.environ['PATH']}",
        }
        for name in "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL":
            self.environment.pop(name, None)
        self.script(self.play / "python3", BASE)

    def script(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *argv, cwd=None, name="run.sh"):
        return subprocess.Popen(
            [self.root / name, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.play,
            env=self.environment,
            start_new_session=True,
        )

    def run(self, *argv, cwd=None):
        process = self.start(*argv, cwd=cwd)
        stdout, stderr = process.communicate(timeout=600)
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def calls(self):
        path = self.play / "calls"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def let_pip_end(self):
        (self.play / "go").touch()

    def set_up(self, python):
        """As after the set-up, with this script for .venv/bin/python."""
        self.script(self.root / ".venv" / "bin" / "python", python)
        with open(self.root / "requirements.txt") as requirements:
            (self.root / ".venv" / "ready").write_text(
                subprocess.check_output("cksum", stdin=requirements, text=True)
            )


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_two_first_set_ups_at_once_take_turns(tree):
    first = tree.start("--setup")
    wait_until(lambda: tree.calls() == ["venv", "begins"], what="pip's start")
    second = tree.start("--setup")
    waits = "run.sh: packages: another run.sh installs them; waiting until it has ended\n"
    assert second.stderr.readline() == waits
    tree.let_pip_end()
    said = first.communicate(timeout=600)[1]
    then = second.communicate(timeout=600)[1]
    assert (first.returncode, second.returncode, tree.calls()) == (0, 0, ["venv", "begins", "ends"])
    assert then == "run.sh: packages: ready in .venv\n"
    assert said.splitlines()[0].startswith(
        "run.sh: packages: creating .venv with Python 3.12.0: about a minute and "
    )


def test_a_set_up_that_was_killed_holds_no_lock_and_is_continued(tree):
    first = tree.start("--setup")
    wait_until(lambda: tree.calls() == ["venv", "begins"], what="pip's start")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=600)
    tree.let_pip_end()
    done = tree.run("--setup")
    assert done.returncode == 0 and "waiting" not in done.stderr, done.stderr
    assert tree.calls() == ["venv", "begins", "begins", "ends"]


def test_what_the_tests_add_is_installed_once_and_only_for_them(tree):
    tree.let_pip_end()
    assert tree.run("--setup").returncode == 0
    assert tree.calls() == ["venv", "begins", "ends"]
    for _ in range(2):
        done = tree.run("--setup-tests")
        assert done.returncode == 0 and tree.calls() == ["venv", *["begins", "ends"] * 2]
    assert (
        "tests/requirements.txt" not in done.stderr
        and tree.run("--setup").stderr == "run.sh: packages: ready in .venv\n"
    )
    (tree.root / "tests/requirements.txt").write_text("another==1\n")
    assert "installing tests/requirements.txt into .venv" in tree.run("--setup-tests").stderr


@pytest.fixture
def machine(tree):
    """machine(version of the NVIDIA driver, by nvidia-smi or not; whether PyTorch's index answers)
    -> its tree and the index's URL."""
    # it takes connections, and says nothing
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0),
            type(
                "Index",
                (BaseHTTPRequestHandler,),
                {
                    "do_HEAD": lambda self: self.send_response(200) or self.end_headers(),
                    "log_message": lambda *_: None,
                },
            ),
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def machine(driver, by_smi, answers):
            url = f"http://127.0.0.1:{server.server_port}" if answers else silent
            script = tree.root / "run.sh"
            proc = tree.play / "version"
            script.write_text(
                script.read_text()
                .replace("https://download.pytorch.org/whl/cpu", url)
                .replace("/proc/driver/nvidia/version", f"'{proc}'")
            )
            tree.script(
                tree.play / "nvidia-smi",
                (
                    f"#!/bin/sh\necho {driver}\n"
                    if by_smi
                    else "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n"
                ),
            )
            if driver and not by_smi:
                proc.write_text(
                    f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release"
                    " Build\n"
                )
            tree.let_pip_end()
            return tree, url

        yield machine
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "driver, by_smi, answers",
    [
        ("", False, True),
        ("", False, False),
        ("580.65.06; sleep 0.1; echo 580.65.06", True, True),
        ("595.71", False, True),
    ],
)
def test_torch_s_build_fits_the_machine(machine, driver, by_smi, answers):
    """The build for CPUs comes from PyTorch's index, if that answers within 3 s and there is no
    NVIDIA driver."""
    tree, url = machine(driver, by_smi, answers)
    done = tree.run("--setup")
    assert done.returncode == 0 and all(
        line.startswith("run.sh: ") for line in done.stderr.splitlines()
    ), done.stderr
    (words,) = (tree.play / "pip").read_text().splitlines()
    assert (
        (f"--extra-index-url {url} -r" in words)
        == ("for CPUs" in done.stderr)
        == (sys.platform == "linux" and answers and not driver)
    )


def test_an_old_driver_is_told_the_cure_before_the_download(machine):
    tree, _ = machine("535.183.01", False, True)
    done = tree.run("--setup")
    assert done.returncode == 2 and not tree.calls() and done.stderr.count("\n") == 1
    assert (
        "driver is 535.183.01" in done.stderr
        and "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 ./run.sh" in done.stderr
    )
    tree.environment["PIP_EXTRA_INDEX_URL"] = "https://download.pytorch.org/whl/cu126"  # as it says
    done = tree.run("--setup")
    assert done.returncode == 0 and tree.calls() == ["venv", "begins", "ends"], done.stderr


def test_a_driver_that_is_too_old_for_cuda_12_has_one_cure(machine):
    tree, _ = machine("470.57.02", True, True)
    done = tree.run("--setup")
    assert (
        done.returncode == 2
        and not tree.calls()
        and "driver is 470.57.02" in done.stderr
        and done.stderr.endswith("Update the driver\n")
    )


# nor pip, as after the system's Python was replaced by a newer one
WITHOUT_PACKAGES = '"$REAL_PYTHON" -S "$@"'


def test_a_venv_whose_python_finds_no_packages_is_made_anew(tree):
    tree.set_up(REAL.replace('"$REAL_PYTHON" "$@"', WITHOUT_PACKAGES))
    (tree.root / ".venv" / "made-by-run.sh").touch()
    (tree.root / ".venv" / "mine.txt").touch()
    tree.let_pip_end()
    for typed in ["--setup"], ["--setup"]:
        assert tree.run(*typed).returncode == 0
        assert (
            tree.calls() == ["venv", "begins", "ends"]
            and (tree.root / ".venv" / "mine.txt").exists()
        )


@pytest.mark.parametrize("has_ensurepip", [True, False])
def test_a_venv_of_another_tool_keeps_what_is_in_it(tree, has_ensurepip):
    """uv's has no pip: Python adds it, or run.sh says what to do; it removes nothing, also without
    a network."""
    answer = "echo added >> $PLAY/calls; touch $PLAY/pip-is-there" if has_ensurepip else "exit 1"
    tree.script(
        tree.root / ".venv" / "bin" / "python",
        BASE.replace(
            '"-m pip --version"|"-m ensurepip") [ -z "$WITHOUT_PIP" ]',
            f'"-m pip --version") [ -e $PLAY/pip-is-there ] ;;\n    "-m ensurepip") {answer}',
        ),
    )
    for name in "pyvenv.cfg", "mine.txt":
        (tree.root / ".venv" / name).touch()
    tree.let_pip_end()
    done = tree.run("-n", "5", "--json")
    assert (tree.root / ".venv" / "mine.txt").exists() and "venv" not in tree.calls()
    if has_ensurepip:
        assert tree.calls() == ["added", "begins", "ends"]
    else:
        assert (
            done.returncode == 2
            and f"{tree.root}/.venv is not run.sh's" in done.stderr
            and "mv '" in done.stderr
            and not tree.calls()
        )
        assert json.loads(done.stdout) == {
            **logs.not_judged(done.stderr.partition("error: ")[2].strip())
        }


def test_the_settings_of_a_cluster_s_packages_do_not_reach_venv(tree):
    tree.environment |= {
        "PIP_USER": "1",
        "PIP_TARGET": "/x",
        "PIP_PREFIX": "/x",
        "PIP_ROOT": "/x",
        "PYTHONHOME": "/x",
        "PYTHONPATH": "/x",
    }
    tree.let_pip_end()
    assert (
        tree.run("--setup").returncode == 0
        and (tree.play / "settings").read_text() == "PIP_USER=0\n"
    )


def test_packages_that_pip_puts_elsewhere_are_missed(tree):
    tree.script(tree.play / "python3", BASE.replace('"$REAL_PYTHON" "$@"', WITHOUT_PACKAGES))
    tree.let_pip_end()
    done = tree.run("--setup")
    assert (
        done.returncode == 2
        and "error: pip ended without an error, but .venv lacks packages" in done.stderr
    ), done.stderr


@pytest.mark.parametrize(
    "words, folder, settings",
    [
        (["sh", "run.sh"], "my copy", {}),
        (["./a link"], "play", {}),
        (["bash", "my copy/run.sh"], ".", {"CDPATH": ".:/"}),
    ],
)
def test_ways_to_start(tree, words, folder, settings):
    (tree.play / "a link").symlink_to(tree.root / "run.sh")
    done = subprocess.run(
        [*words, "--help"],
        cwd=tree.root.parent / folder,
        env=tree.environment | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: ./run.sh") and not done.stderr, (
        done.stderr
    )


def test_what_keeps_venv_from_its_work_is_said(tree):
    tree.script(
        tree.play / "python3",
        BASE.replace('"-m venv "*)', '"-m venv "*) echo no room >&2; exit 1;'),
    )
    done = tree.run("--setup")
    assert (
        done.returncode == 2
        and "python3 cannot create .venv" in done.stderr
        and done.stderr.endswith("no room\n")
    ), done.stderr


def test_ctrl_c_in_the_set_up_ends_in_a_line_that_says_what_is_kept(tree):
    process = tree.start("--setup", name="test.sh")  # which must end with it
    wait_until(lambda: tree.calls() == ["venv", "begins"], what="pip's start")
    os.killpg(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == 130
    assert [
        line
        for line in stderr.splitlines()
        if not line.startswith(("run.sh: packages:", "ERROR: Op"))
    ] == ["run.sh: interrupted; what is in .venv stays; run this again to continue"]


def test_a_wish_for_a_checkpoint_does_not_end_the_set_up(tree):
    process = tree.start("--setup")
    wait_until(lambda: "begins" in tree.calls())
    process.send_signal(signal.SIGUSR1)
    (tree.play / "go").touch()
    assert process.wait(30) == 0


def test_help_installs_nothing_and_fits_on_a_screen(tree):
    for typed in (["--help"], ["-n", "5", "-h"], ["--help-all", "--preset", "frontier"]):
        done = tree.run(*typed)
        assert (
            done.returncode == 0
            and not done.stderr
            and not tree.calls()
            and not (tree.root / ".venv").exists()
        )
        lines = done.stdout.splitlines()
        assert 24 <= len(lines) <= 48 and max(map(len, lines)) <= 80
        presets = re.search(r"--preset NAME ((?:.|\n)*?)--text", done.stdout)[1]
        assert all(
            re.search(rf"\b{name}\b", presets) for name in (*train_gpt.PRESETS, *frontier.PRESETS)
        )
    tree.set_up(REAL)
    (tree.root / "train_gpt.py").write_text(
        "import sys\nPRESETS = {'laptop': 0}\ndef require(*_): pass\n"
        "if __name__ == '__main__': print(*sys.argv)\n"
    )
    (tree.root / "frontier.py").write_text("PRESETS = {}\n")
    assert tree.run("--help").stdout == done.stdout
    assert tree.run("--help-all").stdout == f"{done.stdout}\ntrain_gpt.py --help\n"


# What start.py starts

REAL = '#!/bin/sh\nexec "$REAL_PYTHON" "$@"\n'


@pytest.fixture
def gpus(monkeypatch):
    """gpus(seen, usable) makes torch see so many."""

    def see(seen, usable=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0 and usable)

    return see


@pytest.fixture(autouse=True)
def same_on_every_python(monkeypatch):
    monkeypatch.setattr(start, "LIBRARY", "{}.{}".format(*sys.version_info))


@pytest.fixture
def started(monkeypatch, tmp_path):
    """started(word, ...) -> what start.main starts, one string each; data scripts and programs
    only write down that they are called."""

    def called(*words):
        return (
            "".join(f"[{word}]" for word in words)
            .replace(f"[{sys.executable}]", "[PY]")
            .replace(str(tmp_path), "HERE")
        )

    def call(words, kept, tee=False):
        calls.append(called(*words))
        return (
            f"{words[words.index('--out') + 1]}-DIGEST\n"
            if "--out" in words
            else answers.pop()
            if tee
            else ""
        )

    calls = []
    answers = []
    monkeypatch.setattr(start, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(start, "check_imports", lambda: None)  # pytest imports this file
    monkeypatch.setattr(start, "call", call)
    monkeypatch.setattr(start, "become", lambda words: (calls.append(called(*words)), sys.exit(0)))
    monkeypatch.setattr(
        ranks,
        "start",
        lambda number, program, flags: calls.append(called(number, program, *flags)) or 1,
    )

    def main(*typed, answer="{}"):
        calls.clear()
        answers[:] = [answer]
        monkeypatch.chdir(tmp_path)
        with contextlib.suppress(SystemExit):
            start.main(typed)
        return [re.sub(r"(data/own-my_notes-)\d+", r"\1SUM", line) for line in calls]

    return main


RANKS = "[{}][train_gpt.py]"


STARTED = (  # GPUs, and the words of run.sh
    (0, ""),
    (0, "--preset=laptop --train_files 'mine*'"),
    (0, "--init_from 'a run.ckpt' --layers '- S0M'"),
    (0, "--resume race.jsonl --vs ../theirs --cmd 'x y'"),
    (
        0,
        "-n 2 --vs \"--muon_lr 0.05 --adam-lr -1e-3 --train_files 'data/own-x y/*.bin'\""
        " '--vs=--b -0.5'",
    ),
    (0, "--muon-lr .05 --init-from=m --max_n 9 --until_decided"),
    (0, "--trial --seed 1"),
    (8, "-n 3 --trial --num_steps 9"),
    (8, "-n 5 --vs ../theirs --cmd 'torchrun --nproc_per_node=8 train_gpt.py' --preset laptop"),
    (8, "-n 5 --vs '--preset frontier'"),
    (7, "--seed 3"),
)


def test_what_is_started(started, gpus, tmp_path, golden):
    (tmp_path / "a run.ckpt").touch()
    (tmp_path / "race.jsonl").touch()
    shown = []
    for seen, typed in STARTED:
        gpus(seen)
        shown += [f"{seen} GPUs, {typed}: {call}\n" for call in started(*shlex.split(typed))]
    golden("started", "".join(shown))


@pytest.mark.parametrize(
    "typed, expected",
    [
        (["--resume", "latest", "--num_steps", "9"], "[--resume][latest][--num_steps][9]"),
        (["--resume", "a run.ckpt"], "[--resume][HERE/a run.ckpt]"),
    ],
)
def test_a_resumed_run_keeps_the_flags_that_it_began_with(
    started, gpus, tmp_path, monkeypatch, typed, expected
):
    gpus(8)
    (tmp_path / "a run.ckpt").touch()
    saved = dataclasses.replace(
        train_gpt.PRESETS["speedrun"],
        resume="a checkpoint",
        train_files="mine*",
        target_val_loss=0.0,
    )
    monkeypatch.setattr(
        train_gpt, "parse_config", lambda flags, preset, presets: ("speedrun", saved)
    )
    assert started(*typed)[-1:] == [RANKS.format(8) + expected]


def test_a_text_is_encoded_and_its_shards_are_named(started, gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(start, "fit_text", lambda config, given: {"epochs": 2})
    assert started(
        "--seed",
        "3",
        "--text",
        "my notes",
        "/b.txt",
        "--val-fraction",
        "0.3",
        "--sync",
        "step",
        "--field=body",
    ) == [
        "[PY][data/text.py][HERE/my"
        " notes][/b.txt][--out][data/own-my_notes-SUM][--encoding][bytes][--force][--by-content]"
        "[--val-fraction][0.3][--field][body]",
        RANKS.format(2) + "[--train_files][data/own-my_notes-SUM-DIGEST/*_train_*.bin]"
        "[--val_files][data/own-my_notes-SUM-DIGEST/*_val_*.bin][--preset][laptop][--seed][3][--sync][step][--epochs=2]",
    ]
    assert (
        started("--text", "my notes", "-n", "3", "--vs", "--muon_lr 0.05", "--name", "mine")[1]
        == "[launch/race.py][-n][3][--name][mine][--vs][--muon_lr"
        " 0.05][--ranks][2][--][--train_files]"
        "[data/own-my_notes-SUM-DIGEST/*_train_*.bin][--val_files][data/own-my_notes-SUM-DIGEST/*_val_*.bin][--preset][laptop][--epochs=2]"
    )
    assert started("--text", "my notes", "latin-\udce9.txt")[0].startswith(
        "[PY][data/text.py][HERE/my notes][HERE/latin-\udce9.txt]"
    )


def test_a_program_is_shown_as_it_prints_and_its_last_line_returned(monkeypatch, capsys):
    monkeypatch.setattr(start.signal, "signal", lambda *_: None)
    assert (
        start.call([sys.executable, "-c", "print('a table'); print('{}')"], "nothing", tee=True)
        == "{}\n"
    )
    assert capsys.readouterr().out == "a table\n"
    with pytest.raises(SystemExit, match="2"):
        start.call(
            [sys.executable, "-c", "print('a table'); print('why'); raise SystemExit(1)"],
            "nothing",
            tee=True,
        )
    assert capsys.readouterr().out == "a table\nwhy\n"


def test_the_preflight_answer_is_kept_per_source_machine_and_flags(
    started, gpus, tmp_path, monkeypatch, capsys
):
    gpus(8)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    files = ["--train_files", "mine*", "--target_val_loss", "0"]
    check = "[PY][-I][launch/preflight.py][--ranks=8][--preset][speedrun][--train_files][mine*][--target_val_loss][0]"
    run = RANKS.format(8) + check.partition("[--ranks=8]")[2]
    taken = "[--attention=masked][--fp8_head=false]"
    answer = '{"attention": "masked", "fp8_head": false}'
    assert started(*files, answer=answer) == [check, run + taken]
    assert (
        started(*files) == [run + taken]
        and "--attention=masked --fp8_head=false (checked before" in capsys.readouterr().err
    )
    assert started(*files, "--seed", "5") == [run + "[--seed][5]" + taken]
    assert started(*files, "--preflight") == [check]
    assert len(started(*files, "--micro_batches", "16")) == 2
    monkeypatch.setattr(train_gpt, "nvidia_smi", lambda fields: ["another GPU"])
    assert started(*files)[0] == check
    mine = tmp_path / "mine.py"
    source = Path(train_gpt.__file__).read_text()
    monkeypatch.setattr(train_gpt, "__file__", str(mine))
    mine.write_text(source.replace("return Plan(", "return Plan(  # remark\n        "))
    assert started(*files) == [run.replace("train_gpt.py", "mine.py")]
    mine.write_text(source.replace("min(0.9999,", "min(0.9998,"))
    assert started(*files)[0] == check
    gpus(0)
    assert started(*files, "--preset", "laptop", "--preflight") == [
        check.replace("8]", "2]").replace("speedrun", "laptop")
    ]


@pytest.mark.parametrize(
    "typed, status, says",
    [
        (["-n"], 2, "error: argument -n: expected one argument; --help lists the options"),
        (
            ["--resume", "race.jsonl", "--seed", "3"],
            2,
            "continues a race as it began; leave out --seed 3",
        ),
        (["--resume", "x.ckpt", "-n", "3"], 2, "continues one run; leave out -n 3"),
        (
            ["--resume", "latest", "--text", "a.txt"],
            2,
            "continues with the text of its run; leave out --text",
        ),
        (["--text", "--seed", "3"], 2, "argument --text: expected at least one argument"),
        (["--field", "body"], 2, "--field needs --text"),
        *(
            (words.split(), 2, f"{words.removeprefix('--trial ')}: only a race has this")
            for words in ("--name x", "--trial --json")
        ),
        (
            ["--sed", "3"],
            2,
            "run.sh: error: unrecognized arguments: --sed 3; did you mean --seed? ./run.sh"
            " --help-all lists",
        ),
        (
            ["--preset", "fronteir"],
            2,
            f"--preset is fronteir; there are {', '.join([*train_gpt.PRESETS, *frontier.PRESETS])}",
        ),
        # once, and not by each rank
        (
            ["--preset", "laptop", "--num_heads", "5"],
            2,
            "run.sh: error: model_dim is 64; give a multiple of 4 * num_heads, 20",
        ),
    ],
)
def test_wrong_words_are_refused_before_anything_is_started(script, tmp_path, typed, status, says):
    refused = script(ROOT / "launch" / "start.py", *typed)
    stdout, stderr = refused.communicate(timeout=600)
    assert refused.returncode == status and stderr.count("\n") == 1 and says in stderr
    assert bool(stdout) == ("--json" in typed)
    if stdout:
        assert json.loads(stdout) == logs.not_judged(stderr.partition("error: ")[2][:-1])


@pytest.mark.parametrize(
    "program, beside",
    [
        ("train_gpt.py", "my_idea"),
        ("frontier.py", "package.my_idea"),
        ("launch/start.py", "package.my_idea"),
    ],
)
def test_code_in_a_file_of_its_own_is_refused_in_one_line(script, tmp_path, program, beside):
    """Of a module beside the script the log has no source; by PYTHONPATH run.sh finds none."""
    copy = tmp_path / "copy"
    idea = copy / f"{beside.replace('.', '/')}.py"
    idea.parent.mkdir(parents=True)
    idea.write_text("RATE = 0.05\n")
    shutil.copytree(ROOT / "launch", copy / "launch")
    (copy / "records").mkdir()
    for name in ("train_gpt.py", "frontier.py", "records/logs.py"):
        shutil.copy(ROOT / name, copy / name)
    edited = copy / program.replace("launch/start", "train_gpt")
    text = edited.read_text()
    edited.write_text(text.replace("import math\n", f"import math\nimport {beside}\n", 1))
    if program != "launch/start.py":
        refused = script(copy / program, "--train_files", "none")
        _, stderr = refused.communicate(timeout=600)
        assert refused.returncode == 1
    else:
        # laptop has a target, about which another Python than 3.11 gets a line
        start = [sys.executable, "-I", copy / program, "--preset", "bench"]
        refused = subprocess.run(start, capture_output=True, text=True, timeout=600)
        stderr = refused.stderr
        assert refused.returncode == 2
        idea.rename(tmp_path / "my_idea.py")
        elsewhere = {**os.environ, "PYTHONPATH": str(tmp_path)}
        missing = subprocess.run(start, capture_output=True, text=True, env=elsewhere)
        assert missing.returncode == 2 and missing.stderr.count("\n") == 1
        assert re.search("No module named '.*my_idea'; a run finds", missing.stderr)
    assert stderr.count("\n") == 1 and f"imports {beside.partition('.')[0]}" in stderr, stderr


@needs_venv
def test_a_library_that_cannot_be_loaded_is_named_in_a_line(tmp_path):
    (tmp_path / "libstdc++.so.6").write_text("no library")
    done = subprocess.run(
        [sys.executable, "-I", ROOT / "launch" / "start.py", "-n", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and f"LD_LIBRARY_PATH is '{tmp_path}'; unset it" in done.stderr
    ), done.stderr
    assert "libstdc++.so.6: file too short" in json.loads(done.stdout)["reason"]


@pytest.mark.parametrize(
    "more",
    [
        ["--text", "my notes"],
        ["-n", "2", "--vs", "HEAD"],
    ],
)
@pytest.mark.parametrize("preset", ["speedrun", *frontier.PRESETS])
def test_a_preset_for_gpus_is_refused_without_one_before_data_are_fetched(
    started, gpus, capsys, preset, more
):
    gpus(0)
    calls = started("--preset", preset, *more)
    assert not [call for call in calls if "text.py" not in call]
    assert (
        f"{preset} is for GPUs: " in (said := capsys.readouterr().err) and said.count("error") == 1
    )


def test_a_side_may_have_a_preset_of_its_own(gpus, monkeypatch):
    """Its program then knows no other preset, so that of all sides is left out."""
    gpus(8)
    flags = ["--preset", "speedrun", "--attention", "masked"]
    sides = race.describe_sides(["--preset frontier", "--preset=laptop"], None, flags)
    assert [side["flags"] for side in sides.values()] == [
        ["--attention", "masked", *own] for own in (["--preset", "frontier"], ["--preset=laptop"])
    ] + [flags]
    for idea in "--preset fronteir", "--sed 3":
        with pytest.raises(
            logs.UserError, match="there are speedrun, laptop, bench|did you mean --seed"
        ):
            race.describe_sides([idea], None, flags)
    gpus(0)
    with pytest.raises(logs.UserError, match="frontier is for GPUs"):
        race.describe_sides(["--preset frontier"], None, ["--preset", "laptop"])


def test_latest_to_resume_is_what_stopped_last(monkeypatch, tmp_path):
    def stopped(name, at, text=""):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (at, at))

    def resumed(*more):
        return start.parse(["--resume", "latest", *more])[1:]

    declared = {
        "race": {
            "id": "X",
            "sides": {"": {"revision": None, "flags": []}},
            "ranks": 1,
            "n": 1,
            "seed": 0,
        }
    }
    ended = {"run_id": "X_01", "run": 1, "side": "", "status": "done"}
    monkeypatch.setattr(start, "ROOT", tmp_path)
    assert resumed() == ([], ["--resume", "latest"])
    stopped("race-X/race.jsonl", 2, json.dumps(declared) + "\n")
    folder = str(tmp_path / "logs" / "race-X")
    assert resumed() == (["--resume", folder], []) and resumed("--log_dir", "x")[0] == []
    stopped("run.step000004.ckpt", 1)
    assert resumed() == (["--resume", folder], [])
    stopped("run.step000004.ckpt", 3)
    assert resumed() == ([], ["--resume", "latest"])
    stopped("race-X/race.jsonl", 4, f"{json.dumps(declared)}\n{json.dumps(ended)}\n")
    assert resumed() == ([], ["--resume", "latest"]), "no run of it is left"


@pytest.mark.parametrize(
    "quota, cores", [("max 100000", 3), ("150000 100000", 2), ("900000 100000", 3)]
)
def test_threads_that_encode_a_text_are_the_cores_of_this_process(monkeypatch, quota, cores):
    """Not those of the machine, of which Slurm (affinity) or a container (quota) may give a few."""
    monkeypatch.syspath_prepend(ROOT / "data")
    import shards

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    monkeypatch.setattr(shards, "Path", lambda name: types.SimpleNamespace(read_text=lambda: quota))
    assert shards.usable_cores() == cores


def making_data(tree, script, preset="laptop"):
    """start.py in the tree as it makes the embedded corpus, which takes minutes."""
    (tree.root / "data" / "stdlib.py").write_text(
        "import time, shards\ndef main():\n    try:\n        print('makes', flush=True)\n       "
        " for _ in range(900):\n"
        "            time.sleep(0.1)\n"  # a signal just before one long sleep is heard after it
        "    finally:\n        print('cleans up', flush=True)\nshards.run(main)\n"
    )
    process = script(
        tree.root / "launch" / "start.py",
        "--preset",
        preset,
        "--target_val_loss",
        "1.4",
        prepare=os.setsid,
    )
    wait_until(
        lambda: process.outputs[0].exists() and process.outputs[0].read_text() == "makes\n",
        what="the script",
    )
    return process


@pytest.mark.parametrize("preset", ["laptop", "bench"])
def test_ctrl_c_while_data_are_made_lets_the_script_clean_up(tree, script, preset):
    process = making_data(tree, script, preset)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stdout) == (130, "makes\ncleans up\n")
    assert stderr == "interrupted\nrun.sh: interrupted; complete shards stay\n"


def test_ctrl_c_as_a_script_starts_reaches_the_script(monkeypatch):
    """As on a busy machine, where the script runs before start.py does again."""

    class Popen(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(start.subprocess, "Popen", Popen)
    monkeypatch.setattr(start, "interrupted", lambda *_, kept="nothing was started": sys.exit(kept))
    before = signal.signal(signal.SIGINT, start.interrupted)
    try:
        with pytest.raises(SystemExit, match="complete shards stay"):
            start.make_data("stdlib.py", "--out", "/dev/null/none")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not start.PRCTL, reason="only on Linux a parent's end is a signal")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_that_makes_data_ends_with_the_launcher(tree, script, number):
    process = making_data(tree, script)
    process.send_signal(number)
    wait_until(lambda: "cleans up" in process.outputs[0].read_text())


# What fits this machine


def test_a_build_for_cpus_beside_a_driver_is_not_used_silently(gpus, monkeypatch, capsys):
    """As on a GPU node whose .venv was made on a login node."""
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(train_gpt, "nvidia_smi", lambda fields: ["580.65.06"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(ROOT)
    assert start.main([]) == start.main(["-n", "3"]) == 2
    assert (
        len(
            re.findall(
                "run.sh: error: .* holds torch's build for CPUs.*rm -r .venv.*\n",
                said := capsys.readouterr().err,
            )
        )
        == said.count("\n")
        == 2
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert start.choose([], False, False)[2] == "laptop"


def test_all_usable_gpus_are_taken_and_two_ranks_without_one(gpus):
    for seen, expected in ((0, (0, 2, "laptop")), (4, (4, 4, "speedrun")), (7, (7, 4, "speedrun"))):
        gpus(seen)
        assert start.choose([], False, False)[:3] == expected
    assert start.choose(["--preset", "laptop"], False, False)[:3] == (7, 2, "laptop")


def test_a_batch_that_two_ranks_cannot_share_is_said(gpus, capsys):
    gpus(0, False)
    assert start.choose(["--micro_batches", "3"], False, False)[1] == 1
    assert (
        "run.sh: 1 rank(s) instead of 2: ranks share the 3 micro-batches of a step evenly;"
        " --micro_batches" in capsys.readouterr().err
    )
    start.choose([], False, False)
    assert not capsys.readouterr().err


def test_a_reader_that_leaves_before_the_run_ends_it_without_a_word():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / "start.py", "--help-all"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=600,
    )
    os.close(write)
    assert done.returncode == -signal.SIGPIPE and not done.stderr


@pytest.mark.parametrize("program", ["train_gpt.py", "sample.py"])
def test_a_python_without_torch_names_the_one_that_has_it(program):
    done = subprocess.run(
        [sys.executable, "-S", ROOT / program, "--help"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1 and re.fullmatch(
        rf"\S+{program}: error: No module named 'numpy'; run .venv/bin/python \S+{program} "
        r"\(./run.sh --setup creates .venv\)\n",
        done.stderr,
    ), done.stderr


NO_TARGET = ["--target_val_loss=0"]


@pytest.mark.parametrize(
    "flags, target, why",
    [
        ("--train_files own_train_*.bin", NO_TARGET, "your own data: the preset's target 1.4"),
        ("--train_files own_train_*.bin --target_val_loss 2", [], ""),
        ("--train_files elsewhere/stdlib_train_*.bin", [], ""),
        ("--num_steps 20", NO_TARGET, "a trial of 20 of the preset's "),
        ("--num_steps 20 --target_val_loss 1.9", [], ""),
        ("--num_steps 150", [], ""),
        ("--seed 1", NO_TARGET, "not of 3.9: the preset's target 1.4 does"),
        ("--target_val_loss 1.5", [], ""),
    ],
)
def test_a_run_of_other_data_or_steps_has_no_target(gpus, capsys, monkeypatch, flags, target, why):
    gpus(0, False)
    if "3.9" in why:  # the library of another Python
        monkeypatch.setattr(start, "LIBRARY", "3.9")
    words = ["--preset", "laptop", *flags.split()]
    assert start.choose(words, False, False)[-1] == words + target
    said = capsys.readouterr().err
    assert why in said and ("target" in said) == bool(why)


def test_steps_and_epochs_fit_the_size_of_a_text(gpus, capsys, tmp_path, monkeypatch, golden):
    """tests/golden/text_sizes.txt has what is chosen for texts of so many tokens."""
    gpus(0, False)
    reads = []
    next_batch = train_gpt.Stream.next_batch
    monkeypatch.setattr(
        train_gpt.Stream,
        "next_batch",
        lambda stream, plan: reads.append(plan.step) or next_batch(stream, plan),
    )
    shown = []
    for train, val, flags in (
        (1_200_000, 1000, ""),
        (1_200_000, 1000, "--num_steps 507"),
        (1_200_000, 1000, "--num_steps 542"),
        (40_000, 700_000, ""),
        (10_000, 1000, ""),
        (10_000, 1000, "--num_steps 18"),
        (140_000, 1000, ""),
        (40_000, 700_000, "--num_steps 70 --target_val_loss 2 --val_tokens 1024 --ngram_reset 0"),
        (40_000, 1000, "--epochs 1"),
        (1500, 1000, ""),
        (150, 1000, ""),
        (1000, 1000, "--num_steps 20 --micro_batches 1 --micro_batch_tokens 40"),
    ):
        for name, tokens in (("train_000001", train), ("val_000000", val)):
            made = some_documents(1, tokens, 257, 256, mean=400)
            write_shard(tmp_path / f"t_{name}.bin", made, 257, 256)
        files = [f"--{split}_files={tmp_path / f't_{split}_*.bin'}" for split in ("train", "val")]
        shown.append(f"$ {train} tokens, {val} to validate {flags}")
        reads.clear()
        try:
            *_, words = start.choose(["--preset", "laptop", *files, *flags.split()], True, False)
        except logs.UserError as error:
            shown.append(str(error))
            continue
        config = train_gpt.parse_config(words, "laptop")[1]
        chosen = [f"{name} {getattr(config, name)}" for name in CHOSEN]
        shown.append(f"of {train}: {', '.join(chosen)}, batches read {len(reads)}")
        shown.append(capsys.readouterr().err)
        stream = train_gpt.Stream(train_gpt.find_shards(config.train_files), config)
        stream.check_enough()
        stream.close()
    golden("text_sizes", "\n".join(shown))


CHOSEN = (
    "num_steps epochs ngram_reset max_document_tokens micro_batch_tokens val_tokens"
    " target_val_loss muon_momentum_rise"
).split()


def test_a_driver_too_old_for_torch_is_said_and_not_raced_on_the_cpu(
    gpus, tree, monkeypatch, capsys
):
    gpus(8, usable=False)
    monkeypatch.chdir(tree.play)
    tree.script(tree.play / "nvidia-smi", "#!/bin/sh\necho 550.54\necho 550.54\n")
    monkeypatch.setenv("PATH", str(tree.play), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    says = r"built for CUDA 13.0, cannot use the 8 GPU\(s\) of this machine: update the driver"
    assert (
        start.main([]) == 2 == start.main(["-n", "3", "--vs", "HEAD"])
        and len(re.findall(says, capsys.readouterr().err)) == 2
    )
    assert train_gpt.main(train_gpt.PRESETS, []) == 1
    assert re.search(says, capsys.readouterr().err)


# The launcher

LISTENS = """
import os, sys, signal, torch.distributed as dist
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

def listeners(pid):
    opened = [os.path.basename(os.path.realpath(link)) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {name[len("socket:["):-1] for name in opened if name.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in inodes:
                yield words[1].split(":")[0]

rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=600)))
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
dist.barrier()
if rank == 1:
    found = [*listeners(os.getpid()), *listeners(os.getppid())]
    print(os.environ["LAUNCHER_PID"] == str(os.getppid()), os.environ["GLOO_SOCKET_IFNAME"], len(found), *set(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(),
    reason="this system has no /proc/net, which lists who listens",
)
def test_a_run_listens_on_loopback_only(script, tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(LISTENS)
    for name in [name for name in os.environ if name.startswith(("GLOO_", "NCCL_"))]:
        monkeypatch.delenv(name)
    launcher = script(ROOT / "launch" / "ranks.py", "2", tmp_path / "ranks.py")
    stdout, stderr = launcher.communicate(timeout=600)
    # the launcher's store, and gloo's of the rank; addresses are little-endian hexadecimal
    assert stdout == "True lo 2 0100007F\n", stdout + stderr
    assert launcher.returncode == 128 + signal.SIGKILL
    assert stderr == "ranks.py: error: rank 1 was killed by SIGKILL; perhaps memory ran out\n"


# A rank, forked or new, finds what `python -I -u` would give it, and answers signals to its
# launcher
ALONE = """
import json, os, signal, sys, time
from pathlib import Path
number = os.environ["RANK"]
if number == "1":
    while not os.fstat(1).st_size:  # rank 0 has said all
        time.sleep(0.01)
    sys.exit("rank 1 fails")
if sys.argv[1] == "fails":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({"name": __name__, "file": __file__, "argv": sys.argv,
                  "foreign": [name for name in ("train_gpt", "frontier", "ranks", "start", "stats") if name in sys.modules or
                              any(Path(folder, name + ".py").exists() for folder in sys.path)],
                  "descriptors": len(os.listdir("/proc/self/fd")) - 1, "forked": os.environ["LAUNCHER_PID"] == str(os.getppid())}), flush=True)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
if sys.argv[1] not in ("fails", "early"):
    os.kill(os.getppid(), getattr(signal, sys.argv[1]))
time.sleep(2 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 600)
"""


# One process that has torch forks the launcher of each case
LAUNCHERS = """
import os, signal, sys
sys.path += [{root!r}, {root!r} + "/launch"]
import train_gpt, ranks
for what, ignored, _ in {cases}:
    if not os.fork():
        for descriptor, name in (1, "out"), (2, "err"):
            os.dup2(os.open(what + str(ignored) + name, os.O_WRONLY | os.O_CREAT), descriptor)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if what == "early":  # before the launcher knows its rank
            os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
        sys.exit(ranks.start(2 if what == "fails" else 1, "alone.py", [what]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
CASES = [  # what happens, whether SIGHUP is ignored, the launcher's exit status
    ("SIGTERM", False, 143),
    ("SIGHUP", True, 0),
    ("SIGHUP", False, 129),
    ("SIGUSR1", False, 7),
    ("fails", False, 1),
    ("early", False, 143),
]


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.device_count(),
    reason="ranks are forks on Linux without a GPU",
)
def test_a_forked_rank_is_the_program_alone_and_signals_reach_it(script, tmp_path):
    """nohup's ignored SIGHUP stays ignored. A rank that fails ends the others."""
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    code = LAUNCHERS.format(root=str(ROOT), cases=CASES)
    (tmp_path / "launchers.py").write_text(code)
    launchers = script(tmp_path / "launchers.py", prepare=functools.partial(os.chdir, tmp_path))
    stdout, stderr = launchers.communicate(timeout=1800)
    statuses = [int(status) for status in stdout.split()]
    assert statuses == [status for *_, status in CASES], stderr
    for what, ignored, _ in CASES[:-1]:
        out, err = ((tmp_path / f"{what}{ignored}{name}").read_text() for name in ("out", "err"))
        assert err == ("rank 1 fails\n" if what == "fails" else "")
        assert json.loads(out) == {
            "name": "__main__",
            "file": str(path),
            "argv": ["alone.py", what],
            "foreign": [],
            "descriptors": 3,
            "forked": True,
        }


def test_ctrl_c_during_imports_is_no_traceback_and_a_request_for_a_checkpoint_no_end(tree):
    waits = (
        "import os, signal\nfor number in (signal.SIGUSR1, signal.SIGINT): os.kill(os.getpid(),"
        " number)\nwhile True: pass"
    )
    tree.set_up(REAL)
    (tree.root / "train_gpt.py").write_text(waits)
    done = tree.run()
    assert (done.returncode, done.stderr) == (130, "run.sh: interrupted; nothing was started\n")
    (tree.root / "launch" / "torch.py").write_text(waits)
    done = subprocess.run(
        [sys.executable, tree.root / "launch" / "ranks.py", "1", "x.py"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    "saved, status, followed",
    [
        (["new.txt"], 0, ["new.txt"]),
        (["old.txt", "old.pt"], 0, ["old.txt", "old.pt"]),  # written again
        (["other.txt"], 0, []),  # of a run that is under way
        (["new.txt", "new.pt"], 3, []),
    ],
)
def test_a_complete_run_is_drawn_and_its_model_writes_a_sample(
    tmp_path, monkeypatch, capsys, saved, status, followed
):
    for name in ("old.txt", "old.pt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))

    def run(*_):
        for name in saved:
            (tmp_path / name).write_text("source\n" + '{"end": {}}\n' * (name != "other.txt"))
        return status

    def call(words, **_):
        called.append(
            str(words[2])
            if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
            else "a request for a checkpoint would end it"
        )
        return types.SimpleNamespace(communicate=lambda: (b"", None))

    called = []
    monkeypatch.setattr(ranks, "start", run)
    monkeypatch.setattr(start.subprocess, "Popen", call)
    monkeypatch.setattr(sample, "main", lambda words: called.append(words[0]))
    whole = signal.signal
    config = dataclasses.replace(train_gpt.PRESETS["laptop"], log_dir=str(tmp_path))
    monkeypatch.setattr(
        signal,
        "signal",
        lambda number, handler: number == signal.SIGUSR1 and whole(number, handler),
    )
    whole(signal.SIGUSR1, signal.SIG_IGN)  # as ranks.start leaves it
    assert start.run_once(config, 1, ["--save_model", "true"], "longer") == status
    assert capsys.readouterr().err == "run.sh: starting 1 rank(s)\n"
    assert called == [str(tmp_path / name) for name in followed]
    called.clear()
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.dup(1)
    try:
        os.dup2(writer, 1)  # as after `| head`
        assert start.run_once(config, 1, ["--save_model", "true"], "longer") == status and all(
            path.endswith(".txt") for path in called
        )
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(writer)


def test_one_model_that_nobody_asked_for_stays_and_a_run_says_what_is_next(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(sample, "main", lambda words: 0)
    monkeypatch.setattr(start, "ROOT", tmp_path)
    made = []
    for number, asked in enumerate([False, True, False, False]):
        made.append(tmp_path / f"{number}.pt")
        before = start.written(tmp_path)
        made[-1].touch()
        start.show_results(tmp_path, before, "a longer run: ./run.sh --text caf\udce9", asked)
        said = capfd.readouterr().out
        assert (
            'more text: ./run.sh sample --prompt "..."\na longer run: ./run.sh --text caf' in said
        )
        assert ("the next run replaces this model; --save_model true keeps one" in said) != asked
    assert f"removed: {made[2]}\n" in said and [path.exists() for path in made] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "words, tokens, text, said",
    [
        (["--trial"], 1_000, False, "./run.sh"),
        ([], 200_000, False, "./run.sh --num_steps 80"),
        (["--num-steps=20", "--seed", "3"], 200_000, False, "./run.sh --seed 3 --num_steps 80"),
        ([], 50_000, False, None),
        (
            ["--text", "a b.txt", "--num_steps", "20"],
            150_000,
            True,
            "./run.sh --text 'a b.txt' --num_steps 40",
        ),
        (["--text", "b.txt"], 60_000, True, None),
    ],
)
def test_a_longer_run_is_advised_unless_it_reads_data_twice(words, tokens, text, said, tmp_path):
    write_shard(tmp_path / "t.bin", some_documents(1, tokens, 257, 256), 257, 256)
    config = dataclasses.replace(
        train_gpt.PRESETS["laptop"], num_steps=20, train_files=str(tmp_path / "t.bin")
    )
    advice = start.longer_run(words, config, text)
    assert (
        advice == f"a longer run: {said}"
        if said
        else ("give more text" in advice) == text and "longer run" not in advice
    )


@pytest.mark.parametrize("tool", start.TOOLS)
def test_run_sh_becomes_each_tool_with_the_same_words(monkeypatch, tool):
    monkeypatch.setattr(start, "become", sys.exit)
    with pytest.raises(SystemExit) as became:
        start.begin([tool, "latest", "--x y"])
    assert (
        became.value.code == [ROOT / start.TOOLS[tool], "latest", "--x y"]
        and (ROOT / start.TOOLS[tool]).exists()
    )


# The whole way


def run_sh(folder, *argv):
    return subprocess.run(
        [ROOT / "run.sh", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env=offline(),
    )


def offline():
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def tiny_flags(tmp_path):
    values = {
        **TINY,
        **write_corpus(tmp_path, train=(9000,)),
        "num_steps": 4,
        "log_dir": tmp_path / "logs",
        "layers": "S0M LM",
        "backout_layer": 0,
    }
    return as_flags(values)


@pytest.mark.slow
@needs_venv
def test_one_command_trains_on_own_text_and_leaves_log_model_picture_and_a_sample(
    tmp_path, tiny_flags
):
    notes = tmp_path / f"notes {uuid.uuid4().hex}"
    notes.mkdir()
    (notes / "a.txt").write_text("".join(f"line {i} of what I wrote\n" for i in range(900)))
    at = [i for i, word in enumerate(tiny_flags) if word in ("--train_files", "--val_files")]
    done = run_sh(
        tmp_path,
        *(word for i, word in enumerate(tiny_flags) if not {i, i - 1} & {*at}),
        "--text",
        notes.name,
    )
    made_of = notes.name.replace(" ", "_")
    for made in (ROOT / "data").glob(f"own-{made_of}-*"):  # no folder of the user's
        shutil.rmtree(made)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^run\.sh: text: \d\d,\d{3} training tokens \(bytes\), 4 steps of 384: part of the text;"
        r" .*\n"
        r"(?:run\.sh: .*\n)?run\.sh: starting \d rank\(s\)$",
        done.stderr,
        re.M,
    )
    [log] = (tmp_path / "logs").glob("*.txt")
    assert [log.with_suffix(suffix).exists() for suffix in (".pt", ".png")] == [True, True]
    assert re.search(
        r"^step 4/4 .* validation …\n\nvalidation loss \d\.\d+ \(\d\.\d+ bits per byte\), after .*\nmodel: .*\nlog:"
        rf" {log}\n\n(.|\n){{300}}"
        rf"(.|\n)*\npicture: {log.with_suffix('.png')}\n$",
        done.stdout,
        re.M,
    ), done.stdout


@needs_venv
def test_ctrl_c_ends_a_run_with_130_and_says_what_is_kept_and_how_to_go_on(tmp_path, tiny_flags):
    write_shard(tmp_path / "toy_train_000001.bin", some_documents(1, 60_000))
    run = subprocess.Popen(
        [
            ROOT / "run.sh",
            "--preset",
            "laptop",
            *tiny_flags,
            *"--num_steps 9000 --epochs 1000 --micro_batches 2 --warmup_steps 0".split(),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=offline(),
        start_new_session=True,
    )
    while "step:10/" not in (line := run.stdout.readline()):
        assert line, run.stderr.read()
    os.killpg(run.pid, signal.SIGINT)
    stderr = run.communicate(timeout=600)[1]
    assert run.returncode == 130, stderr
    [log] = (tmp_path / "logs").glob("*.txt")
    said = rf"interrupted before step \d+; --resume {log} continues from there"
    # rank 1 has no log
    assert re.search(rf"rank (0: {said}; the log so far: {log}|1: {said})\n", stderr), stderr
    assert f"run.sh: to continue: ./run.sh --resume latest --log_dir {log.parent}\n" in stderr
    assert [*log.parent.glob("*.ckpt")]
    assert "Traceback" not in stderr and "torch" not in stderr
