"""Tests of records/board.py: records from races, and their pages."""

import datetime
import hashlib
import html
import io
import json
import re
import sys
from pathlib import Path

import pytest

RECORDS = Path(__file__).resolve().parent.parent / "records"
sys.path.insert(0, str(RECORDS))

import board  # noqa: E402
import leaks  # noqa: E402
import logs  # noqa: E402
import pages  # noqa: E402
import same_loss  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402

RULE = "=" * 100
HOSTILE = (
    "</script ><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>|`*[x](y)"
    + "w" * 60
)


def write_log(
    folder,
    run,
    side,
    loss,
    seconds,
    declared=3,
    source="import torch\nprint('one')\n",
    device="a machine",
    **config,
):
    """Write a run of ten steps in the form of train_gpt.py."""
    start = {
        "run_id": f"r{run}{side}",
        "started": f"2026-01-02T03:0{run}:05+00:00",
        "preset": "toy",
        "config": {"seed": run, "log_dir": "logs", "sync": "hook", "race_side": side, **config},
        "seed": run,
        "ranks": 2,
        "environment": {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "error.json"},
        "git": {"revision": "c0ffee", "clean": True},
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "hardware": {"device": device, "gpus": []},
        "target_val_loss": 1.4,
        "race": {"race_id": "x", "run": run, "declared_n": declared, "side": side},
    }
    steps = [
        f"step:{i}/10 train_time:{i * seconds * 100:.0f}ms step_avg:{seconds * 100:.2f}ms"
        f" train_loss:{5 - 0.37 * i - 0.01 * run:.4f}"
        for i in range(1, 11)
    ]
    lines = [
        source,
        RULE,
        "Running Python",
        RULE,
        json.dumps(start),
        "step:0/10 val_loss:5.0000 train_time:0ms step_avg:0.00ms",
        *steps[:5],
        f"step:5/10 val_loss:{3 + loss / 10:.4f} train_time:{seconds * 500:.0f}ms"
        f" step_avg:{seconds * 100:.2f}ms",
        *steps[5:],
        f"step:10/10 val_loss:{loss:.4f} train_time:{seconds * 1000:.0f}ms"
        f" step_avg:{seconds * 100:.2f}ms",
        json.dumps({"end": {"final_val_loss": loss}}),
        "peak memory allocated: 1 MiB reserved: 1 MiB",
    ]
    (folder / f"r{run}{side}.txt").write_text("\n".join(lines) + "\n")


