#!/usr/bin/env bash
# Makes the environment and runs every check and test: bash scripts/test.sh [arguments of pytest]
# Compiled programs are kept in .cache/jax (ROLLOUT_JAX_CACHE: elsewhere), so a second run is much shorter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
environment test
export ROLLOUT_JAX_CACHE=${ROLLOUT_JAX_CACHE:-$root/.cache/jax}
mkdir -p "$ROLLOUT_JAX_CACHE"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m pytest -n 2 --dist worksteal "$@" # two processes: compiling keeps one core busy
