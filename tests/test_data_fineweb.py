"""data/fineweb.py as a program, with a folder in place of the hub; without a network it asks by
the real huggingface_hub."""

import functools
import hashlib
import json
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA))

import frontier  # noqa: E402
import fineweb  # noqa: E402
import gpt2  # noqa: E402
from conftest import vocabulary, wait_until, write_gpt2_tokens  # noqa: E402
from shards import MAGIC, sha256_of  # noqa: E402

VAL = "fineweb_val_000000.bin"
TRAIN1 = "fineweb_train_000001.bin"
TRAIN2 = "fineweb_train_000002.bin"
TOKENS = 60_000


def make_shard(seed, magic=MAGIC):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, TOKENS
    tokens = np.random.default_rng(seed).integers(0, 50256, TOKENS).astype("<u2")
    tokens[::1000] = 50256
    return header.tobytes() + tokens.tobytes()


class Hub:
    """A folder in place of the hub: the shards, NAME.sha256 with what is stated of one, NAME.slow
    while its download waits."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        self.files = {
            VAL: make_shard(0),
            TRAIN1: make_shard(1),
            TRAIN2: make_shard(2),
        }
        for name, content in {**self.files, gpt2.VOCABULARY: vocabulary()}.items():
            (folder / name).write_bytes(content)

    def asked(self, what):
        """Names of the files whose content was asked for (requests), or that were looked up, since
        the last call."""
        path = self.folder / what
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names


def stand_in(folder):
    """Let huggingface_hub read this folder, in a process that will run fineweb.py or gpt2.py."""
    import huggingface_hub

    def note(what, name):
        with open(folder / what, "a") as file:
            file.write(f"{name}\n")

    def stated(name):
        digest = folder / f"{name}.sha256"
        return digest.read_text() if digest.exists() else sha256_of(folder / name)

    def get_paths_info(api, repo, names, repo_type, revision):
        assert (repo, repo_type, revision) == (fineweb.REPO, "dataset", fineweb.REVISION)
        for name in filter(lambda name: (folder / name).exists(), names):
            note("looked_up", name)
            yield SimpleNamespace(
                path=name,
                size=(folder / name).stat().st_size,
                lfs=stated(name) and SimpleNamespace(sha256=stated(name)),
            )

    def download(repo, name, local_dir, **_):
        note("looked_up" if name == gpt2.VOCABULARY else "requests", name)
        path = Path(local_dir) / name
        content = (folder / name).read_bytes()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[:10_000])
        while (folder / f"{name}.slow").exists():
            time.sleep(0.02)
        path.write_bytes(content)
        return str(path)

    huggingface_hub.HfApi = type("Api", (), {"get_paths_info": get_paths_info})
    huggingface_hub.hf_hub_download = download
    huggingface_hub.get_hf_file_metadata = lambda url: note("looked_up", gpt2.VOCABULARY)


@pytest.fixture
def hub(tmp_path):
    return Hub(tmp_path / "hub")


@pytest.fixture
def start(hub, script, tmp_path):
    """Start fineweb.py, which writes shards to `out`, or gpt2.py. endpoint: ask this address in
    place of the stand-in."""

    def start(shards=1, endpoint=None, program="fineweb.py"):
        words = [*([shards, "--out"] if program == "fineweb.py" else []), tmp_path / "out"]
        return script(
            DATA / program,
            *words,
            prepare=None if endpoint else functools.partial(stand_in, hub.folder),
            NO_PROXY="*",
            no_proxy="*",
            HF_ENDPOINT=endpoint or "http://127.0.0.1:9",
            HF_HOME=str(tmp_path / "hf"),
            HF_HUB_OFFLINE="0",
        )

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
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [VAL, TRAIN1, TRAIN2, "manifest.json", "gpt2.tiktoken"]
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["encoding"], manifest["vocab_size"], manifest["bos_id"]) == (
        "gpt2",
        50257,
        50256,
    )
    assert manifest["revision"] == fineweb.REVISION
    entries = {entry["name"]: entry for entry in manifest["files"]}
    for name, content in hub.files.items():
        assert (out / name).read_bytes() == content
        assert entries[name] == {
            "name": name,
            "split": "val" if name == VAL else "train",
            "tokens": TOKENS,
            "documents": TOKENS // 1000,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    hub.asked("requests"), hub.asked("looked_up")
    code, said, _ = download(2)
    assert code == 0 and "all 3 shards exist" in said
    assert not hub.asked("requests") and not hub.asked("looked_up")


def test_gpt2s_tokens_are_written_beside_other_shards(hub, download, out):
    for _ in range(2):
        code, said, err = download(program="gpt2.py")
        assert (code, said, err) == (0, f"{out / 'gpt2.tiktoken'}: exists and is verified\n", "")
    assert (
        frontier.gpt2_token_bytes(out)[50255] == b" gazed"
        and hub.asked("looked_up") == ["vocab.json"] * 2
    )


def test_more_shards_later_keep_the_manifest_of_the_first(hub, download, out):
    assert download(1)[0] == 0
    hub.asked("requests")
    assert download(2)[0] == 0
    assert hub.asked("requests") == [TRAIN2]
    assert len(json.loads((out / "manifest.json").read_text())["files"]) == 3


def start_until_it_asks_for(name, hub, start):
    (hub.folder / f"{name}.slow").touch()
    process = start()
    wait_until(
        lambda: (
            (hub.folder / "requests").exists() and name in (hub.folder / "requests").read_text()
        ),
        what="the download",
    )
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_complete_shards_stay_after_the_process_was_killed(hub, start, download, out, how):
    process = start_until_it_asks_for(TRAIN1, hub, start)
    process.send_signal(how)
    _, err = process.communicate(timeout=600)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130) and "Traceback" not in err
    assert (out / VAL).exists() and not (out / TRAIN1).exists()
    assert (out / ".download").exists() == (how == signal.SIGKILL)
    (hub.folder / f"{TRAIN1}.slow").unlink(), hub.asked("requests")
    assert download()[0] == 0
    assert hub.asked("requests") == [TRAIN1]
    assert (out / TRAIN1).read_bytes() == hub.files[TRAIN1]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [VAL, TRAIN1, "manifest.json", "gpt2.tiktoken"]
    )


def test_a_second_process_waits_and_downloads_nothing_again(hub, start, out):
    first = start_until_it_asks_for(VAL, hub, start)
    second = start()
    said = f"waiting for another process that is writing to {out}\n"
    wait_until(lambda: second.outputs[0].exists() and second.outputs[0].read_text() == said)
    (hub.folder / f"{VAL}.slow").unlink()
    assert [process.communicate(timeout=600)[1] for process in (first, second)] == ["", ""]
    assert (first.returncode, second.returncode) == (0, 0)
    assert hub.asked("requests") == [VAL, TRAIN1]


@pytest.mark.parametrize(
    "change",
    [lambda text: text[:-2], lambda text: text.replace(b'"the"', b'"teh"'), lambda text: b"[]"],
)
def test_a_vocabulary_that_is_not_gpt2s_is_not_kept(hub, download, out, change):
    (hub.folder / gpt2.VOCABULARY).write_bytes(change(vocabulary()))
    code, _, err = download()
    assert (
        code == 1
        and "vocab.json of openai-community/gpt2 is not GPT-2's vocabulary" in err
        and len(err.splitlines()) == 1
    )
    assert (out / TRAIN1).exists() and not (out / "gpt2.tiktoken").exists()
    (hub.folder / gpt2.VOCABULARY).write_bytes(vocabulary())
    assert download()[0] == 0 and gpt2.has_tokens(out)


def test_a_file_with_a_wrong_checksum_is_not_kept(hub, download, out):
    (hub.folder / f"{TRAIN1}.sha256").write_text("0" * 64)
    code, _, err = download()
    assert (
        code == 1
        and TRAIN1 in err
        and "the download has 121024 bytes and SHA-256" in err
        and len(err.splitlines()) == 1
    )
    assert sorted(path.name for path in out.iterdir()) == [VAL, "manifest.json"]


def test_a_file_that_is_not_a_shard_is_not_kept(hub, download, out):
    (hub.folder / TRAIN1).write_bytes(make_shard(1, magic=MAGIC + 1))
    code, _, err = download()
    assert code == 1 and "not a shard" in err and not (out / TRAIN1).exists()


@pytest.mark.parametrize("missing", [VAL, TRAIN1])
def test_the_error_names_a_file_that_the_hub_lacks(hub, download, out, missing):
    (hub.folder / missing).unlink()
    code, _, err = download()
    assert (
        code == 1 and f"1 of 2 shards are missing ({missing}" in err and len(err.splitlines()) == 1
    )
    assert (out / (VAL if missing == TRAIN1 else TRAIN1)).exists()


def test_a_hub_without_checksums_is_not_trusted(hub, download, out):
    (hub.folder / f"{VAL}.sha256").write_text("")
    code, _, err = download()
    assert (
        code == 1
        and VAL in err
        and "no such file with a SHA-256" in err
        and not (out / VAL).exists()
    )


@pytest.fixture
def nowhere():
    """Return an address without a server."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_without_a_network_the_error_names_missing_shards(download, out, nowhere):
    code, _, err = download(endpoint=nowhere)
    assert (
        code == 1
        and "cannot reach the hub" in err
        and f"{VAL}, {TRAIN1}, gpt2.tiktoken; set HTTPS_PROXY" in err
        and len(err.splitlines()) == 1
    )
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
    assert (
        code == 0
        and not err
        and said.endswith(f"all 2 shards exist; cannot reach the hub to verify {VAL}, {TRAIN1}\n")
    )
    assert not (out / "manifest.json").exists()


def test_existing_files_are_hashed_and_only_wrong_ones_downloaded(hub, download, out):
    out.mkdir()
    (out / VAL).write_bytes(hub.files[VAL])
    (out / TRAIN1).write_bytes(hub.files[TRAIN1][:-2] + b"\0\0")
    code, said, _ = download()
    assert code == 0 and "differs from the hub's file" in said
    assert hub.asked("requests") == [TRAIN1]
    entries = json.loads((out / "manifest.json").read_text())["files"]
    assert (
        all(sha256_of(out / entry["name"]) == entry["sha256"] for entry in entries)
        and len(entries) == 2
    )


def test_a_full_disk_is_an_error_before_the_download(hub, out, monkeypatch, capsys):
    monkeypatch.setattr(
        fineweb.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})
    )
    monkeypatch.setattr(
        fineweb, "look_up", lambda names: {name: (len(hub.files[name]), "0" * 64) for name in names}
    )
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "1", "--out", str(out)])
    with pytest.raises(SystemExit, match="1,000 free"):
        fineweb.run(fineweb.main)


def test_the_number_of_shards_is_checked(start):
    process = start(104)
    assert "1 to 103" in process.communicate(timeout=600)[1] and process.returncode == 2
