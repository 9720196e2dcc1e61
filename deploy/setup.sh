#!/bin/sh
# Creates the virtual environment of this checkout: setup.sh PYTHON VENV EXTRAS
set -eu
python=$1 venv=$2 extras=$3
vision=worker/vision/requirements.txt

fail() { echo "mlxd: $*" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "'$python' was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; mlxd needs Python 3.11 or newer: make PYTHON=/path/to/python3"

echo "mlxd: setting up $venv (once; a minute or two on a first run)"
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv" || fail "uv could not create $venv"
    uv pip install --quiet --python "$venv/bin/python" --editable ".[$extras]" || fail "the packages could not be installed (see above)"
    uv pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes --requirement "$vision" || fail "mlx-vlm could not be installed (see above)"
else
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$venv"
        "$python" -m venv "$venv" 2>/dev/null ||
            fail "'$python -m venv' does not work; on Debian and Ubuntu: sudo apt install python3-venv (or install uv)"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" ||
        fail "the packages could not be installed (see above); is the network up?"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$vision" ||
        fail "mlx-vlm could not be installed (see above); is the network up?"
fi
echo "mlxd: $venv is ready"
