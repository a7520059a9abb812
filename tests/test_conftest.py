"""What conftest.py keeps from the tests: the settings of whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STARTED = f"""
import subprocess, sys, urllib.request
from pathlib import Path
sys.path += [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import conftest

def git(*words):
    named = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    return subprocess.check_output(["git", *named, *words], cwd="mine", text=True)
git("init", "-q")
git("add", "name")
git("commit", "-qm", "mine")
print(git("ls-files"), ascii(Path("mine/name").read_text()))
print(bool(urllib.request.proxy_bypass("127.0.0.1:80")))
"""
CONFIG = """
[commit]
gpgsign = true
[gpg]
program = false
[core]
hooksPath = {folder}
"""


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_settings_of_whoever_starts_the_tests_do_not_reach_them(tmp_path):
    """As in `git rebase -x` and in git's hooks, behind a proxy, in cron and in a container."""
    theirs = tmp_path / "theirs"
    for folder, content in (theirs, "ü"), (tmp_path / "mine", "ä"):
        folder.mkdir()
        (folder / "name").write_text(content, "utf-8")
    for words in ["init", "-q"], ["add", "name"]:
        subprocess.run(["git", *words], cwd=theirs, check=True)
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "pre-commit").symlink_to("/bin/false")
    before = contents(theirs)
    dropped = ("HOME", "no_proxy", "NO_PROXY")
    environment = {name: setting for name, setting in os.environ.items() if name not in dropped}
    environment |= {
        "GIT_DIR": str(theirs / ".git"),
        "GIT_WORK_TREE": str(theirs),
        "GIT_INDEX_FILE": str(theirs / ".git/index"),
        "GIT_CONFIG_GLOBAL": str(tmp_path / "config"),
        "GIT_CONFIG_PARAMETERS": "'commit.gpgsign=true'",
        "GIT_AUTHOR_DATE": "no date",
        "http_proxy": "http://127.0.0.1:9",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert (done.stdout, done.stderr) == ("name\n '\\xe4'\nTrue\n", "")
    assert contents(theirs) == before
