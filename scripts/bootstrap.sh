#!/usr/bin/env bash
# Makes the checkout ready to run: finds uv, or installs it into <checkout>/.uv, then syncs the
# environment. Prints the path of uv on standard output, everything else on standard error.
# Nothing outside the checkout is changed.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
private="$root/.uv"

say() {
  printf '%s\n' "$*" >&2
}

runs() {
  "$1" --version >/dev/null 2>&1
}

# Prints the path of a uv that works; fails when there is none.
find_uv() {
  local candidate
  for candidate in \
    "$(command -v uv || true)" \
    "${HOME:-}/.local/bin/uv" \
    "${HOME:-}/.cargo/bin/uv" \
    "${HOMEBREW_PREFIX:-/opt/homebrew}/bin/uv" \
    "$private/bin/uv"; do
    if [ -n "$candidate" ] && runs "$candidate"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

install_with_pip() {
  python3 -m venv "$private" >&2 &&
    "$private/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2 &&
    runs "$private/bin/uv"
}

# The installer is read whole before it runs, so that half a download does nothing.
install_with_installer() {
  local url="https://astral.sh/uv/install.sh" installer
  if command -v curl >/dev/null; then
    installer="$(curl -LsSf --proto '=https' --retry 2 "$url")" || return 1
  elif command -v wget >/dev/null; then
    installer="$(wget -qO- "$url")" || return 1
  else
    return 1
  fi
  printf '%s\n' "$installer" | UV_UNMANAGED_INSTALL="$private/bin" sh >&2 &&
    runs "$private/bin/uv"
}

install_uv() {
  say "uv was not found: installing it into $private"
  rm -rf -- "$private"
  if command -v python3 >/dev/null && install_with_pip; then
    return 0
  fi
  say "pip could not install uv here: trying its official installer"
  rm -rf -- "$private"
  install_with_installer
}

if ! uv="$(find_uv)"; then
  if ! install_uv; then
    rm -rf -- "$private"
    say "error: uv could not be installed: look at the lines above, check the network, or install uv" \
      "yourself (https://docs.astral.sh/uv/getting-started/installation/), then run this again"
    exit 1
  fi
  uv="$private/bin/uv"
fi

# The first time there is much to fetch, and uv shows how far it is. Compiling takes it some 20 s and
# saves every later start of a process 2 s.
sync() {
  if [ -d "$root/.venv" ]; then
    "$uv" sync --quiet --project "$root" >&2
  else
    say "preparing the environment in $root/.venv"
    "$uv" sync --compile-bytecode --project "$root" >&2
  fi
}

if ! sync; then
  say "error: uv could not prepare the environment in $root/.venv: look at the lines above" \
    "(the first time it needs the network and about 6 GB of disk), then run this again"
  exit 1
fi
printf '%s\n' "$uv"
