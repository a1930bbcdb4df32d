#!/usr/bin/env bash
# Everything that is checked: lint, format, types, tests with fakes at the process borders, the pins for machines with
# GPUs, tests with a real vLLM.
#
#   scripts/test.sh [--fast]      --fast leaves out the pins and the tests with a real server
#
# Goes through all stages and fails at the end if one of them failed. Temporary files go where TMPDIR says.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -eq 0 || $* == --fast ]] || {
    echo "test.sh: unknown argument: $*. The only one is --fast" >&2
    exit 2
}

# Some tests run torch.compile, which on CPU writes C++.
command -v "${CXX:-g++}" >/dev/null || {
    echo "test.sh: there is no C++ compiler (${CXX:-g++}); on Debian and Ubuntu: apt install g++ python3-dev" >&2
    exit 1
}

# Tests reach no hub, no tracker and no cache of the user's.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline VLLM_NO_USAGE_STATS=1
export HF_HOME=$PWD/.cache/huggingface

failed=()
stage() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
    printf '== %s: %d s\n' "$name" "$((SECONDS - started))"
}

bash_syntax() {
    local file
    for file in scripts/*.sh .ci/run; do bash -n "$file" || return; done
}

LIT_RL_DEVICE=${LIT_RL_DEVICE:-cpu} scripts/setup_env.sh --test
python=.venv/bin/python
stage "bash syntax" bash_syntax
stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy" "$python" -m mypy
# Many small tensors and several processes on few cores: more threads would only wait for each other.
stage "unit and process tests" env OMP_NUM_THREADS=1 "$python" -m pytest -m "not integration" -n 2 --dist loadfile
if [[ $# -eq 0 ]]; then
    stage "pins for GPUs" "$python" scripts/resolve_pins.py
    stage "the quickstart's model" "$python" scripts/prepare_model.py
    # as `lit-rl` sets it: threads that spin would keep the server from the cores
    stage "integration tests" env OMP_WAIT_POLICY=PASSIVE LIT_RL_TEST_MODEL="$PWD/models/SmolLM2-135M-Instruct" "$python" -m pytest -m integration
fi

if [[ ${#failed[@]} -gt 0 ]]; then
    printf '\nfailed: %s\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')" >&2
    exit 1
fi
