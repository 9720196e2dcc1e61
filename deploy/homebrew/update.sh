#!/bin/sh
# Makes the formula of a release: update.sh WHEEL URL HOMEPAGE > mlxd.rb
# Version, description and licence are those of the wheel's metadata; the checksum is of what the URL, that of the sdist,
# gives now. Nothing is written when it gives nothing, or another version.
set -eu
[ $# -eq 3 ] || { echo "usage: update.sh WHEEL URL HOMEPAGE > mlxd.rb" >&2; exit 2; }
fail() { echo "update.sh: $*" >&2; exit 1; }
archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
metadata=$(python3 -c '
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
print(next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))
' "$1" 2>/dev/null) || fail "$1 is no wheel"
field() { printf '%s\n' "$metadata" | sed -n "s/^$1: //p" | head -n 1; }
version=$(field Version) summary=$(field Summary) license=$(field License-Expression)
[ "$(field Name)" = mlxd ] || fail "$1 is no wheel of mlxd"
curl --fail --location --silent --show-error --output "$archive" "$2"
tar -tzf "$archive" | grep -q "^mlxd-$version/pyproject.toml$" || fail "$2 is no source archive of mlxd $version"
if command -v sha256sum >/dev/null; then sum=$(sha256sum "$archive"); else sum=$(shasum -a 256 "$archive"); fi
sed -e "s|@VERSION@|$version|" -e "s|@URL@|$2|" -e "s|@HOMEPAGE@|$3|" -e "s|@SHA256@|${sum%% *}|" \
    -e "s|@SUMMARY@|$summary|" -e "s|@LICENSE@|$license|" "$(dirname "$0")/mlxd.rb.in"
