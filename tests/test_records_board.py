"""Records made from races, and the leaderboard from the records."""

import json
import sys
from pathlib import Path

import pytest

RECORDS = Path(__file__).resolve().parent.parent / "records"
sys.path.insert(0, str(RECORDS))

import board  # noqa: E402


def write_log(folder, run, side, loss, seconds, declared=3, source="print('one')"):
    start = {"run_id": f"r{run}{side}", "started": "2026-01-02T03:04:05+00:00", "config": {"seed": run, "log_dir": "/home/me/logs"},
             "seed": run, "ranks": 2, "environment": {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "/home/me/error.json"},
             "git": {"revision": "c0ffee", "clean": True}, "hardware": {"device": "a machine", "gpus": []}, "target_val_loss": 1.4,
             "race": {"race_id": "x", "run": run, "declared_n": declared, "side": side}}
    rule = "=" * 100
    steps = [f"step:{i}/10 train_time:{i * seconds * 100:.0f}ms step_avg:{seconds * 100:.2f}ms" for i in range(1, 11)]
    lines = [source, rule, "Running Python", rule, json.dumps(start), f"step:0/10 val_loss:5.0000 train_time:0ms step_avg:0.00ms", *steps,
             f"step:10/10 val_loss:{loss:.4f} train_time:{seconds * 1000:.0f}ms step_avg:{seconds * 100:.2f}ms",
             json.dumps({"end": {"final_val_loss": loss}}), "peak memory allocated: 1 MiB reserved: 1 MiB"]
    (folder / f"r{run}{side}.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def race(tmp_path, monkeypatch):
    """A finished race of three pairs in which side a is a second faster, and an empty folder of records."""
    folder = tmp_path / "race-x"
    folder.mkdir()
    for run in (1, 2, 3):
        write_log(folder, run, "a", 1.2 + 0.001 * run, 9 + 0.01 * run)
        write_log(folder, run, "b", 1.2 + 0.001 * run, 10 + 0.01 * run)
    (folder / "race.jsonl").write_text('{"race": "x"}\n')
    records = tmp_path / "records"
    records.mkdir()
    monkeypatch.setattr(board, "HERE", records)
    return folder, records


def test_a_race_becomes_a_record_and_a_row(race, capsys):
    folder, records = race
    assert board.main(["add", str(folder), str(records / "2026-01-02_toy"), "A toy | record"]) == 0
    made = records / "2026-01-02_toy"
    assert sorted(path.name for path in made.iterdir()) == ["README.md", "plot.png", "r1a.txt", "r1b.txt", "r2a.txt", "r2b.txt", "r3a.txt", "r3b.txt", "race.jsonl"]
    before, after = (place.joinpath("r1a.txt").read_text().splitlines() for place in (folder, made))
    assert [i for i, (a, b) in enumerate(zip(before, after)) if a != b] == [4] and len(before) == len(after)
    assert "/home/me" in before[4] and "/home/me" not in after[4] and json.loads(after[4])["environment"] == {"OMP_NUM_THREADS": "1"}
    page = (made / "README.md").read_text()
    assert page.startswith("# A toy | record\n") and "python records/stats.py records/2026-01-02_toy --side a" in page
    assert "1.20200" in page and "9.0200" in page and "revision `c0ffee`" in page
    leaderboard = (records / "README.md").read_text()
    row = next(line for line in leaderboard.splitlines() if "2026-01-02_toy" in line)
    assert "A toy \\| record" in row and "1.20200" in row and "the claim holds" in row and "times faster" in row and "| 3 |" in row
    assert board.main([]) == 0 and (records / "README.md").read_text() == leaderboard


def test_without_records_there_is_no_leaderboard(race, capsys):
    assert board.main([]) == 2 and "no record lies in" in capsys.readouterr().err and not list(race[1].iterdir())


@pytest.mark.parametrize("spoil,says", [
    (lambda folder, records: (folder / "r3b.txt").unlink(), "declared"),
    (lambda folder, records: write_log(folder, 3, "a", 1.2, 9.0, source="print('two')"), "source"),
    (lambda folder, records: [path.unlink() for path in folder.iterdir()], ""),
    (lambda folder, records: (records / "new").mkdir(), "exists"),
    (lambda folder, records: (folder / "r4a.txt").write_text('{"run_id": "cut'), "r4a.txt: cannot be read as a log"),
    (lambda folder, records: (folder / "r4a.txt").write_bytes(b"\xff\xfe"), "r4a.txt: cannot be read as a log"),
])
def test_what_cannot_be_judged_leaves_nothing_behind(race, capsys, spoil, says):
    folder, records = race
    spoil(folder, records)
    before = sorted(records.rglob("*"))
    assert board.main(["add", str(folder), str(records / "new"), "A toy"]) == 2
    assert sorted(records.rglob("*")) == before
    error = capsys.readouterr().err
    assert error.startswith("board.py: error: ") and says in error and error.count("\n") == 1
    assert board.main(["add", str(folder / "nowhere"), str(records / "x"), "A toy"]) == 2
