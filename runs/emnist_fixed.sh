#!/usr/bin/env bash
# Accuracy of the CNN and the 2NN when all clients of a round share their random keys.
source "$(dirname "$0")/common.sh"
run_sweeps femnist "emnist-cnn-fixed emnist-2nn-fixed" "$@"
