#!/usr/bin/env bash
# Set up once, then run the tests, from any directory: ./test.sh [pytest's own arguments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/run.sh" --setup
cd "$here"
unset PYTHONDONTWRITEBYTECODE  # what pytest makes of the tests' asserts is kept: else each of its processes makes it anew
exec .venv/bin/python -m pytest "$@"