def write_race(folder, **baseline):
    """Write a finished race of three pairs in which side a is one second faster. baseline:
    settings of side b's logs."""
    folder.mkdir()
    for run in (1, 2, 3):
        write_log(folder, run, "a", 1 + 0.05 * run, 9 + 0.01 * run)
        write_log(folder, run, "b", 1.02 + 0.05 * run, 10 + 0.01 * run, **baseline)
    sides = {
        "a": {"revision": None, "flags": ["--train_files", "data/*.bin"]},
        "b": {"revision": None, "flags": ["--sync", "step"]},
    }
    race = {
        "id": "x",
        "n": 3,
        "seed": 0,
        "ranks": 2,
        "sides": sides,
        "threads": "1",
        "revision": None,
        "declared": "2026-01-02T03:00:00+00:00",
    }
    (folder / "r1a.steps.json").write_text("[[1, 2.5]]\n")  # older races wrote it
    (folder / "race.png").write_bytes(b"drawn while it ran")
    (folder / "race.jsonl").write_text(json.dumps({"race": race}) + "\n")
    return folder


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return (a race, an empty folder of records) on a machine with a known name."""
    monkeypatch.setattr(board.socket, "gethostname", lambda: "my-host.local")
    monkeypatch.setattr(board, "HERE", tmp_path / "records")
    (tmp_path / "records").mkdir()
    return write_race(tmp_path / "race-x"), tmp_path / "records"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a folder of two records; in the second, side b has another source and hostile names."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "records").mkdir()
    other = "import torch\n" + "".join(f"print({i})\n" for i in range(40)) + "print('two')\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "HERE", folder / "records")
        patch.setattr(sys, "stdin", io.StringIO("y\ny\n"))  # both break rules
        first = write_race(folder / "race-1", sync="step")
        second = write_race(
            folder / "race-2", sync="step", source=other, device=HOSTILE, dtype=HOSTILE
        )
        (second / "race.jsonl").unlink()
        for log in second.glob("*a.txt"):
            log.write_text(
                log.read_text()
                .replace("print('one')", "print('more')")
                .replace('"a machine"', json.dumps(HOSTILE))
                .replace(
                    hashlib.sha256(b"import torch\nprint('one')\n").hexdigest(),
                    hashlib.sha256(b"import torch\nprint('more')\n").hexdigest(),
                )
            )
        assert (
            board.main(
                ["add", str(first), str(folder / "records" / "2026-01-02_toy"), "A toy | record"]
            )
            == 0
        )
        assert (
            board.main(
                ["add", str(second), str(folder / "records" / "2026-01-03_hostile"), HOSTILE]
            )
            == 0
        )
    return folder / "records"


@pytest.fixture
def judged(places, monkeypatch):
    """Return (records, report, rules): the tools' verdicts are these two dicts, which a test may
    change."""
    folder, records = places
    (records / "2026-01-02_toy").mkdir()
    for path in folder.glob("*.txt"):
        (records / "2026-01-02_toy" / path.name).write_text(path.read_text())
    (records / "2026-01-02_toy" / "README.md").write_text("# A toy\n")
    (records / "2026-01-02_toy" / "plot.png").write_bytes(b"")
    mean = {"n": 3, "mean": 1.202, "sd": 0.001}
    report = {
        "verdict": "the claim holds",
        "reason": "because",
        "alpha": 0.01,
        "warnings": [],
        "left_out": [],
        "loss": {**mean, "target": 1.4, "p": 1e-5, "significant": True},
        "time": {"n": 3, "mean": 9.02, "sd": 0.01},
        "verdicts": [
            stats.Verdict(
                name="side a",
                base="side b",
                n=3,
                paired=True,
                mean_loss=1.1,
                base_loss=1.12,
                loss=stats.Contrast(-0.02, -0.03, -0.01, 0.003),
                mean_seconds=9.02,
                base_seconds=10.02,
                time=stats.Contrast(0.9, 0.89, 0.91, 1e-6),
                answer=same_loss.Answer(
                    0.9, 0.89, 0.91, 1e-6, 0.005, 4, 0.5, 0.2, "by turns", 0.01, 1e-6
                ),
                why="",
                bits=[1.6, 1.62],
            )
        ],
    }
    rules = {
        "rules": [
            {"rule": name, "verdict": verdict, "reason": "seen"}
            for name, verdict in (
                ("one", "pass"),
                ("two", "not checkable"),
                ("three", "fail"),
                ("faster than the other side, p < 0.01", "fail"),
            )
        ],
        "unseen": "",
    }

    def judge_runs(folder):
        report["sides"] = stats.choose_sides(stats.parse([str(folder)]))
        return report

    monkeypatch.setattr(board, "judge_runs", judge_runs)
    monkeypatch.setattr(board, "judge_rules", lambda folder: (rules["rules"], rules["unseen"]))
    return records, report, rules


def written():
    return board.main(["write"]) == 0


# Records
# --------------------------------------------------------------------------------------------------


def test_the_board_shows_and_changes_nothing(published, capsys, monkeypatch):
    monkeypatch.setattr(board, "HERE", published)
    page = published / "README.md"
    before = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    capsys.readouterr()
    assert board.main([]) == 0 and capsys.readouterr().out == page.read_text()
    assert {path: path.stat().st_mtime_ns for path in published.rglob("*")} == before


def test_a_race_becomes_a_record_and_a_row(published):
    before = datetime.date.today()
    today = board.new_folder("toy")
    assert today in [board.HERE / f"{day}_toy" for day in (before, datetime.date.today())]
    assert board.new_folder("records/2026_x") == Path("records/2026_x")
    made = published / "2026-01-02_toy"
    names = [f"r{run}{side}.txt" for run in (1, 2, 3) for side in "ab"]
    assert sorted(path.name for path in made.iterdir()) == ["README.md", logs.ARCHIVE, "plot.png"]
    assert [*logs.members(made / logs.ARCHIVE)] == sorted(["race.jsonl", *names])
    said = board.judge_runs(made)["verdicts"][0].sentence
    row = next(
        line for line in (published / "README.md").read_text().splitlines() if "[2026-01-02" in line
    )
    assert "is not judged: no short base" in said
    for text in ((made / "README.md").read_text(), row):
        assert said in html.unescape(text)


def test_pages_of_two_records_are_those_of_the_golden_file(published, golden):
    """The second record has another source on each side, and hostile names."""
    pages = {path: path.read_text() for path in sorted(published.rglob("README.md"))}
    golden(
        "board",
        "\n".join(f"--- {path.relative_to(published)}\n{text}" for path, text in pages.items()),
    )
    digests = {
        source: hashlib.sha256(f"import torch\nprint('{source}')\n".encode()).hexdigest()
        for source in ("one", "more")
    }
    first = pages[published / "2026-01-02_toy/README.md"]
    second = pages[published / "2026-01-03_hostile/README.md"]
    assert (
        first.count(digests["one"]) == 2
        and digests["one"] not in second
        and digests["more"] in second
    )


def test_pages_written_again_do_not_change_and_each_log_is_parsed_once(published, monkeypatch):
    """A racer who edits train_gpt.py and adds a record finds no other record's page changed."""
    before = {path: path.read_bytes() for path in published.rglob("*.*")}
    parsed = []
    parse = logs._parse
    monkeypatch.setattr(
        logs, "_parse", lambda path, content: parsed.append(path) or parse(path, content)
    )
    monkeypatch.setattr(logs, "_cache", {})
    monkeypatch.setattr(
        leaks, "source_of_checkout", lambda: "import torch\nprint(open('another script'))\n" * 9
    )
    monkeypatch.setattr(board, "HERE", published)
    assert board.main(["write"]) == 0 and len(parsed) == len(set(parsed)) == 12
    assert {path: path.read_bytes() for path in published.rglob("*.*")} == before


