"""Render templates/ to terminal text, Markdown and the live page's HTML with charts, with jinja2."""

import html
import itertools
import math
import os
import re
import shlex
import statistics
import textwrap
from pathlib import Path

import jinja2

import logs
from manifest import place_of

FOLDER = Path(__file__).resolve().parent / "templates"
# read once, at start
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
WIDTH = 120  # columns; the same in every terminal, for pages are compared
SMOOTHED = 1 / 20  # fraction of a run's steps in a running mean
POINTS = 100  # of a line
TICKS = 6  # of an axis, about
# fraction of a run that its vertical axis ignores: the loss falls too far for one scale
EARLY = 0.1


def markdown(value):
    """Escape a text from a log or an author for Markdown, on one line, except its `code`."""
    parts = re.split(r"`([^`]*)`", " ".join(str(value).split()))
    return "".join(code(part) if at % 2 else escape(part) for at, part in enumerate(parts))


def escape(text):
    """Escape what Markdown or HTML could take for markup. An underscore within a word is none."""
    return html.escape(
        re.sub(r"([\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text), quote=False
    )


def code(value):
    text = " ".join(str(value).split())
    return f"`{text}`" if re.fullmatch(r"[^`|<>&\\]+", text) else f"<code>{escape(text)}</code>"


def fence(lines):
    """Return a fence for a Markdown code block that none of its lines closes."""
    return "`" * max([3, *(1 + len(ticks) for line in lines for ticks in re.findall("`+", line))])


def number(value, digits=4):
    """Format a number, such as a p-value, with this many significant digits."""
    return "-" if value is None else f"{value:.{digits}g}"


def wrap(text, indent=""):
    """Wrap a text to WIDTH columns."""
    return "\n".join(
        textwrap.wrap(
            logs.printable(text),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    )


def render(template, **values):
    """Render a template with these values, which may be functions. Values in HTML are escaped."""
    env = jinja2.Environment(
        loader=jinja2.DictLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=lambda name: bool(name) and ".html" in name,
    )
    env.filters |= {
        "md": markdown,
        "code": code,
        "fence": fence,
        "number": number,
        "printable": logs.printable,
        "plural": logs.plural,
        "basename": os.path.basename,
        "wrap": wrap,
    }
    return env.get_template(template).render(values)


def show(template, **values):
    """Render a terminal text without surrounding or repeated blank lines."""
    return re.sub("\n{3,}", "\n\n", render(template, **values)).strip("\n")


# Charts: places in percent of the chart's width and height, for templates/watch.html.jinja


def running_means(points, steps=None):
    """Return at most POINTS points (tuples) with the running mean of their last value. steps: of
    the whole run.

    A single negative value is left out: a speed between two lines of which the clock was reset at
    the second."""
    negative = [point for point in points if point[-1] < 0]
    points = [point for point in points if len(negative) != 1 or point[-1] >= 0]
    width = max(1, round(SMOOTHED * (steps or len(points))))
    apart = math.ceil(len(points) / POINTS) or 1
    return [
        (
            *points[at][:-1],
            statistics.fmean(point[-1] for point in points[max(0, at + 1 - width) : at + 1]),
        )
        for at in range(len(points) - 1, -1, -apart)
    ][::-1]


def run_names(runs):
    """Return a name for each run: what tells runs apart, as flags, then by source and seed.

    Runs of a race are named by its sides, runs that differ in nothing by their files too."""

    def word(value):
        return shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))

    about = []
    for run in runs:
        config = {f"--{key}": word(value) for key, value in logs.config_of(run).items()}
        about.append({"--preset": (run.start or {}).get("preset"), **config})
    keys = [key for key in dict.fromkeys(itertools.chain(*about)) if key != "--target_val_loss"]
    for one, run in zip(about, runs):
        one |= {"source": (run.source_sha256 or "")[:8], "--seed": run.seed}
    names = [""] * len(runs)
    for key in (*keys, "source", "--seed"):
        longer = [
            name if one.get(key) is None else f"{name} {key} {one[key]}".strip()
            for name, one in zip(names, about)
        ]
        if len({*longer}) > len({*names}):
            names = longer
    for i, place in enumerate(map(place_of, runs)):
        if place:
            names[i] = f"{place[0]}, {place[2]}"
    return [
        name if names.count(name) == 1 and name else f"{name} {Path(run.path).stem}".strip()
        for run, name in zip(runs, names)
    ]


