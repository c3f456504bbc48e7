/**
 * Speaks to one service over HTTP: asks again where that may help, and never waits for ever.
 *
 * Works in a browser and in Node alike. In a browser the service must name the page's origin
 * (`keyhole serve --allow-origin`); without that the browser keeps every answer to itself.
 */

import { concat, KeyholeError } from "./bytes.js";
import { checkSignature, readManifest } from "./manifest.js";
import { answerBytes, decodeAnswer, encodeQuery } from "./messages.js";

const ATTEMPTS = 5;
const FIRST_WAIT = 500; // milliseconds, doubled with every attempt
const SLOWEST = 60_000;
const MAX_JSON = 1 << 16;
const MAX_MANIFEST = 16 << 20;
const OCTETS = "application/octet-stream";
const NO_ANSWER = "no answer";

/** Waits; ends early, with an error, where the signal does. */
export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}

/** An answer that may be another one a moment later. */
class Passing extends Error {
  constructor(reason, after) {
    super(reason);
    this.after = after;
  }
}

/** A service, as one device knows it. */
export class Service {
  /**
   * @param {string} url
   * @param {{token?: string, signal?: AbortSignal, onBytes?: (down: number, up: number) => void,
   *   onAgain?: (reason: string) => void}} how
   */
  constructor(url, { token = "", signal, onBytes = () => {}, onAgain = () => {} } = {}) {
    let base;
    try {
      base = new URL(url);
    } catch {
      throw badUrl("text that is no address");
    }
    if (!["http:", "https:"].includes(base.protocol)) throw badUrl(base.protocol);
    this.base = base.href.replace(/\/+$/, "");
    this.token = token;
    this.signal = signal;
    this.onBytes = onBytes;
    this.onAgain = onAgain;
    this.hasAnswered = false;
  }

  /** Checks in: `{round, number, token, fetch_after}`, or `{wait}` in seconds. */
  async checkIn(said = {}) {
    const body = Object.keys(said).length ? new TextEncoder().encode(JSON.stringify(said)) : undefined;
    return this.json("POST", "/v1/checkin", { body, token: this.token });
  }

  /** Returns the newest round. */
  async current(token) {
    return this.json("GET", "/v1/rounds/current", { token });
  }

  /** Returns the manifest of a round; signed by the trainer, where this device pins a key. */
  async manifest(round, token, trainerKey = "") {
    const path = `/v1/rounds/${round}/manifest`;
    return this.again(path, async () => {
      const { bytes, headers } = await this.once("GET", path, { token, limit: MAX_MANIFEST });
      const manifest = await readManifest(round, bytes);
      if (trainerKey) await checkSignature(manifest, trainerKey, headers.get("keyhole-signature"));
      return manifest;
    });
  }

  /** Returns the records of keys, ask by ask, checked against the manifest. */
  async slices(manifest, asks, token) {
    const path = `/v1/rounds/${manifest.id}/slices`;
    const limit = answerBytes(manifest.tables, asks);
    const body = encodeQuery(asks);
    return this.again(path, async () => {
      const { bytes } = await this.once("POST", path, { body, type: OCTETS, token, limit });
      return decodeAnswer(manifest.tables, asks, bytes);
    });
  }

  /** Returns the params of a table, from a service that says it is this server of the two. */
  async params(manifest, place, server, token) {
    const path = `/v1/rounds/${manifest.id}/tables/${place}/pir/two-server`;
    return this.again(path, async () => {
      const { bytes, headers } = await this.once("GET", path, { token, limit: 1024 }).catch((error) => {
        if (error.kind === "NotFoundError" && server === 1) error.kind = "StaleError"; // it lags behind
        throw error;
      });
      const says = headers.get("keyhole-server");
      if (says === String(server)) return bytes;
      throw new KeyholeError("ServiceError", "another server answers", {
        got: says === null ? "one that does not say which it is" : `server ${says}`,
        expected: `server ${server} of the two`,
        fix: "name the service with --pir 0 first and the one with --pir 1 second",
      });
    });
  }

  /** Returns the nodes that rows of a table are compared with. */
  async top(manifest, place, limit, token) {
    const path = `/v1/rounds/${manifest.id}/tables/${place}/top`;
    return this.again(path, async () => (await this.once("GET", path, { token, limit })).bytes);
  }

  /** Sends a private query, once: a second attempt needs a new one. */
  async ask(manifest, place, body, limit, token) {
    const path = `/v1/rounds/${manifest.id}/tables/${place}/pir/two-server`;
    return (await this.once("POST", path, { body, type: OCTETS, token, limit })).bytes;
  }

  /** Sends an update until the service has it on its disk: the same bytes count once. */
  async update(round, body, token) {
    return this.json("POST", `/v1/rounds/${round}/updates`, { body, type: OCTETS, token });
  }

