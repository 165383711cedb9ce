#!/usr/bin/env bash
# All checks that need no GPU: sets up .venv, then lint, format, types and tests, fast tests first.
#
#   bash tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/setup_venv.sh
. tools/setup_venv.sh
setup_venv dev
ruff check .
ruff format --check .
mypy
exec python -m pytest -m "not gpu" "$@"
