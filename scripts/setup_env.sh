#!/usr/bin/env bash
# Makes .venv from the pinned requirement files and installs lit_rl in it. A second run takes a moment.
#
#   scripts/setup_env.sh [--test]      --test adds the tools of scripts/test.sh
#
#   LIT_RL_DEVICE=cpu|gpu   which pins to take; by default gpu where an NVIDIA GPU is, else cpu
#   PYTHON=python3.12       which Python makes the environment; by default the first of 3.11, 3.12 that is found
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
log=$root/.cache/setup.log

say() { printf '%s\n' "$*" >&2; }
die() {
    printf '\nsetup_env.sh: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        # Run it: a pyenv shim exists on PATH also where that version does not.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "lit_rl needs Python 3.11 or 3.12; tried: ${PYTHON:-python3.11, python3.12, python3}.
Install one of them, or name it: PYTHON=/path/to/python3.11 $0"
}

find_device() {
    case ${LIT_RL_DEVICE:-auto} in
        cpu | gpu) printf '%s' "$LIT_RL_DEVICE" ;;
        auto)
            if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then printf gpu; else printf cpu; fi
            ;;
        *) die "LIT_RL_DEVICE = '$LIT_RL_DEVICE': give cpu or gpu, or leave it unset" ;;
    esac
}

# The environment holds absolute paths, and torch's CPU and CUDA builds do not mix: a copy from elsewhere, another
# device or a half-made folder is made anew.
make_venv() {
    local device=$1 python made_for="$root $1"
    if [[ -x $venv/bin/python && $(cat "$venv/.made_for" 2>/dev/null) == "$made_for" ]]; then
        return
    fi
    python=$(find_python)
    say "Making .venv with $("$python" --version) for $device"
    "$python" -m venv --clear "$venv" >>"$log" 2>&1 ||
        die "$python -m venv failed (on Debian and Ubuntu: apt install python3-venv). The end of $log:
$(tail -n 5 "$log")"
    printf '%s' "$made_for" >"$venv/.made_for"
}

# Counts pip's packages on one line while a person is watching; pip's own words go to the log.
progress() {
    local total=$1 count=0 line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        [[ -t 2 ]] || continue
        case $line in
            Collecting*) count=$((count + 1)) && printf '\r  fetching %d of %d ' "$count" "$total" >&2 ;;
            Installing*) printf '\r  unpacking %d packages    ' "$total" >&2 ;;
        esac
    done
    [[ ! -t 2 ]] || printf '\r%40s\r' '' >&2
}

run_pip() {
    local total=$1 bytecode=--no-compile
    shift
    # Most files are never imported, the others are compiled when they are; unless Python is told to keep no bytecode,
    # when every process would compile them again.
    [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || bytecode=--compile
    "$venv/bin/python" -m pip install --no-deps "$bytecode" --no-input --disable-pip-version-check "$@" 2>&1 |
        progress "$total" && return
    die "pip install $* failed. The end of $log:
$(grep -v '^WARNING: Location' "$log" | tail -n 12)

Look for a missing network or a full disk. The +cpu build of torch is not on PyPI itself: where pip does not find it,
name the CPU index of PyTorch's install page in PIP_EXTRA_INDEX_URL and run this again."
}

# Stamps hold the hash of what was installed, so that a changed pin installs and an unchanged one costs nothing.
install_pins() {
    local file=$1 stamp hash count
    stamp=$venv/.installed_$(basename "$file" .txt)
    hash=$(sha256sum <"$file")
    [[ $(cat "$stamp" 2>/dev/null) != "$hash" ]] || return 0
    count=$(grep -c '==' "$file")
    say "Installing the $count packages of $file (minutes; log: ${log#"$root"/})"
    run_pip "$count" -r "$file"
    printf '%s' "$hash" >"$stamp"
}

install_package() {
    local stamp=$venv/.installed_lit_rl hash
    hash=$(sha256sum <pyproject.toml)
    [[ $(cat "$stamp" 2>/dev/null) != "$hash" ]] || return 0
    run_pip 1 --no-build-isolation -e "$root"
    printf '%s' "$hash" >"$stamp"
}

main() {
    local device started=$SECONDS
    [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] ||
        die "this is $(uname -s) on $(uname -m); the pinned vLLM builds are for Linux on x86_64"
    [[ $# -eq 0 || $* == --test ]] || die "unknown argument: $*. The only one is --test"
    device=$(find_device)
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock 9 # two scripts at once: the second waits for the first one's pip
    : >"$log"
    make_venv "$device"
    install_pins "scripts/requirements-$device.txt"
    [[ $# -eq 0 ]] || install_pins scripts/requirements-test.txt
    install_package
    say "The environment is ready: .venv ($device), $((SECONDS - started)) s"
}

main "$@"
