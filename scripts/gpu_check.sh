#!/usr/bin/env bash
# What only a GPU machine can tell:  bash scripts/gpu_check.sh benchmarks/NAME [PART…] [--dry-run]
#
#   kernels   Triton kernels: bits against the reference, and bandwidth         NAME-kernels.json
#   te        Transformer Engine's layers against our emulation                 NAME-te.json
#   native    fp4train doctor; torch's scaled products against our emulation    NAME-doctor.json NAME-native.json
#   steps     quantise, linear and step times; recorded steps against eager     NAME.{json,md,png} NAME-graph.json
#   runs      short real runs, compared                                         runs/NAME-*, NAME-runs.png
#   sanitize  the kernels under compute-sanitizer; only where it is asked for
#
# Without a PART: all but sanitize. What is done is noted in NAME.done and not done again, so that a part which was cut
# off goes on when it is called again; results are written as they come. The package need not be installed. Exit code 1:
# something failed; what cannot run here, such as Transformer Engine's part without it, is left out with its reason.
set -uo pipefail
out=""
dry=0
parts=()
for word in "$@"; do
  case "$word" in
    --dry-run) dry=1 ;;
    kernels | te | native | steps | runs | sanitize) parts+=("$word") ;;
    -* ) echo "gpu_check: unknown option $word" >&2; exit 2 ;;
    *) if [ -z "$out" ]; then out=$word; else echo "gpu_check: unknown part $word" >&2; exit 2; fi ;;
  esac
done
[ -n "$out" ] || { echo "say where to write: bash scripts/gpu_check.sh benchmarks/NAME [PART…]" >&2; exit 2; }
[ ${#parts[@]} -gt 0 ] || parts=(kernels te native steps runs)
[[ $out = /* ]] || out=$PWD/$out
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$out.triton}"
python=${PYTHON:-python}
name=$(basename "$out")
failed=0
[ $dry = 1 ] || mkdir -p "$(dirname "$out")"

# step NAME COMMAND…: once; exit code 3 says that it cannot run here.
step() {
  local what=$1
  shift
  if [ $dry = 1 ]; then echo "$*"; return 0; fi
  if grep -qxF "$what" "$out.done" 2> /dev/null; then echo "== $what: done before"; return 0; fi
  echo "== $what: $*"
  local code=0
  "$@" || code=$?
  case $code in
    0) echo "$what" >> "$out.done" ;;
    3) echo "== $what: left out" ;;
    *) echo "== $what: FAILED ($code)"; failed=1 ;;
  esac
  return $code
}

doctor() {
  "$python" -m fp4train doctor --json > "$out-doctor.json"
  local code=$?
  "$python" -m fp4train doctor
  return $code
}

for part in "${parts[@]}"; do
  case $part in
    kernels) step kernels "$python" scripts/gpu_kernels.py --out "$out-kernels.json" ;;
    te) step te "$python" scripts/te_selfcheck.py --out "$out-te.json" ;;
    native)
      step doctor doctor
      step native "$python" scripts/gpu_native.py --out "$out-native.json"
      ;;
    steps)
      for each in quantize scaling linear step; do
        step "steps $each" "$python" scripts/benchmark.py "$each" --processes 1 --out "$out-$each"
      done
      step "steps graph" "$python" scripts/gpu_graph.py --out "$out-graph.json"
      ;;
    runs)
      finished=()
      for recipe in bf16 nvfp4 mxfp8 fp8_current nvfp4-compiled; do
        options=("recipe=${recipe%-compiled}")
        [ "$recipe" = "${recipe%-compiled}" ] || options+=(train.compile=true)
        # A run that was cut off goes on from its last checkpoint.
        if [ -d "runs/$name-$recipe/checkpoints" ]; then
          options=("resume=runs/$name-$recipe")
        else
          options+=(model=llama_125m train.steps=200 train.batch_size=32 train.seq_len=1024 track=jsonl
            checkpoint.every=50 "run.name=$name-$recipe" run.overwrite=true)
        fi
        step "run $recipe" "$python" -m fp4train "${options[@]}" && finished+=("runs/$name-$recipe")
      done
      [ ${#finished[@]} -lt 2 ] || step compare "$python" -m fp4train compare "${finished[@]}" "out=$out-runs.png"
      ;;
    sanitize)
      if command -v compute-sanitizer > /dev/null || [ $dry = 1 ]; then
        step sanitize env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
          "$python" scripts/gpu_kernels.py --sanitize
      else
        echo "== sanitize: left out: compute-sanitizer is not installed"
      fi
      ;;
  esac
done
exit $failed
