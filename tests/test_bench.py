"""Each benchmark runs at a tiny size and prints its table. Counts are compared with computed
values.

test_whole_step starts its script as a user does. The other tests fork from a process that has
imported torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt


BENCH = Path(__file__).resolve().parent.parent / "bench"
SMALL_MODEL = "--layers 2 --dim 16 --vocab 32 --tokens 16 --batch 1 --bucket_mb 0.01".split()


def ranks_are_forked():
    multiprocessing.get_context = lambda method, context=multiprocessing.get_context: context(
        "fork"
    )


@pytest.fixture
def start(script):
    """start("name.py", flag, ...) -> the running benchmark."""
    return lambda name, *flags: script(
        BENCH / name, *flags, OMP_NUM_THREADS="1", prepare=ranks_are_forked
    )


@pytest.fixture
def bench(start):
    """bench("name.py", flag, ...) -> the benchmark's output."""

    def bench(name: str, *flags: str) -> str:
        process = start(name, *flags)
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return out

    return bench


def rows(out: str) -> list[dict[str, str]]:
    """Parse the rows of the only table in the output."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(lines[0], line)) for line in lines[2:]]


@pytest.mark.slow
def test_whole_step():
    command = [
        sys.executable,
        "-W",
        "ignore",
        BENCH / "whole_step.py",
        *SMALL_MODEL,
        *"--rounds 3 --warm 1 --no-memory".split(),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    table = {row["variant"]: row for row in rows(done.stdout)}
    assert list(table) == [
        "buckets",
        "buckets, gloo's own",
        "DDP, gradients as views",
        "DDP",
        "DDP + ZeRO, parameters as views",
        "DDP + ZeRO",
        "FSDP2, not resharded",
        "FSDP2",
    ]
    assert len({row["last loss"][:5] for row in table.values()}) == 1
    state = {
        name: int(row["bytes of optimizer state per rank"].replace(",", ""))
        for name, row in table.items()
    }
    assert state["buckets"] < 0.7 * state["DDP"]


def terminated_in_a_fork():
    ranks_are_forked()
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_a_signal_while_ranks_are_started_ends_them(script):
    """Python drops what a handler raises in a hook of fork."""
    process = script(
        BENCH / "whole_step.py", *SMALL_MODEL, "--rounds", "100000", prepare=terminated_in_a_fork
    )
    _, errors = process.communicate(timeout=600)  # until no rank has its end of the pipe
    assert (process.returncode, errors) == (1, "error: interrupted\n")


@pytest.mark.slow
def test_own_model(bench, tmp_path):
    """Ranks share a batch, so losses agree; the grid goes on until its best factor is no end; a
    second start makes only the missing run."""
    path = tmp_path / "runs"
    flags = [*"--models mlp --steps 4 --seeds 1 --results".split(), str(path)]
    table = rows(bench("own_model.py", *flags))
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join(rest) + "\n")
    assert (
        [row["optimizer"] for row in table]
        == ["ours", "Muon and AdamW", "AdamW"]
        == [row["optimizer"] for row in rows(bench("own_model.py", *flags))]
    )
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    assert {**runs[-1], "seconds": 0} == {**json.loads(first), "seconds": 0} and len(runs) == len(
        rest
    ) + 1
    for row in table:
        one, two = (
            {
                run["factor"]: run["loss"]
                for run in runs
                if (run["optimizer"], run["ranks"]) == (row["optimizer"], n)
            }
            for n in (1, 2)
        )
        assert (
            min(one) < (best := min(one, key=one.get)) < max(one)
            and abs(two[best] - one[best]) < 1e-4
            and f"{one[best]:.3f}" == row["loss, best rates"]
        )


def test_one_rank_of_8(bench):
    out = bench("one_rank_of_8.py", "--preset", "laptop", "--rounds", "1")
    assert rows(out)[-1]["longest window"] == "mean of a run"
    assert "launch to the end of the first step" in out


def test_the_other_ranks_of_one_rank_of_8_say_what_json_carries(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    from common import FakeComm

    assert FakeComm.all_gather_json(SimpleNamespace(ranks=8), (9, 0)) == [[9, 0]] * 8, (
        "as after JSON, tuples are lists"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which takes minutes")
def test_one_rank_of_8_says_why_it_is_skipped(bench):
    assert bench("one_rank_of_8.py").startswith("skipped: the preset speedrun needs an NVIDIA GPU")


def test_a_rank_that_fails_ends_the_benchmark_with_one_line(start):
    process = start("whole_step.py", "--layers", "1", "--dim", "193")  # of three heads
    _, errors = process.communicate(timeout=600)
    assert process.returncode and errors.splitlines()[-1].startswith("error: timings: ")


@pytest.mark.slow
def test_nanogpt_beside_the_laptop_preset(bench, tmp_path):
    """With a clone that prints as nanoGPT does: time excludes iterations that evaluate, and the
    last loss counts."""
    (tmp_path / "clone/data/shakespeare_char").mkdir(parents=True)
    (tmp_path / "clone/data/shakespeare_char/prepare.py").write_text("")
    (tmp_path / "clone/train.py").write_text(
        "import sys; assert '--max_iters=3' in sys.argv and"
        " open('data/shakespeare_char/input.txt').read(2) == 'ab'\nprint('step 0: train loss"
        " 4.2000, val loss 4.1000\\niter 0: loss 4.2000, time 9000.00ms, mfu"
        " -100.00%')\nprint('iter 1: loss 3.0000, time 1500.00ms, mfu 0.1%\\niter 2: loss 3.0000,"
        " time 500.00ms, mfu 0.1%')\nprint('step 3: train loss 1.9000, val loss 1.8800\\niter 3:"
        " loss 1.9000, time 7000.00ms, mfu 0.1%')\n"
    )
    (tmp_path / "text").write_text("abcdefgh\n" * 4000)
    shown = bench(
        "nanogpt.py",
        "--nanogpt",
        str(tmp_path / "clone"),
        "--text",
        str(tmp_path / "text"),
        *"--rounds 1 --ranks 1 --nanogpt_steps 3".split(),
        "--picture",
        str(tmp_path / "picture.png"),
        "--flags",
        "--num_steps 4 --micro_batches 2 --model_dim 16 --num_heads 1 --ngrams Ngrams(2,16,8)"
        " --stages 'Stage(long_window=4)' --muon_momentum_rise 1 --muon_momentum_fall 1"
        " --warmup_steps 0",
    )
    assert (
        "| nanoGPT | 1.8800 | 2.0 |" in shown
        and "| train_gpt.py | " in shown
        and (tmp_path / "picture.png").exists()
    )


def test_nanogpt_wants_a_clone(start, tmp_path):
    process = start("nanogpt.py", "--nanogpt", str(tmp_path), "--text", str(tmp_path))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1 and "train.py does not exist; give a clone of nanoGPT" in errors


# A program with the names of record 44's that trains as train_gpt.py does, with further flags
STAND_IN = """
import shlex, torch, train_gpt as t
from torch import nn
_reduce_scatter_hooks = nvidia_smi = print0 = str  # muon_warmup_steps=300, muon_cooldown_steps=50
THEIRS = {{"attn.qkvo": "attn.qkvo_w", "attn.gate": "attn.attn_gate.weight", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
          "smear_gate": "smear_gate.weight"}}
