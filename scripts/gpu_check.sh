#!/usr/bin/env bash
# What only a GPU machine can tell:  bash scripts/gpu_check.sh benchmarks/NAME --total 9
# The same at tiny sizes on a CPU:   bash scripts/gpu_check.sh --dry-run --total 9
#
# gpu_check.py says what the parts are and what they write. The package need not be installed.
python=${PYTHON:-}
if [ -z "$python" ]; then
  for python in python3 python; do command -v "$python" > /dev/null && break; done
fi
exec "$python" -u "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
