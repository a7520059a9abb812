"""Test the commands, flags, paths, links and scripts of README.md, docs/ and the results of bench/, and the files of
launch/cluster. For each command the table names the test that runs it, or the reason why none does."""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import sample
import train_gpt
from conftest import forked, free_port

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import export  # noqa: E402
import ladder  # noqa: E402
import race  # noqa: E402
import start  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402

PAGES = {path: path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "dry_gpu/README.md", *sorted((ROOT / "docs").glob("*.md")))}
RESULTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "bench").rglob("*.md"))}
# LOG.md is only checked for links: an entry keeps the names that files and flags had on its day
LINKING = {**PAGES, **RESULTS, **{path: path.read_text(encoding="utf-8") for path in (ROOT / "LOG.md", ROOT / "records/README.md")}}
README = PAGES[ROOT / "README.md"]
PROGRAMS = (r"(?:[A-Z_]+=\S* )*(?:\./run\.sh|\./test\.sh|\.venv/bin/|torchrun|sbatch|dry_gpu/(?:run|setup)\b|"
            r"(?:rm|git|docker|sky|modal|pip|python|bench/first_gpu|apt-get|rsync|module)(?: |$))")

RUN = object()  # test_the_commands_of_a_first_hour runs it, in this order
LONG = "takes minutes; its parts are tested: "
COMMANDS = {
    "./run.sh --trial": RUN,
    '.venv/bin/python sample.py --prompt "def read(" --tokens 200': RUN,
    ".venv/bin/python records/export.py logs/RUN.txt --to csv": RUN,
    ".venv/bin/python records/stats.py --plan --sd 0.0013 --margin 0.002": RUN,
    "git clone URL gpt-speedrun && cd gpt-speedrun": "needs a network; test_the_commands_of_a_first_hour copies what git tracks",
    "git clone": "the same",
    "pip install git+URL": "needs a network; from a folder: test_readme.py::test_an_installed_package_has_two_files_and_writes_nothing",
    "python own.py": "test_readme.py::test_the_script_of_the_readme_trains_saves_and_continues",
    "./run.sh --help": "test_scripts.py::test_help_installs_nothing_and_fits_on_a_screen",
    "./run.sh --help-all": "test_scripts.py::test_help_installs_nothing_and_fits_on_a_screen",
    "./run.sh": "test_readme.py::test_the_default_run_reaches_its_target",
    "./test.sh": "it runs these tests",
    "./test.sh --all": "it runs these tests",
    "./test.sh tests/test_model.py -k rotary": "it runs these tests",
    "./run.sh --text FILE FOLDER …": "test_scripts.py::test_one_command_trains_on_own_text_and_leaves_log_model_picture_and_a_sample",
    "./run.sh --text input.txt --num_steps 980": LONG + "test_scripts.py::test_steps_and_epochs_fit_the_size_of_a_text",
    './run.sh --text FILE -n 3 --vs "--muon_lr 0.05"': "test_scripts.py::test_a_text_is_encoded_and_its_shards_are_named",
    "./run.sh --preset frontier": "needs a GPU",
    "HF_HUB_OFFLINE=1 ./run.sh": "needs a GPU",
    "./run.sh --resume latest": "test_scripts.py::test_a_resumed_run_keeps_the_flags_that_it_began_with",
    "./run.sh -n 10": "test_scripts.py::test_what_is_started",
    "./run.sh -n 5 --vs HEAD": "test_scripts.py::test_what_is_started",
    './run.sh -n 5 --vs "--muon_lr 0.03" --vs "--adam_lr 0.01"':
        "test_records_race.py::test_a_ladder_judges_each_idea_against_the_base",
    "./run.sh -n 5 --vs ONE --vs TWO --vs main": "test_records_race.py::test_several_revisions_are_compared_with_the_last",
    './run.sh -n 5 --vs ../modded-nanogpt --cmd "torchrun --nproc_per_node=8 train_gpt.py"':
        "test_records_race.py::test_another_project_s_script_runs_in_turn_and_is_judged_by_the_same_figures",
    './run.sh -n 5 --vs "--muon_lr 0.05"': "test_scripts.py::test_what_is_started",
    './run.sh -n 3 --vs "--muon_lr 0.05" --trial':
        "test_records_race.py::test_a_race_ends_with_a_table_and_the_page_of_its_record_says_the_same",
    "./run.sh --resume logs/race-ID/race.jsonl": "test_records_race.py::",
    ".venv/bin/python records/ladder.py RACE RACE": "test_records_race.py::test_a_ladder_judges_each_idea_against_the_base",
    ".venv/bin/python records/ladder.py RACE --equal-time": "test_records_race.py::test_a_ladder_judges_each_idea_against_the_base",
    "torchrun --nproc_per_node=2 own.py": "test_readme.py::test_the_script_of_the_readme_trains_saves_and_continues",
    ".venv/bin/python records/stats.py records/2026-11-22_pieces": RUN,
    ".venv/bin/python records/verify.py records/2026-11-22_pieces": RUN,
    "./run.sh -n 10 --vs REVISION": "test_scripts.py::test_what_is_started",
    "./run.sh --until-decided --max-n 12 --vs HEAD": LONG + "test_records_race.py::test_a_race_until_decided_stops_for_the_claim",
    "CUDA_VISIBLE_DEVICES= ./run.sh": "the same as ./run.sh without a GPU",
    "./run.sh --preset speedrun": "needs a GPU",
    ".venv/bin/pip install kernels==0.17.2": "needs a network",
    """.venv/bin/python -c 'import train_gpt; print("FlashAttention 3:", train_gpt.find_flash_3() or "loaded")'""":
        "test_readme.py::test_flash_attention_3_is_installed_and_imported",
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 ./run.sh":
        "test_scripts.py::test_torch_s_build_for_an_older_driver_is_one_variable_away",
    "docker build -f launch/cluster/Dockerfile -t gpt-speedrun .": "needs Docker; test_readme.py::test_the_dockerfile_copies_what_its_set_up_needs",
    'docker run -it --gpus all --ipc=host -v "$PWD/data:/speedrun/data" -v "$PWD/logs:/speedrun/logs" -v "$PWD/records:/speedrun/records" '
    '-v "$PWD/.cache:/speedrun/.cache" gpt-speedrun -n 5': "needs Docker and GPUs",
    'sky launch -c speedrun launch/cluster/skypilot.yaml --env RACE="-n 5"': "test_readme.py::test_skypilot_starts_a_race_with_its_arguments",
    'modal run launch/cluster/modal_app.py --race "-n 5"': "test_readme.py::test_the_modal_app_brings_logs_back_also_from_a_race_that_failed",
    "apt-get install -y git python3-venv python3-dev build-essential procps": "needs root and a network",
    "module load gcc python": "needs a cluster",
    'rsync -a ./ NODE:"$PWD"/': "needs a second machine",
    "python bench/first_gpu": "needs a GPU",
    "bench/first_gpu --dry": LONG + "test_dry_gpu.py::",
    "python data/cached_fineweb10B.py 9": "modded-nanogpt's",
    "rm -r .venv": "it would delete the tests' own packages",
    ".venv/bin/torchrun --nproc_per_node=8 train_gpt.py": "needs eight GPUs; on two ranks: test_signals.py::test_torchrun_by_hand",
    "torchrun --max-restarts 3": "test_signals.py::test_twenty_kills_at_random_moments_change_no_byte",
    ".venv/bin/torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint HOST:29500 --rdzv_id RUN train_gpt.py":
        "needs two hosts with GPUs; with two network namespaces: test_hosts.py::",
    ".venv/bin/python data/fineweb.py 9": "test_data_fineweb.py::test_a_second_call_requests_nothing_after_a_complete_download",
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu130 ./run.sh --setup": "test_scripts.py::test_what_the_tests_add_is_installed_once_and_only_for_them",
    ".venv/bin/python data/gpt2.py DIR": "test_data_fineweb.py::test_gpt2s_tokens_are_written_beside_other_shards",
    ".venv/bin/python records/export.py logs/RUN.txt --to wandb --follow": "test_records_export.py::test_wandb_reads_what_was_sent",
    ".venv/bin/python records/picture.py logs/RUN.txt logs/RUN2.txt":
        "test_records_picture.py::test_several_runs_in_one_picture_are_named_by_what_differs",
    ".venv/bin/python records/trace.py before.json.gz --vs after.json.gz --picture FILE": "test_records_trace.py::test_two_versions_in_one_picture",
    ".venv/bin/python launch/watch.py": "test_records_picture.py::test_the_page_follows_a_run_from_its_first_step_to_its_end",
    ".venv/bin/python records/stats.py THEIR_LOGS --target 3.28": "test_records_stats.py::",
    ".venv/bin/python records/stats.py logs/race-ID": "test_records_stats.py::",
    ".venv/bin/python records/verify.py logs/race-ID --data data/stdlib": "test_records_verify.py::",
    '.venv/bin/python records/board.py add logs/race-ID records/DATE_NAME "what it shows"': "test_records_board.py::",
    ".venv/bin/python records/board.py pack records/DATE_NAME":
        "test_records_board.py::test_unpacked_logs_of_a_record_are_packed_again_into_the_same_bytes",
    ".venv/bin/python records/stats.py records/DATE_NAME": "test_records_logs.py::test_an_archive_is_read_like_files_beside_it",
    "sbatch launch/cluster/speedrun.sbatch -n 5": "test_readme.py::test_the_slurm_job_starts_what_it_says",
    "sbatch --nodes 2 --gpus-per-node 4 launch/cluster/speedrun.sbatch": "test_readme.py::test_the_slurm_job_starts_what_it_says",
    "sbatch --nodes 2 launch/cluster/speedrun.sbatch --micro_batch_splits 2": "test_config.py::test_sixteen_gpus_need_micro_batches_in_two_parts",
    ".venv/bin/python bench/own_model.py": "test_bench.py::test_own_model",
    ".venv/bin/python bench/public_record.py LOG_OR_PROGRAM": "test_bench.py::test_a_last_window_of_18_blocks_in_place_of_20_shows",
    "dry_gpu/setup": "test_dry_gpu.py::",
    "DRY_GPU_HOME=DIR dry_gpu/setup 2.11.0": "downloads 5 GB",
    "dry_gpu/run --flash 2 -- --preset speedrun": "test_dry_gpu.py::test_flash_attention_2_is_slower_on_hopper_alone",
    "dry_gpu/run -- --preset speedrun": "test_dry_gpu.py::",
    "dry_gpu/run --compare": "test_emulated_steps.py::test_two_steps",
    "dry_gpu/run --program FILE_OR_LOG -- --preset frontier": "test_dry_gpu.py::test_a_public_program",
    "dry_gpu/run --ranks 1 --memory 24 --arch 89 -- --preset speedrun": "test_dry_gpu.py::",
    "dry_gpu/run --records CLONE": "needs a clone of the records; its parts: test_dry_gpu.py::test_the_difference_of_two_columns",
    "dry_gpu/run --order": "test_emulated_gpu.py::test_uses_of_memory_are_ordered",
    ".venv/bin/python dry_gpu/faults.py": "test_emulated_gpu.py::test_a_planted_fault_is_found",
    "./run.sh --preflight": "test_preflight.py::",
}


