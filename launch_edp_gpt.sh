#!/usr/bin/env bash
# Trains a GPT with EDP: `bash launch_edp_gpt.sh --local` on this machine; `--help` shows all flags.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
exec bash "$root/scripts/launch.sh" edp-gpt "$@"
