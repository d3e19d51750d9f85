#!/usr/bin/env bash
# All tests on another version of torch:
#
#   bash scripts/test_torch.sh 2.11.0 [OPTIONS of pytest, such as --long]      the oldest that works
#   bash scripts/test_torch.sh newest [OPTIONS]                                the newest that pip finds
#
# The Makefile sets .venv-torch-VERSION up as it does .venv (some GB), at the versions of constraints.txt but for those
# that torch itself chooses, and an older numpy: the interpreter of Triton 3.6, which torch 2.11 brings, fails with 2.4.
# What is there already is taken.
set -euo pipefail
version=${1:?"say which: bash scripts/test_torch.sh 2.11.0, or newest"}
shift
if [ "$version" = newest ]; then
  version=$(python3 -m pip index versions torch 2> /dev/null | sed -nE '1s/^torch \((.*)\)$/\1/p')
  [ -n "$version" ] || { echo "test_torch: pip finds no torch; name a version" >&2; exit 1; }
fi
cd "$(dirname "$0")/.."
venv=.venv-torch-$version
mkdir -p "$venv"
sed -E "s/^torch==.*/torch==$version/; s/^numpy==.*/numpy<2.4/; /^(triton|setuptools)==/d" constraints.txt > "$venv/constraints.txt"
make --no-print-directory "$venv/.ready" VENV="$venv" CONSTRAINTS="$venv/constraints.txt"
"$venv/bin/python" -c 'import torch, fp4train; print("torch", torch.__version__, "imports fp4train")'
exec "$venv/bin/pytest" -n 2 --dist worksteal --durations=10 "$@"
