#!/usr/bin/env bash
# Updates divided by the cohort (Eq. 5) or by those who chose the key; not in the paper.
source "$(dirname "$0")/common.sh"
run_sweeps femnist "divisor" "$@"
