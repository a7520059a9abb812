"""Draw runs: their losses over steps and over time, their target, their speed.

    python records/picture.py logs/RUN.txt       draw logs/RUN.png, also while the run goes on
    python records/picture.py latest             draw the last run in logs/, or a race's race.png
    python records/picture.py logs/A.txt logs/B.txt …   several, named by what differs: runs.png
    ... OUT.svg                                  another file: .png, .svg or .pdf

./run.sh draws the plot after each run. Exit status: 0 drawn, 2 nothing to draw.
"""

import argparse
import functools
import math
import os
import statistics
import textwrap
from pathlib import Path

import logs
import pages
from logs import UserError
from manifest import manifest_in

# a notebook's is not in .venv, and plots that are only saved need none
os.environ.pop("MPLBACKEND", None)
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
}
# as in templates/theme.css
COLORS = "#1b6ac9", "#b8531a", "#1d7044", "#7a3fb5", "#a8780a", "#0f7d86"
VALIDATION = COLORS[1]
FAR = 6  # times the median reach of the intervals: ratios beyond it are an arrow
MOST_COLUMNS = 4  # sides whose runs are shown one by one


def read(path):
    """Return the last run of a log, finished or not. Raise UserError if no step has a time."""
    run = logs.last_run(path)
    if not run.steps:
        why = run.reason and f" ({run.reason})"
        raise UserError(f"{path}: no step with a train_time{why}; name the log of a run")
    return run


def title_of(run, *others):
    """Return what a run has reached, or several, as the title of their plot."""
    if others:
        runs = run, *others
        losses = [one.validations[-1].loss for one in runs if one.validations]
        return (
            f"{len(runs)} runs"
            + (f": validation losses from {min(losses):.4f} to {max(losses):.4f}" if losses else "")
            + "; not on the same validation data" * (len({one.validated_on for one in runs}) > 1)
        )
    start = run.start or {}
    target = logs.target_of(run)
    name = (
        f"{start['preset']} preset, seed {start.get('seed')}"
        if "preset" in start
        else Path(run.path).name
    )
    if not run.over:
        return f"{name}: step {run.last_step} of {run.stated_steps or '?'}"
    if not run.final_loss:
        return f"{name}: ended at step {run.last_step}"
    reached = (
        ""
        if target is None
        else f", target {target:g} {'' if run.final_loss <= target else 'not '}reached"
    )
    took = "" if run.train_time_ms is None else f" and {run.train_time_ms / 1000:,.1f} s"
    return (
        f"{name}: validation loss {run.final_loss:.4f} after {run.last_step:,} steps{took}{reached}"
    )


def follow(axes, losses, target):
    """Fit the vertical axis to these losses. Draw the target's line if it is near; else the legend
    says where it is."""
    if not losses:
        return
    note, near = pages.far_note(target and (target, f"target {target:g}"), losses)
    if near:
        axes.axhline(target, color="#333333", lw=1, ls="--", label=f"target {target:g}")
        losses = [*losses, target]
    elif note:
        axes.plot([], [], " ", label=note)
    length = max(losses) - min(losses) or 0.1
    axes.set_ylim(min(losses) - 0.06 * length, max(losses) + 0.02 * length)


