# shellcheck shell=bash
# Sourced by the scripts beside it: makes .venv in the clone with pinned requirements, once, and puts
# it on PATH. Quick when all is set up: a stamp in .venv records what was installed for which group.
#
# Use: source environment.sh && prepare_environment demo|test|docs
# FOVEA_PYTHON names the interpreter to build .venv with (default: the first Python >= 3.11 found).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in "${FOVEA_PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 python; do
        if [ -n "$candidate" ] && is_new_enough "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found; install one, or name it: FOVEA_PYTHON=/path/to/python $0"
}

has_gpu() { [ -n "$(nvidia-smi -L 2>/dev/null | grep GPU)" ]; }

# Whether the build of torch that pip would take by default brings CUDA's libraries along (several GB).
default_torch_is_cuda_build() {
    "$VENV/bin/python" -m pip install --quiet --dry-run --no-deps --ignore-installed --report - \
        -r "$ROOT/scripts/requirements-torch.txt" 2>/dev/null |
        "$VENV/bin/python" -c '
import json, platform, sys
requires = json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])
has_cuda = any(name.startswith(("nvidia-", "cuda-")) for name in requires)
sys.exit(0 if has_cuda and platform.system() == "Linux" else 1)'
}

install_torch() {
    local pin
    pin="$(grep -E '^torch==' "$ROOT/scripts/requirements-torch.txt")"
    if "$VENV/bin/python" -c "
import importlib.metadata, sys
sys.exit(importlib.metadata.version('torch').split('+')[0] != '${pin#torch==}')" 2>/dev/null; then
        return
    fi
    if ! has_gpu && default_torch_is_cuda_build; then
        say "installing $pin, the CPU build (no GPU here) from $TORCH_CPU_INDEX: minutes, without a word"
        if "$VENV/bin/python" -m pip install --quiet --index-url "$TORCH_CPU_INDEX" "$pin"; then
            return
        fi
        say "that index did not answer; taking the default build of torch, which is large"
    else
        say "installing $pin: minutes, without a word"
    fi
    "$VENV/bin/python" -m pip install --quiet -r "$ROOT/scripts/requirements-torch.txt"
}

prepare_environment() {
    local group="$1" stamp wanted python
    stamp="$VENV/.installed-$group"
    wanted="$(cat "$ROOT"/scripts/requirements-*.txt "$ROOT/pyproject.toml" | cksum) $ROOT"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        if ! is_new_enough "$VENV/bin/python"; then
            python="$(find_python)" || exit 1
            say "making a virtual environment in $VENV with $("$python" --version)"
            rm -rf "$VENV"
            "$python" -m venv "$VENV" ||
                fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
        fi
        install_torch
        say "installing the pinned requirements of '$group' and fovea itself (editable): minutes, without a word"
        "$VENV/bin/python" -m pip install --quiet -r "$ROOT/scripts/requirements-$group.txt"
        "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e "$ROOT"
        printf '%s' "$wanted" >"$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
    # cuobjdump and nvdisasm, which their wheels put where no PATH looks.
    local tools
    for tools in "$VENV"/lib/python*/site-packages/nvidia/cu13/bin; do
        export PATH="$PATH:$tools"
    done
}
