#!/usr/bin/env bash
# Create .venv once, then become launch/start.py, which knows all options: ./run.sh --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run.sh
set -euo pipefail
unset CDPATH PYTHONHOME  # cd would print; .venv's Python would not start
export PATH=$PATH:/usr/lib/wsl/lib  # WSL's nvidia-smi, which ssh and sudo do not find
script=${BASH_SOURCE[0]}
[ ! -L "$script" ] || script=$(readlink -f "$script")
here=$(cd "$(dirname "$script")" && pwd)
python=$here/.venv/bin/python kept="nothing was started" waits=0
say() { printf 'run.sh: %s\n' "$*" >&2; }
case " $* " in *" --json "*) json=true ;; *) json=false ;; esac
fail() {  # 2, as all that cannot be judged
    say "error: $*"
    local reason="$*"
    reason=${reason//\\/\\\\}
    reason=${reason//\"/\\\"}
    ! $json || printf '{"verdict": "not judged", "reason": "%s", "status": 2, "folder": null, "best": null, "sides": [], "ideas": []}\n' "${reason//$'\n'/ }"
    exit 2
}
trap 'say "interrupted; $kept"; exit 130' INT
trap '' USR1  # it asks a run for a checkpoint, and there is no run yet
list=requirements.txt stamp=$here/.venv/ready mine=$here/.venv/made-by-run.sh
[ "${1:-}" != --setup-tests ] || list=tests/requirements.txt stamp=$here/.venv/ready-tests  # test.sh, after --setup
wanted=$(cksum < "$here/$list")
# .venv is complete only if its own Python finds each package: a replaced system Python looks elsewhere
installed='import re, sys; from importlib.metadata import version
for line in open(sys.argv[1]): (name := re.match(r"[\w-]+", line)) and version(name[0])'
ready() { [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$python" -I -c "$installed" "$here/$list" 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
lock='import fcntl, sys  # the lock belongs to file 9: it ends with this shell and its children, however they end
try: fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error: sys.exit(isinstance(error, BlockingIOError))  # another: a file system without locks'
if ! ready; then
    for base in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python ""; do new_enough "$base" && break; done
    [ -n "$base" ] || fail "no Python 3.10 or newer was found; install one, then run this again"
    case " $* " in *" -h "*|*" --help "*|*" --help-all "*) exec "$base" "$here/launch/start.py" --help ;; esac
    [ -w "$here/requirements.txt" ] || fail "$here cannot be written; copy it to a folder of your own"
    exec 9<> "$here/requirements.txt"
    until "$base" -c "$lock" 2>/dev/null; do
        [ $((waits++)) -gt 0 ] || say "packages: another run.sh installs them; waiting until it has ended"; sleep 0.2
    done
fi
cpu_builds=https://download.pytorch.org/whl/cpu
answers='import os, sys, threading, urllib.request as web; end = threading.Timer(3, os._exit, [1]); end.daemon = True
end.start(); web.urlopen(web.Request(sys.argv[1], method="HEAD"))'  # a signal that ends it would have bash print a line
nvidia_driver() {  # its version; nothing without one
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -E '^[0-9]' ||  # a line for each GPU
        grep -m 1 -oE '[0-9]{3,}\.[0-9.]+' /proc/driver/nvidia/version 2>/dev/null
}
show_last() {  # the last line of what it reads, in place; nothing where nobody waits at a terminal
    [ -t 2 ] || exec cat >/dev/null
    while IFS= read -r line; do printf '\r\033[K%.79s' "$line" >&2; done
    printf '\r\033[K' >&2
}
# without what a cluster sets for its own packages
own=(env -u PYTHONPATH -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0)
if ! ready; then
    kept="what is in .venv stays; run this again to continue"
    build=() size="up to 5 GB, with torch for CUDA"
    if [ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ] || [ "$list" != requirements.txt ]; then
        true  # the user chose where torch comes from, or it is installed
    elif driver=$(nvidia_driver); then
        driver=${driver%%[!0-9.]*} older=", or take the build for CUDA 12: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 ./run.sh"
        [ "${driver%%.*}" -ge 525 ] || older=""  # CUDA 12 needs this
        [ "${driver%%.*}" -ge 580 ] || "$python" -I -c 'import torch' 2>/dev/null || fail "the NVIDIA driver is $driver, and torch's default build is for CUDA 13, which" \
            "needs 580 or newer. Update the driver$older"
    elif [ "$(uname)" = Linux ] && "$base" -c "$answers" "$cpu_builds/torch/" >/dev/null 2>&1; then
        build=(--extra-index-url "$cpu_builds") size="1.3 GB, with torch for CPUs: there is no NVIDIA driver"
    fi
    has_pip() { "${own[@]}" "$python" -m pip --version >/dev/null 2>&1; }
    add_pip() { [ -e "$here/.venv/pyvenv.cfg" ] && "${own[@]}" "$python" -m ensurepip >/dev/null 2>&1; }  # uv makes .venv without it
    if ! has_pip && ! add_pip; then
        [ ! -e "$here/.venv" ] || [ -e "$mine" ] || fail "$here/.venv is not run.sh's, and its Python has no pip; nothing in it was" \
            "changed. Keep it under another name, then run this again: mv '$here/.venv' '$here/.venv-before'"
        say "packages: creating .venv with $("$base" --version): about a minute and $size"
        mkdir -p "$here/.venv"
        touch "$mine"
        rm -f "$here"/.venv/bin/python*  # venv keeps links, also to a Python that is gone
        problem=$("${own[@]}" "$base" -m venv "$here/.venv" 2>&1) ||
            fail "$base cannot create .venv (Debian has venv in python3-venv): $problem"
    fi
    say "packages: installing $list into .venv"
    "${own[@]}" "$python" -m pip install --disable-pip-version-check ${build[@]+"${build[@]}"} -r "$here/$list" | show_last ||
        fail "pip could not install $list into $here/.venv, see above; check the network, then run this again"
    printf '%s\n' "$wanted" > "$stamp"
    ready || fail "pip ended without an error, but .venv lacks packages of $list. Rename .venv and run this again; if" \
        "that does not help, pip's settings send packages elsewhere (target, prefix or root): $python -m pip config list"
fi
[ "${1:-}" != --setup ] || { say "packages: ready in .venv"; exit; }
[ "${1:-}" != --setup-tests ] || exit 0
hold=(env --default-signal=INT --block-signal=INT)  # Ctrl-C waits until Python can answer it without a traceback
"${hold[@]}" true 2>/dev/null || hold=()
exec ${hold[@]+"${hold[@]}"} "$python" -I "$here/launch/start.py" "$@" 9>&-