def test_a_long_diff_is_cut_and_says_by_how_much():
    lines = board.short_diff("".join(f"{i}\n" for i in range(500)), "", ("b", "a"))
    assert (
        len(lines) == board.MAX_DIFF_LINES + 1
        and lines[-1] == f"… and {503 - board.MAX_DIFF_LINES} more lines"
    )
    assert pages.fence(["````x", "``"]) == "`````"


def test_sides_differ_by_their_configs():
    configs = ({"seed": 1, "lr": 0.1, "x": "S", "few": True}, {"seed": 2, "lr": 0.2, "x": "S"})
    sides = [stats.Side("", [logs.Run("x", start={"config": config})]) for config in configs]
    assert board.differences(sides) == [("lr", "0.1", "0.2"), ("few", "true", "-")]


def test_a_side_s_curve_is_the_mean_of_its_runs():
    runs = [
        logs.Run(
            "x",
            steps=[logs.Step(i, 1000 * i * slow, 1.0, 2.0 + slow, False) for i in range(1, 301)],
            validations=(
                logs.Validation(0, 9.0, 0, {}),
                logs.Validation(300, 2.0 * slow, 1e6 * slow, {}),
            ),
        )
        for slow in (1, 2)
    ]
    trained, validated = pages.mean_curves(runs)
    assert (
        len(trained) == pages.POINTS
        and trained[-1] == (300, 450.0, 3.5)
        and validated == [(300, 1500.0, 3.0)]
    )


def test_without_records_there_is_no_leaderboard(places, capsys):
    assert (
        board.main(["write"]) == 2
        and "no records in" in capsys.readouterr().err
        and not list(places[1].iterdir())
    )


@pytest.mark.parametrize(
    "spoil,says",
    [
        (lambda folder, records: (folder / "r3b.txt").unlink(), "declared"),
        (
            lambda folder, records: [path.unlink() for path in folder.iterdir()],
            "holds no logs of a race",
        ),
        (
            lambda folder, records: (folder / "r4a.txt").write_bytes(b"\xff\xfe"),
            "r4a.txt: cannot be read as a log",
        ),
        (
            lambda folder, records: write_log(
                folder, 3, "a", 1.2, 9.0, source=f"x = '{records.parent}'\n"
            ),
            "r3a.txt, line 1, names",
        ),
        (
            lambda folder, records: write_log(folder, 3, "a", 1.2, 9.0, device="on my-host"),
            "r3a.txt, line 7, names",
        ),
    ],
)
def test_what_cannot_be_judged_leaves_nothing_behind(places, capsys, spoil, says):
    folder, records = places
    spoil(folder, records)
    before = sorted(records.rglob("*"))
    assert board.main(["add", str(folder), str(records / "new"), "A toy"]) == 2
    assert sorted(records.rglob("*")) == before
    error = capsys.readouterr().err
    assert error.startswith("board.py: error: ") and says in error and error.count("\n") == 1
    advised = re.search("stats.py ([^ `]+)", error)
    assert not advised or Path(advised[1]).is_dir(), error
    assert board.main(["add", str(folder / "nowhere"), str(records / "x"), "A toy"]) == 2


# Publishing
# --------------------------------------------------------------------------------------------------


