"""Render templates/ to terminal text, Markdown and HTML, with jinja2, which torch installs."""

import html
import os
import re
import textwrap
from pathlib import Path

import jinja2

import logs

FOLDER = Path(__file__).resolve().parent / "templates"
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}  # read once, at start
WIDTH = 120  # columns of a terminal


def markdown(value):
    """Escape a text from a log or an author for Markdown, on one line."""
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(str(value).split()))
    return html.escape(text, quote=False)


def code(value):
    text = " ".join(str(value).split())
    return f"`{text}`" if re.fullmatch(r"[^`|<>&\\]+", text) else f"<code>{markdown(text)}</code>"


def fence(lines):
    """Return a fence for a Markdown code block that none of its lines closes."""
    return "`" * max([3, *(1 + len(ticks) for line in lines for ticks in re.findall("`+", line))])


def signed(value):
    return f"{value:+.2f}".replace("-", "−")


def number(value, digits=4):
    """Format a number, such as a p-value, with this many significant digits."""
    return "-" if value is None else f"{value:.{digits}g}"


def wrap(text, indent="", lines=None):
    """Wrap a text to WIDTH columns; show at most this many lines."""
    return "\n".join(textwrap.wrap(logs.printable(text), WIDTH, initial_indent=indent, subsequent_indent=indent,
                                   max_lines=lines, placeholder=" …", break_on_hyphens=False))


def render(template, **values):
    """Render a template with these values, which may be functions. Values in HTML are escaped."""
    env = jinja2.Environment(loader=jinja2.DictLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                             autoescape=lambda name: bool(name) and ".html" in name)
    env.filters |= {"md": markdown, "code": code, "fence": fence, "signed": signed, "number": number,
                    "printable": logs.printable, "plural": logs.plural, "basename": os.path.basename, "wrap": wrap}
    env.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}  # for jinja's tojson
    return env.get_template(template).render(values)


def show(template, **values):
    """Render a terminal text without surrounding or repeated blank lines."""
    return re.sub("\n{3,}", "\n\n", render(template, **values)).strip("\n")
