"""A folder to watch: two runs with all that can happen to a cohort, and a round of devices."""

from contextlib import contextmanager

from keyhole.experiments.watch.app import WatchApp
from keyhole.experiments.watch.folder import RunFolder
from keyhole.rounds.record import RoundRecord, encode_records
from keyhole.service.publishing import Publisher
from keyhole.service.transport import serving
from tests.experiments.report.runs import write_trial
from tests.service.small_service import LAYOUT, random_state

COHORT, ROUNDS = 10, 6
PRIVATE = {"epsilon": 3.25, "delta": 1e-6, "rounds": ROUNDS, "unit": "client", "drawn": "secret"}
PRIVATE |= {"neighbours": "add-or-remove", "sampling": "participation", "epsilon_unseen": 0.5}
LEARNED = {"server": "keys and whose they are"}
IN_SUM = {"server": "each update, its keys and whose they are"}


def record_of(t, value, **more):
    """Round t of ten clients: in round 2 one is late and one lost, in round 3 nobody comes."""
    clients = list(range(COHORT))
    told = {"staleness": [0] * COHORT, "bytes_down": [1200] * COHORT, "bytes_up": [800] * COHORT}
    if t == 2:
        told |= {"staleness": [0] * 8, "late": [3], "lost_before": [4]}
    if t == 3:
        told |= {"staleness": [], "lost_before": clients, "closed": "time"}
    if t == 4:
        told |= {"incidents": ["a worker was lost: <b>its</b> clients were trained again"]}
    told |= {"seen_by": LEARNED, "seen_in_sum": IN_SUM, "metrics": {"accuracy": value}, **more}
    return RoundRecord(round=t, step=t + 1, clients=clients, **told)


def write_arm(out, arm, trials, last, test=0.5, **more):
    for trial in range(trials):
        directory = write_trial(out, arm, trial, (), test, rounds=ROUNDS)
        values = [last * (t + 1) / ROUNDS + 0.02 * trial for t in range(ROUNDS)]
        records = [record_of(t, value, **more) for t, value in enumerate(values)]
        (directory / "records.jsonl").write_bytes(encode_records(records))


def make_folder(out):
    """`top4` with three trials, `top8-noise` with noise and unfinished, and a round under way."""
    write_arm(out, "emnist-top4", 3, 0.6)
    write_arm(out, "emnist-top8-noise", 1, 0.4, None, privacy=PRIVATE, are_maxima=True)
    with Publisher(out / "rounds") as publisher:
        state = random_state(LAYOUT)
        cohort = ["device-1", "device-2", "device-3"]
        publisher.publish_state(state, number=4, cohort=cohort, durable=False)
    return out


@contextmanager
def watching(folder, **options):
    """The page of a folder; gives its URL."""
    found = RunFolder(folder)
    with serving(WatchApp(found, found, **options), prepare=lambda: None) as url:
        yield url
