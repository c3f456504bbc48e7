#!/usr/bin/env bash
# Client and server rates of the EMNIST tasks, tuned without select.
source "$(dirname "$0")/common.sh"
run_sweeps femnist "emnist-cnn-rates emnist-2nn-rates" "$@"