class Hyperparameters:
    num_scheduled_iterations: int = 2205  # as in the record's program
    num_extension_iterations, num_iterations, train_batch_size, train_max_seq_len, block_size = 40, 2245, 262144, 2048, 128
class GPT(nn.Module):
    def __init__(self, vocab, layers, heads, head_dim, dim, longest):
        super().__init__()
        flags = shlex.split(f"--fp8_head false --num_heads {{heads}} --model_dim {{dim}} "
            f"--num_steps {{args.num_iterations}} --micro_batch_tokens {{args.train_batch_size // 8}} --max_document_tokens "
            f"{{args.train_max_seq_len}} --window_block {{args.block_size}} --muon_momentum_rise 6 --muon_momentum_fall 5 --stages "
            f"'Stage(until=1/3, long_window=3), Stage(until=2/3, long_window=7), Stage(long_window=11), "
            f"Stage(extra_steps={{args.num_extension_iterations}}, long_window=13)' {0}")
        config = t.parse_config(flags, "speedrun")[1]
        self.worker = [t.Worker(config, t.Comm(), torch.device("cpu"), t.find_shards(args.train_files))]
    def named_parameters(self):
        for name, p in self.worker[0].model.named_parameters():
            for ours, theirs in THEIRS.items():
                name = name.replace(ours, theirs)
            yield name, torch.cat([p[:5], torch.zeros(7), p[5:]]) if name == "scalars" else p
