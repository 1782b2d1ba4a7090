#!/usr/bin/env bash
# The check on a machine with a GPU:   [PYTHON=python3] [OUT=FILE or FOLDER] tests/gpu/check.sh
#
# Runs the tests marked gpu, then 20 steps of the preset `local` under torchrun at world size 1, and writes one JSON
# report to $OUT (records/bench/gpu_check.json, unless set). Uses the packages that $PYTHON has; installs nothing and
# needs no network. Each phase has a time limit, together under 6 minutes.
# Exit: 0 all passed, 1 something failed (the report says what), 2 no GPU here: nothing was checked.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${OUT:-records/bench/gpu_check.json}
[[ ! -d $out ]] || out=$out/gpu_check.json

"$python" -c 'import torch' 2>/dev/null || {
    echo "check.sh: $python has no torch: nothing was checked" >&2
    exit 2
}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "check.sh: no CUDA device on this machine: nothing was checked" >&2
    exit 2
}

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# phase NAME SECONDS COMMAND...: the output goes to a file, since a pipe would wait for any process left behind.
phase() {
    local name=$1 limit=$2 started code=0
    shift 2
    started=$("$python" -c 'import time; print(time.time())')
    echo "check.sh: $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1 </dev/null || code=$?
    tail -n 15 -- "$work/$name.log"
    printf '%s %s %s\n' "$name" "$code" "$started" >>"$work/phases"
}

phase tests 150 "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider --junitxml="$work/tests.xml"
phase train 170 "$python" -m torch.distributed.run --standalone --nproc_per_node=1 \
    train_gpt.py local --steps 20 --runs-dir "$work/runs"
"$python" tests/gpu/report.py "$work" "$out"