def commands(text):
    """Return every command in blocks and in code spans, once each."""
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.M | re.S)
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```\n.*?^```$", "", text, flags=re.M | re.S))
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()] + spans
    found = (" ".join(line.split()) for line in lines)
    return list(dict.fromkeys(line for line in found if re.match(PROGRAMS, line)))


def test_every_command_is_in_the_table_and_each_named_test_is_there():
    assert {command for text in PAGES.values() for command in commands(text)} == {*COMMANDS}
    for command, how in COMMANDS.items():
        for file, name in re.findall(r"(test_\w+\.py)::(\w*)", how if how is not RUN else ""):
            assert re.search(rf"^def {name or 'test_'}\b" if name else "^def test_", (ROOT / "tests" / file).read_text(), re.M), command


@pytest.fixture
def clone(tmp_path):
    """A copy of the files that git tracks, with links to .venv and the data."""
    if not (ROOT / ".venv" / "ready").exists():
        pytest.skip("run.sh has not set up .venv here")
    clone = tmp_path / "a clone"
    for name in subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True).split("\n")[:-1]:
        if (ROOT / name).is_file() and ("2026-11-22_pieces" in name or not name.startswith(("tests/", "records/20"))):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    for linked in (".venv", "data/stdlib"):
        if (ROOT / linked).exists():  # otherwise the first command makes it
            (clone / linked).symlink_to(ROOT / linked)
    return clone


