#!/usr/bin/env bash
# From nothing to a trained model: the environment, SmolLM2-135M-Instruct, then the training run.
#
#   scripts/quickstart.sh [options of `lit-rl fit`, for instance --trainer.max_steps 3]
#
#   LIT_RL_DEVICE=cpu|gpu   where to run; by default gpu where two NVIDIA GPUs are, else cpu
#
# With the environment made, the last line by itself does the same: .venv/bin/lit-rl fit --config configs/quickstart.yaml
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

count_gpus() {
    local ids=()
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -ra ids <<<"$CUDA_VISIBLE_DEVICES"
        echo "${#ids[@]}"
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# Trainer and server need a GPU each, and vLLM's build for GPUs cannot serve on a CPU.
find_device() {
    local gpus
    gpus=$(count_gpus)
    if [[ $gpus -ge 2 ]]; then
        printf gpu
    else
        [[ $gpus -eq 0 ]] || echo "One GPU is not enough for trainer and server: both run on the CPU" >&2
        printf cpu
    fi
}

export LIT_RL_DEVICE=${LIT_RL_DEVICE:-$(find_device)}
scripts/setup_env.sh
.venv/bin/python scripts/prepare_model.py
# the configuration says cpu; the server takes the first GPU that the trainer leaves
[[ $LIT_RL_DEVICE == cpu ]] || set -- --trainer.accelerator gpu "$@"
exec .venv/bin/lit-rl fit --config configs/quickstart.yaml "$@"
