"""Test the commands, flags, paths, links and scripts of README.md, docs/ and the results of
bench/, and the files of launch/cluster. Each program's own parser parses every documented command;
those of a first hour run."""

import argparse
import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import frontier
import logs
import sample
import train_gpt
from conftest import forked, free_port

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import export  # noqa: E402
import race  # noqa: E402
from ranks import program_of  # noqa: E402
import start  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402

PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "dry_gpu/README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
RESULTS = {
    path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "bench").rglob("*.md"))
}
# LOG.md is only checked for links: an entry keeps the names that files and flags had on its day
LINKING = {
    **PAGES,
    **RESULTS,
    **{
        path: path.read_text(encoding="utf-8")
        for path in (ROOT / "LOG.md", ROOT / "records/README.md")
    },
}
README = PAGES[ROOT / "README.md"]
PROGRAMS = (
    r"(?:[A-Z_]+=\S*"
    r" )*(?:\./run\.sh|\./test\.sh|\.venv/bin/|torchrun|sbatch|dry_gpu/(?:run|setup)\b|"
    r"(?:rm|git|docker|pip|python|bench/first_gpu|apt-get|rsync|module)(?: |$))"
)

# test_the_commands_of_a_first_hour, in this order
RUN = (
    "./run.sh --trial",
    './run.sh sample --prompt "def read(" --tokens 200',
    "./run.sh export logs/RUN.txt --to csv",
    "./run.sh stats --plan --sd 0.0013 --margin 0.002",
    "./run.sh stats records/2026-11-29_doc_copy",
    "./run.sh verify records/2026-11-29_doc_copy --data data/stdlib",
)
# What others wrote, and what no parser reads
ELSEWHERE = (
    r"(?:git|docker|pip|rm|apt-get|rsync|module|sbatch|dry_gpu/setup|\./test\.sh|tmux|\.venv/bin/(?:pip|python"
    r" -m (?:pip|torch\.))|python own\.py)\b|torchrun|"
    r"\.venv/bin/(?:torchrun |python -c )|python data/cached_fineweb10B\.py"
)


class Parsed(BaseException):
    """A program's parser has accepted its words."""


def parse_as_program(program, words, monkeypatch):
    """Run a program up to the end of its own parser. SystemExit: it refused the words."""

    def parse(parser, *arguments, whole=argparse.ArgumentParser.parse_known_args, **options):
        unknown = whole(parser, *arguments, **options)[1]
        raise Parsed if not unknown else SystemExit(f"{program}: unrecognized arguments: {unknown}")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), *words])
    monkeypatch.syspath_prepend(str((ROOT / program).parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / program), run_name="__main__")


def commands(text):
    """Return every command in blocks and in code spans, once each."""
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.M | re.S)
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```\n.*?^```$", "", text, flags=re.M | re.S))
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()] + spans
    found = (" ".join(line.split()) for line in lines)
    return list(dict.fromkeys(line for line in found if re.match(PROGRAMS, line)))


def documented():
    """Return (program, words) of every command of ours in the pages and in the docstrings of
    programs, but for runs and races."""
    tools = rf"\./run\.sh ({'|'.join(start.TOOLS)})\b"
    lines = [
        re.sub(r"^(?:\w+=\S* )*", "", line) for text in PAGES.values() for line in commands(text)
    ]
    lines = [
        line
        for line in lines
        # a sentence names some commands without their words
        if re.match(rf"{tools}(?!$| --json$| add$)", line)
        or not re.match(rf"{ELSEWHERE}|\./run\.sh", line)
    ]
    for path in (
        ROOT / "sample.py",
        ROOT / "bench/first_gpu",
        *(
            path
            for folder in ("bench", "data", "dry_gpu", "launch", "records")
            for path in (ROOT / folder).glob("*.py")
        ),
    ):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines += re.findall(
            r"^ +((?:(?:\.venv/bin/)?python (?!launch/race|own)[\w/.]+|"
            rf"{tools.replace('(', '(?:')})(?: [^\n\[…]*?)?)(?:  .*)?$",
            said,
            re.M,
        )
    lines = [re.sub(tools, lambda found: start.TOOLS[found[1]], line) for line in lines]
    for line in dict.fromkeys(
        re.sub(r"^(?:\.venv/bin/)?python ", "", line).replace("SEED", "1") for line in lines
    ):
        program, *words = shlex.split(line)
        if program == "dry_gpu/run":
            program = f"dry_gpu/{'compute' if words[:1] and words[0] in ('--compute', '--compare', '--order') else 'page'}.py"
        if (ROOT / program).exists() and "ArgumentParser(" in (ROOT / program).read_text():
            yield program, words


