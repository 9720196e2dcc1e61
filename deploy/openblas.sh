#!/bin/sh
# Puts a fast BLAS beside MLX's CPU build, for benchmarks: openblas.sh PYTHON.  Needs no root.
# MLX's Linux CPU wheel brings the reference BLAS, which is single-threaded and 3 to 30 times slower in float32.
set -eu
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/.cache/openblas
lib=$out/lib

say() { echo "mlxd: $*"; }
fail() { echo "mlxd: $*" >&2; exit 1; }

usage() {
    say "OpenBLAS is in $lib; the benchmarks use it by themselves. By hand:"
    echo "  LD_LIBRARY_PATH=$lib OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$lib/libopenblas.so.0 $python ..."
}

# The package of this machine, unpacked to $1. Falls back to a private package list where the system's is empty.
fetch() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 ||
        fail "no libopenblas.so.0 on this machine and no apt-get to fetch it with; install OpenBLAS with your package manager and run this again"
    say "fetching Debian's libopenblas0-pthread into .cache/openblas (once, about 7 MB)"
    mkdir -p "$1/lists/partial"
    private="-o Dir::State::Lists=$1/lists -o Debug::NoLocking=1"
    # shellcheck disable=SC2086  # the options are words
    (
        cd "$1"
        apt-get download libopenblas0-pthread ||
            { apt-get $private update && apt-get $private download libopenblas0-pthread; }
    ) >"$1/log" 2>&1 || fail "libopenblas0-pthread could not be downloaded: $(grep -v '^W:' "$1/log" | tail -n 1)"
    dpkg -x "$1"/libopenblas0-pthread_*.deb "$1/unpacked" || fail "the downloaded package could not be unpacked"
}

[ "$(uname -s)" = Linux ] || { say "nothing to do: MLX uses Metal and Accelerate on this machine"; exit 0; }
wheel=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/mlx_cpu.libs
[ -d "$wheel" ] || { say "nothing to do: MLX's CPU build is not installed for $python"; exit 0; }
[ -e "$lib/libopenblas.so.0" ] && [ -e "$lib/libgfortran.so.5" ] && { usage; exit 0; }

work=$(mktemp -d "${TMPDIR:-/tmp}/mlxd-openblas.XXXXXX")
trap 'rm -rf "$work"' EXIT
found=$(ldconfig -p 2>/dev/null | sed -n 's/.*libopenblas\.so\.0 .*=> //p' | head -n 1)
if [ -z "$found" ]; then
    fetch "$work"
    found=$(ls "$work"/unpacked/usr/lib/*/openblas-pthread/libopenblas.so.0)
fi
mkdir -p "$lib"
# OpenBLAS wants the Fortran runtime under its plain name; the wheel's copy wants quadmath under the wheel's name.
for file in "$wheel"/libgfortran-*.so.*; do ln -sf "$file" "$lib/libgfortran.so.5"; done
for file in "$wheel"/libquadmath-*.so.*; do [ ! -e "$file" ] || ln -sf "$file" "$lib/"; done
cp -L "$found" "$lib/libopenblas.so.0"
LD_LIBRARY_PATH=$lib OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$lib/libopenblas.so.0 "$python" -c 'import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))' ||
    { rm -f "$lib/libopenblas.so.0"; fail "OpenBLAS was fetched but MLX does not run with it (see above)"; }
usage
