#!/usr/bin/env bash
# From nothing to a trained model: the environment, SmolLM2-135M-Instruct, then the training run.
#
#   scripts/quickstart.sh [options of `lit-rl fit`, for instance --trainer.max_steps 3]
#
# With the environment made, the last line by itself does the same: .venv/bin/lit-rl fit --config configs/quickstart.yaml
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# the run serves and trains on CPU, also where there is a GPU
LIT_RL_DEVICE=${LIT_RL_DEVICE:-cpu} scripts/setup_env.sh
.venv/bin/python scripts/prepare_model.py
exec .venv/bin/lit-rl fit --config configs/quickstart.yaml "$@"
