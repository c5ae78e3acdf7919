#!/usr/bin/env bash
# Spreads a model's layers over machines: `bash launch_pipeline.sh --local` on this machine; `--help` shows all flags.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
exec bash "$root/scripts/launch.sh" pipeline "$@"