def run_in(clone, command):
    """Run a command as written, on the CPU -> what it printed."""
    done = subprocess.run(["bash", "-c", command], cwd=clone, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_the_default_run_reaches_its_target(clone):
    reached = "target reached: " if sys.version_info[:2] == start.LIBRARY else "\nvalidation loss "  # with others it has no target
    assert reached in run_in(clone, "./run.sh")


@pytest.mark.slow
def test_the_commands_of_a_first_hour(clone, monkeypatch, capsys):
    """The trial starts as written; the others run in this process, which has torch and scipy already."""
    tried, said = run_in(clone, "./run.sh --trial"), {}
    (log,) = (path.stem for path in clone.glob("logs/*.txt"))
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sample, "ROOT", clone)
    capsys.readouterr()
    for command in [command for command, how in COMMANDS.items() if how is RUN][1:]:
        program, *words = shlex.split(command.replace("RUN", log))[1:]
        programs = {"sample.py": sample, "records/export.py": export, "records/stats.py": stats, "records/verify.py": verify}
        assert programs[program].main(words) == 0, command
        said[command] = capsys.readouterr().out
    shown = README.split("```")[3]
    for line in ("validation loss ", "model: ", "log: ", "picture: "):
        assert line in tried and line in shown
    for line in README.split("## Check a record")[1].split("```")[1].splitlines()[3:]:
        assert line in "".join(said.values()), line
    assert next(iter(said.values())).startswith("def read(")
    assert (clone / "logs/speedrun/steps.csv").read_text().count("\n") == 1 + 20 + 1


