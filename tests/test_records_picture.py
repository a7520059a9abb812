"""Tests of records/picture.py and launch/watch.py, on logs of this project and of others."""

import dataclasses
import gc
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import logs  # noqa: E402
import pages  # noqa: E402
import picture  # noqa: E402
import same_loss  # noqa: E402
import stats  # noqa: E402
import watch  # noqa: E402

START = (
    '{"run_id": "x", "preset": "x", "seed": 3, "target_val_loss": 1.5, "planned": {"steps": 40}}'
)
RACE = {
    "id": "R",
    "n": 2,
    "ranks": 1,
    "seed": 0,
    "sides": {
        "a": {"revision": None, "flags": ["--preset", "toy", "--muon_lr", "0.05"]},
        "b": {"revision": None, "flags": ["--preset", "toy"]},
    },
}
END = '{"end": {"final_val_loss": 1.4}}'


def log(*lines):
    return "\n".join(["import torch", "=" * 100, "a machine", "=" * 100, *lines, ""])


def steps(first, last, total=40):
    return [
        f"step:{n}/{total} train_time:{100 * n}ms step_avg:100.00ms train_loss:{1 + 5 / n:.4f}"
        for n in range(first, last + 1)
    ]


WHOLE = log(
    START,
    "step:0/40 val_loss:5.5000 train_time:0ms step_avg:0.00ms",
    *steps(1, 40),
    "step:40/40 val_loss:1.4000 train_time:4000ms step_avg:100.00ms",
    END,
)
COMMUNITY = log(
    "step:0/40 val_loss:10.8 train_time:0ms step_avg:nanms",
    *(f"step:{n}/40 train_time:{90 * n}ms step_avg:90.00ms" for n in range(1, 41)),
    "step:40/40 val_loss:3.2780 train_time:3600ms step_avg:90.00ms",
)


def svg(tmp_path, text):
    (tmp_path / "run.txt").write_text(text)
    assert picture.main([str(tmp_path / "run.txt"), str(tmp_path / "run.svg")]) == 0
    return (tmp_path / "run.svg").read_text()


def test_a_run_s_picture_tells_its_losses_its_target_and_its_speed(tmp_path):
    drawn = svg(tmp_path, WHOLE)
    for said in (
        "x preset, seed 3: validation loss 1.4000 after 40 steps and 4.0 s, target 1.5 reached",
        "Loss over steps",
        "Loss over time",
        "Speed",
        "validation: 1.4000",
        "target 1.5",
        "ms/step",
    ):
        assert f">{said}<" in drawn, said
    (tmp_path / "run.svg").unlink()
    assert picture.main([str(tmp_path / "run.txt")]) == 0 and (
        tmp_path / "run.png"
    ).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text, says",
    [
        (log(START, *steps(1, 1)), "validation: none yet"),
        (COMMUNITY, "validation: 3.2780"),
        (log(START, *steps(1, 9), '{"resumed": {"from_step": 5}}', *steps(6, 8)), "target 1.5"),
        (log('{"run_id": "x", "config": [1]}', *steps(1, 7)), "validation: none yet"),
        (log('{"run_id": "x", "target_val_loss": {}}', *steps(1, 7)), "validation: none yet"),
    ],
)
def test_a_run_under_way_or_of_others_is_drawn_as_far_as_it_is(tmp_path, text, says):
    assert f">{says}<" in svg(tmp_path, text)


