#!/usr/bin/env bash
# Makes the environment, then teaches a small transformer a reasoning task by RL: bash scripts/quickstart.sh [WORKDIR]
# About ten minutes alone on two cores of an AMD EPYC, after the installation. Stop it with Ctrl-C; the same
# command goes on from there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
workdir=${1:-runs/quickstart}
cd "$root"
environment
"$python" -m experiments.train --config=configs/quickstart.py --workdir="$workdir" "${@:2}"
[ -e "$workdir/summary.json" ] || exit 0 # stopped by hand
"$python" - "$workdir" <<'END'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]).absolute()
accuracy = json.loads((folder / 'summary.json').read_text())['accuracy']
print(f'Run folder: {folder}')
print(f'Held-out accuracy: {accuracy["before"]:.1%} before RL, {accuracy["after"]:.1%} after')
END
