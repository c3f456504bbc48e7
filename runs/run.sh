#!/usr/bin/env bash
# Runs sweeps whose results docs/results.md shows: runs/run.sh [NAME...], each in its own folder of OUT.
#
#   KEYHOLE_DATA=../shared/data OUT=keyhole-runs/results runs/run.sh 2nn-ink1 tag-recall
#
# A NAME is that of a file in runs/, runs/suite or runs/questions without .toml, or of a sweep that
# keyhole knows. Without a name: all of them, in the order of what they are worth for their time. What
# is finished is not run again, in OUT or among the runs that docs/results/ keeps; with AGAIN=1 those
# are, too. `python docs/results.py keep OUT --commit $(git rev-parse --short HEAD)` then keeps the
# finished runs, draws the figures and writes the tables.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-keyhole-runs/results}
keyhole=$root/.venv/bin/keyhole
[ -x "$keyhole" ] || keyhole=keyhole
export PYTHONPATH="$root/runs${PYTHONPATH:+:$PYTHONPATH}"  # parts.py

suite=$(cd "$root/runs/suite" && ls ./*.toml)
questions=$(cd "$root/runs/questions" && ls ./*.toml)
all="2nn-ink1 2nn-ink0 2nn-choosers-ink1 tag-keys tag-recall cnn-small-ink1 $suite $questions
    2nn-fixed-ink1 2nn-choosers-ink0 2nn-fixed-ink0 word-alpha cnn-large-ink1 cnn-choosers-ink1
    cnn-fixed-ink1 emnist-2nn-rates so-tag-rates emnist-cnn-rates cnn-small-ink0 cnn-large-ink0"

for name in ${*:-$all}; do
    name=$(basename "$name" .toml)
    file=$(find "$root/runs" -name "$name.toml")
    case $name in
        tag-*) set -- "$name" --data stackexchange --trials 5 --out "$out/tags" ;;  # they share runs
        word-alpha) set -- "$name" --data stackexchange --trials 3 --out "$out/$name" ;;
        so-tag-rates) set -- "$name" --data stackexchange --trials 1 --out "$out/$name" ;;
        emnist-*) set -- "$name" --data femnist --trials 1 --out "$out/$name" ;;
        *) set -- "${file:-$name}" --out "$out/$name" ;;
    esac
    kept=$root/docs/results/$name.json
    if [ -z "${AGAIN:-}" ] && [ -e "$kept" ]; then set -- "$@" --kept "$kept"; fi
    echo "== keyhole sweep $*"
    "$keyhole" sweep "$@"
done
echo "to keep what is finished: python docs/results.py keep $out --commit COMMIT"
