#!/usr/bin/env bash
# Runs every test that this machine can run, in .venv, which it sets up first. Arguments go to pytest:
#   ./scripts/test.sh -x -k zigzag
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh test
export OMP_NUM_THREADS=1 # the ring tests start up to 8 processes
exec .venv/bin/python -m pytest "$@"
