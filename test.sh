#!/usr/bin/env bash
# Set up once, then run the tests, from any directory: ./test.sh [pytest's own arguments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/run.sh" --setup
cd "$here"
exec .venv/bin/python -m pytest "$@"
