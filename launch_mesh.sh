#!/usr/bin/env bash
# Trains on a mesh: `bash launch_mesh.sh --local` as 8 processes of this machine, TP 2 x PP 4; `--help` shows all flags.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
uv="$(bash "$root/scripts/bootstrap.sh")"
if [ "${1-}" = --local ]; then
    shift
    set -- --world-size 8 --tp 2 --pp 4 --layers 8 --microbatches 8 --batch-size 16 "$@"
fi
exec "$uv" run --no-sync --project "$root" python -m smolcluster.distributed_training "$@"
