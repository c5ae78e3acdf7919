#!/usr/bin/env bash
# All checks: ruff, then pytest and beside it mypy; pytest's summary comes last. Arguments go to pytest, of which
# several processes run, because most of a test's time is waiting: three for each of two cores.
# Exits with pytest's code, or with 1 when only another check failed.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"

# Debian packages that tests need, separated by spaces.
system_packages="openssh-server openssh-client tmux rsync iproute2 procps fish zsh prometheus chromium chromium-driver docker-compose nginx graphviz slurmctld slurmd slurm-client"

# shellcheck disable=SC2329 # `check` invokes it
install_system_packages() {
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@" ||
      { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"; }
  else
    printf 'some tests need these packages, which only root can install: %s\n' "$*"
  fi
}

# Else each of some hundred processes would compile the project anew.
unset PYTHONDONTWRITEBYTECODE

beside="$(mktemp -d)" # what the other checks leave for the end
trap 'rm -rf -- "$beside"' EXIT

# Runs a command and notes if it fails.
check() {
  printf '\n== %s\n' "$*"
  "$@" || printf 'FAILED: %s\n' "$*" >>"$beside/failed"
}

# Beside pytest, which shows what is said before its own summary (tests/conftest.py).
check_types() {
  check "$uv" run --no-sync mypy >"$beside/said" 2>&1
  : >"$beside/done"
}

# shellcheck disable=SC2086 # a list of words
check install_system_packages $system_packages >"$beside/packages" 2>&1 &
packages=$!
uv="$(bash scripts/bootstrap.sh --torch cuda)" # the lab of the tests installs PyPI's PyTorch
check_types &
types=$!
check "$uv" run --no-sync ruff check .
check "$uv" run --no-sync ruff format --check .
check "$uv" run --isolated --only-group docs mkdocs build --strict --site-dir "$beside/site"
wait "$packages"
cat "$beside/packages"
if [ ! -d tests/unit/__pycache__ ]; then # or all processes would do it at once, each for itself
  "$uv" run --no-sync pytest -n 0 --collect-only -q -m "" >/dev/null || true
  .venv/bin/python -c "import peft, torch.distributed.pipelining, torch._dynamo" || true
fi

printf '\n== pytest, and mypy beside it\n'
code=0
CHECKS_BESIDE="$beside" "$uv" run --no-sync pytest -n 6 --dist loadgroup "$@" || code=$?
wait "$types"
[ -f "$beside/shown" ] || cat "$beside/said"
if [ "$code" -eq 0 ] && [ -f "$beside/failed" ]; then
  code=1
fi
exit "$code"
