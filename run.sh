#!/usr/bin/env bash
# Set up once, then race. From any directory:
#   ./run.sh                                  one run, with the preset that fits this machine
#   ./run.sh --text FILE FOLDER ...           one run on your own text: small, on a CPU too, then a sample of what it says
#   ./run.sh -n 5                             five timed runs, a log each, declared before the first
#   ./run.sh -n 5 --vs "--sync step"          five pairs of runs in turn, the first with further flags
#   ./run.sh -n 5 --vs HEAD~1                 likewise, the second of another git revision
#   ./run.sh -n 5 --vs FOLDER --cmd COMMAND   likewise, the second another project's, started so in that folder
#   ./run.sh --until-decided --max-n 12 --vs HEAD~1   likewise, until the verdict is there
#   ./run.sh --resume latest                  goes on with the run that stopped last; or name its checkpoint or log
#   ./run.sh --resume logs/race-ID/race.jsonl goes on with a race that stopped
#   ./run.sh --preset laptop --num_steps 300  every other flag goes to train_gpt.py; --help lists them
#   ./run.sh --preflight                      each part of a run once, beside its plain form: a table, and no run
#   ./run.sh --setup                          only make .venv
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/.venv/bin/python
kept="nothing was started"
trap 'say "interrupted; $kept"; exit 130' INT
trap '' USR1  # a checkpoint is wanted, and there is nothing to keep; the run that this becomes listens to it

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
fail() { say "error: $*"; exit 1; }

wanted=$(cksum < "$here/requirements.txt")
ready() { [ "$(cat "$here/.venv/ready" 2>/dev/null)" = "$wanted" ] && "$python" -c '' 2>/dev/null; }

# The lock belongs to file 9 as this shell and its children hold it open: it ends with the last of them, however they
# end. macOS has no flock command; Python has the call on both
lock='
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("run.sh: packages: another run.sh is setting up here; waiting until it has ended", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks, such as some network ones
'

set_up() {
    local candidate base=""
    if ready; then say "packages: ready in .venv"; return; fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then base=$candidate; break; fi
    done
    [ -n "$base" ] || fail "no Python 3.10 or newer was found; install one and come again"
    exec 9<> "$here/requirements.txt"
    "$base" -c "$lock"
    if ready; then say "packages: ready in .venv"; exec 9>&-; return; fi
    kept="what is in .venv stays; run this again to go on"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        say "packages: making .venv with $("$base" --version), once: some 40 s and 1.3 GB with torch's CPU build, more with CUDA's"
        rm -rf "$here/.venv"
        "$base" -m venv "$here/.venv" || fail "$base cannot make a virtual environment; install its venv module (on Debian python3-venv)"
    fi
    say "packages: installing requirements.txt into .venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt" ||
        fail "pip could not install requirements.txt (above is why); with a network that reaches a package index, run this again"
    printf '%s\n' "$wanted" > "$here/.venv/ready"
    exec 9>&-
    kept="nothing was started"
}

race=() resume="" help=false flags=() text=()
while [ $# -gt 0 ]; do
    case $1 in
        --setup) set_up; exit ;;
        -n|--vs|--cmd|--max-n|--test|--alpha|--resume|--init_from)
            [ $# -gt 1 ] || fail "$1 wants a value; --help says which"
            value=$2
            case $1$value in
                --resume[!/]*|--init_from[!/]*) if [ -f "$value" ]; then value=$PWD/$value; fi ;;
            esac
            case $1$value in
                --resume*.jsonl) resume=race race+=("$1" "$value") ;;
                --resume*) resume=run flags+=("$1" "$value") ;;
                --init_from*) flags+=("$1" "$value") ;;
                *) race+=("$1" "$value") ;;
            esac
            shift ;;
        --text)
            while [ $# -gt 1 ] && [ "${2#-}" = "$2" ]; do
                case $2 in /*) text+=("$2") ;; *) text+=("$PWD/$2") ;; esac
                shift
            done
            [ ${#text[@]} -gt 0 ] || fail "--text wants files or folders of text" ;;
        --until-decided) race+=("$1") ;;
        -h|--help) help=true; flags+=("$1") ;;
        *) flags+=("$1") ;;
    esac
    shift
done

cd "$here"
if $help; then
    sed -n '2,14s/^# \{0,1\}//p' run.sh
    if ready; then exec "$python" train_gpt.py "${flags[@]}"; fi
    printf '\nBehind this come the flags of train_gpt.py, once .venv is there: ./run.sh --setup\n'
    exit
fi
if [ "$resume" = race ] && [ ${#flags[@]} -gt 0 ]; then fail "--resume goes on as the race began; leave out ${flags[*]}"; fi
if [ "$resume" = run ] && [ ${#race[@]} -gt 0 ]; then fail "--resume goes on with one run; leave out ${race[*]}, or name a race.jsonl"; fi
if [ -n "$resume" ] && [ ${#text[@]} -gt 0 ]; then fail "--resume goes on with the text of its run; leave out --text"; fi
set_up
# Python answers Ctrl-C with a traceback until its script says otherwise: blocked it waits until then, ignored (where env
# cannot block) it is run.sh's to answer, once the script has ended
held=(env --default-signal=INT --block-signal=INT)
"${held[@]}" true 2>/dev/null || held=()
become() { exec ${held[@]+"${held[@]}"} "$python" "$@"; }
start() { (trap '' INT; become "$@"); }
# Ctrl-C in a data script: it cleans up; what is kept is said here
script='
import os, runpy, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")'
if [ "$resume" = race ]; then become records/race.py "${race[@]}"; fi

fit=--fit
if [ ${#text[@]} -gt 0 ]; then
    name=$(basename "${text[0]}")
    name=$(printf '%s\n' "${name%.*}" | tr -c 'A-Za-z0-9\n' _)
    shards=data/own-$name-$(printf '%s\n' "${text[@]}" | cksum | cut -d ' ' -f 1)  # another text, another folder
    start -c "$script" data/text.py "${text[@]}" --out "$shards" --encoding bytes --force
    flags=(--preset laptop --train_files "$shards/*_train_*.bin" --val_files "$shards/*_val_*.bin" ${flags[@]+"${flags[@]}"})
    fit=--fit_text
fi
# torch says what the ranks will see: it knows CUDA_VISIBLE_DEVICES and whether its build fits the driver
fitting=$(start records/launch.py "$fit" ${flags[@]+"${flags[@]}"})
{ read -r gpus ranks preset own_data log_dir; read -r -a fits || true; } <<< "$fitting"
flags+=(${fits[@]+"${fits[@]}"})
case "$resume ${flags[*]+${flags[*]}}" in
    run*|*--preset*) ;;
    *) flags=(--preset "$preset" ${flags[@]+"${flags[@]}"}) ;;  # the same on both sides of a race, whoever looks
esac
if [ "$gpus" -eq 0 ]; then
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
fi
kept="shards that are whole stay"
case $own_data$preset in
    Falsespeedrun|Falsefrontier) start -c "$script" data/fineweb.py 9 ;;
    Falselaptop) start -c "$script" data/stdlib.py ;;
esac
kept="nothing was started"
if [ ${#race[@]} -gt 0 ]; then become records/race.py "${race[@]}" --ranks "$ranks" -- "${flags[@]}"; fi
say "racing: $ranks rank(s), preset $preset"
# as a race starts its runs: neither PYTHON* variables nor a module beside the script changes one
for variable in ${!PYTHON*}; do unset "$variable"; done
become -I records/launch.py --then "$log_dir" --nproc_per_node="$ranks" --no-python "$python" -I -u train_gpt.py "${flags[@]}"