@pytest.mark.parametrize(
    "program, words",
    [pytest.param(*found, id=shlex.join([found[0], *found[1]])) for found in documented()],
)
def test_a_documented_command_is_parsed_by_its_program(monkeypatch, tmp_path, program, words):
    monkeypatch.setattr(logs, "HOME", tmp_path)
    (tmp_path / "race-1").mkdir()
    for name in ("race-1/race.jsonl", "1.txt", "1.pt"):  # for latest
        (tmp_path / name).touch()
    parse_as_program(program, words, monkeypatch)


@pytest.fixture
def clone(tmp_path):
    """A copy of the files that git tracks, with links to .venv and the data."""
    if not (ROOT / ".venv" / "ready").exists():
        pytest.skip("run.sh has not set up .venv here")
    clone = tmp_path / "a clone"
    for name in subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    ).split("\n")[:-1]:
        if (ROOT / name).is_file() and (
            "2026-11-28_copying" in name or not name.startswith(("tests/", "records/20"))
        ):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    for linked in (".venv", "data/stdlib"):
        if (ROOT / linked).exists():  # otherwise the first command makes it
            (clone / linked).symlink_to(ROOT / linked)
    return clone


def run_in(clone, command):
    """Run a command as written, on the CPU -> what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_the_default_run_reaches_its_target(clone):
    # with others it has no target
    standard = "{}.{}".format(*sys.version_info) == start.LIBRARY
    reached = "target reached: " if standard else "\nvalidation loss "
    assert reached in run_in(clone, "./run.sh")


@pytest.mark.slow
def test_the_commands_of_a_first_hour(clone, monkeypatch, capsys):
    """The trial starts as written; the others run in this process, which has torch and scipy
    already."""
    tried = run_in(clone, "./run.sh --trial")
    said = {}
    (log,) = (path.stem for path in clone.glob("logs/*.txt"))
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sample, "ROOT", clone)
    monkeypatch.setattr(logs, "HOME", clone / "logs")
    capsys.readouterr()
    assert {*RUN} <= {command for text in PAGES.values() for command in commands(text)}
    for command in RUN[1:]:
        tool, *words = shlex.split(command.replace("RUN", log))[1:]
        tools = {"sample": sample, "export": export, "stats": stats, "verify": verify}
        assert tools[tool].main(words) == 0, command
        said[command] = capsys.readouterr().out
    shown = README.split("## Train a model on your text")[1].split("```")[3]
    for line in ("validation loss ", "model: "):
        assert line in tried and line in shown
    (block,) = re.findall(
        "## Check a record.*?```.*?\n\n(.*?)```", PAGES[ROOT / "docs/racing.md"], re.S
    )
    for line in block.splitlines():
        assert line in "".join(said.values()), line
    assert next(iter(said.values())).startswith("def read(")
    assert (clone / "logs/speedrun/steps.csv").read_text().count("\n") == 1 + 20 + 1


def test_every_documented_run_and_race_is_accepted_by_the_programs_parsers():
    """Also the script's: flags that it lacks, values that it refuses, ideas of several flags, and
    numbers of ranks."""
    found = [
        line
        for text in (race.__doc__, start.COMMANDS)
        for line in re.findall(
            r"^ +((?:(?:\.venv/bin/)?python launch/race\.py|\./run\.sh).*?)(?:  .*)?$", text, re.M
        )
    ]
    found += [
        line
        for text in PAGES.values()
        for line in commands(text)
        if re.match(r"(\w+=\S* )?\./run\.sh", line)
    ]
    assert len(found) > 30
    for line in (
        line for line in found if not re.search(rf"run\.sh ({'|'.join(start.TOOLS)})\b", line)
    ):
        program, words = re.fullmatch(r".*?(run\.sh|race\.py) ?(.*)", line).groups()
        words = shlex.split(words)
        flags = []
        ranks = 8
        if program == "run.sh":
            _, words, flags = start.parse(words)
        if words:
            options = race.parse(words)
            flags = flags + options.flags
            ranks = options.ranks
        if "--resume" in line:
            continue
        ideas = [idea for idea in options.vs if idea.startswith("-")] if words else []
        for side in race.describe_sides(ideas, None, race.check_flags(flags)[1]).values():
            preset, config = train_gpt.parse_config(
                side["flags"], "laptop", program_of(side["flags"]).PRESETS
            )
            if preset == "laptop":  # others do not fit on every machine
                train_gpt.check_config(
                    config, ranks if program == "race.py" else train_gpt.usable_ranks(config, ranks)
                )


def test_every_flag_is_one_of_a_program_here_and_every_link_leads_somewhere():
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (
            ROOT / "sample.py",
            ROOT / "test.sh",
            ROOT / "bench/first_gpu",
            *(
                path
                for folder in ("bench", "data", "dry_gpu", "launch", "records")
                for path in (ROOT / folder).glob("*.py")
            ),
        )
    )
    # --porcelain is git's; the last four are lm-eval's
    torchrun = (
        "--nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --rdzv_id --max-restarts --update"
        " --porcelain --model --model_args --tasks --num_fewshot"
    ).split()
    known = {
        *(
            flag
            for program in (train_gpt, frontier)
            for flag in train_gpt.make_parser(program.PRESETS)._option_string_actions
        ),
        *re.findall(r"--[a-z][\w-]+", sources),
        *torchrun,
    }
    for path in (
        *PAGES,
        *RESULTS,
        *(path for path in (ROOT / "launch/cluster").iterdir() if path.is_file()),
    ):
        text = re.sub(
            r"^#SBATCH.*|--[a-z]+\[-_\]|--no-install-recommends|--(gpus all|ipc=host|build-arg|nodes"
            r" 2|gpus-per-node|env RACE|race |exclusive|cpus-per-task|account|partition)",
            "",
            path.read_text(),
            flags=re.M,
        )
        assert not {*re.findall(r"(?<![\w-])--[a-z][\w-]+", text)} - known, path
    for page, link in (
        (page, link)
        for page, text in LINKING.items()
        for link in re.findall(r"\]\((?!http)([^)]+)\)", text)
    ):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), (page, link)
        found = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M) if heading else []
        assert heading in {
            "",
            *(re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in found),
        }, (page, link)


def test_every_path_in_code_is_a_file_here():
    elsewhere = r"\.\./|logs/|[A-Z_]+/|data/cached_fineweb10B.py|data/own-|data/fineweb10B|data/stdlib|records/DATE_NAME"
    folder = r"(?:bench|data|docs|dry_gpu|launch|records|tests)/\w"
    for page, text in {**PAGES, **RESULTS}.items():
        code = " ".join(re.findall(r"^```.*?^```$|`[^`]+`|^    [^\n]*$", text, re.M | re.S))
        for path in re.findall(
            rf"(?<![\w./…-])(?:{folder}[\w./-]*|[\w-]+/[\w./-]+\.(?:py|md|sh|c|png|yaml|sbatch))",
            code,
        ):
            assert re.match(elsewhere, path) or (ROOT / path).exists(), (page, path)


def scripts(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def run_own(folder, rank, port, output):
    """Run own.py in this forked process, as python does, or as torchrun does rank by rank."""
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= (
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if port
        else {}
    )
    runpy.run_path("own.py", run_name="__main__")


def test_the_complete_script_trains_saves_and_continues(tmp_path):
    """As written, beside nothing but the package: on two ranks, which save, and alone, from what
    they saved."""
    page = PAGES[ROOT / "docs/gradient-sync.md"]
    (block,) = (block for block in scripts(page) if "own.pt" in block)
    losses = []
    (tmp_path / "own.py").write_text(block)
    (tmp_path / "gpt_speedrun").symlink_to(ROOT / "gpt_speedrun")
    for ranks in 2, 1:
        output = tmp_path / f"output{ranks}"
        port = free_port() if ranks == 2 else 0
        processes = [forked(run_own, tmp_path, rank, port, output) for rank in range(ranks)]
        for process in processes:
            process.join(600)
        found = re.findall(r"^step (\d+): loss (\d+\.\d{3})$", output.read_text(), re.M)
        assert len(found) == ranks and {process.exitcode for process in processes} == {0}, (
            output.read_text()
        )
        losses.append({(int(step), float(loss)) for step, loss in found})
    ((step, two),), ((later, continued),) = losses
    stated = float(re.search(r"It prints about `step 50: loss (\S+)`", page)[1])
    assert (step, later) == (50, 100) and abs(two - stated) < 0.3 and continued < two - 0.1


def test_the_loop_for_programs_commits_a_win_and_takes_back_all_else(tmp_path):
    """As written; by its run.sh, which is not ours, every idea is better but the last. The README
    edits the same line."""
    (block,) = scripts(PAGES[ROOT / "AGENTS.md"])
    (_, better), (kept, lost) = ideas = ast.literal_eval(
        re.search(r"^ideas = (\[.*?\])$", block, re.M | re.S)[1]
    )
    assert re.search(r"replace\s+`(\S+)`\s+by\s+`(\S+)`", README).groups() == ideas[0]
    shutil.copy(ROOT / "train_gpt.py", tmp_path)
    (tmp_path / "run.sh").write_text(
        '#!/bin/sh\necho a run\necho \'{"verdict": "better", "folder": "logs/race-1"}\'\n! git diff HEAD | grep -q'
        f" '{lost}'\n"
    )
    (tmp_path / "run.sh").chmod(0o755)
    environment = {
        **os.environ,
        **{
            f"GIT_{who}_{what}": "a"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    subprocess.run(
        "git init -q && git add . && git commit -qm base",
        shell=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )

    def loop():
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        said = subprocess.run(
            "git status --short; git log --format=%s",
            shell=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        ).stdout
        return done, said.splitlines()

    (hook := tmp_path / ".git/hooks/pre-commit").write_text(
        "#!/bin/sh\necho no ticket number >&2\nexit 1\n"
    )
    hook.chmod(0o755)
    for why in (
        "no ticket number",
        "edits that are not committed",
    ):  # a win that git refuses, and the edit that it leaves
        done, said = loop()
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr
        assert (
            said == [" M train_gpt.py", "base"]
            and better in (tmp_path / "train_gpt.py").read_text()
        )
    hook.unlink()
    subprocess.run(["git", "checkout", "-q", "."], check=True, cwd=tmp_path)
    done, said = loop()
    assert (
        said == [f"{better}: better than {ideas[0][0]} in logs/race-1", "base"]
        and done.returncode == 0
    ), done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0", "1"]
    assert better in (source := (tmp_path / "train_gpt.py").read_text()) and kept in source


def test_the_rule_of_the_docs_trains_as_its_formula_says():
    (block,) = (
        block for block in scripts(PAGES[ROOT / "docs/gradient-sync.md"]) if "class Lion" in block
    )
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
        for p, m in zip(
            models[1].parameters(), averages
        ):  # algorithm 2 of arXiv:2302.06675, without decay
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
    python.write_text(
        '#!/bin/sh\ncase "$*" in "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", entry],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0 and (tmp_path / ".venv" / "ready").exists(), done.stderr
    for line in re.findall(r"^RUN (.*)", text, re.M):
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
    assert {line.split()[0] for line in text.splitlines() if line and line[0] != "#"} == {
        *"FROM RUN WORKDIR ARG COPY ENTRYPOINT".split()
    }
    ignored = (ROOT / "launch/cluster/Dockerfile.dockerignore").read_text().split("\n")[1:-1]
    assert ignored == [
        ".venv",
        "logs",
        "data/*",
        "!data/*.py",
        "**/__pycache__",
    ], "a pattern's last slash would be dropped"


def test_every_place_installs_the_same_builds(monkeypatch, capsys):
    """Without a driver run.sh would take torch's build for CPUs. A line says whether
    FlashAttention 3 can be loaded."""
    text = {
        name: (ROOT / name).read_text()
        for name in (
            "docs/clusters.md",
            "docs/gpus.md",
            "launch/cluster/Dockerfile",
            "launch/cluster/speedrun.sbatch",
        )
    }
    for name in {*text} - {"docs/gpus.md"}:
        assert "cu130" in (
            said := {
                *re.findall(
                    r"PIP_EXTRA_INDEX_URL\W+https://download\.pytorch\.org/whl/(\w+)", text[name]
                )
            }
        ) and said <= {"cu126", "cu130"}, name
    for name in {*text} - {"launch/cluster/speedrun.sbatch"}:
        (line,), version = (
            {*re.findall(found, text[name])}
            for found in (
                r"\.venv/bin/python -c '(import train_gpt.*)'",
                r"\.venv/bin/(?:python -m )?pip install (kernels\S*?)[\"\s]",
            )
        )
        assert version == {"kernels==0.17.2"}, name
        for why in "", "kernels: No module named 'kernels'":
            monkeypatch.setattr("train_gpt.find_flash_3", lambda: why)
            exec(line, {})
            assert capsys.readouterr().out == f"FlashAttention 3: {why or 'loaded'}\n"


@pytest.mark.parametrize(
    "environment, flags, started",
    [
        ({}, "-n 5", "./run.sh -n 5"),
        ({}, "--save_every 5", "./run.sh --run_id slurm-77.0 --save_every 5"),
        ({"SLURM_RESTART_COUNT": "1"}, "", "./run.sh --resume logs/slurm-77.0.step000004.ckpt"),
        (
            {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"},
            "",
            ".venv/bin/python -m torch.distributed.run --nnodes 2 --nproc_per_node 4"
            " --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id 77 train_gpt.py"
            " --run_id slurm-77.0",
        ),
        (
            {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"},
            "--preset=frontier89",
            ".venv/bin/python -m torch.distributed.run --nnodes 2 --nproc_per_node 8"
            " --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id 77 frontier.py"
            " --run_id slurm-77.0 --preset=frontier89",
        ),
        ({"SLURM_NNODES": "2"}, "-n 5", ""),
        *(
            ({"SLURM_RESTART_COUNT": "1"}, race, "")
            for race in ("--vs=HEAD", "--max_n 12", "--until_decided")
        ),
        ({"SLURM_RESTART_COUNT": "1"}, "--resume logs/race-X", "./run.sh --resume logs/race-X"),
        ({"SLURM_RESTART_COUNT": "1"}, "--log-dir=x", "./run.sh --log-dir=x"),
    ],
)
def test_the_slurm_job_starts_what_it_says(tmp_path, environment, flags, started):
    for name, text in (
        ("srun", 'echo "$@"'),
        ("scontrol", '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "77",
        **environment,
    }

    def job():
        return subprocess.run(
            ["bash", ROOT / "launch/cluster/speedrun.sbatch", *flags.split()],
            capture_output=True,
            text=True,
            env=environment,
        )

    refused = job()
    assert (
        refused.returncode == 1 and "on the login node run PIP_EXTRA_INDEX_URL=" in refused.stderr
    )
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


def package_source(folder):
    """Copy what an installation reads."""
    shutil.copytree(
        ROOT / "gpt_speedrun", folder / "gpt_speedrun", ignore=shutil.ignore_patterns("__pycache__")
    )
    names = "pyproject.toml setup.py MANIFEST.in train_gpt.py README.md LICENSE requirements.txt"
    for name in names.split():
        shutil.copy(ROOT / name, folder / name)
    for name in "data", "launch", "records", "tests":  # what setuptools could take for packages
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return folder


@pytest.mark.parametrize("by", ["sdist", pytest.param("wheel", marks=pytest.mark.slow)])
def test_an_installed_package_has_two_files_and_writes_nothing(tmp_path, by):
    """A script elsewhere trains a model with its optimizer, also one that is called train_gpt.py,
    as modded-nanogpt's."""
    source = package_source(tmp_path / "source")
    if by == "sdist":
        make = (
            f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
        )
        source = (
            tmp_path
            / subprocess.check_output(
                [sys.executable, "-c", make], cwd=source, text=True
            ).splitlines()[-1]
        )
        with tarfile.open(source) as archive:
            assert archive.getmember(f"{source.name.removesuffix('.tar.gz')}/train_gpt.py").isreg()
    site = tmp_path / "site"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            *"-m pip install --quiet --disable-pip-version-check --no-deps".split(),
            *"--no-build-isolation --no-compile --target".split(),
            site,
            source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (package,) = (path for path in site.iterdir() if path.suffix != ".dist-info")
    assert package.name == "gpt_speedrun" and sorted(path.name for path in package.iterdir()) == [
        "__init__.py",
        "engine.py",
    ]
    assert not (package / "engine.py").is_symlink()
    assert (package / "engine.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    if by == "sdist":  # the slow form trains with what is installed
        return
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
    done = subprocess.run(
        [sys.executable, "-B", "train_gpt.py"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.stdout == f"{package / '__init__.py'} True\n", done.stderr
    assert {*tmp_path.rglob("*")} == before
    done = subprocess.run(
        [sys.executable, elsewhere / "train_gpt.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == f"{ROOT / 'gpt_speedrun' / '__init__.py'} True\n", done.stderr
    assert not (ROOT / "gpt_speedrun" / "engine.py").is_symlink()
