#!/usr/bin/env bash
# The tests on another version of torch:  bash scripts/test_torch.sh 2.11.0 [FOLDER]
# Makes a virtual environment with it in FOLDER (default .venv-torch-VERSION, some GB) or takes the one that is there,
# trains a few steps through the command line, and runs the tests of what touches torch. C kernels are used if built.
set -euo pipefail
version=${1:?"say which: bash scripts/test_torch.sh 2.11.0"}
cd "$(dirname "$0")/.."
venv=${2:-.venv-torch-$version}
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/python" - > "$venv/requirements.txt" << 'PY'
import tomllib

for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    if not line.startswith("torch"):
        print(line)
PY
  "$venv/bin/pip" install "torch==$version" -r "$venv/requirements.txt" pytest pytest-xdist hypothesis ml_dtypes
fi
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
"$venv/bin/python" -c 'import torch, fp4train; print("torch", torch.__version__, "imports fp4train")'
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
"$venv/bin/python" -m fp4train model.width=32 model.layers=2 model.heads=2 model.kv_heads=1 model.hidden=64 \
  train.steps=6 train.batch_size=4 train.seq_len=32 eval.batches=1 data=text data.path=README.md track=jsonl \
  "data.cache_dir=$runs/cache" "run.dir=$runs/run"
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/nn tests/precision tests/backends tests/models tests/quantize
