#!/bin/sh
# Checks the types of the page's modules, as their JSDoc has them, where there is npm to fetch the checker.
set -eu
cd "$(dirname "$0")"

command -v npm >/dev/null 2>&1 || { echo "mlxd: the page's types are not checked: there is no npm here"; exit 0; }
if [ ! -e node_modules/.ready ] || [ package-lock.json -nt node_modules/.ready ]; then
    npm ci --silent --no-audit --no-fund || { echo "mlxd: the page's types are not checked: npm ci failed"; exit 0; }
    touch node_modules/.ready
fi
npm run --silent check
