"""Draw one run: its losses over steps and over time, its target, its speed.

    python records/picture.py logs/RUN.txt            draw logs/RUN.png, also while the run goes on
    python records/picture.py logs/RUN.txt OUT.svg

./run.sh draws the plot after each run. Exit status: 0 drawn, 2 nothing to draw.
"""

import logs

logs.end_at_ctrl_c(__name__)  # importing numpy takes time

import argparse
from pathlib import Path

import numpy as np

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "svg.fonttype": "none"}
TRAINING, VALIDATION = "#1b6ac9", "#e07b39"
SMOOTHED = 1 / 20  # fraction of the steps in a running mean, and of the first steps outside the loss axis


class NothingToDraw(Exception):
    """The message states what was seen and what to do."""


def read(path):
    """Return the last run of a log, finished or not. Raise NothingToDraw if no step has a time."""
    run = logs.last_run(path)
    if not run.steps:
        why = run.reason and f" ({run.reason})"
        raise NothingToDraw(f"{path}: no step with a train_time{why}; name the log of a run")
    return run


def running_mean(values):
    """Return the mean of each value and those before it, over SMOOTHED of all values."""
    width = max(1, round(SMOOTHED * len(values)))
    sums = np.convolve(values, np.ones(width))[:len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), width)


def draw(run, out, form=None):
    """Write the plot to a path or an open file. form: a format like "svg"; for a path its suffix decides."""
    import matplotlib
    from matplotlib.figure import Figure

    config = (run.start or {}).get("config")
    trained = [step for step in run.steps if step.train_loss is not None]
    timed = [step for step in run.steps if step.step > 0 and not step.validation]
    validated = [step for step in run.validations if step.time_ms is not None]
    target = config.get("target_val_loss") if isinstance(config, dict) else None
    target = target if type(target) in (int, float) else None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4))
        over_steps, over_seconds, speed = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.12, top=0.93, wspace=0.2)  # a fitted layout takes 0.3 s
        for axes, place, title, unit in (
                (over_steps, lambda line: line.step, "Loss over steps", "step"),
                (over_seconds, lambda line: line.time_ms / 1000, "Loss over seconds", "seconds of training")):
            if trained:
                at, losses = [place(step) for step in trained], [step.train_loss for step in trained]
                axes.plot(at, losses, color=TRAINING, lw=0.7, alpha=0.3)
                axes.plot(at, running_mean(losses), color=TRAINING, lw=1.5, label="training and its running mean")
            shown = [line for line in validated if line.step > 0] or validated
            axes.plot([place(line) for line in shown], [line.loss for line in shown], "o-", color=VALIDATION,
                      label=f"validation: {shown[-1].loss:.4f}" if shown else "validation: none yet")
            if target:
                axes.axhline(target, color="#333333", lw=1, ls="--", label=f"target {target:g}")
            axes.set(title=title, xlabel=unit, ylabel="nats/token")
        if late := [step.train_loss for step in trained if step.step >= SMOOTHED * trained[-1].step]:
            lowest = min([*late, *(line.loss for line in validated), *([target] if target else [])])
            for axes in (over_steps, over_seconds):
                axes.set_ylim(lowest - 0.05 * (max(late) - lowest + 0.1), max(late))
        over_steps.legend(frameon=False, loc="upper right")
        if len(timed) > 1:
            steps, ms = (np.array([getattr(step, name) for step in timed]) for name in ("step", "time_ms"))
            speed.plot(steps[1:], running_mean(np.diff(ms) / np.maximum(np.diff(steps), 1)), color=TRAINING)
        speed.set(title="Speed", xlabel="step", ylabel="ms/step", ylim=(0, None))
        figure.savefig(out, dpi=120, format=form)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("log", type=Path, help="the log of a run")
    parser.add_argument("out", type=Path, nargs="?", help="default: the path of the log with .png")
    options = parser.parse_args(arguments)
    out = options.out or options.log.with_suffix(".png")
    try:
        draw(read(options.log), out)
    except (NothingToDraw, OSError, ValueError) as reason:
        return logs.refuse("picture.py", reason)
    print(f"picture: {out}")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
