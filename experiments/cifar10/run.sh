#!/usr/bin/env bash
# All methods of this folder: JOBS=3 run.sh OUT [--set ...]
set -u
out=$1; shift
here=$(dirname "$0")
ls -r "$here"/*.yaml | grep -v base.yaml | xargs -P "${JOBS:-3}" -I{} sh -c '
  n=$(basename {} .yaml); o=$1; shift
  python -m slimbayes.lab.command fit {} --out "$o/$n" --resume "$@" > "$o/$n.log" 2>&1 || echo "$n failed: $(tail -2 "$o/$n.log")"' sh "$out" "$@"
