"""What a reader sees, from templates/: text for a terminal, Markdown and HTML, all by jinja2, which torch brings."""

import html
import os
import re
import textwrap
from pathlib import Path

import jinja2

import logs

FOLDER = Path(__file__).resolve().parent / "templates"
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}  # as they were when we began
WIDTH = 120  # columns of a terminal


def markdown(value):
    """Text from a log or an author as Markdown shows it: on one line, and neither markup nor HTML."""
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(str(value).split()))
    return html.escape(text, quote=False)


def code(value):
    text = " ".join(str(value).split())
    return f"`{text}`" if re.fullmatch(r"[^`|<>&\\]+", text) else f"<code>{markdown(text)}</code>"


def fence(lines):
    """What opens and closes a block of code in Markdown that no line of it can close."""
    return "`" * max([3, *(1 + len(ticks) for line in lines for ticks in re.findall("`+", line))])


def signed(value):
    return f"{value:+.2f}".replace("-", "−")


def number(value, digits=4):
    """With so many digits that count; p-values and such."""
    return "-" if value is None else f"{value:.{digits}g}"


def wrap(text, indent="", lines=None):
    """In lines of WIDTH columns, of which so many are shown."""
    return "\n".join(textwrap.wrap(logs.printable(text), WIDTH, initial_indent=indent, subsequent_indent=indent,
                                   max_lines=lines, placeholder=" …", break_on_hyphens=False))


def render(template, **values):
    """The template of this name with these values; what is HTML is escaped. Values may be functions that it calls."""
    env = jinja2.Environment(loader=jinja2.DictLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                             autoescape=lambda name: bool(name) and ".html" in name)
    env.filters |= {"md": markdown, "code": code, "fence": fence, "signed": signed, "number": number,
                    "printable": logs.printable, "basename": os.path.basename, "wrap": wrap}
    env.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}  # of jinja's own tojson
    return env.get_template(template).render(values)


def show(template, **values):
    """A text for a terminal: without blank lines around it, or one after another."""
    return re.sub("\n{3,}", "\n\n", render(template, **values)).strip("\n")
