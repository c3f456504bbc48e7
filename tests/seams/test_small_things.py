"""Small things that a user meets in the first hour."""

import subprocess
import sys

from keyhole.aggregation import aggregation_names
from keyhole.planner.capacity import price_sums
from keyhole.pricing import Workload
from keyhole.rounds.record import append_records, read_records

AGGREGATIONS = aggregation_names()

# A command that is interrupted, and once more while the process ends. A shell in the background
# has its children ignore SIGINT, so they set it back.
INTERRUPTED_TWICE = """
import atexit, os, signal
import click
from keyhole.cli import main as cli

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(interrupt)
cli.keyhole.add_command(click.Command("work", callback=interrupt))
cli.main(["work"])
"""


def test_records_are_read_from_a_path_that_is_text(tmp_path):
    append_records(tmp_path / "records.jsonl", [])
    assert read_records(str(tmp_path / "records.jsonl")) == []


def test_every_sum_has_a_price():
    need = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    assert {price.name for price in price_sums(need)} == set(AGGREGATIONS)


def test_two_interrupts_end_without_a_traceback():
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines() == ["keyhole: interrupted"]
    assert done.returncode == 130
