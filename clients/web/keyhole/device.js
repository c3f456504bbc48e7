/**
 * Takes part in rounds: checks in, fetches slices, trains, sends an update.
 *
 * Everything about a round is read from the round. What this device insists on is its operator's: the
 * way in which slices are fetched follows from the servers it was given, an update goes in the clear or
 * not at all, and with a pinned key no round counts that the trainer did not sign.
 */

import { concat, KeyholeError, unbase64 } from "./bytes.js";
import { decodeRecord } from "./manifest.js";
import { encodeReport, encodeUpdate, readyUpdate } from "./messages.js";
import { levelSizes, NODE, pathLevels } from "./merkle.js";
import { checkParams, maxKeysOf, paramsOf, PrivateTable } from "./retrieval.js";
import { pause } from "./service.js";
import { bagsOf, chooseWords, drawBatches, localize, readSpec, recallAt5, train } from "./tags.js";

const CLEAR = ["pregenerated", "on-demand"];
const PRIVATE = ["pir"];
const AFTER_MISS = 1; // seconds
const LONGEST_WAIT = 60;
const MAX_STALE = 8; // misses in a row because two servers hold other rounds

/** Kinds of errors that end a round of a device, and not its work. */
const GROWING = ["StaleError", "AwayError", "UntimelyError"]; // after which it waits longer and longer
const MISSES = ["TooLateError", "ConflictError", ...GROWING];

/** Kinds of errors by which a service says that a token is good no more. */
const REFUSALS = ["AccessError", "NotAdmittedError"];

/** An error that ends a round of this device, and not its work. */
function miss(wrong, got, expected) {
  const facts = { got, expected, fix: "the device checks in for the next one" };
  return new KeyholeError("TooLateError", wrong, facts);
}

/** One device, with its posts. */
export class Device {
  /**
   * @param {import("./service.js").Service} service where it checks in and sends updates
   * @param {{words: number[], tags: number[]}[]} posts which stay here
   * @param {{second?: import("./service.js").Service, trainerKey?: string, said?: object}} how
   *   second: the other slice server, run by somebody else: slices are fetched in private
   *   said: what it tells at its check-in, `memory_mb` and `examples`, if anything
   */
  constructor(service, posts, { second = null, trainerKey = "", said = {} } = {}) {
    this.service = service;
    this.posts = posts;
    this.second = second;
    this.trainerKey = trainerKey;
    this.said = said;
    this.tables = new Map(); // of private retrieval, by their params
  }

  /** Takes part in one round, or says how many seconds to wait before asking again. */
  async takePart(onStep = () => {}) {
    onStep("check in");
    const told = await this.service.checkIn(this.said);
    if ("wait" in told) return { wait: told.wait };
    await pause(1000 * told.fetch_after, this.service.signal);
    const manifest = await this.service.manifest(told.round, told.token, this.trainerKey);
    this.refuseOther(manifest.settings);
    const spec = readSpec(manifest);
    const bags = bagsOf(this.posts, spec);
    const words = chooseWords(bags, spec);
    const isPrivate = this.isPrivate(manifest.settings);
    onStep("fetch", { number: manifest.number, words, isPrivate });
    const { keys, model } = await this.fetch(manifest, words, told.token, isPrivate);
    onStep("train");
    const examples = localize(bags, keys);
    const made = train(model, examples, drawBatches(examples.length, spec), spec.rate);
    onStep("send");
    const body = updateOf(manifest, keys, made, examples.length);
    await this.send(told, body);
    return {
      number: manifest.number,
      round: manifest.id,
      words: words.length,
      missing: words.length - keys.length,
      isPrivate,
      loss: made.loss,
      recall: recallAt5(model, examples),
      sent: body.length,
      wholeBytes: manifest.tables.reduce((sum, table) => sum + table.num_keys * table.record_bytes, 0),
    };
  }

  /**
   * Takes part in round after round, until the signal of its service ends it.
   *
   * A service that has answered once may be away for a while; one that never has ends it.
   */
  async keepTakingPart({ rounds = Infinity, onStep, onRound = () => {}, onMiss = () => {}, onWait = () => {} }) {
    let misses = 0; // in a row
    for (let taken = 0; taken < rounds; ) {
      let outcome;
      try {
        outcome = await this.takePart(onStep);
        misses = 0;
      } catch (error) {
        this.service.signal?.throwIfAborted();
        const { kind } = error;
        const isOver = kind === "UntimelyError" && !isTimely(this.service.token);
        misses = GROWING.includes(kind) ? misses + 1 : 0;
        if (!MISSES.includes(kind) || isOver || (kind === "StaleError" && misses === MAX_STALE)) throw error;
        onMiss(error);
        outcome = { wait: Math.min(LONGEST_WAIT, AFTER_MISS * 2 ** Math.max(0, misses - 1)) };
      }
      if ("wait" in outcome) {
        onWait(outcome.wait);
        await pause(1000 * outcome.wait, this.service.signal);
      } else {
        taken += 1;
        onRound(outcome);
      }
    }
  }

  /** Refuses rounds that this device cannot or must not take part in, before anything is asked for. */
  refuseOther(settings) {
    if ("sum_terms" in settings) {
      throw new KeyholeError("ViolationError", "the round adds updates up in shares of two aggregators", {
        got: "a device in a browser, which sends its update in the clear",
        expected: "a round whose updates go to the service",
        fix: "take part with keyhole device",
      });
    }
    if ("popular" in settings) {
      throw new KeyholeError("ViolationError", "the round asks for popular keys apart", {
        got: "a device in a browser, which makes one query for all keys",
        expected: "a round without popular keys",
        fix: "take part with keyhole device",
      });
    }
    if ("evaluation" in settings) {
      throw miss("this device measures nothing", "a round that measures the model", "one that trains it");
    }
  }

