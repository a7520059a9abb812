"""A race on 8 H100 of Modal (pip install modal; modal setup). From the repository's folder, with arguments of ./run.sh:

    modal run launch/cluster/modal_app.py --race "-n 5 --vs '--muon_lr 0.05'"

The logs come back into logs/, also those of a race that failed. The shards stay in a volume for the next race. Never run
on Modal. Modal 1.6.4 accepts this file, and its function ran locally with a fake run.sh (tests/test_readme.py).
"""

import shlex
import subprocess
from pathlib import Path

import modal

FOLDER = "/speedrun"
# FlashAttention 3 into the image. Where no GPU is at hand, its import may fail; each run says whether it has it
FLASH_3 = """.venv/bin/python -c 'import train_gpt; print("FlashAttention 3:", train_gpt.find_flash_3() or "loaded")'"""
HOURS = 2  # a race that takes longer is stopped, and its logs are lost
KEPT = {".txt", ".json", ".jsonl", ".png"}  # logs and pictures; checkpoints and models are too large to return

here = Path(__file__).resolve().parents[2] if modal.is_local() else Path(FOLDER)
app = modal.App("gpt-speedrun")
shards = modal.Volume.from_name("gpt-speedrun-shards", create_if_missing=True)
image = (modal.Image.debian_slim(python_version="3.13")
         .apt_install("build-essential", "git", "procps")
         .env({"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cu130"})  # no driver where an image is built
         .add_local_file(here / "run.sh", f"{FOLDER}/run.sh", copy=True)
         .add_local_file(here / "requirements.txt", f"{FOLDER}/requirements.txt", copy=True)
         .run_commands(f"{FOLDER}/run.sh --setup", f"{FOLDER}/.venv/bin/pip install kernels==0.17.2")
         .add_local_dir(here, FOLDER, ignore=[".venv", ".cache", "logs", "data/*/**", "**/__pycache__"], copy=True)
         .run_commands(f"cd {FOLDER} && {FLASH_3}"))


@app.function(image=image, gpu="H100!:8", timeout=HOURS * 3600, volumes={f"{FOLDER}/data/fineweb10B": shards})
def start(arguments: list[str], folder: str = FOLDER) -> tuple[int, dict[str, bytes]]:
    """Run ./run.sh in `folder` and return its exit status and {path below logs/: content}."""
    status = subprocess.run(["./run.sh", *arguments], cwd=folder).returncode
    logs = Path(folder, "logs")
    return status, {str(path.relative_to(logs)): path.read_bytes() for path in logs.rglob("*") if path.suffix in KEPT}


@app.local_entrypoint()
def main(race: str = "-n 5") -> None:
    status, files = start.remote(shlex.split(race))
    for name, content in files.items():
        path = here / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"{len(files)} files in {here / 'logs'}")
    raise SystemExit(status)
