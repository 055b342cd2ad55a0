#!/usr/bin/env bash
# Installs the package with the pinned versions into a virtual environment of its own.
#
#   launch/install.sh cpu|cuda12|cuda13|tpu [VENV]
#
# VENV is .venv beside this folder unless given. EXTRAS=data,plot,tune names the optional parts, of
# which `tune` brings torch; data,plot is the default. Python 3.11 or newer is looked for first under
# PYTHON, then as python3.13 to python3. Where there is none, Debian's is installed if this is Debian
# 12 or newer and we are root, else uv downloads one, and is itself downloaded if it is not there.
set -euo pipefail

accelerator=${1:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${2:-$root/.venv}
extras=${EXTRAS:-data,plot}
case $accelerator in
cpu) ;;
cuda12 | cuda13 | tpu) extras=$extras,$accelerator ;;
*)
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac

find_python() {
  local name
  for name in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
    # Debian's Python has no ensurepip before python3-venv is installed.
    if "$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  return 1
}

install_debian_python() {
  [[ $(id -u) == 0 && -e /etc/debian_version ]] || return 1
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    ca-certificates python3 python3-venv >/dev/null
  find_python >/dev/null
}

if find_python >/dev/null || install_debian_python; then
  python=$(find_python)
  "$python" -m venv --clear "$venv"
else
  uv=$(command -v uv || true)
  if [[ -z $uv ]]; then
    uv=$root/.uv/uv
    curl -LsSf https://astral.sh/uv/install.sh |
      env UV_INSTALL_DIR="$root/.uv" UV_NO_MODIFY_PATH=1 sh
  fi
  "$uv" venv --seed --clear --python=3.12 "$venv"
fi

# The pins are constraints here: of what they list, only what the extras need is installed.
"$venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check --use-pep517 \
  --constraint="$root/requirements.txt" --editable="${root}[$extras]"