def draw(runs, out):
    """Write the plot of runs to a path, whose suffix decides the format."""
    import matplotlib
    from matplotlib.figure import Figure

    several = len(runs) > 1
    targets = {logs.target_of(run) for run in runs}
    late = []
    # of several, the names stand below
    height = 4.3 + several * (0.3 + 0.23 * (len(runs) // 2 + 1))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, height))
        over_steps, over_seconds, speed = figure.subplots(1, 3)
        # a fitted layout takes 0.3 s
        figure.subplots_adjust(
            left=0.05, right=0.99, bottom=1 - 3.78 / height, top=1 - 0.69 / height, wspace=0.2
        )
        figure.suptitle(logs.printable(title_of(*runs)), x=0.01, ha="left", fontweight="bold")
        for at, (run, name) in enumerate(zip(runs, pages.run_names(runs))):
            mean = functools.partial(pages.running_means, steps=run.stated_steps)
            trained, validated, ms = pages.curves(run)
            late += [
                point[2]
                for point in validated
                + [point for point in trained if point[0] >= pages.EARLY * trained[-1][0]]
            ]
            reached = (
                f"{shorten(name, 70) if several else 'validation'}:"
                f" {f'{validated[-1][2]:.4f}' if validated else 'none yet'}"
            )
            of_line, of_dots = (
                ("training and its running mean", reached)
                if not several
                else (reached, None)
                if trained
                else (None, reached)
            )
            color = COLORS[at % len(COLORS)]
            style = ("-", "--", ":")[at // len(COLORS) % 3]
            for axes, place in ((over_steps, 0), (over_seconds, 1)):
                losses, dots = (
                    [(point[place], point[2]) for point in points if point[place] is not None]
                    for points in (trained, validated)
                )
                if losses and not several:
                    axes.plot(*zip(*losses), color=color, lw=0.7, alpha=0.3)
                if losses:
                    axes.plot(*zip(*mean(losses)), style, color=color, lw=1.5, label=of_line)
                axes.plot(
                    [at for at, _ in dots],
                    [loss for _, loss in dots],
                    "o" if several and trained else f"o{style}",
                    color=color if several else VALIDATION,
                    label=of_dots,
                )
            if ms:
                speed.plot(*zip(*mean(ms)), style, color=color)
        for axes, title, unit, kind in (
            (
                over_steps,
                "Loss over steps" + several * "; dots: validation",
                "step",
                "nats per token",
            ),
            (over_seconds, "Loss over time", "seconds of training", "nats per token"),
            (speed, "Speed", "step", "ms/step"),
        ):
            axes.set(title=title, xlabel=unit, ylabel=kind)
            if axes is not speed:
                follow(axes, late, targets.copy().pop() if len(targets) == 1 else None)
            if axes is not over_seconds:
                axes.xaxis.get_major_locator().set_params(integer=True)
                axes.set_xlim(0, 1.03 * max(run.steps[-1].step for run in runs) or 1)
        speed.set_ylim(0, None)
        legend = {"loc": "lower left", "ncols": 2} if several else {"loc": "upper right"}
        (figure if several else over_steps).legend(
            *over_steps.get_legend_handles_labels(), frameon=False, **legend
        )
        figure.savefig(out, dpi=120)


def shorten(name, width=26):
    return textwrap.shorten(logs.printable(name), width, placeholder=" …")


def draw_answers(axes, found):
    """Plot the time to the base's loss of each idea, with its interval; the right axis states it.

    A ratio FAR times as far from 1 as most is an arrow at the edge."""
    answers = [one.answer for one in found]
    reaches = [max(abs(end - 1) for end in (each.low, each.high)) for each in answers]
    far = FAR * statistics.median(reaches)
    for at, each in enumerate(answers):
        color = {"better": COLORS[0], "worse": COLORS[1]}.get(each.verdict, "#8a8a8a")
        if abs(each.ratio - 1) > far:
            edge = 1 + math.copysign(far, each.ratio - 1)
            axes.plot(edge, at, ">" if edge > 1 else "<", color=color, markersize=9)
            continue
        ends = [[each.ratio - each.low], [each.high - each.ratio]]
        axes.errorbar(each.ratio, at, xerr=ends, fmt="D", color=color, capsize=4, markersize=5)
    axes.axvline(1, color="#333333", lw=1, ls="--")
    axes.set(title="Time to the base's loss", xlabel="part of the base's time, 95 % interval")
    names = [shorten(one.name) if found[1:] else "" for one in found]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(len(found) - 0.5, -0.5)
    figures = axes.secondary_yaxis("right")
    figures.set_yticks(range(len(found)), [f"{each.ratio:.3f}" for each in answers])
    figures.tick_params(length=0)
    figures.spines["right"].set_visible(False)
    axes.xaxis.get_major_locator().set_params(nbins=4)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(False, axis="y")


def draw_losses(axes, found):
    """Plot the difference of the mean losses of each idea, where no answer is known."""
    for at, one in enumerate(found):
        axes.plot(one.loss.value, at, "D", color=COLORS[0])
        if one.loss.low is not None:  # None without a spread
            axes.plot([one.loss.low, one.loss.high], [at, at], color=COLORS[0])
    axes.axvline(0, color="#333333", lw=1, ls="--")
    axes.set(title="Loss against the base's", xlabel="nats per token, 95 % interval")
    axes.set_yticks(range(len(found)), [shorten(one.name) for one in found])
    axes.invert_yaxis()


def draw_pairs(axes, sides, target):
    """Plot the final losses: a column for each side, the base first, a line for each seed."""
    columns = [*sides[-1:], *sides[:-1]]
    losses = [side.losses for side in columns]
    if len({*map(len, losses)}) == 1:
        for pair in zip(*losses):
            axes.plot(range(len(pair)), pair, "-", color="#b0b0b0", lw=0.8)
    for at, (side, values) in enumerate(zip(columns, losses)):
        color = COLORS[sides.index(side) % len(COLORS)]
        axes.plot([at] * len(values), values, "o", color=color, alpha=0.5, markeredgewidth=0)
        axes.plot(at, statistics.mean(values), "D", color=color, markersize=7)
    follow(axes, [value for values in losses for value in values], target)
    axes.set(title="Final losses; lines: seeds", ylabel="nats per token")
    axes.set_xticks(range(len(columns)), [shorten(side.label, 18) for side in columns])
    axes.set_xlim(-0.4, len(columns) - 0.6)
    axes.grid(False, axis="x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def draw_curves(axes, sides, target):
    """Plot the mean loss of each side over time, or over steps without clocks."""
    timed = not any(side.untimed for side in sides)
    late = []
    for at, side in enumerate(sides):
        color = COLORS[at % len(COLORS)]
        label = f"{shorten(side.label)}, n = {len(side.runs)}"
        trained, validated = (
            [(found[int(timed)], found[2]) for found in points]
            for points in pages.mean_curves(side.runs)
        )
        # the base's may lie on the others
        line = "--" if len(sides) > 1 and side is sides[-1] else "-"
        for points, style in ((trained, line), (validated, "o" if trained else "o" + line)):
            if points:
                axes.plot(*zip(*points), style, color=color, label=label)
                late += [loss for place, loss in points if place >= pages.EARLY * points[-1][0]]
                label = None
    follow(axes, late, target)
    if late:
        axes.legend(frameon=False)
    axes.set(
        title="Loss",
        xlabel="seconds of training" if timed else "step",
        ylabel="nats per token; line: training, dot: validation",
    )


def draw_sides(titles, sides, found, target, path):
    """Plot what the Verdicts (found) answer, then the pairs of runs, then the losses over time."""
    import matplotlib
    from matplotlib.figure import Figure

    answered = [one for one in found if one.answer]
    few = len(sides) <= MOST_COLUMNS
    columns = bool(answered) + 2 * few or 1
    size = (4.8 * columns, 4.4) if few else (9.5, 2.2 + 0.36 * len(answered or found))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        lines = [
            line
            for title in titles
            for line in textwrap.wrap(logs.printable(title), int(10 * size[0]))
        ]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontweight="bold")
        axes = iter(figure.subplots(1, columns, squeeze=False)[0])
        if answered:
            draw_answers(next(axes), answered)
        elif not few:
            draw_losses(next(axes), found)
        if few:
            draw_pairs(next(axes), sides, target)
            draw_curves(next(axes), sides, target)
        figure.savefig(path, dpi=150)


def draw_race(manifest, path):
    """Plot the rounds of a race that all sides have done. UserError if there is none."""
    import stats

    names = manifest.race["sides"]
    home = manifest.path.parent
    runs = {
        which: found[0]
        for which, attempt in manifest.done().items()
        if (found := logs.read_file(f"{home}/{attempt['run_id']}.txt")[0])
    }
    out = manifest.race.get("out", {})
    names = [name for name in names if name not in out]
    rounds = [
        run
        for run in range(1, manifest.race["n"] + 1)
        if all((run, name) in runs for name in names)
    ]
    if not rounds:
        raise UserError(f"{home}: no round of this race is done; wait for the first")
    *ideas, base = sides = [
        stats.Side(f"side {name}", [runs[run, name] for run in rounds], declared=manifest.race)
        for name in names
    ]
    stats.plot(sides, stats.verdicts([(idea, base) for idea in ideas]), str(path))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "paths",
        type=logs.or_latest(logs.RACE, logs.RUN),
        nargs="+",
        metavar="LOG",
        help="logs of runs, or a race's folder; then a picture",
    )
    paths = [*map(Path, parser.parse_args(arguments).paths)]
    out = paths.pop() if len(paths) > 1 and paths[-1].suffix in (".png", ".svg", ".pdf") else None
    try:
        race = manifest_in(paths[0])
        out = out or (
            paths[0] / "race.png"
            if race
            else paths[0].with_name("runs.png")
            if len(paths) > 1
            else paths[0].with_suffix(".png")
        )
        (
            draw_race(race, out)
            if race and len(paths) == 1
            else draw([read(path) for path in paths], out)
        )
    except (UserError, OSError, ValueError) as reason:
        return logs.refuse("picture.py", reason)
    print(f"picture: {out}")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
