#!/usr/bin/env bash
# All checks: ruff, mypy, then pytest, whose summary comes last. Arguments go to pytest, of which two run side
# by side: one of them has all tests of faults, because these watch the time.
# Exits with pytest's code, or with 1 when only a check before it failed.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"

# Debian packages that tests need, separated by spaces.
system_packages="openssh-server openssh-client tmux rsync iproute2 procps fish zsh prometheus chromium chromium-driver docker-compose nginx"

install_system_packages() {
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@" ||
      { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"; }
  else
    printf 'some tests need these packages, which only root can install: %s\n' "$*"
  fi
}

failed=""

check() {
  printf '\n== %s\n' "$*"
  "$uv" run --no-sync "$@" || failed="${failed:+$failed, }$*"
}

uv="$(bash scripts/bootstrap.sh)"
if [ -n "$system_packages" ]; then
  # shellcheck disable=SC2086 # a list of words
  install_system_packages $system_packages
fi

check ruff check .
check ruff format --check .
check mypy

if [ -n "$failed" ]; then
  printf '\nFAILED before pytest: %s\n' "$failed"
fi

printf '\n== pytest\n'
code=0
"$uv" run --no-sync pytest -n 2 --dist loadgroup "$@" || code=$?
if [ "$code" -eq 0 ] && [ -n "$failed" ]; then
  code=1
fi
exit "$code"
