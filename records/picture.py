"""Draw one run: its losses over steps and over time, its target, its speed.

    python records/picture.py logs/RUN.txt            draw logs/RUN.png, also while the run goes on
    python records/picture.py logs/RUN.txt OUT.svg

./run.sh draws the plot after each run. Exit status: 0 drawn, 2 nothing to draw.
"""

import logs

logs.end_at_ctrl_c(__name__)  # importing matplotlib takes time

import argparse
import functools
from pathlib import Path

import pages

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "svg.fonttype": "none"}
TRAINING, VALIDATION = "#1b6ac9", "#e07b39"


class NothingToDraw(Exception):
    """The message states what was seen and what to do."""


def read(path):
    """Return the last run of a log, finished or not. Raise NothingToDraw if no step has a time."""
    run = logs.last_run(path)
    if not run.steps:
        why = run.reason and f" ({run.reason})"
        raise NothingToDraw(f"{path}: no step with a train_time{why}; name the log of a run")
    return run


def title_of(run):
    """Return what a run has reached, as the title of its plot."""
    start, target = run.start or {}, logs.target_of(run)
    name = f"{start['preset']} preset, seed {start.get('seed')}" if "preset" in start else Path(run.path).name
    if not run.over:
        return f"{name}: step {run.last_step} of {run.stated_steps or '?'}"
    if not run.final_loss:
        return f"{name}: ended at step {run.last_step}"
    reached = "" if target is None else f", target {target:g} {'' if run.final_loss <= target else 'not '}reached"
    return (f"{name}: validation loss {run.final_loss:.4f} after {run.last_step:,} steps and "
            f"{run.train_time_ms / 1000:,.1f} s{reached}")


def mark_target(axes, target, values):
    """Draw the target's line if it is near the values; else say in the legend where it is."""
    if pages.is_near(target, min(values), max(values)):
        axes.axhline(target, color="#333333", lw=1, ls="--", label=f"target {target:g}")
        return target
    axes.plot([], [], " ", label=f"target {target:g} is far {'below' if target < min(values) else 'above'}")


def draw(run, out):
    """Write the plot of a run to a path, whose suffix decides the format."""
    import matplotlib
    from matplotlib.figure import Figure

    trained = [step for step in run.steps if step.train_loss is not None]
    timed = [step for step in run.steps if step.step > 0 and not step.validation]
    validated = [step for step in run.validations if step.time_ms is not None]
    target, mean = logs.target_of(run), functools.partial(pages.running_means, steps=run.stated_steps)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.3))
        over_steps, over_seconds, speed = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.05, right=0.99, bottom=0.12, top=0.84, wspace=0.2)  # a fitted layout takes 0.3 s
        figure.suptitle(logs.printable(title_of(run)), x=0.01, ha="left", fontweight="bold")
        late = [line.loss for line in validated if line.step > 0] + [
            step.train_loss for step in trained if step.step >= pages.EARLY * trained[-1].step]
        for axes, place, title, unit in (
                (over_steps, lambda line: line.step, "Loss over steps", "step"),
                (over_seconds, lambda line: line.time_ms / 1000, "Loss over time", "seconds of training")):
            if trained:
                losses = [(place(step), step.train_loss) for step in trained]
                axes.plot(*zip(*losses), color=TRAINING, lw=0.7, alpha=0.3)
                axes.plot(*zip(*mean(losses)), color=TRAINING, lw=1.5, label="training and its running mean")
            shown = [line for line in validated if line.step > 0] or validated
            axes.plot([place(line) for line in shown], [line.loss for line in shown], "o-", color=VALIDATION,
                      label=f"validation: {shown[-1].loss:.4f}" if shown else "validation: none yet")
            axes.set(title=title, xlabel=unit, ylabel="nats per token")
            if late:
                seen = [*late, mark_target(axes, target, late)] if target else late
                low, high = (end(value for value in seen if value is not None) for end in (min, max))
                axes.set_ylim(low - 0.05 * (high - low + 0.1), high + 0.02 * (high - low))
        over_steps.legend(frameon=False, loc="upper right")
        if len(timed) > 1:
            ms = [(b.step, (b.time_ms - a.time_ms) / max(b.step - a.step, 1)) for a, b in zip(timed, timed[1:])]
            speed.plot(*zip(*mean(ms)), color=TRAINING)
        speed.set(title="Speed", xlabel="step", ylabel="ms/step", ylim=(0, None))
        for axes in (over_steps, speed):
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(out, dpi=120)


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
