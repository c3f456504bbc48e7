/**
 * Runs the device of a page beside it: browsers slow the timers of a hidden tab, and not those of its
 * workers. It is told what to start with, and then to stop; it tells the page what it does.
 */

import { Device } from "./keyhole/device.js";
import { Service } from "./keyhole/service.js";

const stop = new AbortController();

self.addEventListener("message", ({ data }) => {
  if (data.stop) stop.abort();
  else takePart(data);
});

function tell(what, facts = {}) {
  self.postMessage({ what, ...facts });
}

async function takePart({ url, token, posts, second, secondToken, trainerKey }) {
  const how = {
    signal: stop.signal,
    onBytes: (down, up) => tell("bytes", { down, up }),
    onAgain: (reason) => tell("again", { reason }),
  };
  let error = "";
  try {
    const service = new Service(url, { ...how, token });
    const other = second ? new Service(second, { ...how, token: secondToken }) : null;
    await new Device(service, posts, { second: other, trainerKey }).keepTakingPart({
      onStep: (step, facts) => tell("step", { step, ...facts }),
      onRound: (taken) => tell("round", taken),
      onMiss: ({ message }) => tell("again", { reason: message }),
      onWait: () => tell("wait"),
    });
  } catch (raised) {
    if (!stop.signal.aborted) error = raised.message;
  }
  tell("ended", { error });
}
