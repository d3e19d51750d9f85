#!/usr/bin/env bash
# Everything that only a GPU machine can tell, in one command:  bash scripts/gpu_check.sh benchmarks/NAME
# Writes NAME-kernels.json (Triton kernels: bits and bandwidth), NAME-te.json (Transformer
# Engine's layers against our emulation), NAME.{json,md,png} (quantise, linear and step times) and NAME-*/ (short real runs).
set -uo pipefail
out=${1:?"say where to write: bash scripts/gpu_check.sh benchmarks/NAME"}
mkdir -p "$(dirname "$out")"
failed=0
step() { echo "== $*"; "$@" || { echo "FAILED: $*"; failed=1; }; }

step python scripts/gpu_kernels.py --out "$out-kernels.json"
if command -v compute-sanitizer > /dev/null; then
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step compute-sanitizer --error-exitcode 1 python scripts/gpu_kernels.py --sanitize
fi
step python scripts/te_selfcheck.py --out "$out-te.json"
step python scripts/benchmark.py quantize scaling linear step --processes 1 --out "$out"
for recipe in bf16 nvfp4 mxfp8 fp8_current; do
  step python -m fp4train model=llama_125m train.steps=200 train.batch_size=32 train.seq_len=1024 \
    "recipe=$recipe" "run.name=$(basename "$out")-$recipe" track=jsonl
done
step python -m fp4train model=llama_125m train.steps=200 train.batch_size=32 train.seq_len=1024 \
  recipe=nvfp4 train.compile=true "run.name=$(basename "$out")-nvfp4-compiled" track=jsonl
step python -m fp4train compare "runs/$(basename "$out")-"{bf16,nvfp4,nvfp4-compiled,mxfp8,fp8_current} "out=$out-runs.png"
exit $failed
