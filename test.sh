#!/usr/bin/env bash
# Set up once, then run the tests, from any directory: ./test.sh [pytest's own arguments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/run.sh" --setup
"$here/run.sh" --setup-tests
cd "$here"
home=${DRY_GPU_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/dry-gpu}
[ -e "$home/lib/libdrygpu.so" ] ||
    echo "test.sh: no simulated GPU in $home: tests on it are skipped; dry_gpu/setup installs it"
unset PYTHONDONTWRITEBYTECODE  # what pytest makes of the tests' asserts is kept: else each of its processes makes it anew
exec .venv/bin/python -m pytest "$@"
