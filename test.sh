#!/usr/bin/env bash
# Set up once, then run the tests, from any directory: ./test.sh [--all] [pytest's own arguments]. --all: slow ones too
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh test.sh
set -euo pipefail
unset CDPATH  # cd would print
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chosen=(-m "not slow")
[ "${1:-}" != --all ] || { chosen=(); shift; }
"$here/run.sh" --setup
"$here/run.sh" --setup-tests
cd "$here"
home=${DRY_GPU_HOME:-${XDG_CACHE_HOME:-~/.cache}/dry-gpu}
[ -e "$home/lib/libdrygpu.so" ] ||
    echo "test.sh: no simulated GPU in $home: tests on it are skipped; dry_gpu/setup installs it"
unset PYTHONPATH  # runs record it
unset PYTHONDONTWRITEBYTECODE  # what pytest makes of the tests' asserts is kept: else each of its processes makes it anew
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$here/.cache/torchinductor}
TMPDIR=$(mktemp -d) && export TMPDIR  # killed processes leave files
trap 'rm -rf "$TMPDIR"' EXIT
.venv/bin/python -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
