#!/usr/bin/env bash
# Client and server rates of the text tasks, tuned without select.
source "$(dirname "$0")/common.sh"
run_sweeps stackexchange "so-tag-rates so-word-rates" "$@"