  /** Whether slices of a round are fetched in private; refuses a way that its operator did not choose. */
  isPrivate(settings) {
    const allowed = this.second ? PRIVATE : CLEAR;
    const name = settings.delivery || allowed[0];
    if (allowed.includes(name)) return this.second !== null;
    throw new KeyholeError("ViolationError", "the round is fetched in a way that this device does not allow", {
      got: name,
      expected: allowed.join(" or "),
      fix: this.second ? "leave the second server out to name keys" : "give the second server's address",
    });
  }

  /** Returns the sub-model of words, and which of them it holds. */
  async fetch(manifest, words, token, isPrivate) {
    const bias = { place: 0, keys: [0] };
    if (!isPrivate) {
      const asks = [bias, { place: 1, keys: words }];
      const [shared, rows] = await this.service.slices(manifest, asks, token);
      return assembled(manifest, shared, words, rows);
    }
    const found = await this.fetchPrivately(manifest, 1, words, token);
    const [shared] = await this.service.slices(manifest, [bias], token);
    const kept = words.filter((word) => found.has(word));
    return assembled(manifest, shared, kept, kept.map((word) => found.get(word)));
  }

  /** Records by key, from two servers of which neither learns the keys. */
  async fetchPrivately(manifest, place, keys, token) {
    if (maxKeysOf(manifest, manifest.tables[place]) === manifest.tables[place].num_keys) {
      return this.whole(manifest, place, token); // a query would be no shorter than the table
    }
    const tokens = [token, await this.joinSecond(manifest)];
    const servers = [this.service, this.second];
    const table = await this.privateTable(manifest, place, servers, tokens);
    const wanted = [...keys].sort((a, b) => a - b);
    return this.service.again("a private query", async () => {
      const query = await table.query(wanted); // anew each time: a query is for one use
      const replies = await allOf(servers.map((server, i) =>
        server.ask(manifest, place, query.messages[i], table.replyBytes, tokens[i]),
      ));
      return query.open(replies);
    });
  }

  /** All records of a table, which tells nobody what this device wants of it. */
  async whole(manifest, place, token) {
    const keys = Array.from({ length: manifest.tables[place].num_keys }, (_, key) => key);
    const [records] = await this.service.slices(manifest, [{ place, keys }], token);
    return new Map(keys.map((key) => [key, records[key]]));
  }

  /** The token of the round at the second server: its own, for one service's are none of another. */
  async joinSecond(manifest) {
    if (!this.second.token) return "";
    const told = await this.second.checkIn(this.said);
    if (told.round === manifest.id) return told.token;
    throw new KeyholeError("StaleError", "the second server does not let this device take part", {
      got: "round" in told ? `round ${told.number}` : "no round",
      expected: `round ${manifest.number}`,
      fix: "wait until it has the round, and check the token for it",
    });
  }

  async privateTable(manifest, place, servers, tokens) {
    const expected = paramsOf(manifest, place);
    const known = this.tables.get(manifest.id);
    if (known) return known;
    const given = await allOf(servers.map((server, i) => server.params(manifest, place, i, tokens[i])));
    given.forEach((params, i) => checkParams(expected, params, i));
    const { num_keys: numKeys } = manifest.tables[place];
    const topBytes = NODE * levelSizes(numKeys)[pathLevels(numKeys)];
    const table = new PrivateTable(expected, await this.service.top(manifest, place, topBytes, tokens[0]));
    this.tables = new Map([[manifest.id, table]]);
    return table;
  }

  /** Sends an update; a device that was let in and is so no longer has come too late. */
  async send(told, body) {
    await this.refuseLate(told);
    await this.service.update(told.round, body, told.token).catch((error) => {
      if (REFUSALS.includes(error.kind)) error.kind = "TooLateError";
      throw error;
    });
  }

  /** Asking costs little; an update that nobody uses costs the work of others. */
  async refuseLate(told) {
    const now = await this.service.current(told.token);
    if (now.number < told.number) return; // a replica that does not know of the round yet
    if (now.trailing.includes(told.round)) return;
    if (now.round === told.round && now.phase === "open") return;
    throw miss("the round is over", `round ${told.number}, while round ${now.number} is ${now.phase}`,
      "the newest round while it is open");
  }
}

/** Whether a token is good by the clock of this device: then that of the service may be wrong. */
function isTimely(token) {
  try {
    const { issued, expires } = JSON.parse(new TextDecoder().decode(unbase64(token.split(".")[1])));
    const now = Date.now() / 1000;
    return issued <= now && now < expires;
  } catch {
    return false; // not a token that one can read
  }
}

/** Waits for all, also where one fails: then the first error counts. */
async function allOf(promises) {
  const settled = await Promise.allSettled(promises);
  for (const { status, reason } of settled) if (status === "rejected") throw reason;
  return settled.map(({ value }) => value);
}

function assembled(manifest, [shared], keys, records) {
  const [everyone, word] = manifest.tables;
  const kernel = records.map((record) => decodeRecord(word, record));
  return { keys, model: { bias: decodeRecord(everyone, shared), kernel } };
}

/** Returns what is sent: an update under its words, and the mean loss before it. */
export function updateOf(manifest, words, made, examples) {
  const ready = readyUpdate(manifest.settings, [[made.bias], made.kernel], examples);
  const update = encodeUpdate(manifest, new Map([["word", words]]), ready.parts);
  return concat(encodeReport(ready.weight, { loss: made.loss }), update);
}