args = Hyperparameters()
print0(nvidia_smi())
model = torch.compile(GPT(50257, 12, 6, 128, 768, 1), dynamic=False)
worker, texts = model.worker[0], t.validation_sequences(t.find_shards(args.val_files), args.val_tokens, args.val_batch_size // 8)
for step in range(args.num_iterations + 1):
    plan = t.plan_of(worker.config, step)
    val_loss = worker.validate(plan, texts)[0]
    print(f"step:{{step}}/{{args.num_iterations}} val_loss:{{val_loss:.4f}} train_time:0ms")
    if step < args.num_iterations:
        worker.step(plan, worker.stream.next_batch(plan))
worker.stream.close()
"""


@pytest.mark.slow
def test_a_last_window_of_18_blocks_in_place_of_20_shows(start, tmp_path):
    """Only in the last validation; the parameters agree."""
    log = tmp_path / "log.txt"
    log.write_text(STAND_IN.format("--final_window 18") + "\n" + "=" * 100 + "\nRunning Python\n")
    process = start("public_record.py", str(log))
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 1 and "The programs DO NOT agree: losses differ" in out, (
        errors + out
    )
    losses, *_ = out.split("\n\n| parameters")
    differences = [abs(float(row["difference"])) for row in rows(losses)]
    assert len(differences) == 19 and max(differences[:18]) < 1e-12 < 1e-9 < differences[18], (
        differences
    )
    assert "| blocks.*.attn.qkvo | 10 |" in out


@pytest.mark.skipif(
    "PUBLIC_RECORDS" not in os.environ,
    reason="PUBLIC_RECORDS names no clone's records/track_1_short",
)
@pytest.mark.parametrize(
    "program",
    [
        "2025-10-31_AdamSyncGradientHook/0c17cdfd-772c-4906-8d11-141b370599a0.txt",
        "../../train_gpt.py",
    ],
)
def test_presets_train_as_the_records_own_programs_do(start, program):
    process = start("public_record.py", str(Path(os.environ["PUBLIC_RECORDS"], program)))
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0 and "The programs agree" in out, errors + out


def test_a_log_of_no_known_record_is_refused(start, tmp_path):
    (tmp_path / "log.txt").write_text("import torch\n" + "=" * 100 + "\n")
    for name, says in (
        ("log.txt", "does not begin with the program of record 44 or 89; get it"),
        ("none", "No such file or directory"),
    ):
        process = start("public_record.py", str(tmp_path / name))
        errors = process.communicate(timeout=600)[1]
        assert process.returncode == 1 and says in errors and "Traceback" not in errors


def test_each_known_idea_is_an_edit_that_the_preset_of_the_bench_can_train(monkeypatch):
    """Its texts stand once in the script, and the edited script accepts its values."""
    monkeypatch.syspath_prepend(BENCH)
    import known_ideas

    for idea in known_ideas.IDEAS:
        source = known_ideas.edited((BENCH.parent / "train_gpt.py").read_text("utf-8"), idea)
        compile(source, "train_gpt.py", "exec")
        changed = [new for old, new in idea.edits if old == known_ideas.ANCHOR]
        names = dict(vars(train_gpt))
        for text in changed:
            exec(text, names)
            train_gpt.check_config(names["PRESETS"]["bench"], 2)
            assert names["PRESETS"]["bench"] != train_gpt.PRESETS["bench"], idea.name