  async json(method, path, how) {
    return this.again(path, async () => {
      const { bytes } = await this.once(method, path, { ...how, limit: MAX_JSON });
      return JSON.parse(new TextDecoder().decode(bytes));
    });
  }

  /** Calls until it succeeds, or is refused for good: damage and busy services may pass. */
  async again(path, call) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await call();
      } catch (error) {
        this.signal?.throwIfAborted();
        const mayPass = error instanceof Passing || error.kind === "DamageError";
        if (!mayPass) throw error;
        if (attempt === ATTEMPTS) throw error instanceof Passing ? await this.unusable(path, error) : error;
        this.onAgain(error.message);
        const wait = FIRST_WAIT * 2 ** (attempt - 1) * (0.5 + Math.random());
        await pause(Math.max(wait, 1000 * (error.after ?? 0)), this.signal);
      }
    }
  }

  /** One request and the whole of its answer, no longer than the limit. */
  async once(method, path, { body, type, token, limit }) {
    const headers = {};
    if (token) headers.authorization = `Bearer ${token}`;
    if (type) headers["content-type"] = type;
    const signals = [AbortSignal.timeout(SLOWEST), ...(this.signal ? [this.signal] : [])];
    let answer, bytes;
    try {
      answer = await fetch(this.base + path, {
        method,
        body,
        headers,
        signal: AbortSignal.any(signals),
        credentials: "omit",
        redirect: "error",
        referrerPolicy: "no-referrer",
      });
      bytes = await bodyOf(answer, answer.ok ? limit : MAX_JSON);
    } catch (error) {
      this.signal?.throwIfAborted();
      if (error instanceof KeyholeError) throw error;
      throw new Passing(NO_ANSWER);
    }
    this.hasAnswered = true;
    this.onBytes(bytes.length, body?.length ?? 0);
    if (!answer.ok) throw refusalOf(answer, bytes);
    return { bytes, headers: answer.headers };
  }

  /** What is wrong where the last attempt brought nothing either. */
  async unusable(path, last) {
    const { origin } = globalThis; // of this page; Node has none
    if (origin && last.message === NO_ANSWER && !this.hasAnswered && (await this.isThere())) {
      return new KeyholeError("OriginError", "the service keeps its answers from this page", {
        got: `a page of ${origin}`,
        expected: "an origin that the operator of the service names",
        fix: `ask the operator to add --allow-origin ${origin}`,
      });
    }
    const kind = this.hasAnswered ? "AwayError" : "ServiceError"; // it may come back
    return new KeyholeError(kind, "the service gives no usable answer", {
      got: `${last.message} (${ATTEMPTS} attempts)`,
      expected: `an answer at ${path.replace(/[0-9a-f]{56,}/, "…")}`,
      fix: "check its address, and that it runs",
    });
  }

  /** Whether somebody listens: a browser tells a page as much even where it hides the answer. */
  async isThere() {
    const how = { mode: "no-cors", credentials: "omit", signal: AbortSignal.timeout(SLOWEST) };
    return fetch(`${this.base}/healthz`, how).then(() => true, () => false);
  }
}

function badUrl(got) {
  return new KeyholeError("InputError", "the address of a service cannot be used", {
    got,
    expected: "http://HOST:PORT or https://HOST",
    fix: "copy it from the line that keyhole serve prints",
  });
}

async function bodyOf(answer, limit) {
  const reader = answer.body?.getReader();
  const pieces = [];
  let length = 0;
  for (;;) {
    const { done, value } = reader ? await reader.read() : { done: true };
    if (done) return concat(...pieces);
    pieces.push(value);
    length += value.length;
    if (length > limit) {
      await reader.cancel();
      throw new KeyholeError("ServiceError", "an answer is longer than it can be", {
        got: `more than ${limit} bytes`,
        expected: `${limit} bytes at most`,
        fix: "check the address; this may not be a slice service",
      });
    }
  }
}

/** What a refused request means: something that passes, or an error with the service's own facts. */
function refusalOf(answer, bytes) {
  let told = {};
  try {
    told = JSON.parse(new TextDecoder().decode(bytes)).error ?? {};
  } catch {
    // an answer of something in between, or the one refusal of private queries
  }
  if ([408, 429].includes(answer.status) || answer.status >= 500) {
    return new Passing(told.wrong ?? `status ${answer.status}`, Number(answer.headers.get("retry-after")));
  }
  const kind = told.kind ?? (answer.status === 400 ? "ProtocolError" : "RequestError");
  const error = new KeyholeError(kind, told.wrong ?? "the service refuses", {
    got: told.got ?? `status ${answer.status}`,
    expected: told.allowed ?? "an answer",
    fix: told.fix ?? "check the address",
  });
  error.status = answer.status;
  return error;
}
