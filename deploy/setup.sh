#!/bin/sh
# Creates the virtual environment of this checkout: setup.sh PYTHON VENV EXTRAS
# Where Python is too old, as a Mac's own 3.9 is, its pip fetches uv into .cache, and uv finds or brings a newer one.
set -eu
python=$1 venv=$2 extras=$3
vision=worker/vision/requirements.txt
audio=worker/audio/requirements.txt
oldest=3.11
wanted=">=$oldest,<3.14"
advice="install Python $oldest or newer (python.org, brew install python, apt install python3) or uv (https://docs.astral.sh/uv), then run make again; or name a Python: make PYTHON=/path/to/python3"

fail() { echo "mlxd: $*" >&2; exit 1; }

uv=$(command -v uv || :)
is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if ! command -v "$python" >/dev/null 2>&1; then
    [ -n "$uv" ] || fail "'$python' was not found: $advice"
    python=$wanted
elif ! is_new "$python"; then
    version=$("$python" --version 2>&1) || version=$python
    if [ -z "$uv" ]; then
        uv=$PWD/.cache/uv/bin/uv
        # What uv brings stays in this checkout as well.
        export UV_PYTHON_INSTALL_DIR="$PWD/.cache/python"
        if [ ! -x "$uv" ]; then
            echo "mlxd: $version is too old; fetching uv, which finds or brings a newer one"
            "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target .cache/uv uv ||
                fail "$version is too old, and its pip cannot fetch uv: $advice"
        fi
    fi
    python=$wanted
fi

echo "mlxd: setting up $venv (once; a minute or two on a first run)"
if [ -n "$uv" ]; then
    if [ ! -x "$venv/bin/python" ] || ! is_new "$venv/bin/python"; then
        rm -rf "$venv"
        "$uv" venv --quiet --python "$python" "$venv" ||
            fail "uv could not create $venv (see above); if it cannot download Python: $advice"
    fi
    "$uv" pip install --quiet --python "$venv/bin/python" --editable ".[$extras]" || fail "the packages could not be installed (see above)"
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes --requirement "$vision" --requirement "$audio" || fail "mlx-vlm and mlx-audio could not be installed (see above)"
else
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$venv"
        "$python" -m venv "$venv" 2>/dev/null ||
            fail "'$python -m venv' does not work; on Debian and Ubuntu: sudo apt install python3-venv (or install uv)"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" ||
        fail "the packages could not be installed (see above); is the network up?"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$vision" --requirement "$audio" ||
        fail "mlx-vlm and mlx-audio could not be installed (see above); is the network up?"
fi
echo "mlxd: $venv is ready"
