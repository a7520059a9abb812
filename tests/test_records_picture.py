"""Tests of records/picture.py and records/watch.py, on logs of this project and of others."""

import os
import re
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import picture  # noqa: E402
import watch  # noqa: E402

START = '{"run_id": "x", "config": {"target_val_loss": 1.5}, "planned": {"steps": 40}}'
END = '{"end": {"final_val_loss": 1.4}}'


def log(*lines):
    return "\n".join(["import torch", "=" * 100, "a machine", "=" * 100, *lines, ""])


def steps(first, last, total=40):
    return [f"step:{n}/{total} train_time:{100 * n}ms step_avg:100.00ms train_loss:{1 + 5 / n:.4f}" for n in range(first, last + 1)]


WHOLE = log(START, "step:0/40 val_loss:5.5000 train_time:0ms step_avg:0.00ms", *steps(1, 40),
            "step:40/40 val_loss:1.4000 train_time:4000ms step_avg:100.00ms", END)
COMMUNITY = log("step:0/40 val_loss:10.8 train_time:0ms step_avg:nanms",
                *(f"step:{n}/40 train_time:{90 * n}ms step_avg:90.00ms" for n in range(1, 41)),
                "step:40/40 val_loss:3.2780 train_time:3600ms step_avg:90.00ms")


def svg(tmp_path, text):
    (tmp_path / "run.txt").write_text(text)
    assert picture.main([str(tmp_path / "run.txt"), str(tmp_path / "run.svg")]) == 0
    return (tmp_path / "run.svg").read_text()


def test_a_run_s_picture_tells_its_losses_its_target_and_its_speed(tmp_path):
    drawn = svg(tmp_path, WHOLE)
    for said in ("Loss over steps", "Loss over seconds", "Speed", "validation: 1.4000", "target 1.5", "ms/step"):
        assert f">{said}<" in drawn, said
    (tmp_path / "run.svg").unlink()
    assert picture.main([str(tmp_path / "run.txt")]) == 0 and (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text, says", [
    (log(START, *steps(1, 7)), "validation: none yet"),
    (log(START, *steps(1, 1)), "validation: none yet"),
    (COMMUNITY, "validation: 3.2780"),
    (log(START, *steps(1, 9), '{"resumed": {"from_step": 5}}', *steps(6, 8)), "target 1.5"),
    (log('{"run_id": "x", "config": [1]}', *steps(1, 7)), "validation: none yet"),
    (log('{"run_id": "x", "config": {"target_val_loss": {}}}', *steps(1, 7)), "validation: none yet"),
])
def test_a_run_under_way_or_of_others_is_drawn_as_far_as_it_is(tmp_path, text, says):
    assert f">{says}<" in svg(tmp_path, text)


@pytest.mark.parametrize("text", ["", "my diary", log(START), None])
def test_what_is_no_run_is_named_in_a_line(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "run.txt").write_text(text)
    assert picture.main([str(tmp_path / "run.txt")]) == 2
    said = capsys.readouterr().err
    assert re.match(r"picture.py: error: .*run.txt: no step with a train_time.*; name the log of a run\n$", said), said
    assert not (tmp_path / "run.png").exists()


def test_the_running_mean_is_that_of_the_latest_twentieth():
    values = np.random.default_rng(0).normal(size=100)
    expected = [values[max(0, i - 4):i + 1].mean() for i in range(100)]
    assert np.allclose(picture.running_mean(values), expected)


@pytest.fixture
def open_page(tmp_path):
    """Return open_page(path), which fetches a page from a server on tmp_path."""
    server = watch.serve(tmp_path, 0)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def open_page(path="/"):
        return urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=30).read().decode()
    open_page.port = server.server_port
    yield open_page
    server.shutdown()
    server.server_close()


def test_the_page_follows_a_run_from_its_first_step_to_its_end(tmp_path, open_page):
    assert "no log yet" in open_page()
    path = tmp_path / "race-1" / "<b>run.txt"
    path.parent.mkdir()
    for text, says in ((log(START), "no step yet"), (log(START, *steps(1, 10)), "step 10 of 40: running"),
                       (log(START, *steps(1, 20)), "step 20 of 40: running"), (WHOLE, "step 40 of 40: ended"), (COMMUNITY, "step 40 of 40: ended")):
        path.write_text(text)
        page = open_page()
        assert says in page and "&lt;b&gt;run.txt" in page and "<b>" not in page
        assert page.count("<svg") == page.count("Loss over seconds") == (says != "no step yet")
    assert f'http-equiv="refresh" content="{watch.PERIOD_S}"' in page
    path.write_text(log(START, *steps(1, 10)))
    path.write_text(log(START, *steps(1, 10), "error: the disk <i>burns"))
    assert "error: the disk &lt;i&gt;burns" in open_page()
    path.write_text(log(START, *steps(1, 10)))
    os.utime(path, (1, 1))
    assert re.search(r"step 10 of 40: nothing written for \d+ min, and no end line", open_page())
    with pytest.raises(urllib.error.HTTPError):
        open_page("/race-1/")


def test_a_silent_client_a_dangling_link_and_an_odd_log_do_not_block_the_page(tmp_path, open_page, monkeypatch):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "odd.txt").write_text(WHOLE)
    (tmp_path / "run.txt").write_text(WHOLE)
    read = picture.read
    monkeypatch.setattr(picture, "read", lambda path: read(path) if path.name == "run.txt" else {}["steps"])
    with socket.create_connection(("127.0.0.1", open_page.port)):  # says nothing
        page = open_page()
    assert "step 40 of 40: ended" in page and page.count("<svg") == 1 and "cannot be drawn: KeyError" in page
    assert "not shown: gone.txt: No such file or directory" in page


def test_the_first_page_does_not_wait_for_all_plots(tmp_path, open_page, monkeypatch):
    draw = picture.draw
    monkeypatch.setattr(picture, "draw", lambda *arguments: (time.sleep(0.7), draw(*arguments)))
    for i in range(watch.SHOWN):
        (tmp_path / f"{i}.txt").write_text(WHOLE)
    page = open_page()
    assert 1 <= page.count("<svg") <= 2 and page.count("drawn at the next reload") == watch.SHOWN - page.count("<svg")
    for _ in range(watch.SHOWN):
        page = open_page()
    assert page.count("<svg") == watch.SHOWN


def test_a_browser_that_leaves_early_causes_no_traceback(tmp_path, open_page, capsys, monkeypatch):
    (tmp_path / "run.txt").write_text(WHOLE)
    left, page = threading.Event(), watch.page
    monkeypatch.setattr(watch, "page", lambda folder: left.wait(10) and page(folder) * 100)
    with socket.create_connection(("127.0.0.1", open_page.port)) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
    left.set()
    assert open_page().count("<svg") == 100 and capsys.readouterr().err == ""


def test_only_this_machine_s_own_names_open_the_page(open_page):
    """A page of another site may let its name resolve to 127.0.0.1."""
    for host, status in (("evil.example", 403), (f"evil.example:{open_page.port}", 403), ("127.0.0.1.example", 403), ("", 403),
                         (f"localhost:{open_page.port}", 200), ("localhost:9000", 200), ("127.0.0.1", 200)):
        request = urllib.request.Request(f"http://127.0.0.1:{open_page.port}/", headers={"Host": host})
        try:
            assert urllib.request.urlopen(request, timeout=30).status == status
        except urllib.error.HTTPError as error:
            assert error.code == status


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    server = watch.serve(tmp_path, 0)
    assert watch.main([str(tmp_path), "--port", str(server.server_port)]) == 2
    server.server_close()
    assert "choose another --port" in capsys.readouterr().err
