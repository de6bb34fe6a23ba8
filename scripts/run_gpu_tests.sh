#!/usr/bin/env bash
# Run every test that needs a GPU, then memcheck and racecheck on a small case of each kernel.
#
# INT8MOE_TEST_WORKERS sets the number of test processes (default 6), INT8MOE_SANITIZER_TOOLS the
# sanitizer's tools (default "memcheck racecheck"; empty: none). Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# One compilation at a time in each process: the processes already fill the machine.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1
failed=0

"$python" - <<'names' || failed=1
import sys
sys.path.insert(0, "tests")
from test_families_gpu import SAMPLE, SEED
print(f"families of INT8MOE_FAMILY_SEED={SEED}:", *(family.class_name for family in SAMPLE))
names
# Only the files that have such tests: the others' imports may be missing on a GPU machine.
mapfile -t files < <(grep -l "mark\.gpu" tests/test_*.py)
"$python" -m pytest -q -m gpu -n "${INT8MOE_TEST_WORKERS:-6}" --dist worksteal "$@" "${files[@]}" ||
    failed=1

# Every allocation its own, so that a step past a buffer's end is one past an allocation.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Compile first: under the sanitizer a compiler process would be watched, too.
"$python" tests/sanitized.py || failed=1
# What racecheck takes for a race in loads "stream" is none, so that it leaves them out, until it
# follows the order that tests/racecheck_order.cu has: 0 hazards where it finds 1, then 1.
hazards_of() {
    nvcc -arch=sm_90 -DARRIVAL="$1" tests/racecheck_order.cu -o "$probe/order" &&
        compute-sanitizer --tool racecheck "$probe/order" | grep -o "SUMMARY: [0-9]*"
}
for tool in ${INT8MOE_SANITIZER_TOOLS-memcheck racecheck}; do
    echo "== $tool"
    left_out=
    if [ "$tool" = racecheck ]; then
        left_out=--without-stream
        probe=$(mktemp -d)
        found=$(for arrival in 0 1 2; do hazards_of $arrival; done | tr -dc '0-9\n' | tr '\n' ' ')
        rm -r "$probe"
        echo "hazards of tests/racecheck_order.cu (0 1 1 when --without-stream was added): $found"
        [ "$found" = "0 0 1 " ] && left_out=
    fi
    compute-sanitizer --tool "$tool" --target-processes application-only --error-exitcode 9 \
        "$python" tests/sanitized.py $left_out || failed=1
done
exit $failed
