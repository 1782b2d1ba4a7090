#!/usr/bin/env bash
# ./run.sh [PRESET] [flags]      trains: the words are those of train_gpt.py (./run.sh --help lists them)
# ./run.sh test [pytest flags]   runs the tests
#
# Makes .venv beside this script when it is missing and installs the pinned requirements into it. What was installed is
# noted in .venv, so a later call starts at once, and a call after an interrupted install mends it.
set -euo pipefail

root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=$root/.venv

fail() {
    printf 'run.sh: %s\n' "$1" >&2
    exit 1
}

# The first interpreter that is new enough and can make an environment.
find_python() {
    local name version without_venv='' too_old=''
    for name in python3 python3.13 python3.12 python3.11; do
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            too_old=${too_old:-" ($name is $version)"}
        elif ! "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            without_venv=${without_venv:-$version}
        else
            printf '%s\n' "$name"
            return
        fi
    done
    if [[ $without_venv ]]; then
        fail "Python $without_venv lacks the venv module: install it, e.g. apt install python$without_venv-venv"
    fi
    fail "no Python 3.11 or newer found$too_old: install one, e.g. apt install python3.11-venv"
}

# A note is a copy of the requirements file it stands for.
note_of() {
    printf '%s\n' "$venv/installed-${1##*/}"
}

up_to_date() {
    [[ -x $venv/bin/python ]] || return
    local file note
    for file in "$@"; do
        note=$(note_of "$file")
        [[ -f $note && $(<"$note") == "$(<"$file")" ]] || return
    done
}

make_venv() {
    local python
    python=$(find_python)
    printf 'run.sh: making .venv with %s\n' "$python" >&2
    rm -rf -- "$venv"
    mkdir -- "$venv"
    : >"$venv/unfinished"
    "$python" -m venv "$venv" || fail 'could not make .venv (see above)'
    rm -- "$venv/unfinished"
}

install() {
    local file half
    if [[ -e $venv/unfinished ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        make_venv
    fi
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "the Python in $venv is older than 3.11: remove that folder"
    "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip >&2
    rm -f -- "$venv"/installed-*
    # pip writes INSTALLER last: a package without it was cut off half way, and pip would take it for whole.
    for half in "$venv"/lib/python3*/site-packages/*.dist-info; do
        [[ -f $half/INSTALLER ]] || rm -rf -- "$half"
    done
    printf 'run.sh: installing %s\n' "${*##*/}" >&2
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "${@/#/--requirement=}" >&2 ||
        fail 'could not install the requirements (see above): the next call tries again'
    for file in "$@"; do
        cp -- "$file" "$(note_of "$file")"
    done
}

requirements=("$root/requirements.txt")
[[ ${1:-} != test ]] || requirements+=("$root/requirements-test.txt")
up_to_date "${requirements[@]}" || install "${requirements[@]}"

if [[ ${1:-} == test ]]; then
    shift
    cd -- "$root"
    # One thread a worker: torch's threads and pytest's workers would fight for the same cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$venv/bin/python" -m pytest -n auto --maxprocesses 8 --dist loadgroup "$@"
fi
exec "$venv/bin/python" "$root/train_gpt.py" "$@"