def test_every_documented_run_and_race_is_accepted_by_the_programs_parsers():
    """Also the script's: flags that it lacks, values that it refuses, ideas of several flags, and numbers of ranks."""
    found = [line for text in (race.__doc__, ladder.__doc__, start.COMMANDS)
             for line in re.findall(r"^ +((?:python launch/race\.py|\./run\.sh).*?)(?:  .*)?$", text, re.M)]
    found += [line for text in PAGES.values() for line in commands(text) if re.match(r"(\w+=\S* )?\./run\.sh", line)]
    assert len(found) > 30
    for line in found:
        program, words = re.fullmatch(r".*?(run\.sh|race\.py) ?(.*)", line).groups()
        words, flags, ranks = shlex.split(words), [], 8
        if program == "run.sh":
            _, words, flags = start.parse(words)
        if words:
            options = race.parse(words)
            flags, ranks = flags + options.flags, options.ranks
        if "--resume" in line:
            continue
        ideas = [idea for idea in options.vs if idea.startswith("-")] if words else []
        for side in race.describe_sides(ideas, None, race.check_flags(flags)[1]).values():
            preset, config = train_gpt.parse_config(side["flags"], "laptop")
            if preset == "laptop":  # others do not fit on every machine
                train_gpt.check_config(config, ranks if program == "race.py" else train_gpt.usable_ranks(config, ranks))


def test_every_flag_is_one_of_a_program_here_and_every_link_leads_somewhere():
    sources = "".join(path.read_text(encoding="utf-8") for path in
                      (ROOT / "sample.py", ROOT / "test.sh", ROOT / "bench/first_gpu", *(path for folder in ("bench", "data", "dry_gpu", "launch", "records")
                                             for path in (ROOT / folder).glob("*.py"))))
    torchrun = {"--nnodes", "--nproc_per_node", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--max-restarts"}
    known = {*train_gpt.make_parser()._option_string_actions, *re.findall(r"--[a-z][\w-]+", sources), *torchrun}
    for path in (*PAGES, *RESULTS, *(path for path in (ROOT / "launch/cluster").iterdir() if path.is_file())):
        text = re.sub(r"^#SBATCH.*|--no-install-recommends|--(gpus all|ipc=host|build-arg|nodes 2|gpus-per-node|env RACE|race |exclusive|cpus-per-task)", "", path.read_text(), flags=re.M)
        assert not {*re.findall(r"(?<![\w-])--[a-z][\w-]+", text)} - known, path
    for page, link in ((page, link) for page, text in LINKING.items() for link in re.findall(r"\]\((?!http)([^)]+)\)", text)):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), (page, link)
        found = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M) if heading else []
        assert heading in {"", *(re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in found)}, (page, link)


