#!/usr/bin/env bash
# All checks that need no GPU: sets up .venv, then lint, format, types and tests, fast tests first.
#
#   bash tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/setup_venv.sh
. tools/setup_venv.sh
setup_venv dev

# Every check runs whatever the others find; pytest comes last, so that its summary is the last line.
status=0
ruff check . || status=1
ruff format --check . || status=1
mypy || status=1
python -m pytest -m "not gpu" "$@" || status=1
exit "$status"
