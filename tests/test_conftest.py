"""What conftest.py keeps from the tests: the settings of whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

STARTED = """
import subprocess, sys, urllib.request
from pathlib import Path
sys.path += [{root!r}, {root!r} + "/tests"]
import conftest
def git(*words):
    return subprocess.check_output(["git", *words], text=True)
git("init", "-q", "mine")
for words in ["add", "name"], ["-c", "user.name=me", "-c", "user.email=me@x", "commit", "-qm", "mine"]:
    git("-C", "mine", *words)
print(git("-C", "mine", "ls-files"), ascii(Path("mine/name").read_text()), bool(urllib.request.proxy_bypass("127.0.0.1:80")))
"""


def test_the_settings_of_whoever_starts_the_tests_do_not_reach_them(tmp_path):
    """As in `git rebase -x`, in git's hooks, behind a proxy, in cron and in a container."""
    def git(*words):
        return subprocess.check_output(["git", *words], cwd=tmp_path, text=True)
    git("init", "-q", "theirs")
    (tmp_path / "mine").mkdir()
    for folder, content in ("theirs", "ü"), ("mine", "ä"):
        (tmp_path / folder / "name").write_text(content, "utf-8")
    git("-C", "theirs", "add", "name")
    repository = tmp_path / "theirs/.git"
    (tmp_path / "config").write_text(f"[commit]\ngpgsign = true\n[gpg]\nprogram = false\n[core]\nhooksPath = {tmp_path}\n")
    (tmp_path / "pre-commit").symlink_to("/bin/false")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    done = subprocess.run([sys.executable, "-c", STARTED.format(root=str(Path(__file__).parent.parent))], cwd=tmp_path, capture_output=True, text=True, env={
        **{name: setting for name, setting in os.environ.items() if name not in ("HOME", "no_proxy", "NO_PROXY")},
        "GIT_DIR": str(repository), "GIT_WORK_TREE": str(repository.parent), "GIT_INDEX_FILE": str(repository / "index"), "GIT_PREFIX": "",
        "GIT_CONFIG_GLOBAL": str(tmp_path / "config"), "GIT_CONFIG_PARAMETERS": "'commit.gpgsign=true'", "GIT_AUTHOR_DATE": "no date",
        "http_proxy": "http://127.0.0.1:9", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (done.stdout, done.stderr) == ("name\n '\\xe4' True\n", "")
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before
