"""Download FineWeb10B in GPT-2 tokens from the Hugging Face hub: the validation shard and the
first N training shards.

    .venv/bin/python data/fineweb.py        # into data/fineweb10B/: 9 training shards, 2 GB
    .venv/bin/python data/fineweb.py 103    # the whole data set, 21 GB

It also writes gpt2.tiktoken, the bytes of GPT-2's tokens. A shard is verified by its size, header
and SHA-256 before it gets its final name. Run the command again to continue an interrupted
download: complete shards stay. Shards in manifest.json are already verified. Other shards are
hashed again; if the hub cannot be reached, only their headers and sizes are checked.
"""

import argparse
import shutil
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download

import gpt2
from shards import (
    GPT2,
    DataError,
    entry_of,
    in_one_line,
    is_intact,
    only_writer,
    read_header,
    read_manifest,
    run,
    sha256_of,
    write_manifest,
)

REPO = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
TRAIN_SHARDS = 103
DEFAULT_SHARDS = 9
UNFINISHED = ".download"  # folder within the output folder for shards that are not verified yet


def look_up(names):
    """Return {name: (size in bytes, SHA-256)} of the files that the hub has."""
    found = HfApi().get_paths_info(REPO, names, repo_type="dataset", revision=REVISION)
    return {file.path: (file.size, file.lfs.sha256) for file in found if getattr(file, "lfs", None)}


def download(out, name, size, sha256):
    """Verify or download a shard -> its entry in the manifest. Raise DataError if it fails or its
    content is wrong."""
    path = out / name
    wanted = {"name": name, "bytes": size, "sha256": sha256}
    if path.exists():
        if is_intact(out, wanted):
            print(f"{path}: exists, verified", flush=True)
            return entry_of(path, name, GPT2.bos_id, sha256)
        print(f"{path}: differs from the hub's file, downloading it again", flush=True)
    try:
        part = Path(
            hf_hub_download(
                REPO, name, repo_type="dataset", revision=REVISION, local_dir=out / UNFINISHED
            )
        )
    except Exception as error:  # the client's errors have no common class
        raise DataError(in_one_line(error)) from None
    if not is_intact(part.parent, wanted):
        raise DataError(
            f"the download has {part.stat().st_size} bytes and SHA-256 {sha256_of(part)}, the hub"
            f" states {size} and {sha256}"
        )
    entry = entry_of(part, name, GPT2.bos_id, sha256)
    part.replace(path)
    print(
        f"{path}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, verified",
        flush=True,
    )
    return entry


def is_shard(path):
    """Return whether a file has a shard's header and size. Its content is not checked."""
    try:
        return read_header(path) > 0
    except (DataError, OSError):
        return False


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def verified_before(out):
    """Return {name: entry} of this revision's shards in the manifest whose files still have the
    right size."""
    manifest = read_manifest(out)
    if manifest is None or manifest.get("revision") != REVISION:
        return {}
    return {
        entry["name"]: entry
        for entry in manifest["files"]
        if size_of(out / entry["name"]) == entry["bytes"]
    }


def download_all(out, names):
    entries = verified_before(out)
    wanted = [name for name in names if name not in entries]
    complete = f"{out}: all {len(names)} shards exist"
    if not wanted:
        gpt2.download_tokens(out)
        return f"{complete} and were verified when they were downloaded"
    print(
        f"{out}: {len(wanted)} of {len(names)} shards to download from {REPO} at {REVISION[:12]}",
        flush=True,
    )
    try:
        found = look_up(wanted)
    except Exception as error:  # the client's errors have no common class
        missing = [name for name in wanted if not is_shard(out / name)] + [gpt2.FILE] * (
            not gpt2.has_tokens(out)
        )
        if missing:
            raise DataError(
                f"cannot reach the hub at {constants.ENDPOINT} ({in_one_line(error)}); missing in"
                f" {out}: {', '.join(missing)}; {gpt2.CONNECT}, and run this command again, or copy"
                " these files there from a machine that has them"
            ) from None
        return f"{complete}; cannot reach the hub to verify {', '.join(wanted)}"
    missing_bytes = sum(size for name, (size, _) in found.items() if size_of(out / name) != size)
    if missing_bytes > (free := shutil.disk_usage(out).free):
        raise DataError(
            f"{out}: {missing_bytes:,} bytes to download, {free:,} free; "
            "free some space, request fewer shards, or choose another --out"
        )
    failures = []
    for name in wanted:
        try:
            if name not in found:
                raise DataError("the hub has no such file with a SHA-256")
            entries[name] = download(out, name, *found[name])
        except DataError as error:
            failures.append(f"{name}: {error}")
        else:
            write_manifest(
                out,
                GPT2,
                f"https://huggingface.co/datasets/{REPO}",
                entries.values(),
                revision=REVISION,
            )
    if failures:
        raise DataError(
            f"{len(failures)} of {len(names)} shards are missing ({'; '.join(failures)}); "
            "run this command again to continue"
        )
    gpt2.download_tokens(out)
    return f"{complete} and are verified"


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "shards",
        nargs="?",
        type=int,
        default=DEFAULT_SHARDS,
        metavar="N",
        help=f"training shards, 1 to {TRAIN_SHARDS} (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "fineweb10B",
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )
    args = parser.parse_args()
    if not 1 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"{args.shards} training shards requested; choose 1 to {TRAIN_SHARDS}")
    return args


def main():
    args = parse_arguments()
    names = [
        "fineweb_val_000000.bin",
        *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)),
    ]
    with only_writer(args.out):
        unfinished = args.out / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        try:
            print(download_all(args.out, names))
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    run(main)
