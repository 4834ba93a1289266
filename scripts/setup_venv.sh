#!/usr/bin/env bash
# Makes .venv, or brings it up to date: this package (editable) with the extras of pyproject.toml, in the versions of
# constraints.txt. Does nothing when nothing has changed. Usage: scripts/setup_venv.sh [extras], such as train or test,lint
# PYTHON names the interpreter (default python3); pip's own configuration (indexes, proxies, caches) is honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-train}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "ringflash needs Python 3.11 or newer, '$python' is not: set PYTHON=/path/to/python3.11" >&2
    exit 1
fi

stamp=.venv/installed-$extras
state=$("$python" --version && pwd && cat pyproject.toml constraints.txt)
if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then
    exit
fi

# Debian splits venv's ensurepip off into a package of its own; without it, the interpreter's own pip can fill the venv.
if [[ $(.venv/bin/python --version 2>/dev/null) != $("$python" --version) ]]; then
    "$python" -m venv --clear .venv >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip .venv
        "$python" -m pip --python .venv/bin/python install --quiet pip
    }
fi

# PyPI's torch for Linux carries CUDA, several GB. Without an NVIDIA GPU, PyTorch's own index has a build for CPUs.
# Where that host can't be reached, the plain requirement still holds.
index=()
cpu_builds=https://download.pytorch.org/whl/cpu
if [[ $(uname) == Linux ]] && ! nvidia-smi -L >/dev/null 2>&1 && ! .venv/bin/python -c 'import torch' 2>/dev/null &&
    .venv/bin/python -c "import urllib.request as r; r.urlopen('$cpu_builds/torch/', timeout=10)" 2>/dev/null; then
    index=(--extra-index-url "$cpu_builds")
fi

echo "Installing ringflash[$extras] into .venv" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    ${index[@]+"${index[@]}"} --constraint constraints.txt --config-settings editable_mode=compat --editable ".[$extras]"
echo "$state" >"$stamp"
