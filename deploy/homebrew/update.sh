#!/bin/sh
# Makes the formula of a release: update.sh VERSION URL HOMEPAGE > mlxd.rb
# The checksum is of what the URL gives now; nothing is written when it gives nothing.
set -eu
[ $# -eq 3 ] || { echo "usage: update.sh VERSION URL HOMEPAGE > mlxd.rb" >&2; exit 2; }
archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
curl --fail --location --silent --show-error --output "$archive" "$2"
tar -tzf "$archive" | grep -q 'pyproject.toml$' || { echo "update.sh: $2 is no source archive of mlxd" >&2; exit 1; }
if command -v sha256sum >/dev/null; then sum=$(sha256sum "$archive"); else sum=$(shasum -a 256 "$archive"); fi
sed -e "s|@VERSION@|$1|" -e "s|@URL@|$2|" -e "s|@HOMEPAGE@|$3|" -e "s|@SHA256@|${sum%% *}|" "$(dirname "$0")/mlxd.rb.in"
