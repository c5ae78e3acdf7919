#!/usr/bin/env bash
# Trains with DiLoCo: `bash launch_diloco.sh --local` on this machine; `--help` shows all flags.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
exec bash "$root/scripts/launch.sh" diloco "$@"