@pytest.mark.parametrize(
    "runs, names",
    [
        (
            [{"lr": 0.1, "exact": True}, {"lr": 0.1, "exact": False}],
            ["--exact true", "--exact false"],
        ),
        (
            [
                {"lr": 0.1, "depth": 2, "seed": 1},
                {"lr": 0.2, "depth": 3, "seed": 1},
                {"lr": 0.2, "depth": 3, "seed": 2},
            ],
            ["--lr 0.1 --seed 1", "--lr 0.2 --seed 1", "--lr 0.2 --seed 2"],
        ),
        ([{"lr": 0.1}, {"lr": 0.1, "source": "b" * 64}], ["source aaaaaaaa", "source bbbbbbbb"]),
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2}], ["--lr 0.1", "--lr 0.2 run1", "--lr 0.2 run2"]),
        (
            [
                {"preset": "a", "lr": 0.1, "depth": 2},
                {"preset": "b", "lr": 0.2, "depth": 3},
                {"preset": "b", "lr": 0.3, "depth": 3},
            ],
            ["--preset a --lr 0.1", "--preset b --lr 0.2", "--preset b --lr 0.3"],
        ),
        ([{"lr": 0.1}, {"lr": 0.2}, {}], ["--lr 0.1", "--lr 0.2", "run2"]),
        ([{"rows": "Rows(2, 3)", "old": 1}, {"rows": ""}], ["--rows 'Rows(2, 3)'", "--rows ''"]),
    ],
)
def test_runs_are_named_by_what_differs(runs, names):
    assert (
        pages.run_names(
            [
                logs.Run(
                    f"logs/run{at}.txt",
                    seed=config.get("seed"),
                    source_sha256=config.get("source", "a" * 64),
                    start={
                        "preset": config.get("preset", "toy"),
                        "config": {
                            key: value
                            for key, value in config.items()
                            if key not in ("preset", "source")
                        },
                    },
                )
                for at, config in enumerate(runs)
            ]
        )
        == names
    )


