#!/usr/bin/env bash
# Accuracy of next-word prediction against client size: structured, random and mixed keys.
source "$(dirname "$0")/common.sh"
run_sweeps stackexchange "word-alpha" "$@"
