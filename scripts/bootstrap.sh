#!/usr/bin/env bash
# Makes the checkout ready to run: finds uv, or installs it into <checkout>/.uv, then syncs the
# environment. Prints the path of uv on standard output, everything else on standard error.
# Nothing outside the checkout is changed.
#
# On Linux, `--torch cpu` installs PyTorch without CUDA and `--torch cuda` PyPI's with it. Without the flag an
# environment keeps what it has, and a new one gets CUDA where there is an NVIDIA GPU.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
private="$root/.uv"

say() {
  printf '%s\n' "$*" >&2
}

asked_torch=""
if [ "${1:-}" = --torch ]; then
  asked_torch="${2:-}"
  case "$asked_torch" in
    cpu | cuda) ;;
    *)
      say "error: --torch is cpu or cuda, not '$asked_torch'"
      exit 2
      ;;
  esac
fi

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

# PyTorch for the CPU lies as wheels in the checkout, where uv looks for packages too (`find-links` in
# pyproject.toml). So it is what `uv.lock` names on this machine, and no `uv run` or `uv sync` brings CUDA back.
cpu_index="https://download.pytorch.org/whl/cpu"

# Of a glob: whether anything matches.
exists() {
  [ -e "$1" ]
}

torch_is_installed() {
  exists "$root"/.venv/lib/python3*/site-packages/torch
}

has_cpu_wheels() {
  exists "$root"/torch-*.whl && exists "$root"/torchvision-*.whl
}

lock_names_cpu_wheels() {
  grep -qs '^source = { registry = "\." }' "$root/uv.lock"
}

has_nvidia_gpu() {
  command -v nvidia-smi >/dev/null ||
    [ -e /proc/driver/nvidia ] || [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/nvidia-smi ]
}

# Prints cpu or cuda; nothing where PyTorch has only one build.
chosen_torch() {
  if [ "$(uname)" != Linux ]; then
    return
  elif [ -n "$asked_torch" ]; then
    printf '%s\n' "$asked_torch"
  elif lock_names_cpu_wheels || exists "$root"/torch-*.whl; then
    printf 'cpu\n'
  elif torch_is_installed || has_nvidia_gpu; then
    printf 'cuda\n'
  else
    printf 'cpu\n'
  fi
}

relock_torch() {
  "$uv" lock --quiet --project "$root" --upgrade-package torch --upgrade-package torchvision >&2
}

# Fetches the wheels of the versions that `uv.lock` names, unless they are there. PyTorch's server is asked for
# them first, with little patience: not every network lets through to it.
take_cpu_torch() {
  local pins python="$root/.venv/bin/python" fetched="$private/torch"
  if lock_names_cpu_wheels && has_cpu_wheels; then
    return 0
  fi
  changed=yes
  pins="$("$uv" export --quiet --project "$root" --no-hashes --no-annotate --no-header --no-emit-project |
    grep '^torch\(vision\)\{0,1\}==')" || return 1
  [ -x "$python" ] || "$uv" venv --quiet --project "$root" "$root/.venv" >&2 || return 1
  printf '%s\n' "$pins" | UV_HTTP_RETRIES=0 UV_HTTP_CONNECT_TIMEOUT=5 UV_HTTP_TIMEOUT=10 \
    "$uv" --directory / pip install --dry-run --reinstall --no-deps --torch-backend cpu \
    --python "$python" -r - >/dev/null 2>&1 || return 1
  say "fetching PyTorch without CUDA, 0.2 GB (\`--torch cuda\` installs it with CUDA)"
  rm -rf -- "$fetched"
  printf '%s\n' "$pins" | "$uv" tool run --quiet --python "$python" pip download --quiet --no-deps \
    --only-binary :all: --no-cache-dir --disable-pip-version-check --index-url "$cpu_index" \
    --dest "$fetched" -r /dev/stdin >&2 || return 1
  rm -f -- "$root"/torch-*.whl "$root"/torchvision-*.whl
  mv -- "$fetched"/*.whl "$root" && relock_torch && lock_names_cpu_wheels
}

take_cuda_torch() {
  rm -f -- "$root"/torch-*.whl "$root"/torchvision-*.whl
  if lock_names_cpu_wheels; then
    changed=yes
    relock_torch
  fi
}

# The first time there is much to fetch, and uv shows how far it is. What a run imports is imported once then, so
# that its processes, which begin at the same time, find it compiled; all that is installed would take a minute.
sync() {
  if [ -z "$changed" ]; then
    "$uv" sync --quiet --project "$root" >&2
  else
    say "preparing the environment in $root/.venv"
    "$uv" sync --project "$root" >&2 || return 1
    PYTHONDONTWRITEBYTECODE="" "$root/.venv/bin/python" -c "$used" >&2 || true
  fi
}

used="import torchvision, sklearn.datasets, smolcluster.cli, smolcluster.algorithms.entry"

changed=""
torch_is_installed || changed=yes
# Where no lock can be made, sync says why.
case "$(chosen_torch)" in
  cpu)
    if "$uv" lock --quiet --project "$root" 2>/dev/null && ! take_cpu_torch; then
      say "PyTorch without CUDA cannot be fetched from ${cpu_index#https://}: PyPI's is taken, with 5 GB of CUDA"
      has_cpu_wheels || take_cuda_torch || true
    fi
    ;;
  cuda) take_cuda_torch || true ;;
esac

if ! sync; then
  say "error: uv could not prepare the environment in $root/.venv: look at the lines above" \
    "(the first time it needs the network and 3 GB of disk, 7 GB with CUDA), then run this again"
  exit 1
fi
printf '%s\n' "$uv"
