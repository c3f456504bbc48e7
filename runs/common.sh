# Sourced by the scripts beside it: runs the sweeps behind a figure, then draws the report.
#
#   runs/SCRIPT.sh [--scale small|paper] [--data PATH] [--out DIR] [options of keyhole sweep]
#
# small (the default) takes minutes on two cores and reads the small real data in the folder
# KEYHOLE_DATA; paper has the paper's settings and takes --data, the full data (docs/data.md).

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
keyhole=$root/.venv/bin/keyhole
[ -x "$keyhole" ] || keyhole=keyhole

# run_sweeps SMALL_DATA "FIGURE..." [options]
run_sweeps() {
    local small_data=$1 figures=$2 scale=small data= out= rest=()
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            --scale | --data | --out)
                [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
                printf -v "${1#--}" %s "$2"
                shift 2
                ;;
            *) rest+=("$1"); shift ;;
        esac
    done
    if [ "$scale" = small ]; then
        data=${data:-$small_data}
    elif [ "$scale" != paper ]; then
        echo "--scale is small or paper, not $scale" >&2
        exit 2
    elif [ -z "$data" ]; then
        echo "--scale paper needs --data, the file or folder of the full data (docs/data.md)" >&2
        exit 2
    fi
    out=${out:-keyhole-runs/$scale}
    for figure in $figures; do
        "$keyhole" sweep "$figure" --scale "$scale" --data "$data" --out "$out" "${rest[@]}"
    done
    "$keyhole" report "$out"
}
