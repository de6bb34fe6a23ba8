#!/usr/bin/env bash
# Install into an own virtual environment, then lint, check types and test; arguments go to pytest.
#
# Without arguments this is what CI runs. The slow tests: scripts/test.sh -m slow
# INT8MOE_TEST_WORKERS sets the number of test processes (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv test,hf

ruff check
ruff format --check
mypy

# One thread a worker: two workers on two cores otherwise fight over them.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1
# A cache of its own: a hit left behind by an earlier run would keep the graph pass from running.
TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
export TORCHINDUCTOR_CACHE_DIR
trap 'rm -rf "$TORCHINDUCTOR_CACHE_DIR"' EXIT
pytest -n "${INT8MOE_TEST_WORKERS:-2}" --dist loadfile --cov --cov-report=term --durations=15 \
    -m "not gpu and not slow" "$@"
