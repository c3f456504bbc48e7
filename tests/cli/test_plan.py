"""`keyhole plan`: a table, the best way, and one line and exit code 2 for what cannot be."""

import json

import pytest

from keyhole.cli import main as cli
from keyhole.delivery import delivery_names
from keyhole.planner.capacity import Fleet, delivery_needs
from keyhole.planner.prices import TRUSTS, price_of
from keyhole.pricing import Workload

PAPER = ("--num-keys", "1e4", "--keys-per-client", "1_000", "--slice-bytes", "2000")
COHORT = ("--cohort", "50")


@pytest.fixture
def plan(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *args])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def rows_of(out):
    """First cell -> its lines, in order."""
    found = {}
    for line in filter(str.strip, out.splitlines()):
        found.setdefault(line.split()[0], []).append(line)
    return found


def test_the_best_choice_comes_first_and_every_way_has_its_lines(plan):
    code, out, _ = plan(*PAPER, *COHORT)
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert out.startswith("The best delivery, by what must be kept from whom")
    assert {line[0]: line[1] for line in lines[1:10] if line[0] in TRUSTS} == {
        "open": "pregenerated",
        "unlinked": "relay",
        "hidden": "pir",
        "hidden-one-server": "pir-one-server",
        "hidden-enclave": "enclave",
    }
    assert "50 clients, each 1,000 of 10,000 slices of 2.0 kB" in out
    found = rows_of(out)  # what it costs, what a server makes, who learns
    assert all(len(found[way]) == 3 for way in delivery_names())


def test_numbers_are_readable(plan):
    _, out, _ = plan(*PAPER, *COHORT)
    found = rows_of(out)
    assert "20 MB" in found["broadcast"][0]
    assert "100%" in found["broadcast"][0]
    assert "2.0 MB" in found["on-demand"][0]
    assert "2.1 MB" in found["pregenerated"][0]
    assert "Proofs are 85 kB of what pregenerated sends, 4.2% of its slices." in out
    assert "42%" in found["pir-one-server"][0]
    assert "10,000" in found["pregenerated"][1]
    assert "2 x " in found["pir"][1]  # building, at both servers


HUGE = ("--num-keys", "1e12", "--keys-per-client", "1e9", "--slice-bytes", "1e12")
MILLION = ("--num-keys", "1e6", *PAPER[2:], "--cohort", "1e6")


@pytest.mark.parametrize("args", [(*PAPER, *COHORT), (*MILLION, "--round-seconds", "600")])
def test_tables_fit_80_columns_and_no_number_is_cut(plan, args):
    _, out, _ = plan(*args)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out


@pytest.mark.parametrize("more", [(), ("--round-seconds", "0.001")])
def test_absurd_numbers_are_short(plan, more):
    code, out, _ = plan(*HUGE, "--cohort", "1e12", *more)
    assert code == 0
    assert max(len(word) for word in out.split() if word[0].isdigit()) <= 10


def test_json_holds_exact_numbers_and_who_learns_what(plan):
    code, out, _ = plan(*PAPER, *COHORT, "--distinct", "4e3", "--broadcast-bytes", "77", "--json")
    found = json.loads(out)
    assert code == 0
    need = Workload(10_000, 1_000, 2_000, 50, distinct=4_000, broadcast_bytes=77)
    assert found["workload"] == vars(need)
    prices = {price["way"]: price for price in found["prices"]}
    for way in delivery_names():
        assert prices[way]["bytes_down"] == price_of(way, need).bytes_down
        assert prices[way]["bytes_up"] == price_of(way, need).bytes_up
    assert prices["on-demand"]["slices_generated"] == 4_000
    assert prices["relay"]["seen_by"]["gateway"]["in_words"] == "keys, not whose they are"
    assert found["best"].keys() == TRUSTS.keys()
    assert found["speeds"]["pass_queries"] == 32
    assert prices["pir"]["building_by"] == price_of("pir", need).building_by


def test_one_requirement_names_one_way(plan):
    _, out, _ = plan(*PAPER, *COHORT, "--trust", "hidden", "--json")
    assert json.loads(out)["best"] == {"hidden": "pir"}


def test_a_way_dearer_than_broadcast_is_refused_unless_forced(plan):
    many = ("--num-keys", "1e4", "--keys-per-client", "3000", "--slice-bytes", "2000", *COHORT)
    code, out, said = plan(*many, "--delivery", "pir-one-server")
    assert code == 2
    assert "pir-one-server" in out
    assert said.startswith("keyhole: pir-one-server sends more than the whole model: got 2")
    assert said.count("\n") == 1
    assert plan(*many, "--delivery", "pir-one-server", "--force")[0] == 0
    assert plan(*many, *COHORT, "--delivery", "pir")[0] == 0


