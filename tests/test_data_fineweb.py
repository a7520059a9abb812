"""data/fineweb.py as a program, with the real huggingface_hub client and a small hub on the loopback interface."""
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA))

import train_gpt  # noqa: E402
import fineweb  # noqa: E402
import gpt2  # noqa: E402
from conftest import vocabulary, write_gpt2_tokens  # noqa: E402
from shards import MAGIC, sha256_of  # noqa: E402

VAL, TRAIN1, TRAIN2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
TOKENS, BLOCK = 60_000, 10_000


def make_shard(seed, magic=MAGIC):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, TOKENS
    tokens = np.random.default_rng(seed).integers(0, 50256, TOKENS).astype("<u2")
    tokens[::1000] = 50256
    return header.tobytes() + tokens.tobytes()


class Hub(ThreadingHTTPServer):
    """Answer POST of /api/datasets/REPO/paths-info/REVISION, and HEAD and GET of /datasets/REPO/resolve/REVISION/FILE.

    As on the real hub, the answers state the LFS SHA-256, and those to HEAD and GET redirect to another host. GPT-2's vocab.json is not an LFS file, so the hub itself sends it.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {VAL: make_shard(0), TRAIN1: make_shard(1), TRAIN2: make_shard(2)}
        self.stated_sha256 = {}    # file → SHA-256 to state instead of the right one
        self.cuts = {}             # file → bytes after which the connection breaks, one for each request
        self.failures = {}         # file → statuses to answer instead, one for each request
        self.vocabulary = vocabulary()
        self.slow = set()          # files of which one block is sent, and more when they are no longer in it
        self.requests = []         # files whose content was asked for
        self.looked_up = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *arguments):
        """Do not print an error when a client was killed."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    PREFIX = f"/datasets/{fineweb.REPO}/resolve/{fineweb.REVISION}/"

    def do_POST(self):
        hub, asked = self.server, urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        assert self.path == f"/api/datasets/{fineweb.REPO}/paths-info/{fineweb.REVISION}"
        hub.looked_up += asked["paths"]
        files = []
        for name in asked["paths"]:
            if name in hub.files:
                size = len(hub.files[name])
                files.append({"type": "file", "path": name, "size": size, "oid": "of-the-pointer"})
                if sha256 := hub.stated_sha256.get(name, hashlib.sha256(hub.files[name]).hexdigest()):
                    files[-1]["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(files).encode())

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub, name = self.server, self.path.rsplit("/", 1)[-1]
        if self.path == f"/{gpt2.REPO}/resolve/main/{gpt2.VOCABULARY}":
            hub.looked_up.append(name)
            return self.reply(200, {"X-Repo-Commit": "0" * 40, "ETag": '"of-git"'}, hub.vocabulary)
        if name not in hub.files:
            return self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        content = hub.files[name]
        if self.path.startswith(self.PREFIX):
            sha256 = hashlib.sha256(content).hexdigest()
            return self.reply(302, {"X-Repo-Commit": fineweb.REVISION, "X-Linked-Size": str(len(content)),
                                    "X-Linked-Etag": f'"{sha256}"', "ETag": '"of-the-pointer"',
                                    "Location": f"http://localhost:{hub.server_port}/content/{name}"})
        hub.requests.append(name)
        if hub.failures.get(name):
            return self.reply(hub.failures[name].pop(0), {})
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = hub.cuts[name].pop(0) if hub.cuts.get(name) else len(content)
        block = BLOCK if name in hub.slow else len(content)
        for begin in range(0, cut, block):
            self.wfile.write(content[begin:min(begin + block, cut)])
            while name in hub.slow:
                time.sleep(0.02)
        self.close_connection = cut < len(content)

    def reply(self, status, headers, body=b""):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def start(hub, tmp_path):
    """Start fineweb.py in another directory; it writes shards to `out`. Or start gpt2.py."""
    def start(shards=1, endpoint=f"http://127.0.0.1:{hub.server_port}", program="fineweb.py"):
        environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        return subprocess.Popen([sys.executable, DATA / program, *([str(shards), "--out"] if program == "fineweb.py" else []),
                                 str(tmp_path / "out")],
                                cwd=tmp_path, env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return start


@pytest.fixture
def download(start):
    def download(*arguments, **options):
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=600)
        assert "Traceback" not in err
        return process.returncode, out, err
    return download


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_a_second_call_requests_nothing_after_a_complete_download(hub, download, out):
    code, said, _ = download(2)
    assert code == 0 and "all 3 shards exist and are verified" in said
    assert sorted(path.name for path in out.iterdir()) == sorted([VAL, TRAIN1, TRAIN2, "manifest.json", "gpt2.tiktoken"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["encoding"], manifest["vocab_size"], manifest["bos_id"]) == ("gpt2", 50257, 50256)
    assert manifest["revision"] == fineweb.REVISION
    entries = {entry["name"]: entry for entry in manifest["files"]}
    for name, content in hub.files.items():
        assert (out / name).read_bytes() == content
        assert entries[name] == {"name": name, "split": "val" if name == VAL else "train", "tokens": TOKENS,
                                 "documents": TOKENS // 1000, "bytes": len(content),
                                 "sha256": hashlib.sha256(content).hexdigest()}
    hub.requests.clear(), hub.looked_up.clear()
    code, said, _ = download(2)
    assert code == 0 and "all 3 shards exist" in said
    assert not hub.requests and not hub.looked_up


def test_gpt2s_tokens_are_written_beside_other_shards(hub, download, out):
    for _ in range(2):
        code, said, err = download(program="gpt2.py")
        assert (code, said, err) == (0, f"{out / 'gpt2.tiktoken'}: exists and is verified\n", "")
    assert train_gpt.gpt2_token_bytes(out)[50255] == b" gazed" and hub.looked_up == ["vocab.json"] * 3


def test_more_shards_later_keep_the_manifest_of_the_first(hub, download, out):
    assert download(1)[0] == 0
    hub.requests.clear()
    assert download(2)[0] == 0
    assert hub.requests == [TRAIN2]
    assert len(json.loads((out / "manifest.json").read_text())["files"]) == 3


def test_interrupted_and_refused_requests_are_retried(hub, download, out):
    hub.cuts[TRAIN1] = [50_000, 30_000]
    hub.failures[VAL] = [429]
    assert download()[0] == 0
    assert (hub.requests.count(VAL), hub.requests.count(TRAIN1)) == (2, 3)
    assert (out / TRAIN1).read_bytes() == hub.files[TRAIN1]


def start_until_it_asks_for(name, hub, start):
    process, deadline = start(), time.monotonic() + 600
    while name not in hub.requests:
        assert time.monotonic() < deadline, "the download did not begin"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_complete_shards_stay_after_the_process_was_killed(hub, start, download, out, how):
    hub.slow = {TRAIN1}
    process = start_until_it_asks_for(TRAIN1, hub, start)
    process.send_signal(how)
    _, err = process.communicate(timeout=600)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130) and "Traceback" not in err
    assert (out / VAL).exists() and not (out / TRAIN1).exists()
    assert (out / ".download").exists() == (how == signal.SIGKILL)
    hub.slow.clear(), hub.requests.clear()
    assert download()[0] == 0
    assert hub.requests == [TRAIN1]
    assert (out / TRAIN1).read_bytes() == hub.files[TRAIN1]
    assert sorted(path.name for path in out.iterdir()) == sorted([VAL, TRAIN1, "manifest.json", "gpt2.tiktoken"])


def test_a_second_process_waits_and_downloads_nothing_again(hub, start, out):
    hub.slow = {VAL}
    first = start_until_it_asks_for(VAL, hub, start)
    second = start()
    assert second.stdout.readline() == f"waiting for another process that is writing to {out}\n"
    hub.slow.clear()
    assert [process.communicate(timeout=600)[1] for process in (first, second)] == ["", ""]
    assert (first.returncode, second.returncode) == (0, 0)
    assert hub.requests == [VAL, TRAIN1]


@pytest.mark.parametrize("change", [lambda text: text[:-2], lambda text: text.replace(b'"the"', b'"teh"'), lambda text: b"[]"])
def test_a_vocabulary_that_is_not_gpt2s_is_not_kept(hub, download, out, change):
    hub.vocabulary = change(hub.vocabulary)
    code, _, err = download()
    assert code == 1 and "vocab.json of openai-community/gpt2 is not GPT-2's vocabulary" in err and len(err.splitlines()) == 1
    assert (out / TRAIN1).exists() and not (out / "gpt2.tiktoken").exists()
    hub.vocabulary = vocabulary()
    assert download()[0] == 0 and gpt2.has_tokens(out)


def test_a_file_with_a_wrong_checksum_is_not_kept(hub, download, out):
    hub.stated_sha256[TRAIN1] = "0" * 64
    code, _, err = download()
    assert code == 1 and TRAIN1 in err and "the download has 121024 bytes and SHA-256" in err and len(err.splitlines()) == 1
    assert sorted(path.name for path in out.iterdir()) == [VAL, "manifest.json"]


def test_a_file_that_is_not_a_shard_is_not_kept(hub, download, out):
    hub.files[TRAIN1] = make_shard(1, magic=MAGIC + 1)
    code, _, err = download()
    assert code == 1 and "not a shard" in err and not (out / TRAIN1).exists()


@pytest.mark.parametrize("missing", [VAL, TRAIN1])
def test_the_error_names_a_file_that_the_hub_lacks(hub, download, out, missing):
    del hub.files[missing]
    code, _, err = download()
    assert code == 1 and f"1 of 2 shards are missing ({missing}" in err and len(err.splitlines()) == 1
    assert (out / (VAL if missing == TRAIN1 else TRAIN1)).exists()


def test_a_hub_without_checksums_is_not_trusted(hub, download, out):
    hub.stated_sha256[VAL] = ""
    code, _, err = download()
    assert code == 1 and VAL in err and "no such file with a SHA-256" in err and not (out / VAL).exists()


@pytest.fixture
def nowhere():
    """Return an address without a server."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_without_a_network_the_error_names_missing_shards(download, out, nowhere):
    code, _, err = download(endpoint=nowhere)
    assert code == 1 and "cannot reach the hub" in err and f"{VAL}, {TRAIN1}, gpt2.tiktoken; set HTTPS_PROXY" in err and len(err.splitlines()) == 1
    assert not list(out.glob("*.bin"))


def test_without_a_network_copied_shards_suffice_unverified(hub, download, out, nowhere):
    out.mkdir()
    (out / VAL).write_bytes(hub.files[VAL])
    (out / TRAIN1).write_bytes(hub.files[TRAIN1][:-2])
    code, _, err = download(endpoint=nowhere)
    assert code == 1 and f"missing in {out}: {TRAIN1}, gpt2.tiktoken; set HTTPS_PROXY" in err
    write_gpt2_tokens(out)
    (out / TRAIN1).write_bytes(hub.files[TRAIN1])
    code, said, err = download(endpoint=nowhere)
    assert code == 0 and not err and said.endswith(f"all 2 shards exist; cannot reach the hub to verify {VAL}, {TRAIN1}\n")
    assert not (out / "manifest.json").exists()


def test_existing_files_are_hashed_and_only_wrong_ones_downloaded(hub, download, out):
    out.mkdir()
    (out / VAL).write_bytes(hub.files[VAL])
    (out / TRAIN1).write_bytes(hub.files[TRAIN1][:-2] + b"\0\0")
    code, said, _ = download()
    assert code == 0 and "differs from the hub's file" in said
    assert hub.requests == [TRAIN1]
    entries = json.loads((out / "manifest.json").read_text())["files"]
    assert all(sha256_of(out / entry["name"]) == entry["sha256"] for entry in entries) and len(entries) == 2


def test_a_full_disk_is_an_error_before_the_download(hub, out, monkeypatch, capsys):
    monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(fineweb, "look_up", lambda names: {name: (len(hub.files[name]), "0" * 64) for name in names})
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "1", "--out", str(out)])
    with pytest.raises(SystemExit, match="1,000 free"):
        fineweb.run(fineweb.main)


def test_the_number_of_shards_is_checked(start):
    process = start(104)
    assert "1 to 103" in process.communicate(timeout=600)[1] and process.returncode == 2
