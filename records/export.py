"""Send the steps of runs, with their config, to CSV files or a dashboard.

    python records/export.py latest --to csv                     of the last run or race: logs/speedrun/runs.csv and steps.csv
    python records/export.py logs/RUN.txt … --to tensorboard     then: tensorboard --logdir logs/speedrun
    python records/export.py logs/RUN.txt … --to wandb --out PROJECT --follow     live, until the runs end

Or write the model that a run saved, for programs without this project: weights, and one file that
computes its logits with torch and safetensors alone.

    python records/export.py latest --to safetensors FOLDER

Preset, seed, source and config of a run are in runs.csv, in TensorBoard's hyperparameters, or the
dashboard's config.
"""

import argparse
import csv
import fcntl
import itertools
import os
import time
from pathlib import Path

import export_model
import logs
from manifest import place_of

FORMS = "csv", "tensorboard", "wandb"
MODEL_FORM = export_model.FORM
STEP = ("step", "train_time_ms", "train_loss", "val_loss")  # behind it what else the lines state


def write_table(path, columns, rows):
    columns = dict.fromkeys(itertools.chain(columns, *rows))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def tail(path):
    """Yield (Run, what is new: [{key of STEP: value}]) again and again. Steps that a resumed run
    trains again are repeated."""
    told = resumes = 0
    while True:
        run = logs.last_run(path)
        if again := run.resumed[resumes:]:
            at = min(resumed["from_step"] for resumed in again)
            resumes = len(run.resumed)
            told = min(told, sum(step.step <= at for step in run.steps))
        losses = {line.step: line.loss for line in run.validations}
        lines = [
            dict(
                zip(
                    STEP,
                    (
                        step.step,
                        step.time_ms,
                        step.train_loss,
                        losses.get(step.step) if step.validation else None,
                    ),
                ),
                **step.others,
            )
            for step in run.steps[told:]
        ]
        told = len(run.steps)
        yield (
            run,
            [{key: value for key, value in line.items() if value is not None} for line in lines],
        )


def ended(path, run, silent_s=60):
    """Return whether a run is over. TimeoutError if it was killed: it writes nothing, and no
    process locks its log."""
    if not run.over and (silent := time.time() - os.stat(path).st_mtime) > silent_s:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # its process holds the lock, or the file system has none
                return False
        raise TimeoutError(
            f"{path}: no new line for {silent:.0f} s, and no process writes this log: the run was"
            " killed"
        )
    return run.over


def opener(to, out):
    """Return open_run(name, config), which returns (function of a list of steps' values, function that
    ends the run)."""
    if to == "csv":
        os.makedirs(out, exist_ok=True)
        runs = []
        steps = []

        def open_run(name, config):
            runs.append({"run": name, **config})

            def add(lines):
                steps.extend({**line, "run": name} for line in lines)
                write_table(f"{out}/runs.csv", ["run"], runs)
                write_table(f"{out}/steps.csv", ["run", *STEP], steps)

            return add, lambda: None

    elif to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter, summary

        def open_run(name, config):
            writer = SummaryWriter(f"{out}/{name}")
            for part in summary.hparams(config, {"val_loss": 0.0}):  # states no value of it
                writer.file_writer.add_summary(part)

            def add(lines):
                for line in lines:
                    for key in line.keys() - {"step"}:
                        writer.add_scalar(key, line[key], line["step"])
                writer.flush()

            return add, writer.close

    else:
        import wandb

        def open_run(name, config):
            run = wandb.init(
                project=os.path.basename(out), name=name, config=config, reinit="create_new"
            )
            # wandb's own steps cannot decrease; those of a resumed run do
            run.define_metric("*", step_metric="step")
            return lambda lines: [*map(run.log, lines)], run.finish

    return open_run


def export(paths, open_run, follow):
    """Send what the logs state, and with `follow` what is added to them until all runs are over."""
    tails = {path: tail(path) for path in paths}
    opened = {}
    while tails:
        for path in [*tails]:
            run, lines = next(tails[path])
            if lines and path not in opened:
                side = {"side": place[0]} if (place := place_of(run)) else {}
                values = {
                    **side,
                    "preset": (run.start or {}).get("preset"),
                    "seed": run.seed,
                    "source": (run.source_sha256 or "")[:8],
                    **logs.config_of(run),
                }
                opened[path] = open_run(
                    Path(path).stem,
                    {
                        key: one if isinstance(one, (bool, int, float)) else str(one)
                        for key, one in values.items()
                    },
                )
            if lines:
                opened[path][0](lines)
            if not follow or ended(path, run):
                del tails[path]
                if path not in opened:
                    raise ValueError(
                        f"{path}: no step with a train_time{run.reason and f' ({run.reason})'};"
                        " name the log of a run"
                    )
                opened[path][1]()
        time.sleep(bool(tails))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="RUN",
        help="the log of a run, or a folder of logs; for safetensors its log or saved model",
    )
    parser.add_argument(
        "--to",
        required=True,
        nargs="+",
        metavar=("FORM", "FOLDER"),
        help=f"{', '.join(FORMS)}, or {MODEL_FORM} and the folder to write",
    )
    parser.add_argument("--out", help="the folder or the project", default="logs/speedrun")
    parser.add_argument("--follow", action="store_true", help="until the runs have ended")
    options = parser.parse_args(arguments)
    to, *further = options.to
    if to == MODEL_FORM:
        return export_model.start(parser, options.paths, further)
    if to not in FORMS or not options.paths + further:
        parser.error(f"--to {to}: name a RUN, and --to {', '.join(FORMS)}, or {MODEL_FORM} FOLDER")
    try:
        paths = [
            log
            for path in map(logs.or_latest(logs.RACE, logs.RUN), options.paths + further)
            for log in logs.files_in([path], [])
            if log.endswith(".txt") or log == path
        ]
        [logs.exists(path) or os.stat(path) for path in paths]  # before a dashboard is opened
        export(paths, opener(to, options.out), options.follow)
        files = {"csv": f"{options.out}/runs.csv and steps.csv", "tensorboard": options.out}
        place = files.get(to, f"project {os.path.basename(options.out)} of {to}")
        print(f"{logs.plural(len(paths), 'run')} written: {place}")
        return 0
    except ImportError as error:
        return logs.refuse(
            "export.py",
            f"--to {to}: {error}; install it: .venv/bin/pip install {to}, or use --to csv",
        )
    except (OSError, ValueError, argparse.ArgumentTypeError) as error:
        return logs.refuse("export.py", error)


if __name__ == "__main__":
    logs.run_main(main)
