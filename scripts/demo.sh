#!/usr/bin/env bash
# Install into an own virtual environment and run the demo; arguments go to `int8moe demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
use_venv hf
exec int8moe demo "$@"
