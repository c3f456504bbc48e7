#!/usr/bin/env bash
# Recall@5 of tag prediction by vocabulary n and keys per client m: curves, final recall, sizes.
source "$(dirname "$0")/common.sh"
run_sweeps stackexchange "tag-recall" "$@"