def curves(run):
    """Return [(step, seconds, training loss)], [(step, seconds or None, validation loss)] and
    [(step, ms per step)] of a run."""
    timed = [step for step in run.steps if step.step > 0 and not step.validation]
    return (
        [
            (step.step, step.time_ms / 1000, step.train_loss)
            for step in timed
            if step.train_loss is not None
        ],
        [
            (line.step, line.time_ms and line.time_ms / 1000, line.loss)
            for line in run.validations
            if line.step > 0 and math.isfinite(line.loss)
        ],
        [
            (b.step, (b.time_ms - a.time_ms) / max(b.step - a.step, 1))
            for a, b in itertools.pairwise(timed)
        ],
    )


def mean_curves(runs):
    """Return the means over a side's runs: [(step, seconds, training loss)], smoothed, and the
    same of validations."""

    def means(lines):
        by_step = {}
        for step, time_ms, loss in lines:
            if step > 0 and time_ms is not None and loss is not None:
                by_step.setdefault(step, []).append((time_ms / 1000, loss))
        return [
            (step, *map(statistics.fmean, zip(*found)))
            for step, found in sorted(by_step.items())
            if len(found) == len(runs)
        ]

    return (
        running_means(
            means((step.step, step.time_ms, step.train_loss) for run in runs for step in run.steps)
        ),
        means((line.step, line.time_ms, line.loss) for run in runs for line in run.validations),
    )


def far_note(level, values):
    """Return (a note on a level that is far from the values, else "", and whether the axis is
    extended to it).

    A level is (value, name) or None. It is extended by half its length at most."""
    low = min(values)
    high = max(values)
    half = (high - low) / 2
    if not level or low - half <= level[0] <= high + half:
        return "", bool(level)
    return f"{level[1]} is far {'below' if level[0] < low else 'above'}", False


class Axis:
    """A linear axis around values, with round ticks (place, text). whole: no fractions; tight:
    hardly a margin."""

    def __init__(self, values, whole=False, tight=False):
        low = min(values)
        high = max(values)
        # smaller values are all drawn as 0
        margin = next(x for x in (0.06 * (high - low), 0.01 * abs(high), 1) if x > 1e-12)
        self.low = low - margin * (not tight)
        self.high = high + margin / (3 if tight else 1)
        least = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * least)
        step = max(step, 1) if whole else step
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        marks = [
            step * i
            for i in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]
        self.ticks = [
            (self.at(mark), f"{mark + 0.0:,.{digits}f}".replace("-", "−")) for mark in marks
        ]

    def at(self, value):
        """Return a value's place in percent."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def chart(title, unit, lines, level=None, whole=False):
    """Return the drawing of lines over steps or seconds.

    lines: dicts with name, color (0 to 5), points [(x, y)], dots [(x, y)], and a style, faint or
    none. level: (value, name) of a horizontal line. The vertical axis follows the data; a level far
    away becomes a note."""
    drawn = [line["points"] or line["dots"] for line in lines]
    late = [
        y
        for line, points in zip(lines, drawn)
        for x, y in (*line["points"], *line["dots"])
        if x >= EARLY * points[-1][0]
    ]
    note, shown = far_note(level, late)
    x = Axis([0, *(points[-1][0] for points in drawn)], whole=whole, tight=True)
    y = Axis([*late, level[0]] if shown else late)

    def path(points):
        return "L".join(f"{x.at(a)},{round(100 - y.at(b), 2)}" for a, b in points)

    lines = [
        {
            **line,
            "path": path(line["points"]),
            "dots": "".join(f"M{path([dot])}h0" for dot in line["dots"]),
        }
        for line in lines
    ]
    return {
        "title": title,
        "unit": unit,
        "lines": lines,
        "x": x,
        "y": y,
        "note": note,
        "level": round(100 - y.at(level[0]), 2) if shown else None,
        "level_name": level and level[1],
    }
