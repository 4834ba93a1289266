#!/usr/bin/env bash
# Trains a small byte-level transformer on Python's own library, its sequences sharded over all GPUs or 2 CPU processes,
# in .venv, which it sets up first. Arguments go to the training script: ./scripts/quickstart.sh --steps 1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh train
read -r gpus cores < <(.venv/bin/python -c 'import os, torch; print(torch.cuda.device_count(), os.cpu_count())')
if ((gpus > 0)); then
    ranks=$gpus size=(--layers 8 --dim 512 --heads 8 --kv-heads 2 --seq-len $((16384 * gpus)) --steps 300)
else
    ranks=2 size=(--layers 2 --dim 128 --heads 2 --kv-heads 1 --seq-len 2048 --steps 100)
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    scripts/train_long_context.py --out runs/quickstart "${size[@]}" "$@"
