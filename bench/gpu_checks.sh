#!/usr/bin/env bash
# Builds, proves and times the package on a GPU machine, without network:
#   bash bench/gpu_checks.sh OUT [build selftest gpu parity grouped corners sanitizer suite bench benchgrouped benchdecode accounting accuracy demo]
# Leaves JSON and logs in the folder OUT. Every step runs even if an earlier one failed; the exit
# code is the number of failed steps.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
root=$(cd "$(dirname "$0")/.." && pwd)
steps=${*:-build selftest gpu parity grouped corners sanitizer suite bench benchgrouped benchdecode accounting accuracy demo}
failed=0

step() {
  local name=$1
  shift
  [[ " $steps " == *" $name "* ]] || return 0
  local start=$SECONDS
  "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code, $((SECONDS - start)) s"
  tail -n 12 "$out/$name.log" | sed 's/^/    /'
  [[ $code == 0 ]] || failed=$((failed + 1))
}

sanitize() {
  local tool
  for tool in memcheck racecheck synccheck; do
    # One allocation per buffer, or memcheck cannot see an overrun from one into the next.
    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python3 -P tests/gpu_parity.py --small --jobs 1 || return 1
    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python3 -P tests/gpu_grouped.py --small --jobs 1 || return 1
  done
}

cd "$root"
step build python3 -m pip install --no-build-isolation --no-deps .
step selftest python3 -P -m jax_w4a4 selftest --json "$out/selftest.json"
# The parity cells run once, in the next step.
step gpu python3 -P -m pytest -m gpu tests -q -k "not Parity"
step parity python3 -P tests/gpu_parity.py --jobs 16 --json "$out/parity.json"
step grouped python3 -P tests/gpu_grouped.py --jobs 16 --json "$out/grouped_parity.json"
step corners python3 -P tests/gpu_corners.py --jobs 16 --json "$out/corners.json"
step sanitizer sanitize
step suite env JAX_PLATFORMS=cpu python3 -P -m pytest tests -q -n 8 -m "not gpu"
step bench python3 -m bench --json "$out/bench.json"
step benchgrouped python3 -m bench.grouped --json "$out/grouped.json"
step benchdecode python3 -m bench.decode --json "$out/decode.json"
step accounting python3 -m bench.accounting --json "$out/accounting.json"
step accuracy python3 -m bench.accuracy --json "$out/accuracy.json"
step demo python3 -P -m jax_w4a4 demo --json "$out/demo.json"
exit $failed
