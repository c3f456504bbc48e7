// Takes part in rounds as a device in Node, as the page of clients/web does in a browser. One argument,
// JSON: url, token, posts, rounds, and second, secondToken and trainerKey where there are any. Prints a
// line of JSON for each round, and last what was wrong.

import { Device } from "../../clients/web/keyhole/device.js";
import { Service } from "../../clients/web/keyhole/service.js";

const told = JSON.parse(process.argv[2]);
const count = { down: 0, up: 0 };
const onBytes = (down, up) => {
  count.down += down;
  count.up += up;
};
const service = new Service(told.url, { token: told.token, onBytes });
const second = told.second ? new Service(told.second, { token: told.secondToken, onBytes }) : null;
const device = new Device(service, told.posts, { second, trainerKey: told.trainerKey });
const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
try {
  await device.keepTakingPart({
    rounds: told.rounds,
    onRound: (taken) => say({ ...taken, ...count }),
    onMiss: (error) => say({ missed: error.message }),
  });
} catch (error) {
  say({ kind: error.kind ?? error.name, error: error.message });
  process.exitCode = 1;
}