def test_several_runs_in_one_picture_are_named_by_what_differs(tmp_path):
    paths = []
    for rate, more in ((0.1, [END]), (0.2, [])):  # the second is under way
        start = {
            "run_id": "x",
            "preset": "toy",
            "seed": 1,
            "target_val_loss": 1.5,
            "config": {"lr": rate},
        }
        validated = [
            f"step:40/40 val_loss:{1.2 + rate:.4f} train_time:4000ms step_avg:100.00ms"
        ] * bool(more)
        (tmp_path / f"{rate}.txt").write_text(
            log(json.dumps(start), *steps(1, 40 if more else 20), *validated, *more)
        )
        paths.append(str(tmp_path / f"{rate}.txt"))
    assert picture.main([*paths, str(tmp_path / "both.svg")]) == 0
    drawn = (tmp_path / "both.svg").read_text()
    for said in (
        "2 runs: validation losses from 1.3000 to 1.3000",
        "--lr 0.1: 1.3000",
        "--lr 0.2: none yet",
        "target 1.5",
        "Loss over steps; dots: validation",
        "Loss over time",
        "ms/step",
    ):
        assert f">{said}<" in drawn, said
    assert picture.main(paths) == 0 and (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "not on the same validation data" in picture.title_of(
        *(dataclasses.replace(picture.read(paths[0]), validated_on=data) for data in "ab")
    )


def test_a_notebook_s_backend_is_not_needed(tmp_path):
    """Jupyter and Colab set it for the programs that they start, and it is not in .venv."""
    (tmp_path / "x.txt").write_text(log(START, *steps(1, 4)))
    done = subprocess.run(
        [sys.executable, ROOT / "records" / "picture.py", tmp_path / "x.txt"],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    )
    assert done.returncode == 0 and (tmp_path / "x.png").exists(), done.stderr


@pytest.mark.parametrize("text", ["", log(START), None])
def test_what_is_no_run_is_named_in_a_line(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "run.txt").write_text(text)
    assert picture.main([str(tmp_path / "run.txt")]) == 2
    said = capsys.readouterr().err
    assert re.match(
        r"picture.py: error: .*run.txt: no step with a train_time.*; name the log of a run\n$", said
    ), said
    assert not (tmp_path / "run.png").exists()


def test_the_running_mean_is_that_of_the_latest_twentieth_of_the_run():
    values = np.random.default_rng(0).normal(size=100)
    for steps, width in ((None, 5), (400, 20)):
        expected = [values[max(0, i + 1 - width) : i + 1].mean() for i in range(100)]
        assert np.allclose(
            pages.running_means(list(enumerate(values)), steps), list(enumerate(expected))
        )
    thinned = pages.running_means([(i, 2 * i, 1.0) for i in range(1234)])
    assert (
        len(thinned) <= pages.POINTS
        and thinned[-1] == (1233, 2466, 1.0)
        and pages.running_means([]) == []
    )


@pytest.mark.parametrize(
    "low, high, whole, texts",
    [
        (0, 2, True, ["0", "1", "2"]),
        (1.388, 1.3938, False, ["1.388", "1.390", "1.392", "1.394"]),
        (-0.02, 0.01, False, ["−0.02", "−0.01", "0.00", "0.01"]),
        (0, 2345, True, ["0", "500", "1,000", "1,500", "2,000"]),
    ],
)
def test_an_axis_has_round_ticks_in_their_places(low, high, whole, texts):
    axis = pages.Axis([low, high], whole=whole)
    assert [text for _, text in axis.ticks] == texts
    for place, text in axis.ticks:
        assert (
            0 <= place <= 100 and axis.at(float(text.replace(",", "").replace("−", "-"))) == place
        )
    assert 0 < axis.at(low) < axis.at(high) < 100


def test_an_axis_of_one_value_has_a_length():
    for value in (0, 5, -3, 1e-9, 1e-321):
        assert 0 < pages.Axis([value]).at(value) < 100 and pages.Axis([value]).ticks


def test_a_target_far_away_is_a_note_and_the_axis_follows_the_data():
    lines = [
        {
            "name": "x",
            "color": 0,
            "style": "",
            "dots": [],
            "points": [(step, 2 - step / 100) for step in range(1, 101)],
        }
    ]
    near, far = (
        pages.chart("Loss", "step", lines, (target, f"target {target}")) for target in (0.8, 3.28)
    )
    assert near["level"] is not None and not near["note"] and far["level"] is None
    assert far["note"] == "target 3.28 is far above" and far["y"].high < 2 < near["y"].high + 1


def sides(base_losses=(1.2, 1.3, 1.4), declared=True, **more):
    """Return two Sides of a race of three pairs: the idea's loss is 0.1 lower, its time a tenth
    less. more: fields of its runs."""
    race = {"id": "x", **RACE} if declared else {}

    def side(letter, losses, seconds):
        return stats.Side(
            f"side {letter}",
            [
                logs.Run(
                    f"{letter}{i}.txt",
                    1,
                    final_loss=loss,
                    loss_decimals=4,
                    train_time_ms=1000 * time,
                    last_step=10,
                    start=(
                        {"race": {"race_id": "x", "side": letter, "run": i, "declared_n": 3}}
                        if declared
                        else None
                    ),
                    validations=(logs.Validation(10, loss, 1000 * time, {}),),
                    steps=[
                        logs.Step(step, 100 * step * time, None, loss + 5 / step, False)
                        for step in range(1, 11)
                    ],
                    **(more if letter == "a" else {}),
                )
                for i, (loss, time) in enumerate(zip(losses, seconds), 1)
            ],
            declared=race,
        )

    return [
        side("a", [loss - 0.1 for loss in base_losses], (9.0, 9.9, 10.8)),
        side("b", base_losses, (10.0, 11.0, 12.0)),
    ]


def test_the_steps_of_a_short_run_are_whole(tmp_path):
    drawn = svg(tmp_path, log(START, *steps(1, 2)))
    for axis, after in (
        ("axis_1", "axis_2"),
        ("axis_5", "axis_6"),
    ):  # steps, of the first and the third panel
        ticks = re.findall(
            r">([^<\s]+)</text>",
            drawn.partition(f'id="matplotlib.{axis}"')[2].partition(f'id="matplotlib.{after}"')[0],
        )
        assert "step" in ticks and not any("." in tick for tick in ticks), ticks


SHORT_BASE = {"steps": 9, "base_steps": 10, "losses": {"1": [1.2, 1.3], "2": [1.31, 1.42]}}


def test_a_race_s_plot_says_its_verdict_and_follows_its_data(tmp_path):
    both = sides(base_losses=(1.2, 1.31, 1.4))
    for side in both:
        side.declared["short_base"] = SHORT_BASE
    found = stats.verdicts([both])
    stats.plot(both, found, str(tmp_path / "x.svg"))
    drawn = (tmp_path / "x.svg").read_text()
    assert ">--muon_lr 0.05 reaches the base's loss in 0." in drawn
    for said in (
        "Time to the base's loss",
        f"{found[0].answer.ratio:.3f}",
        "Final losses; lines: seeds",
        "Loss",
        "target 3.28 is far above",
        "--muon_lr 0.05, n = 3",
        "seconds of training",
    ):
        assert f">{said}<" in drawn, said
    stats.plot(both[:1], [], str(tmp_path / "x.svg"))
    assert (
        "1.2033 ± 0.1002 nats per token, 9.9000 ± 0.9000 s (mean ± sd, n = 3)"
        in (tmp_path / "x.svg").read_text()
    )


def test_a_plot_of_several_ideas_ranks_them(tmp_path):
    both = sides()

    def verdict(name, ratio, holm):
        answer = same_loss.Answer(
            ratio, ratio - 0.01, ratio + 0.01, holm, 0.005, 4, 0.5, 0.2, "same work", 0.01, holm
        )
        return stats.replace(stats.verdicts([both])[0], name=name, answer=answer)

    found = [
        verdict("--far 1", 5.0, 0.001),
        verdict("--key_offset true", 0.97, 0.01),
        verdict("--slow 1", 1.05, 0.02),
        verdict("--sync step", 1.0, 0.9),
    ]
    stats.plot([*both[:1]] * 4 + both[1:], found, str(tmp_path / "x.svg"))
    drawn = (tmp_path / "x.svg").read_text()
    for said in ("0.970", "5.000", "--far 1", "and 1 idea below"):
        assert f">{said}<" in drawn, said
    assert "reaches the base's loss in 0.970 of its time (0.960 to 0.980)" in drawn
    names = [">--key_offset true<", ">--sync step<", ">--slow 1<", ">--far 1<"]
    assert [*map(drawn.index, names)] == sorted(map(drawn.index, names))
    assert stats.conclusion(found) == "4 ideas: 1 better, 1 no difference, 2 worse"


@pytest.fixture
def open_page(tmp_path):
    """Return open_page(path), which fetches a page from a server on tmp_path."""
    server = watch.serve(tmp_path, 0)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def open_page(path="/"):
        return (
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=600)
            .read()
            .decode()
        )

    open_page.port = server.server_port
    yield open_page
    server.shutdown()
    server.server_close()


