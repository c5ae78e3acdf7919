#!/usr/bin/env bash
# Trains with SyncPS: `bash launch_syncps.sh --local` on this machine; `--help` shows all flags.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
exec bash "$root/scripts/launch.sh" syncps "$@"
