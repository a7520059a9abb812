"""Serve a web page, on this machine only, with the plots of the latest runs; it reloads while they go on.

    python records/watch.py                  logs/ and its subfolders at http://127.0.0.1:8000
    python records/watch.py FOLDER --port 0  another folder; port 0: any free port

It only reads logs. Each open page takes some tenths of a second of one core every 5 s, so do not use it while a run is
timed on few cores. Ctrl-C stops it.
"""

import logs

logs.end_at_ctrl_c(__name__)  # importing numpy takes time

import argparse
import contextlib
import functools
import io
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib.figure  # a second, before the first request

import pages
import picture

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 6  # runs
PERIOD_S = 5
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: `ssh -L` may use another
DRAW_S = 1  # a page draws new plots for this long and leaves the others to its next reload


@functools.lru_cache(maxsize=2 * SHOWN)
def shown(path, changed):
    """Return (run, its plot as SVG) of a log. `changed`: its time stamp, for the cache. NothingToDraw if no steps."""
    run, drawn = picture.read(path), io.StringIO()
    picture.draw(run, drawn, "svg")
    return run, "<svg" + drawn.getvalue().partition("<svg")[2]


def describe(path, changed):
    """Return the values of one run's section of the page."""
    silent = time.time() - changed / 1e9
    try:
        run, drawn = shown(path, changed)
    except (picture.NothingToDraw, OSError):
        return {"name": path.name, "state": f"no step yet; written {silent:.0f} s ago", "svg": ""}
    except Exception as error:  # one odd log must not take the others off the page
        return {"name": path.name, "state": f"cannot be drawn: {type(error).__name__}: {error}", "svg": ""}
    last, total = run.steps[-1], run.stated_steps
    if run.over:
        state = run.reason or "ended"
    elif silent >= 60:
        state = f"nothing written for {silent / 60:.0f} min, and no end line"
    else:
        state = f"running, written {silent:.0f} s ago"
        if total and last.step:
            state += f", {(total - last.step) * last.time_ms / last.step / 1000:.0f} s left"
    return {"name": path.name, "state": f"step {last.step} of {total or '?'}: {state}", "svg": drawn}


def page(folder):
    """Return the page with the logs that changed last, the latest first."""
    began, found, unreadable, runs = time.monotonic(), [], [], []
    for path in folder.rglob("*.txt"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except OSError as error:  # a dangling link, for instance
            unreadable.append(f"{path.name}: {error.strerror}")
    for changed, path in sorted(found, reverse=True)[:SHOWN]:
        late = time.monotonic() - began > DRAW_S
        runs.append({"name": path.name, "state": "drawn at the next reload", "svg": ""} if late else
                    describe(path, changed))
    return pages.render("watch.html.jinja", period=PERIOD_S, folder=folder, runs=runs, unreadable=unreadable)


def serve(folder, port):
    """Return a server on the loopback interface. OSError if the port is in use."""
    one_page = threading.Lock()  # matplotlib's settings are global

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds that a client may be silent

        def handle(self):
            with contextlib.suppress(ConnectionError):  # a client may leave before its answer
                super().handle()

        def do_GET(self):
            # Another site's name that resolves to this machine must not read the logs (DNS rebinding)
            if not HOST.fullmatch(self.headers.get("Host", "")):
                return self.send_error(403, f"open http://127.0.0.1:{port}/")
            if self.path != "/":
                return self.send_error(404)
            with one_page:
                content = page(folder).encode("utf-8", "replace")
            self.send_response(200)
            for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", len(content))):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    port = server.server_port
    return server


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "logs", help="default: logs")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    options = parser.parse_args(arguments)
    try:
        server = serve(options.folder, options.port)
    except (OSError, OverflowError) as error:
        return logs.refuse("watch.py", f"port {options.port}: {error}; choose another --port")
    print(f"http://127.0.0.1:{server.server_port}/ shows {options.folder}; Ctrl-C stops it", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    logs.run_main(main)
