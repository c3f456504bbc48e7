#!/usr/bin/env bash
# Accuracy of the CNN and the 2NN by random keys per client m: the curves and the two tables.
source "$(dirname "$0")/common.sh"
run_sweeps femnist "emnist-cnn emnist-2nn" "$@"