def test_every_path_in_code_is_a_file_here():
    elsewhere = r"\.\./|logs/|[A-Z_]+/|data/cached_fineweb10B.py|data/own-|data/fineweb10B|data/stdlib|records/DATE_NAME"
    folder = r"(?:bench|data|docs|dry_gpu|launch|records|tests)/\w"
    for page, text in {**PAGES, **RESULTS}.items():
        code = " ".join(re.findall(r"^```.*?^```$|`[^`]+`|^    [^\n]*$", text, re.M | re.S))
        for path in re.findall(rf"(?<![\w./…-])(?:{folder}[\w./-]*|[\w-]+/[\w./-]+\.(?:py|md|sh|c|png|yaml|sbatch))", code):
            assert re.match(elsewhere, path) or (ROOT / path).exists(), (page, path)


def scripts(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def run_own(folder, rank, port, output):
    """Run own.py in this forked process, as python does, or as torchrun does rank by rank."""
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if port else {}
    runpy.run_path("own.py", run_name="__main__")


def test_the_script_of_the_readme_trains_saves_and_continues(tmp_path):
    """As written, beside nothing but the package: on two ranks, which save; alone, from what they saved; and alone."""
    block, = scripts(README)
    losses = []
    for number, (folder, ranks) in enumerate((("a", 2), ("a", 1), ("b", 1))):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "own.py").write_text(block)
        if not (link := tmp_path / folder / "gpt_speedrun").exists():
            link.symlink_to(ROOT / "gpt_speedrun")
        output, port = tmp_path / f"output{number}", free_port() if ranks == 2 else 0
        processes = [forked(run_own, tmp_path / folder, rank, port, output) for rank in range(ranks)]
        for process in processes:
            process.join(600)
        found = re.findall(r"^step (\d+): loss (\d+\.\d{3})$", output.read_text(), re.M)
        assert len(found) == ranks and {process.exitcode for process in processes} == {0}, output.read_text()
        losses.append({(int(step), float(loss)) for step, loss in found})
    ((step, two),), ((later, continued),), ((_, alone),) = losses
    stated = float(re.search(r"It prints about `step 50: loss (\S+)`", README)[1])
    assert (step, later) == (50, 100) and abs(two - stated) < 0.3 and abs(alone - two) < 0.01 and continued < two - 0.1


def test_the_line_that_the_readme_edits_is_there():
    old, new = re.search(r"replace\s+`(\S+)`\s+by\s+`(\S+)`", README).groups()
    assert (ROOT / "train_gpt.py").read_text().count(old) == 1 and old.split("=")[0] == new.split("=")[0]


def test_the_rule_of_the_docs_trains_as_its_formula_says():
    block, = (block for block in scripts(PAGES[ROOT / "docs/gradient-sync.md"]) if "class Lion" in block)
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    names = {"model": models[0], "__name__": __name__}
    exec(block, names)
    optimizer = names["optimizer"]
    averages = [torch.zeros_like(p) for p in models[1].parameters()]
    for step in range(5):
        for model in models:
            model(torch.full((1, 3), step - 2.0)).square().sum().backward()
        optimizer.step()
        for p, m in zip(models[1].parameters(), averages):  # algorithm 2 of arXiv:2302.06675, without decay
            p.data -= 0.01 * (0.9 * m + 0.1 * p.grad).sign()
            m.copy_(0.99 * m + 0.01 * p.grad)
            p.grad = None
    for a, b in zip(*(model.parameters() for model in models)):
        assert torch.allclose(a, b, atol=1e-6)


# launch/cluster


def test_the_dockerfile_copies_what_its_set_up_needs(tmp_path):
    """Run the set-up with only the files that were copied before it, and a fake Python."""
    text = (ROOT / "launch/cluster/Dockerfile").read_text()
    copied, entry = re.search(r"^COPY (.*) \./\nRUN (\./run\.sh --setup)$", text, re.M).groups()
    for name in copied.split():
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "fake" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", "-c", entry], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"})
    assert done.returncode == 0 and (tmp_path / ".venv" / "ready").exists(), done.stderr
    for line in re.findall(r"^RUN (.*)", text, re.M):
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
    assert {line.split()[0] for line in text.splitlines() if line and line[0] != "#"} == \
        {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "ENTRYPOINT"}
    ignored = (ROOT / "launch/cluster/Dockerfile.dockerignore").read_text().split("\n")[1:-1]
    assert ignored == [".venv", "logs", "data/*", "!data/*.py", "**/__pycache__"], "a pattern's last slash would be dropped"