def test_the_page_follows_a_run_from_its_first_step_to_its_end(tmp_path, open_page):
    assert "No log yet" in open_page()
    path = tmp_path / "race-1" / "<b>run.txt"
    path.parent.mkdir()
    for text, step, says in (
        (log(START), "0 of ?", "no step yet"),
        (log(START, *steps(1, 10)), "10 of 40", "running, 3 s left"),
        (log(START, *steps(1, 20)), "20 of 40", "running, 2 s left"),
        (WHOLE, "40 of 40", "ended"),
        (COMMUNITY, "40 of 40", "ended"),
    ):
        path.write_text(text)
        page = open_page()
        assert (
            f">{step}</td>" in page
            and f"<td>{says}" in page
            and "&lt;b&gt;run.txt" in page
            and "<b>" not in page
        )
        assert page.count("<svg") == 3 * (says != "no step yet")
        assert ("target 1.5" in page) == (text not in (log(START), COMMUNITY))
    assert f'http-equiv="refresh" content="{watch.PERIOD_S}"' in page
    path.write_text(log(START, *steps(1, 10), "error: the disk <i>burns"))
    assert "error: the disk &lt;i&gt;burns" in open_page()
    path.write_text(log(START, *steps(1, 10)))
    os.utime(path, (1, 1))
    assert re.search(r"<td>nothing written for \d+ min, and no end line", open_page())
    with pytest.raises(urllib.error.HTTPError):
        open_page("/race-1/")


def test_of_a_log_that_grows_one_version_is_kept(tmp_path):
    for step in range(1, 9):
        (tmp_path / "run.txt").write_text(log(START, *steps(1, step)))
        assert f">{step} of 40</td>" in watch.page(tmp_path)
    gc.collect()
    kept = [
        run
        for run in gc.get_objects()
        if isinstance(run, logs.Run) and run.path == tmp_path / "run.txt"
    ]
    assert len(kept) == 1