def test_a_way_that_is_not_private_is_never_refused(plan):
    tiny = ("--num-keys", "100", "--keys-per-client", "99", "--slice-bytes", "1", *COHORT)
    assert plan(*tiny, "--delivery", "on-demand")[0] == 0
    assert plan(*tiny, "--delivery", "pir")[0] == 2


def test_the_crowd_is_named_and_one_client_is_none(plan):
    _, out, _ = plan(*PAPER, *COHORT, "--trust", "unlinked")
    assert rows_of(out)["unlinked"][0].split()[1] == "relay"
    assert "(in a crowd of 50 clients)" in out
    _, out, _ = plan(*PAPER, "--cohort", "1", "--trust", "unlinked")
    assert rows_of(out)["unlinked"][0].split()[1] == "pir"
    assert "\n1 client, each" in out


def test_a_way_beyond_its_limits_is_named_and_refused(plan):
    huge = ("--num-keys", "1e9", "--keys-per-client", "1e7", "--slice-bytes", "2000", *COHORT)
    code, out, _ = plan(*huge)
    assert code == 0
    assert "beyond the limits of its messages: enclave" in out
    code, _, said = plan(*huge, "--delivery", "enclave")
    assert (code, said.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("args", "about"),
    [
        ((*PAPER,), "--cohort"),
        ((*PAPER, "--cohort", "many"), "'many' is not a whole number"),
        ((*PAPER, "--cohort", "1.5"), "'1.5' is not a whole number"),
        ((*PAPER, "--cohort", "-3"), "'-3' is not a whole number"),
        ((*PAPER, "--cohort", "nan"), "'nan' is not a whole number"),
        ((*PAPER, "--cohort", "1e999999999"), "'1e999999999' is not a whole number"),
        ((*PAPER, "--cohort", "0"), "cohort is out of range"),
        ((*PAPER, *COHORT, "--distinct", "3"), "distinct is out of range"),
        ((*PAPER, *COHORT, "--keys-per-client", "1e5"), "keys_per_client is out of range"),
        ((*PAPER, *COHORT, "--trust", "blind"), "blind"),
        ((*PAPER, *COHORT, "--delivery", "pigeon"), "pigeon"),
        ((*PAPER, *COHORT, "--force"), "--force goes with --delivery"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(args, about, plan):
    code, out, said = plan(*args)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert said.startswith("keyhole: ")
    assert about in said


ROUND = (*PAPER, "--cohort", "1e6", "--round-seconds", "600")


def test_servers_are_counted_for_each_party_of_deliveries_and_sums(plan):
    code, out, _ = plan(*ROUND, "--cores", "8", "--gbit", "10", "--memory-gb", "64")
    assert code == 0
    assert "servers of 8 cores, 10 Gbit/s and 64 GB, 70% in use" in out
    lines = [line.split() for line in out.splitlines()]
    for way in delivery_names():
        assert any(line[:1] == [way] for line in lines)
    for party in ("coordinator", "trainer", "gateway"):
        assert any(party in line for line in lines)
    assert "beyond the limits of its messages: secure-dense, secure-sketch" in out


def test_servers_in_json_are_those_of_the_planner(plan):
    code, out, _ = plan(*ROUND, "--busy", "0.5", "--json")
    found = json.loads(out)
    need = Workload(10_000, 1_000, 2_000, 10**6)
    fleet = Fleet(600, busy=0.5)
    assert code == 0
    assert found["fleet"] == vars(fleet)
    told = [one for one in found["needs"] if one["way"] == "pir"]
    expected = delivery_needs(price_of("pir", need), need, fleet)
    assert [(one["party"], one["servers"], one["cores"]) for one in told] == [
        (one.party, one.servers, one.cores) for one in expected
    ]


def test_what_describes_servers_goes_with_a_time(plan):
    code, out, said = plan(*PAPER, *COHORT, "--cores", "8")
    assert (code, out) == (2, "")
    assert "--cores goes with --round-seconds" in said


def test_popular_keys_are_priced_beside_the_whole_table(plan):
    code, out, _ = plan(*PAPER, *COHORT, "--popular", "2e3", "--popular-share", "0.9")
    assert code == 0
    assert "900 of 1,000 keys are asked of 2,000 popular ones" in out
    assert "a client does without" in out
    assert all(len(rows_of(out)[way]) == 4 for way in ("pir", "pir-one-server"))
    code, out, _ = plan(*PAPER, *COHORT, "--popular", "2000", "--zipf", "0.8", "--json")
    told = json.loads(out)
    assert (code, told["workload"]["popular"], told["zipf"]) == (0, [2000, 1000], 0.8)
    assert 0.1 < told["dropped"] < 0.9


@pytest.mark.parametrize(
    "options",
    [("--zipf", "1"), ("--popular-share", "0.5"), ("--popular", "1000"), ("--popular", "1e4")],
)
def test_popular_keys_that_make_no_sense_are_refused(plan, options):
    code, _, error = plan(*PAPER, *COHORT, *options)
    assert code == 2
    assert "popular" in error