@pytest.mark.parametrize("name", ["docs/clusters.md", "launch/cluster/Dockerfile", "launch/cluster/modal_app.py", "launch/cluster/speedrun.sbatch"])
def test_set_up_without_a_driver_takes_the_build_for_gpus(name):
    """Where an image is built, and on a login node; run.sh alone would take torch's build for CPUs."""
    said = re.findall(r"PIP_EXTRA_INDEX_URL\W+https://download\.pytorch\.org/whl/(\w+)", (ROOT / name).read_text())
    assert "cu130" in said and {*said} <= {"cu126", "cu130"}


@pytest.mark.parametrize("name", ["docs/gpus.md", "launch/cluster/Dockerfile", "launch/cluster/modal_app.py", "launch/cluster/skypilot.yaml"])
@pytest.mark.parametrize("why", ["", "kernels: No module named 'kernels'"])
def test_flash_attention_3_is_installed_and_imported(name, why, monkeypatch, capsys):
    """The same version everywhere, and a line that says whether it can be loaded."""
    text = (ROOT / name).read_text()
    line, = re.findall(r"\.venv/bin/python -c '(import train_gpt.*)'", text)
    assert re.findall(r"\.venv/bin/pip install (kernels\S*?)[\"\s]", text) == ["kernels==0.17.2"]
    monkeypatch.setattr("train_gpt.find_flash_3", lambda: why)
    exec(line, {})
    assert capsys.readouterr().out == f"FlashAttention 3: {why or 'loaded'}\n"


@pytest.mark.parametrize("environment, flags, started", [
    ({}, "-n 5", "./run.sh -n 5"),
    ({}, "--save_every 5", "./run.sh --run_id slurm-77.0 --save_every 5"),
    ({"SLURM_RESTART_COUNT": "1"}, "", "./run.sh --resume logs/slurm-77.0.step000004.ckpt"),
    ({"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}, "", ".venv/bin/python -m torch.distributed.run --nnodes 2 "
     "--nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id 77 train_gpt.py --run_id slurm-77.0"),
    ({"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}, "--micro_batch_splits 2", ".venv/bin/python -m torch.distributed.run --nnodes 2 "
     "--nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id 77 train_gpt.py --run_id slurm-77.0 --micro_batch_splits 2"),
    ({"SLURM_NNODES": "2"}, "-n 5", ""),
    ({"SLURM_RESTART_COUNT": "1"}, "-n 5", ""),
    ({}, "--resume latest", "./run.sh --resume latest"),
])
def test_the_slurm_job_starts_what_it_says(tmp_path, environment, flags, started):
    for name, text in (("srun", 'echo "$@"'), ("scontrol", '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "1",
                   "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "77", **environment}

    def job():
        return subprocess.run(["bash", ROOT / "launch/cluster/speedrun.sbatch", *flags.split()], capture_output=True, text=True, env=environment)
    refused = job()
    assert refused.returncode == 1 and "on the login node run PIP_EXTRA_INDEX_URL=" in refused.stderr
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "ready").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "another.step000100.ckpt").touch()
    if "ckpt" in started:
        assert job().stdout == "./run.sh --run_id slurm-77.1\n", "this job has no checkpoint"
        for step, modified in ((4, 20), (2, 10)):
            (path := tmp_path / "logs" / f"slurm-77.0.step00000{step}.ckpt").touch()
            os.utime(path, (modified, modified))
    done = job()
    assert done.stdout == started + "\n" * bool(started)
    assert (done.returncode, "race" in done.stderr) == ((0, False) if started else (1, True))


def test_skypilot_starts_a_race_with_its_arguments(tmp_path):
    task = yaml.safe_load((ROOT / "launch/cluster/skypilot.yaml").read_text())
    assert {*task} == {"name", "workdir", "resources", "envs", "setup", "run"} and task["resources"]["accelerators"] == "H100:8"
    assert subprocess.run(["bash", "-n", "-c", task["setup"]]).returncode == 0
    for name in "run.sh", "data/fineweb.py":
        assert name in task["setup"] and (ROOT / name).exists()
    (tmp_path / "run.sh").write_text("#!/bin/sh\nprintf '[%s]' \"$@\"\n")
    (tmp_path / "run.sh").chmod(0o755)
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "RACE": '-n 5 --vs "--muon_lr 0.05"'})
    assert done.stdout == "[-n][5][--vs][--muon_lr 0.05]", done.stderr


