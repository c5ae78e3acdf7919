#!/usr/bin/env bash
# What the launch_*.sh have in common: `bash scripts/launch.sh ALGORITHM FLAGS`. Takes out `--torch cpu|cuda`, which
# is for bootstrap.sh, makes the checkout ready and starts the launch.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
algorithm="$1"
shift

torch=""
left=$#
while [ "$left" -gt 0 ]; do
  word="$1"
  shift
  left=$((left - 1))
  case "$word" in
    --torch)
      torch=nothing
      if [ "$left" -gt 0 ]; then
        torch="$1"
        shift
        left=$((left - 1))
      fi
      ;;
    --torch=*)
      torch="${word#*=}"
      torch="${torch:-nothing}"
      ;;
    --help)
      printf '%s\n' "--torch cpu|cuda  PyTorch without or with CUDA, on Linux; a new environment gets CUDA where" \
        "                  there is an NVIDIA GPU. All other flags:"
      set -- "$@" "$word"
      ;;
    *) set -- "$@" "$word" ;;
  esac
done

uv="$(bash "$root/scripts/bootstrap.sh" ${torch:+--torch "$torch"})"
exec "$uv" run --no-sync --project "$root" smolcluster launch "$algorithm" "$@"
