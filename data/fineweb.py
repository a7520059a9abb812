"""FineWeb10B in GPT-2's tokens, from the Hugging Face hub: the validation shard and the first N for training.

    python data/fineweb.py        # data/fineweb10B/: validation and nine shards, 2 GB, enough for the record's run
    python data/fineweb.py 103    # all of it, 21 GB

A shard gets its name when its size, header and SHA-256 are right. An interrupted download goes on where it stopped when
the command is given again. What manifest.json lists counts as verified; without that file all is hashed anew, or, where
the hub cannot be reached, taken for what its header and size say.
"""
import argparse
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers
from tqdm import tqdm

from shards import GPT2, DataError, entry_of, only_writer, partial, read_header, read_manifest, run, sha256_of, write_manifest

REPO = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
TRAIN_SHARDS, ENOUGH = 103, 9
AT_ONCE = 4
TRIES = 4                          # in a row, without a byte gained
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}


class Downloader:
    """Brings shards into a directory, several at once; what one of its threads does, `stop` ends."""

    def __init__(self, out, entries):
        self.out, self.entries = out, entries
        self.stop, self.lock = threading.Event(), threading.Lock()

    def look_up(self, name):
        """(size in bytes, SHA-256) that the hub has for a file."""
        found = self.persist(lambda: get_hf_file_metadata(url_of(name), headers=build_hf_headers()))
        if found.size is None or not re.fullmatch("[0-9a-f]{64}", found.etag or ""):
            raise DataError(f"the hub states no size and SHA-256 for it (size {found.size}, ETag {found.etag})")
        return found.size, found.etag

    def bring(self, name, size, sha256, bar):
        """Sees to it that `name` is there, whole and listed in the manifest. DataError if its content is wrong."""
        path = self.out / name
        if path.exists():
            if path.stat().st_size == size and sha256_of(path) == sha256:
                self.record(entry_of(path, name, GPT2.bos_id, sha256))
                bar.update(size)
                return bar.write(f"{path}: was there, verified")
            bar.write(f"{path}: is not what the hub has, downloading it anew")
        part = partial(path)
        bar.update(size_of(part))
        self.persist(lambda: self.receive(url_of(name), part, size, bar), gained=lambda: size_of(part))
        try:
            seen = sha256_of(part)
            if seen != sha256:
                raise DataError(f"downloaded with SHA-256 {seen}, the hub has {sha256}")
            entry = entry_of(part, name, GPT2.bos_id, sha256)
        except DataError:
            part.unlink()  # going on from wrong bytes can only fail again
            raise
        part.replace(path)
        self.record(entry)
        bar.write(f"{path}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, verified")

    def receive(self, url, part, size, bar):
        """Appends to a partial file what it lacks."""
        with open(part, "ab") as file:
            held = file.tell()
            if held > size:  # not what this program left there
                bar.update(-held)
                held = file.truncate(0)
            if held == size:
                return
            headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={held}-"}
            with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
                hf_raise_for_status(response)
                if held and response.status_code != 206:  # a server that sends all of it, whatever the range
                    file.truncate(0)
                    bar.update(-held)
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    bar.update(len(chunk))
                    if self.stop.is_set():
                        raise DataError("stopped")
        if size_of(part) < size:
            raise httpx2.RemoteProtocolError(f"the connection ended after {size_of(part)} of {size} bytes")

    def persist(self, attempt, gained=lambda: 0):
        """attempt(), again after failures that may pass; gives up after TRIES in a row that left `gained` as it was."""
        failures, before = 0, gained()
        while True:
            try:
                return attempt()
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT_STATUS:
                    raise
                failures, before = (1 if gained() > before else failures + 1), gained()
                if failures == TRIES or self.stop.wait(2 ** (failures - 2)):
                    raise

    def record(self, entry):
        with self.lock:
            self.entries[entry["name"]] = entry
            write_manifest(self.out, GPT2, f"https://huggingface.co/datasets/{REPO}", self.entries.values(),
                           revision=REVISION)


def url_of(name):
    return hf_hub_url(REPO, name, repo_type="dataset", revision=REVISION)


def is_shard(path):
    """Whether a file's header is a shard's and its size what the header says. Its content may be any."""
    try:
        return read_header(path) > 0
    except (DataError, OSError):
        return False


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def attempt_each(pool, function, calls):
    """Name → result, and name → why it failed, of function(name, *arguments) for every call (name, *arguments)."""
    futures = {call[0]: pool.submit(function, *call) for call in calls}
    results, failures = {}, {}
    for name, future in futures.items():
        try:
            results[name] = future.result()
        except (DataError, OSError, httpx2.HTTPError) as error:
            failures[name] = in_one_line(error)
    return results, failures


def in_one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


def verified_before(out):
    """Name → entry of the shards that the manifest of this revision lists and that still have their size."""
    manifest = read_manifest(out)
    if manifest is None or manifest.get("revision") != REVISION:
        return {}
    return {entry["name"]: entry for entry in manifest["files"] if size_of(out / entry["name"]) == entry["bytes"]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", type=int, default=ENOUGH, metavar="N",
                        help=f"shards for training, 1 to {TRAIN_SHARDS} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B", metavar="DIR",
                        help="where the shards go (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"{args.shards} shards for training: the data set has 1 to {TRAIN_SHARDS}")
    return args


def main():
    args = parse_arguments()
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    with only_writer(args.out):
        entries = verified_before(args.out)
        wanted = [name for name in names if name not in entries]
        if not wanted:
            print(f"{args.out}: all {len(names)} shards are there, verified when they came")
            return
        print(f"{args.out}: {len(wanted)} of {len(names)} shards to bring from {REPO} at {REVISION[:12]}", flush=True)
        downloader = Downloader(args.out, entries)
        try:
            downloader.look_up(wanted[0])  # one alone: without a network there is no sense in trying every one
        except (httpx2.TransportError, ConnectionError) as error:
            if missing := [name for name in wanted if not is_shard(args.out / name)]:
                raise DataError(f"the hub can't be reached ({in_one_line(error)}); missing in {args.out}: "
                                f"{', '.join(missing)}; connect, and give the same command again") from None
            print(f"{args.out}: all {len(names)} shards are there; the hub can't be reached to verify {', '.join(wanted)}")
            return
        except (HfHubHTTPError, DataError):
            pass  # of this file alone, perhaps: told below, with the others
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            found, failures = attempt_each(pool, downloader.look_up, [(name,) for name in wanted])
            lacking = sum(size - size_of(partial(args.out / name)) for name, (size, _) in found.items()
                          if size_of(args.out / name) != size)
            if lacking > (free := shutil.disk_usage(args.out).free):
                raise DataError(f"{args.out}: {lacking:,} bytes to download, {free:,} free; "
                                "free some space, ask for fewer shards, or give another --out")
            with tqdm(total=sum(size for size, _ in found.values()), unit="B", unit_scale=True, disable=None) as bar:
                calls = [(name, size, sha256, bar) for name, (size, sha256) in found.items()]
                failures |= attempt_each(pool, downloader.bring, calls)[1]
        finally:
            downloader.stop.set()
            pool.shutdown(cancel_futures=True)
        if failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise DataError(f"{len(failures)} of {len(names)} shards are missing ({reasons}); "
                            "give the same command again, it goes on from what is there")
    print(f"{args.out}: all {len(names)} shards are there and verified")


if __name__ == "__main__":
    run(main)
