#!/usr/bin/env bash
# Recall@5 of tag prediction when clients choose keys by Top, Random and Random Top.
source "$(dirname "$0")/common.sh"
run_sweeps stackexchange "tag-keys" "$@"
