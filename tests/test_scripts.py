"""run.sh and test.sh as a user types them, from another directory."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import train_gpt
from conftest import TINY, some_documents, write_shard

ROOT = Path(train_gpt.__file__).parent
READY = (ROOT / ".venv" / "ready").exists()
pytestmark = pytest.mark.skipif(not READY, reason="run.sh has not set up .venv here; ./test.sh does it first")


def run_sh(folder, *argv):
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([ROOT / "run.sh", *map(str, argv)], capture_output=True, text=True, timeout=180, cwd=folder, env=offline)


@pytest.fixture
def tiny_flags(tmp_path):
    write_shard(tmp_path / "toy_train_000001.bin", some_documents(1, 9000))
    write_shard(tmp_path / "toy_val_000000.bin", some_documents(3, 1000))
    values = {**TINY, "train_files": tmp_path / "toy_train_*.bin", "val_files": tmp_path / "toy_val_*.bin", "num_steps": 4,
              "extension_steps": 1, "log_dir": tmp_path / "logs"}
    return [text for name, v in values.items() for text in (f"--{name}", v)]


def test_set_up_again_does_nothing_and_says_so(tmp_path):
    for _ in range(2):
        done = run_sh(tmp_path, "--setup")
        assert done.returncode == 0 and done.stderr == "run.sh: packages: ready in .venv\n" and not done.stdout


def test_one_command_races_and_leaves_a_log(tmp_path, tiny_flags):
    done = run_sh(tmp_path, "--preset", "laptop", *tiny_flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^run\.sh: racing: \d rank\(s\), preset laptop$", done.stderr, re.M)
    [log] = (tmp_path / "logs").glob("*.txt")
    assert f"log: {log}" in done.stdout and "val_loss:" in done.stdout and re.search("target (reached|missed)", done.stdout)


def test_a_failed_run_ends_with_its_reason(tmp_path, tiny_flags):
    done = run_sh(tmp_path, "--preset", "laptop", *tiny_flags, "--num_heads", "5")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "num_heads * head_dim is 5 * 16; it must be model_dim, 32" in last, done.stderr


def test_the_embedded_corpus_is_made_where_it_is_missing_and_found_where_it_is():
    done = subprocess.run([ROOT / ".venv" / "bin" / "python", ROOT / "data" / "stdlib.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    laptop = train_gpt.PRESETS["laptop"]
    train, val = (train_gpt.find_shards(pattern) for pattern in (laptop.train_files, laptop.val_files))
    assert train[0][2:] == val[0][2:] == (257, 256)
    assert sum(shard.tokens for shard in train) > 3 * laptop.num_steps * laptop.batch_tokens
    stream = train_gpt.Stream(train, laptop)
    stream.check_enough(laptop.num_steps)
    assert len(stream.next_batch()) == 8


def test_wrong_words_are_refused(tmp_path):
    for argv, says in ((["-n"], "-n wants a value"), (["--preset", "desktop"], "desktop")):
        done = run_sh(tmp_path, *argv)
        assert done.returncode != 0 and says in done.stderr, argv
