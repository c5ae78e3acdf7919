#!/usr/bin/env bash
# Checks in at most eight minutes what works on this machine's GPUs: `bash scripts/gpu_check.sh`. Prints a table and
# writes it to benchmarks/results/gpu.md. Flags: those of benchmarks/gpu.py, such as `--device cpu`.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
uv="$(bash "$root/scripts/bootstrap.sh")"
cd "$root"
if command -v nvidia-smi >/dev/null 2>&1; then
  "$uv" pip install --quiet bitsandbytes # models of 4 bits
fi
exec "$uv" run --no-sync python benchmarks/gpu.py "$@"