def test_runs_of_a_race_are_named_by_their_side_and_share_its_color(tmp_path, open_page):
    def raced(which):
        return START.replace(
            '"x", ',
            f'"x", "race": {{"race_id": "R", "run": {which[0]}, "side": "{which[1]}"}}, ',
            1,
        )

    events = [{"race": RACE}]
    for i, which in enumerate(("1a", "1b", "2b", "2a")):
        path = tmp_path / f"x_{which}.txt"
        path.write_text(
            (WHOLE if i < 3 else log(START, *steps(1, 12))).replace(START, raced(which))
        )
        os.utime(path, (time.time() - 10 + i,) * 2)
        events.append(
            {"run": int(which[0]), "side": which[1], "run_id": path.stem, "status": "started"}
        )
    (tmp_path / "race.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = open_page()
    rows = re.findall(
        r'<tr class="(c\d)( faint)?"><td><span class="swatch"></span>(.*?)</td>', page
    )
    assert rows == [
        ("c0", "", "--muon_lr 0.05, run 2"),
        ("c1", "", "base, run 2"),
        ("c1", " faint", "base, run 1"),
        ("c0", " faint", "--muon_lr 0.05, run 1"),
    ]
    over_steps = page[page.index("Loss over steps") : page.index("Loss over time")]
    # one chart for all
    assert over_steps.count("<title>") == 4 and over_steps.count('class="faint"') == 2
    (tmp_path / "uncounted").mkdir()
    (tmp_path / "uncounted" / "x_0a.txt").write_text(log(raced("0a"), *steps(1, 3)))
    assert "</span>--muon_lr 0.05, not counted</td>" in open_page()
    (tmp_path / "race.jsonl").write_text('{"race": ')  # it is being written
    assert "x_2a" in open_page()


def test_what_is_no_log_takes_no_place(tmp_path, open_page):
    (tmp_path / "run.txt").write_text(WHOLE)
    for i in range(watch.SHOWN + 1):
        (tmp_path / f"notes{i}.txt").write_text(f"milk, bread {i}\n" * i)
    page = open_page()
    assert page.count("<tr class") == 1 and "notes" not in page


@pytest.mark.parametrize(
    "record, lost, rows, says",
    [
        ("2026-11-23_key_offset_ladder", "none", 40, "not judged: "),
        ("2026-11-28_copying", "none", 10, "claim holds: "),
        ("2026-11-28_copying", "_05b", 9, "not judged: "),
    ],
)
def test_all_runs_of_a_race_are_shown_with_its_verdict(
    tmp_path, open_page, record, lost, rows, says
):
    """Of several ideas, of one, and of a race that was stopped."""
    folder = tmp_path / "race-1"
    with tarfile.open(ROOT / f"records/{record}/logs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for log in folder.glob(f"*{lost}.txt"):
        log.unlink()
    manifest = folder / "race.jsonl"
    manifest.write_text(
        "".join(line for line in manifest.read_text().splitlines(True) if lost not in line)
    )
    for i in range(watch.SHOWN):  # older runs fill the page, but take no place from the race
        (tmp_path / f"{i}.txt").write_text(WHOLE)
        os.utime(tmp_path / f"{i}.txt", (i, i))
    for path in folder.glob("*.txt"):
        os.utime(path)
    page = open_page()
    assert page.count("<tr class") == max(rows, watch.SHOWN)
    assert ("Verdict" in page) == (lost == "none")  # a race without a run may go on
    os.utime(manifest, (1000, 1000))
    assert f"<b>race-1: Verdict: {says}" in open_page()


def test_a_ladder_without_an_answer_shows_its_losses(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
    picture.main([str(ROOT / "records/2026-11-23_ladder"), str(tmp_path / "x.png")])
    (axes,) = drawn
    marks = [line.get_xdata() for line in axes.lines if line.get_marker() == "D"]
    assert len(marks) == len(axes.get_yticks()) == 9 and marks[-1][0] > 0.1


@pytest.mark.parametrize(
    "start",
    [
        '{"run_id": "x", "config": [1]}',
        '{"run_id": "x", "preset": [], "seed": {}, "target_val_loss": "x"}',
        '{"run_id": "x", "target_val_loss": 1e999}',
    ],
)
def test_a_silent_client_a_dangling_link_and_an_odd_log_do_not_block_the_page(
    tmp_path, open_page, start
):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "odd.txt").write_text(
        log(start, *steps(1, 7), "step:8/40 val_loss:nan train_time:0ms step_avg:0.00ms")
    )
    (tmp_path / "race.jsonl").write_text("[]\n{}\n")
    (tmp_path / "run.txt").write_text(WHOLE)
    with socket.create_connection(("127.0.0.1", open_page.port)):  # says nothing
        page = open_page()
    assert ">40 of 40</td>" in page and page.count("<tr class") == 2
    assert "Not shown: gone.txt: No such file or directory" in page


def test_the_page_needs_no_library_for_plots_or_tests(tmp_path):
    """Which alone takes about a second."""
    (tmp_path / "x.txt").write_text(log(START, *steps(1, 20)))
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import watch;"
        " print('<svg' in watch.page(pathlib.Path(sys.argv[2])), {'numpy', 'scipy', 'matplotlib',"
        " 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "launch"), str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "True set()\n"


def test_a_browser_that_leaves_early_causes_no_traceback(tmp_path, open_page, capsys, monkeypatch):
    (tmp_path / "run.txt").write_text(WHOLE)
    left = threading.Event()
    page = watch.page
    monkeypatch.setattr(watch, "page", lambda folder: left.wait(10) and page(folder) * 100)
    with socket.create_connection(("127.0.0.1", open_page.port)) as browser:
        # close() resets
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
    left.set()
    assert open_page().count("<svg") == 300 and capsys.readouterr().err == ""


def test_only_this_machine_s_own_names_open_the_page(open_page):
    """A page of another site may let its name resolve to 127.0.0.1."""
    for host, status in (
        ("evil.example", 403),
        (f"evil.example:{open_page.port}", 403),
        ("127.0.0.1.example", 403),
        ("", 403),
        (f"localhost:{open_page.port}", 200),
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
    ):
        request = urllib.request.Request(
            f"http://127.0.0.1:{open_page.port}/", headers={"Host": host}
        )
        try:
            assert urllib.request.urlopen(request, timeout=600).status == status
        except urllib.error.HTTPError as error:
            assert error.code == status


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    server = watch.serve(tmp_path, 0)
    assert watch.main([str(tmp_path), "--port", str(server.server_port)]) == 2
    server.server_close()
    assert "choose another --port" in capsys.readouterr().err


def test_a_clock_reset_gives_no_speed():
    speeds = [(i, 100.0 if i != 10 else -29900.0) for i in range(1000)]
    assert all(speed == 100 for _, speed in pages.running_means(speeds, 1000))


def luminance(color):
    linear = [
        (part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4)
        for part in color
    ]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    """Return the contrast of two colors by WCAG; 4.5 is readable."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_of_the_live_page_are_readable_in_light_and_dark(dark):
    colors = {}
    for part in (ROOT / "records/templates/theme.css").read_text().split("@media")[: 1 + dark]:
        colors |= {
            name: bytes.fromhex(color) for name, color in re.findall(r"--(\w+): #(\w{6})", part)
        }
    assert (luminance(colors["paper"]) < 0.1) == dark
    for name, least in {
        "ink": 4.5,
        "pale": 4.5,
        **{f"c{color}": 3 for color in range(watch.COLORS)},
    }.items():
        assert contrast(colors[name], colors["paper"]) >= least, name


@pytest.mark.parametrize("dark", [False, True])
def test_every_word_of_the_diagram_is_readable_in_light_and_dark(dark):
    colors = {}
    for part in (ROOT / "docs/gradient-sync.svg").read_text().split("@media")[: 1 + dark]:
        for names, color in re.findall(r"([.\w, ]+) \{[^}]*?(?<![\w-])fill: #(\w{6})", part):
            colors |= dict.fromkeys(names.strip().split(", "), [*bytes.fromhex(color)])
    plain = ".paper", ".box"
    filled = ".r0", ".r1", ".last", ".early"
    for text, grounds in ("text", plain), (".pale", plain), (".on", filled):
        for ground in grounds:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
