#!/usr/bin/env bash
# Set up once, then race. From any directory:
#   ./run.sh                                  one run, with the preset that fits this machine
#   ./run.sh -n 5                             five timed runs, a log each, declared before the first
#   ./run.sh -n 5 --vs "--sync step"          five pairs of runs in turn, the second with further flags
#   ./run.sh -n 5 --vs HEAD~1                 likewise, the second of another git revision
#   ./run.sh --resume logs/race-ID/race.jsonl goes on with a race that stopped
#   ./run.sh --preset laptop --num_steps 100  every other flag goes to train_gpt.py; --help lists them
#   ./run.sh --setup                          only make .venv
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/.venv/bin/python

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
fail() { say "error: $*"; exit 1; }

set_up() {
    local candidate base="" wanted
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then base=$candidate; break; fi
    done
    wanted=$(cksum < "$here/requirements.txt")
    if [ "$(cat "$here/.venv/ready" 2>/dev/null)" = "$wanted" ] && "$python" -c '' 2>/dev/null; then
        say "packages: ready in .venv"
        return
    fi
    [ -n "$base" ] || fail "no Python 3.10 or newer was found; install one and come again"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        say "packages: making .venv with $("$base" --version)"
        rm -rf "$here/.venv"
        "$base" -m venv "$here/.venv" || fail "$base cannot make a virtual environment; install its venv module (on Debian python3-venv)"
    fi
    say "packages: installing requirements.txt into .venv; this is done once"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt" ||
        fail "pip could not install requirements.txt (above is why); with a network that reaches a package index, run this again"
    printf '%s\n' "$wanted" > "$here/.venv/ready"
}

race=() resume=false preset="" own_data=false help=false flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --setup) set_up; exit ;;
        -n|--vs|--resume)
            [ $# -gt 1 ] || fail "$1 wants a value; --help says which"
            [ "$1" != --resume ] || resume=true
            race+=("$1" "$2"); shift ;;
        --preset) preset=${2:-}; flags+=("$1"); [ $# -eq 1 ] || { flags+=("$2"); shift; } ;;
        --preset=*) preset=${1#*=}; flags+=("$1") ;;
        --train_files*) own_data=true; flags+=("$1") ;;
        -h|--help) help=true; flags+=("$1") ;;
        *) flags+=("$1") ;;
    esac
    shift
done

if $resume && [ ${#flags[@]} -gt 0 ]; then fail "--resume goes on as the race began; leave out ${flags[*]}"; fi
set_up
cd "$here"
if $help; then sed -n '2,9s/^# \{0,1\}//p' run.sh; exec "$python" train_gpt.py "${flags[@]}"; fi

# torch says what the ranks will see: it knows CUDA_VISIBLE_DEVICES and whether its build fits the driver
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=2
if [ "$gpus" -gt 0 ]; then
    for ranks in 8 4 2 1; do [ "$ranks" -gt "$gpus" ] || break; done
else
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
fi
if [ -z "$preset" ]; then
    preset=$([ "$gpus" -gt 0 ] && echo speedrun || echo laptop)
    flags=(--preset "$preset" ${flags[@]+"${flags[@]}"})
fi

if ! $own_data; then
    case $preset in
        speedrun) "$python" data/fineweb.py 9 ;;
        laptop) "$python" data/stdlib.py ;;
    esac
fi
# A rank that fails has said why, unless it was killed: of what torchrun and c10d add to stderr only that remains
brief='
    /^(train_gpt|race)\.py: / { print; fflush(); next }
    /torch\/distributed\/elastic\/.* failed \(exitcode: -/ {
        rank = signal = $0
        sub(/.*local_rank: /, "", rank); sub(/ .*/, "", rank)
        sub(/.*exitcode: -/, "", signal); sub(/\).*/, "", signal)
        print "run.sh: error: rank " rank " was killed by signal " signal (signal == 9 ? "; perhaps memory ran out" : "")
    }
    /torch\/distributed\/elastic\/.*( failed \(exitcode: | death signal)/ { hidden = 1 }  # its traceback follows
    !hidden && !/^[IWE][0-9]+ .*torch\/distributed\/|\[c10d\]/ { print }
    { fflush() }'
briefly() { exec "$@" 2> >(trap '' INT; exec awk "$brief" >&2); }

if $resume; then briefly "$python" records/race.py "${race[@]}"; fi
if [ ${#race[@]} -gt 0 ]; then briefly "$python" records/race.py "${race[@]}" --ranks "$ranks" -- "${flags[@]}"; fi
say "racing: $ranks rank(s), preset $preset"
briefly "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" train_gpt.py "${flags[@]}"
