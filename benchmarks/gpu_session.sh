#!/usr/bin/env bash
# Tests marked `gpu`, then `benchmarks.one_gpu`, within ten minutes on one GPU. It installs nothing.
#
#   bash benchmarks/gpu_session.sh [SECONDS]     all time together, 580 by default
#
# Settings: OUT, folder of the results, build/gpu by default; PYTHON, python3 by default; WHEELS, folder of pure-Python
# wheels (trl, datasets, dill, multiprocess) for TRL's arms, .whl by default.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
limit=${1:-580}
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

timeout 200 "$python" -m pytest -m gpu -q --timeout 120 2>&1 | tee "$out/tests.log"
tests=$?

left=$((limit - SECONDS - 20)) # printing and leaving take seconds, too
[ "$left" -lt 480 ] || left=480
arguments=(--limit-s "$left" --json "$out/one_gpu.json")
[ ! -d "$wheels" ] || arguments+=(--wheels "$wheels")
timeout $((left + 15)) "$python" -m benchmarks.one_gpu "${arguments[@]}" 2>&1 | tee "$out/one_gpu.log"
echo "tests ended with $tests, the benchmark with $?, after $SECONDS s; results are in $out"
exit "$tests"
