"""Serve a web page, on this machine only, with the latest runs in shared charts; it reloads while
they run.

    ./run.sh watch                  logs/ and its subfolders at http://127.0.0.1:8000
    ./run.sh watch FOLDER --port 0  another folder; port 0: any free port

It only reads logs. Each open page takes some hundredths of a second of one core every 5 s, so do
not use it while a run is timed on few cores. Ctrl-C stops it.
"""

import argparse
import contextlib
import functools
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "records"))

import logs  # noqa: E402
import pages  # noqa: E402
from manifest import MANIFEST, manifest_in, place_of  # noqa: E402

SHOWN = 10  # runs, and all others of their races
COLORS = 6  # in templates/theme.css
PERIOD_S = 5
SILENT_S = 60
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: `ssh -L` may use another


def latest(folder):
    """Return ([(path, time stamp, run)] of the SHOWN logs that changed last and of their races,
    these races' folders, messages about what is not shown)."""
    stamps = []
    runs = []
    messages = []
    homes = set()
    for path in folder.rglob("*.txt"):
        try:
            stamps.append((path.stat().st_mtime_ns, path))
        except OSError as error:  # a dangling link, for instance
            messages.append(f"{path.name}: {error.strerror}")
    for changed, path in sorted(stamps, reverse=True):
        if len(runs) >= SHOWN and path.parent not in homes:
            continue
        run = logs.last_run(path)  # which parses a file only when its content has changed
        if run.kind == logs.UNREADABLE:
            messages.append(f"{path.name}: {run.reason}")
        elif run.kind != logs.NOT_A_LOG:
            runs.append((path, changed, run))
            if (path.parent / MANIFEST).exists():
                homes.add(path.parent)
    return runs, homes, messages


def verdict_of(home):
    """Return the verdict of a race in words, or None while it goes on."""
    race = manifest_in(home)
    changed = (home / MANIFEST).stat().st_mtime
    silent = time.time() - changed >= SILENT_S  # it was stopped, or decided early
    running = any(attempt["status"] == "started" for attempt in race.attempts.values())
    if not race.missing() or silent and not running:
        return judge(home, race.race["alpha"], changed)


@functools.cache
def judge(home, alpha, changed):
    import stats  # it takes a second, and this page should appear at once

    words = [str(home), "--json", f"--alpha={alpha}"]
    found = stats.give(stats.parse(words))
    return f"Verdict: {found['verdict']}: {found['reason']}."


def state_of(run, changed):
    silent = time.time() - changed / 1e9
    last = run.steps[-1] if run.steps else None
    total = run.stated_steps
    if run.over:
        return run.reason or "ended"
    if silent >= SILENT_S:
        return f"nothing written for {silent / 60:.0f} min, and no end line"
    if not last:
        return f"no step yet; written {silent:.0f} s ago"
    left = (total - last.step) * last.time_ms / last.step / 1000 if total and last.step else None
    if left is None:
        return "running"
    return "running, " + (f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left")


def describe(runs):
    """Return (rows, charts) of the latest runs of one preset."""
    names = pages.run_names([run for _, _, run in runs])
    # a side of a race, or a run by itself
    places = [place_of(run) for _, _, run in runs]
    sides = [(path.parent, place[1]) if place else path for (path, *_), place in zip(runs, places)]
    rows = []
    losses = []
    times = []
    speeds = []
    colors = list(dict.fromkeys(sides[::-1]))  # the oldest keeps its color
    for i, (path, changed, run) in enumerate(runs):
        line = {
            "name": names[i],
            "color": colors.index(sides[i]) % COLORS,
            "style": "faint" * (sides[i] in sides[:i]),
        }
        trained, validated, speed = pages.curves(run)
        trained = pages.running_means(trained, run.stated_steps)
        dots = [dot for dot in validated if dot[1] is not None]
        for at, lines in ((0, losses), (1, times)):
            if trained or dots:
                lines.append(
                    {
                        **line,
                        "points": [(point[at], point[2]) for point in trained],
                        "dots": [(dot[at], dot[2]) for dot in dots],
                    }
                )
        if speed:
            speeds.append(
                {**line, "dots": [], "points": pages.running_means(speed, run.stated_steps)}
            )
        rows.append(
            {
                **line,
                "file": path.name,
                "seed": (run.start or {}).get("seed", "-"),
                "step": run.last_step or 0,
                "steps": run.stated_steps or "?",
                "state": state_of(run, changed),
                "loss": run.validations[-1].loss if run.validations else None,
            }
        )
    target = logs.target_of(runs[0][2])
    level = target and (target, f"target {target:g}")
    charts = [
        pages.chart(title, unit, lines, mark, whole)
        for title, unit, lines, mark, whole in (
            ("Loss over steps", "step", losses, level, True),
            ("Loss over time", "seconds of training", times, level, False),
            ("Milliseconds per step", "step", speeds, None, True),
        )
        if lines
    ]
    return rows, charts


def page(folder):
    """Return the page: the latest runs by preset, the one that changed last first."""
    runs, homes, messages = latest(folder)
    verdicts = {}
    presets = {}
    for home in sorted(homes, reverse=True):
        with contextlib.suppress(logs.UserError, OSError):  # another's file
            verdicts[home.name] = verdict_of(home)
    for one in runs:
        presets.setdefault(str((one[2].start or {}).get("preset", "unknown")), []).append(one)
    sections = [(preset, *describe(of_preset)) for preset, of_preset in presets.items()]
    return pages.render(
        "watch.html.jinja",
        period=PERIOD_S,
        folder=folder,
        sections=sections,
        verdicts=verdicts,
        messages=messages,
    )


def serve(folder, port):
    """Return a server on the loopback interface. OSError if the port is in use."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):  # a client may leave before its answer
                super().handle()

        def do_GET(self):
            # Another site's name that resolves to this machine must not read the logs (DNS
            # rebinding)
            if not HOST.fullmatch(self.headers.get("Host", "")):
                return self.send_error(403, f"open http://127.0.0.1:{port}/")
            if self.path != "/":
                return self.send_error(404)
            content = page(folder).encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    port = server.server_port
    return server


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=logs.or_latest(logs.RACE),
        nargs="?",
        default=str(logs.HOME),
        help="default: logs; latest: the last race",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    options = parser.parse_args(arguments)
    try:
        server = serve(Path(options.folder), options.port)
    except (OSError, OverflowError) as error:
        return logs.refuse("watch.py", f"port {options.port}: {error}; choose another --port")
    print(
        f"http://127.0.0.1:{server.server_port}/ shows {options.folder}; Ctrl-C stops it",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    logs.run_main(main)
