"""Download FineWeb10B in GPT-2 tokens from the Hugging Face hub: the validation shard and the first N training shards.

    python data/fineweb.py        # into data/fineweb10B/: 9 training shards, 2 GB, enough for the record's run
    python data/fineweb.py 103    # the whole data set, 21 GB

A shard is verified by its size, header and SHA-256 before it gets its final name. Run the command again to resume an
interrupted download. Shards in manifest.json are already verified. Other shards are hashed again; if the hub cannot be
reached, only their headers and sizes are checked.
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
TRAIN_SHARDS, DEFAULT_SHARDS = 103, 9
PARALLEL_DOWNLOADS = 4
MAX_TRIES = 4                      # consecutive tries without progress
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}


class Downloader:
    """Download shards into a directory, several at once. The event `stop` ends all threads."""

    def __init__(self, out, entries):
        self.out, self.entries = out, entries
        self.stop, self.lock = threading.Event(), threading.Lock()

    def look_up(self, name):
        """Return (size in bytes, SHA-256) of a file on the hub."""
        found = self.retry(lambda: get_hf_file_metadata(url_of(name), headers=build_hf_headers()))
        if found.size is None or not re.fullmatch("[0-9a-f]{64}", found.etag or ""):
            raise DataError(f"the hub states no size and SHA-256 (size {found.size}, ETag {found.etag})")
        return found.size, found.etag

    def download(self, name, size, sha256, bar):
        """Verify or download a shard, then add it to the manifest. Raise DataError if its content is wrong."""
        path = self.out / name
        if path.exists():
            if path.stat().st_size == size and sha256_of(path) == sha256:
                self.record(entry_of(path, name, GPT2.bos_id, sha256))
                bar.update(size)
                return bar.write(f"{path}: exists, verified")
            bar.write(f"{path}: differs from the hub's file, downloading it again")
        part = partial(path)
        bar.update(size_of(part))
        self.retry(lambda: self.receive(url_of(name), part, size, bar), progress=lambda: size_of(part))
        try:
            seen = sha256_of(part)
            if seen != sha256:
                raise DataError(f"the download has SHA-256 {seen}, the hub states {sha256}")
            entry = entry_of(part, name, GPT2.bos_id, sha256)
        except DataError:
            part.unlink()  # resuming from wrong bytes would fail again
            raise
        part.replace(path)
        self.record(entry)
        bar.write(f"{path}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, verified")

    def receive(self, url, part, size, bar):
        """Append the missing bytes to a partial file."""
        with open(part, "ab") as file:
            held = file.tell()
            if held > size:  # another program wrote it
                bar.update(-held)
                held = file.truncate(0)
            if held == size:
                return
            headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={held}-"}
            with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
                hf_raise_for_status(response)
                if held and response.status_code != 206:  # the server ignored the range and sends the whole file
                    file.truncate(0)
                    bar.update(-held)
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    bar.update(len(chunk))
                    if self.stop.is_set():
                        raise DataError("stopped")
        if size_of(part) < size:
            raise httpx2.RemoteProtocolError(f"the connection ended after {size_of(part)} of {size} bytes")

    def retry(self, attempt, progress=lambda: 0):
        """Call attempt() until it succeeds. Give up after MAX_TRIES consecutive transient errors without progress."""
        failures, before = 0, progress()
        while True:
            try:
                return attempt()
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT_STATUS:
                    raise
                failures, before = (1 if progress() > before else failures + 1), progress()
                if failures == MAX_TRIES or self.stop.wait(2 ** (failures - 2)):
                    raise

    def record(self, entry):
        with self.lock:
            self.entries[entry["name"]] = entry
            write_manifest(self.out, GPT2, f"https://huggingface.co/datasets/{REPO}", self.entries.values(),
                           revision=REVISION)


def url_of(name):
    return hf_hub_url(REPO, name, repo_type="dataset", revision=REVISION)


def is_shard(path):
    """Return whether a file has a shard's header and size. Its content is not checked."""
    try:
        return read_header(path) > 0
    except (DataError, OSError):
        return False


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def attempt_each(pool, function, calls):
    """Call function(name, *arguments) in the pool for each call -> {name: result}, {name: error message}."""
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
    """Return {name: entry} of this revision's shards in the manifest whose files still have the right size."""
    manifest = read_manifest(out)
    if manifest is None or manifest.get("revision") != REVISION:
        return {}
    return {entry["name"]: entry for entry in manifest["files"] if size_of(out / entry["name"]) == entry["bytes"]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", type=int, default=DEFAULT_SHARDS, metavar="N",
                        help=f"training shards, 1 to {TRAIN_SHARDS} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B", metavar="DIR",
                        help="output folder (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"{args.shards} training shards requested; choose 1 to {TRAIN_SHARDS}")
    return args


def main():
    args = parse_arguments()
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    with only_writer(args.out):
        entries = verified_before(args.out)
        wanted = [name for name in names if name not in entries]
        if not wanted:
            print(f"{args.out}: all {len(names)} shards exist and were verified when they were downloaded")
            return
        print(f"{args.out}: {len(wanted)} of {len(names)} shards to download from {REPO} at {REVISION[:12]}", flush=True)
        downloader = Downloader(args.out, entries)
        try:
            downloader.look_up(wanted[0])  # one request tells whether there is a network
        except (httpx2.TransportError, ConnectionError) as error:
            if missing := [name for name in wanted if not is_shard(args.out / name)]:
                raise DataError(f"cannot reach the hub ({in_one_line(error)}); missing in {args.out}: "
                                f"{', '.join(missing)}; connect to the network and run this command again") from None
            print(f"{args.out}: all {len(names)} shards exist; cannot reach the hub to verify {', '.join(wanted)}")
            return
        except (HfHubHTTPError, DataError):
            pass  # maybe only this file fails; errors are reported below
        pool = ThreadPoolExecutor(PARALLEL_DOWNLOADS)
        try:
            found, failures = attempt_each(pool, downloader.look_up, [(name,) for name in wanted])
            missing_bytes = sum(size - size_of(partial(args.out / name)) for name, (size, _) in found.items()
                                if size_of(args.out / name) != size)
            if missing_bytes > (free := shutil.disk_usage(args.out).free):
                raise DataError(f"{args.out}: {missing_bytes:,} bytes to download, {free:,} free; "
                                "free some space, request fewer shards, or choose another --out")
            with tqdm(total=sum(size for size, _ in found.values()), unit="B", unit_scale=True, disable=None) as bar:
                calls = [(name, size, sha256, bar) for name, (size, sha256) in found.items()]
                failures |= attempt_each(pool, downloader.download, calls)[1]
        finally:
            downloader.stop.set()
            pool.shutdown(cancel_futures=True)
        if failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise DataError(f"{len(failures)} of {len(names)} shards are missing ({reasons}); "
                            "run this command again to resume")
    print(f"{args.out}: all {len(names)} shards exist and are verified")


if __name__ == "__main__":
    run(main)
