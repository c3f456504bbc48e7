"""The small sparse problem of the simulator's tests as a Flower app: what users write themselves.

A client waits while the file `hold` is in the run's directory, so that a test can do harm in the
middle of a round; the file `begun-CLIENT` says that it waits.
"""

import time
from dataclasses import replace
from pathlib import Path

from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.device.take_part import PopulationClient
from keyhole.engines.flower.client_app import make_client_app
from keyhole.engines.flower.server_app import make_server_app
from keyhole.rounds.loop import resume_run, start_run
from keyhole.sampling import Cohorts
from tests.rounds import toy


def plan_of(config):
    """The plan that a run config describes."""
    cohorts = Cohorts(
        len(toy.EXAMPLES),
        config.get("cohort", 3),
        over_selection=config.get("over-selection", 1.0),
        min_updates=config.get("min-updates", 1),
    )
    secure = {"aggregate": TwoServers()} if config.get("aggregators") else {}
    return toy.make_plan(cohorts=cohorts, **secure)


def train(rounds, config, context):
    begin = resume_run if (config.run / "state").exists() else start_run
    plan = plan_of(context.run_config)
    run = begin(toy.make_state(), toy.make_clients(), plan, config.run, rounds)
    for _ in run.rounds(context.run_config.get("rounds", 2)):
        pass
    run.close()
    (config.run / "model").write_text(toy.model_bytes(run.state).hex())


def participant_of(client, context):
    run = Path(context.run_config["run"])
    one = PopulationClient(client, lambda settings: toy.make_clients(), toy.REHEARSED)
    participant = one.participant()

    def hold(known, fetched):
        if (run / "hold").exists():
            (run / f"begun-{client}").touch()
        while (run / "hold").exists():
            time.sleep(0.05)
        return participant.train(known, fetched)

    return replace(participant, train=hold)


server_app = make_server_app(train)
client_app = make_client_app(participant_of)