def test_the_modal_app_brings_logs_back_also_from_a_race_that_failed(tmp_path, monkeypatch):
    """Run its two functions as written, with a stand-in for the package modal, which has no service here."""
    modal = mock.MagicMock()
    modal.is_local.return_value = True
    modal.App().function.return_value = modal.App().local_entrypoint.return_value = lambda function: function
    monkeypatch.setitem(sys.modules, "modal", modal)
    spec = importlib.util.spec_from_file_location("modal_app", ROOT / "launch/cluster/modal_app.py")
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    assert app.here == ROOT
    there, app.here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "run.sh").write_text("#!/bin/sh\nmkdir -p logs/race\nprintf '[%s]' \"$@\" > logs/race/a.txt\ntouch logs/a.pt\nexit 3\n")
    (there / "run.sh").chmod(0o755)
    app.start.remote = lambda arguments: app.start(arguments, there)  # a function takes attributes
    with pytest.raises(SystemExit) as exit:
        app.main("-n 5 --vs '--muon_lr 0.05'")
    assert exit.value.code == 3
    assert [path.name for path in app.here.rglob("*.*")] == ["a.txt"]
    assert (app.here / "logs/race/a.txt").read_text() == "[-n][5][--vs][--muon_lr 0.05]"


def package_source(folder):
    """Copy what an installation reads."""
    shutil.copytree(ROOT / "gpt_speedrun", folder / "gpt_speedrun", ignore=shutil.ignore_patterns("__pycache__"))
    for name in "pyproject.toml", "setup.py", "MANIFEST.in", "train_gpt.py", "README.md", "LICENSE", "requirements.txt":
        shutil.copy(ROOT / name, folder / name)
    for name in "data", "launch", "records", "tests":  # what setuptools could take for packages
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return folder


def build(source, what, folder):
    """Call a function of setuptools.build_meta -> the path of what it built in the folder."""
    make = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", make], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("by", ["sdist", pytest.param("wheel", marks=pytest.mark.slow)])
def test_an_installed_package_has_two_files_and_writes_nothing(tmp_path, by):
    """A script elsewhere trains a model with its optimizer, also one that is called train_gpt.py, as modded-nanogpt's."""
    source = package_source(tmp_path / "source")
    if by == "sdist":
        source = build(source, "sdist", tmp_path)
        with tarfile.open(source) as archive:
            assert archive.getmember(f"{source.name.removesuffix('.tar.gz')}/train_gpt.py").isreg()
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                           "--no-build-isolation", "--no-compile", "--target", site, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, = (path for path in site.iterdir() if path.suffix != ".dist-info")
    assert package.name == "gpt_speedrun" and sorted(path.name for path in package.iterdir()) == ["__init__.py", "engine.py"]
    assert not (package / "engine.py").is_symlink()
    assert (package / "engine.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    script = """
import torch, gpt_speedrun
model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 10))
optimizer = gpt_speedrun.make_optimizer(model)
for _ in range(30):
    loss = torch.nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10).roll(1))
    loss.backward()
    optimizer.step()
print(gpt_speedrun.__file__, loss.item() < 2.0)
"""
    (elsewhere / "train_gpt.py").write_text(script)
    before = {*tmp_path.rglob("*")}
    done = subprocess.run([sys.executable, "-B", "train_gpt.py"], cwd=elsewhere, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(site)})
    assert done.stdout == f"{package / '__init__.py'} True\n", done.stderr
    assert {*tmp_path.rglob("*")} == before
    done = subprocess.run([sys.executable, elsewhere / "train_gpt.py"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == f"{ROOT / 'gpt_speedrun' / '__init__.py'} True\n", done.stderr
    assert not (ROOT / "gpt_speedrun" / "engine.py").is_symlink()
