#!/usr/bin/env bash
# Runs the kernel tests under compute-sanitizer: memcheck (out of bounds, misaligned), then racecheck (shared memory).
# Needs a GPU and the CUDA toolkit. OUT names a folder for the logs; PYTHON the interpreter; more arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../../.."

OUT=${OUT:-out}
PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
LIMIT=${LIMIT:-240} # seconds for each tool
TOOLS=${TOOLS:-memcheck racecheck}
export TEST_SECONDS=$((LIMIT - 40)) # a tool that is ended by force writes no summary: the tests end before
export NEEDS_GPU=1 # without one, all tests would pass by being skipped

mkdir -p "$OUT"
if [[ ! -x $SANITIZER ]]; then
	echo "no compute-sanitizer on this machine: SKIPPED" | tee "$OUT/sanitize.txt"
	exit 0
fi

# torch's caching allocator would hide a step beyond a tensor inside a larger block; memory that is mapped anew by
# other processes is not ours to check, so children (the compiled-elsewhere tests, host_only) are left out.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Time may run out: what writes into memory comes first.
tests=()
for name in unscale clip norm update_scale; do tests+=("tests/unit/kernels/test_$name.py"); done
for file in tests/unit/kernels/test_*.py; do
	[[ " ${tests[*]} " == *" $file "* ]] || tests+=("$file")
done
tests+=(-m "not host_only")
# What packages that only that machine has call deprecated is no finding of a tool's.
tests+=(-W ignore::DeprecationWarning -W ignore::FutureWarning)

# Whether a tool's tests ended for want of time only: pytest's status 2 hides tests that failed, and what the tool found;
# nor may time have been over before the first of them.
ended_early() { # status tool
	local last
	last=$(tail -n 1 "$OUT/$2-tests.log")
	[[ $1 == 2 && $last == *[1-9]*" passed"* && ! $last =~ failed|error ]] &&
		grep -q "out of time" "$OUT/$2-tests.log" && tail -n 1 "$OUT/$2.log" | grep -q "SUMMARY: 0 "
}

# Some virtual machines have the tool and a GPU that it refuses; its tests fail then, of which nothing follows.
is_refused() { # tool
	grep -qs "Device not supported" "$OUT/$1.log" "$OUT/$1-tests.log"
}

status=0 # the second tool runs whatever the first one found
for tool in $TOOLS; do
	echo "== $tool" | tee -a "$OUT/sanitize.txt"
	# torch asks the driver questions whose answer may be an error, and expects that.
	options=()
	if [[ $tool == memcheck ]]; then options=(--report-api-errors no); fi
	ended=0
	timeout "$LIMIT" "$SANITIZER" --tool "$tool" --target-processes application-only --error-exitcode 99 \
		"${options[@]}" --log-file "$OUT/$tool.log" \
		"$PYTHON" -m pytest "${tests[@]}" -q -p no:cacheprovider "$@" 2>&1 | tee "$OUT/$tool-tests.log" || ended=$?
	if is_refused "$tool"; then
		echo "it does not support this device: SKIPPED" | tee -a "$OUT/sanitize.txt"
		continue
	fi
	tail -n 1 "$OUT/$tool-tests.log" >> "$OUT/sanitize.txt"
	tail -n 1 "$OUT/$tool.log" | tee -a "$OUT/sanitize.txt" || status=1
	if ended_early "$ended" "$tool"; then
		echo "not all of the tests: out of time" | tee -a "$OUT/sanitize.txt"
	elif [[ $ended != 0 ]]; then
		status=1
	fi
done
exit $status