def test_a_race_that_breaks_a_rule_becomes_a_record_if_somebody_says_so(
    judged, tmp_path, capsys, monkeypatch
):
    records, _, rules = judged
    race = write_race(tmp_path / "race-y")
    before = sorted(records.rglob("*"))
    described = board.describe(records / "2026-01-02_toy")
    monkeypatch.setattr(
        board,
        "describe",
        lambda folder: (
            described
            | {
                "name": folder.name,
                "broken": described["rules"][0]["verdict"] == "fail",
            }
        ),
    )
    for answer, broken, status in (("", 1, 2), ("n", 1, 2), ("y", 1, 0), ("", 0, 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
        described["rules"][0] |= {
            "verdict": "fail" if broken else "pass",
            "reason": f"seen {'so it was, ' * 50}and this is the advice",
        }
        assert (
            board.main(["add", str(race), str(records / f"2026-01-04_{answer}{broken}"), "a title"])
            == status
        )
        said = capsys.readouterr()
        asked = " ".join(said.err.split()).partition("board.py: write a page that says so? [y/N]")
        assert bool(asked[1]) == asked[0].count("this race breaks a rule: three: seen") == broken
        assert asked[0].count("so it was, ") == 50 * broken, "no part is left out"
        assert (
            ("nothing was written" in asked[2]) == (status == 2) == ("\nwritten: " not in said.out)
        )
        if status:
            assert sorted(records.rglob("*")) == before


def test_a_trial_is_said_to_be_one(judged):
    records, report, rules = judged
    rules["rules"][1] |= {
        "rule": verify.VAL_TOKENS,
        "reason": "6 of 6 runs: no target: 512 of 999 tokens were scored",
    }
    assert written()
    text = (records / "2026-01-02_toy/README.md").read_text()
    assert (
        "No target: 512 of 999 tokens were scored." in text
        and "the answer below is the race" in text
    )
    board_page = (records / "README.md").read_text()
    assert ": no target, [" in board_page and "| **no target**: " in board_page


def test_the_records_here_name_no_folder_and_each_has_its_pages():
    for folder in (path.parent for path in RECORDS.glob("*/README.md")):
        assert f"({folder.name}/)" in (RECORDS / "README.md").read_text()
        files = [
            file
            for path in folder.iterdir()
            for file in logs.listing(str(path))
            if not file.endswith(".png")
        ]
        assert len(files) > 6 and str(folder / "race.jsonl") in files
        for path in [*files, str(RECORDS / "README.md")]:
            text = logs.open_file(path).read().decode()
            text = text.partition(RULE + "\n")[2] or text
            assert not re.search(r"(?<![\w.*])/(?:home|root|work|tmp|mnt|Users)/", text), path


# Pages
# --------------------------------------------------------------------------------------------------


def test_text_from_logs_is_no_markup(published):
    for page in (published / "README.md", published / "2026-01-03_hostile" / "README.md"):
        lines = page.read_text().splitlines()
        # but for the author's title
        assert not any(
            "<script" in line or "<img" in line for line in lines[page.parent != published :]
        )
        for line in lines:
            if line.startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", line)) in (4, 6, 8, 9), line


def test_every_page_says_the_verdict_the_doubts_and_the_broken_rules(judged):
    records, report, _ = judged
    report["loss"]["p_bootstrap"] = 0.245
    said = report["verdicts"][0].sentence
    assert written()
    for page in ("README.md", "2026-01-02_toy/README.md"):
        text = (records / page).read_text()
        assert (
            said in text and "1 rule is broken" in text and "p = 0.24 by a bootstrap-t" in text
        ), page
    lead = next(
        line
        for line in (records / "README.md").read_text().splitlines()
        if line.startswith("The newest")
    )
    assert said in lead and "1 rule is broken" in lead and "p = 0.24 by a bootstrap-t" in lead
    report["verdicts"] = []
    report["loss"]["significant"] = False
    report["loss"]["p"] = 0.3
    assert written()
    page = (records / "2026-01-02_toy/README.md").read_text()
    assert "not shown to be below the target 1.4 (p = 0.3, n = 3)" in page and said not in page


def test_without_a_target_or_a_spread_there_is_a_page(judged):
    records, report, rules = judged
    report["loss"] = {
        "n": 1,
        "mean": 1.2,
        "sd": None,
        "target": None,
        "p": None,
        "significant": None,
    }
    one = report["verdicts"][0]
    one.answer = None
    one.loss.low = one.time.low = None
    report["time"] = {"n": 1, "mean": 9.02, "sd": None}
    assert written()
    text = (records / "2026-01-02_toy/README.md").read_text()
    assert (
        "without a target" in text
        and "| - | - | not judged | 1.1000 | -0.0200 | 9.02 | 0.900 |" in text
        and "nan" not in text
    )
    one.time = one.mean_seconds = one.base_seconds = None
    report["time"] = None
    for log in (records / "2026-01-02_toy").glob("*.txt"):
        log.write_text(re.sub(r" train_time:\S+ step_avg:\S+", "", log.read_text()))
    assert written()
    assert "| -0.0200 | - | - |" in (records / "2026-01-02_toy/README.md").read_text()


def ranks(*records):
    """Return {name: rank} of each leaderboard. records: name, seconds, what its runs state, and
    whether all is good but that."""

    def described(at, name, seconds, good=True, preset="laptop", **facts):
        runs = [
            logs.Run(
                f"{name}{i}",
                1,
                final_loss=3.2,
                loss_decimals=1,
                train_time_ms=seconds,
                **{"card": "EPYC", "gpus": 2, **facts},
                validations=(logs.Validation(9, 3.2, 1000 * at + i, {}),),
            )
            for i in range(3)
        ]
        return {
            "name": name,
            "preset": preset,
            "good": good,
            "report": {"time": seconds and {"mean": seconds}, "sides": [stats.Side("", runs)]},
            "track": board.track_of(
                preset, board.describe_side(stats.Side("", runs), Path("."))["where"], runs[0], None
            ),
        }

    return [
        {row["record"]["name"]: row["rank"] for row in one["rows"]}
        for one in board.leaderboards(
            [described(at, *record[:-1], **record[-1]) for at, record in enumerate(records)]
        )
    ]


def test_a_leaderboard_is_sorted_by_time_and_ranks_what_is_good():
    assert ranks(
        ("slow", 9, {}),
        ("other", 1, {"preset": "x"}),
        ("fast", 2, {}),
        ("broken", 3, {"good": False}),
        ("none", 4, {"card": None}),
    ) == [{"other": 1}, {"fast": 1, "broken": None, "slow": 2}, {"none": None}]


@pytest.mark.parametrize(
    "fact", ["gpus", "card", "torch", "driver", "cpu", "threads", "validated_on"]
)
def test_only_what_stats_compares_shares_a_leaderboard(fact):
    """A fact that older logs do not state separates no records, except the machine."""
    one, other = (5, 6) if fact == "gpus" else ("5", "6")
    assert ranks(("one", 1, {fact: one}), ("two", 2, {fact: other}), ("three", 3, {fact: one})) == [
        {"one": 1, "three": 2},
        {"two": 1},
    ]
    assert len(ranks(("one", 1, {fact: one}), ("two", 2, {fact: None}))) == 1 + (
        fact in ("gpus", "card")
    )


def test_a_run_has_one_place():
    record = {
        "name": "x",
        "preset": "x",
        "track": "x",
        "good": True,
        "report": {"time": None, "sides": [stats.Side("", [logs.Run("x", gpus=1, card="x")])]},
    }
    assert [row["rank"] for row in board.leaderboards([record, record])[0]["rows"]] == [1, None]


@pytest.mark.parametrize(
    "stated,threads,cpu", [("", "1", None), (', "threads": 4, "cpu_id": "25/1/1"', "4", "25/1/1")]
)
def test_the_facts_of_a_run_on_cpus(tmp_path, stated, threads, cpu):
    """Older logs state neither their CPU nor, but for a variable, their threads."""
    write_log(tmp_path, 1, "a", 1.2, 9.0, val_len=64, val_tokens=128)
    log = tmp_path / "r1a.txt"
    log.write_text(log.read_text().replace('"gpus": []', f'"gpus": []{stated}'))
    run = logs.last_run(str(log))
    assert (run.threads, run.cpu, run.validated_on) == (
        threads,
        cpu,
        "128 tokens in sequences of 64",
    )


def test_fails_come_first_and_the_claim_is_no_rule(judged):
    records, _, rules = judged
    assert written()
    text = (records / "2026-01-02_toy/README.md").read_text()
    part = text[text.rindex("1 rule is broken; 1 holds, 1 could not be checked") :]
    places = [
        part.index(f"| {name} |")
        for name in (
            "three",
            "two",
            "one",
            "claim, not a rule: faster than the other side, p &lt; 0.01",
        )
    ]
    assert places == sorted(places) and "not shown" in part
    rules["unseen"] = "No log shows <everything>."
    assert (
        written()
        and "No log shows &lt;everything&gt;." in (records / "2026-01-02_toy/README.md").read_text()
    )
