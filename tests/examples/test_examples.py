"""Every example runs, and prints what it says it shows."""

import re
import subprocess
import sys
from functools import cache

import pytest

from tests.helpers import ROOT, load_example

SIZED = {"fedrolex.py", "llm_lora_experts.py", "recommender.py"}  # run below, at a small size
EXAMPLES = [p for p in sorted((ROOT / "examples").glob("*.py")) if p.name not in SIZED]
SLOW = {  # start processes, compile, or make many rounds
    "personal_head.py",
    "private_fetch.py",
    "private_lookup.py",
    "ray_cohort.py",
    "scaffold.py",
    "serve_and_train.py",
}


@cache
def run(path):
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=600, check=False
    )


def marked(path):
    return pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else (), id=path.name)


@pytest.mark.parametrize("path", [marked(path) for path in EXAMPLES])
def test_an_example_runs_without_a_word_on_stderr(path):
    done = run(path)
    assert (done.returncode, done.stderr) == (0, "")


def test_hello_select_prints_slices_in_order_and_the_means():
    out = run(ROOT / "examples" / "hello_select.py").stdout
    assert "ann asks for [3, 0]: [6.0, 7.0]  [0.0, 1.0]" in out
    assert "ben asks for [3, 3, 4]: [6.0, 7.0]  [6.0, 7.0]  [8.0, 9.0]" in out
    assert "cem asks for []: nothing" in out
    assert "[2.66666667 2.66666667]" in out  # row 3: (2 + 3 + 3) / 3 clients
    assert "[4. 4.]" in out  # row 3: (2 + 3 + 3) / 2 who chose it
    assert "cannot be read at the server" in out


def test_algorithm_2_by_hand_equals_algorithm_1_by_hand():
    out = run(ROOT / "examples" / "algorithm2_by_hand.py").stdout
    assert "largest difference between the two models: 0.0" in out


def test_the_oracle_knows_nothing_of_keyhole():
    source = (ROOT / "examples" / "algorithm2_by_hand.py").read_text()
    assert "import keyhole" not in source
    assert "numpy" not in source


def test_the_oracle_learns():
    oracle = load_example("algorithm2_by_hand")
    clients = oracle.make_clients(40, 50, seed=2)
    trained = oracle.algorithm_1(
        oracle.sgd_client(0.5), oracle.sgd_server(1.0), 40, [0.0] * 50, lambda t: clients
    )
    assert oracle.accuracy(trained, clients) > 0.9


def test_a_private_round_shows_servers_lengths_and_the_sum_alone():
    out = run(ROOT / "examples" / "private_round.py").stdout
    assert out.count("2000 of 2000 rows are not zero") == 2
    assert "230 rows of the sum, right: True" in out


@pytest.mark.slow
def test_every_private_fetch_brings_the_same_slices():
    out = run(ROOT / "examples" / "private_fetch.py").stdout
    assert out.count("the slices that were asked for: True") == 3


@pytest.mark.slow
def test_a_cohort_on_ray_loses_a_worker_and_no_byte():
    out = run(ROOT / "examples" / "ray_cohort.py").stdout
    assert "worker lost: 100 clients asked for keys again" in out
    assert "the bytes of one process: True" in out


@pytest.mark.slow
def test_scaffold_ends_nearer_to_the_best_than_the_mean_of_what_clients_would_like():
    out = run(ROOT / "examples" / "scaffold.py").stdout
    fedavg, scaffold = map(float, re.findall(r"mse (0\.\d+)", out))
    assert scaffold < 0.95 * fedavg


@pytest.mark.slow
def test_a_head_for_each_leaves_a_fraction_of_the_error():
    out = run(ROOT / "examples" / "personal_head.py").stdout
    one, each = map(float, re.findall(r"clients (\d\.\d+)", out))
    assert each < 0.3 * one


LINES = {"recommender.py": 35, "fedrolex.py": 40, "scaffold.py": 60, "personal_head.py": 60}


@pytest.mark.parametrize(("name", "lines"), LINES.items())
def test_an_example_takes_no_more_lines_than_it_may(name, lines):
    source = (ROOT / "examples" / name).read_text()
    code = source.partition('"""')[2].partition('"""')[2].splitlines()
    found = [line for line in code if line.strip() and not line.strip().startswith("#")]
    assert len(found) <= lines


@pytest.mark.slow
def test_sub_models_of_three_papers_all_learn(tmp_path):
    done = run_small("fedrolex.py", tmp_path)
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["rounds", "10", "20", "30", "40", "50", "60"]
    assert [row[0] for row in rows] == ["rolling", "nested", "independent"]
    assert all(max(map(float, row[1:])) > 3 / 62 for row in rows)  # 1 of 62 is guessing


def run_small(name, folder):
    return subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", ROOT / "examples" / name, "--small"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )


def test_parts_of_a_language_model_take_fewer_bytes_and_are_kept_for_peft(tmp_path):
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name, reason="needs torch==2.13.0 and the extra llm")
    done = run_small("llm_lora_experts.py", tmp_path)  # peft reads what transformers deprecates
    assert (done.returncode, done.stderr) == (0, "")
    down = [int(n.replace(",", "")) for n in re.findall(r": ([\d,]+) bytes down", done.stdout)]
    assert down == [403_456, 201_728, 100_864]
    assert (tmp_path / "llm_lora_experts" / "adapter_model.safetensors").is_file()


def test_the_recommender_learns_with_few_items_and_draws_a_figure(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'keyhole[data]'")
    done = run_small("recommender.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall(r"^(\w+) items: auc (0\.\d+), ([\d.]+) kB", done.stdout, re.M)
    (few, few_auc, few_kb), (every, _, all_kb) = found
    assert (few, every) == ("100", "all")
    assert float(few_auc) > 0.75  # 0.5 is guessing
    assert float(few_kb) < float(all_kb) / 20
    assert (tmp_path / "recommender.png").stat().st_size > 10_000
