# shellcheck shell=bash
# Sourced by scripts/check and scripts/test: the checks that run no code of ours. They all run, whatever
# the first one finds, and their number of failures is left in STATIC_FAILURES.

STATIC_FAILURES=0

static_check() {
    say "$1"
    shift
    "$@" || STATIC_FAILURES=$((STATIC_FAILURES + 1))
}

run_static_checks() {
    static_check "format (ruff format --check)" ruff format --check .
    static_check "lint (ruff check)" ruff check .
    static_check "import law (lint-imports)" lint-imports --no-logo
}
