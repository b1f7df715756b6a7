#!/usr/bin/env bash
# Runs the kernel tests under compute-sanitizer: memcheck (out of bounds, misaligned), then racecheck (shared memory).
# Needs a GPU and the CUDA toolkit. OUT names a folder for the logs; PYTHON the interpreter; more arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-out}
PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
LIMIT=${LIMIT:-240} # seconds for each tool
export TEST_SECONDS=$((LIMIT - 40)) # a tool that is ended by force writes no summary: the tests end before

mkdir -p "$OUT"
if [[ ! -x $SANITIZER ]]; then
	echo "no compute-sanitizer on this machine: SKIPPED" | tee "$OUT/sanitize.txt"
	exit 0
fi

# torch's caching allocator would hide a step beyond a tensor inside a larger block; memory that is mapped anew by
# other processes is not ours to check, so children (the compiled-elsewhere tests) are left out.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
tests=(tests/kernels)
for name in aot native_dispatch stub_driver launch_paths simulated ptx_simulator; do tests+=(--ignore "tests/kernels/test_$name.py"); done
# A tool's kernels are not to be timed, and that takes long.
tests+=(--deselect tests/kernels/test_sweep.py::test_a_sweep_with_the_gpus_own_timer)

status=0 # the second tool runs whatever the first one found
for tool in memcheck racecheck; do
	echo "== $tool" | tee -a "$OUT/sanitize.txt"
	# torch asks the driver questions whose answer may be an error, and expects that.
	options=()
	if [[ $tool == memcheck ]]; then options=(--report-api-errors no); fi
	timeout "$LIMIT" "$SANITIZER" --tool "$tool" --target-processes application-only --error-exitcode 99 \
		"${options[@]}" --log-file "$OUT/$tool.log" \
		"$PYTHON" -m pytest "${tests[@]}" -q -p no:cacheprovider "$@" 2>&1 | tee "$OUT/$tool-tests.log" || status=1
	tail -n 1 "$OUT/$tool.log" | tee -a "$OUT/sanitize.txt" || status=1
done
exit $status
