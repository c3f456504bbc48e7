/**
 * Private retrieval from two servers: neither learns which keys, as long as they do not collude.
 *
 * A query is for one use: whoever asks again makes a new one, with new secrets, for all keys. A row
 * that is wrong is left out, as if its key had found no place, and nothing that anybody sees follows
 * from it.
 */

import { areEqual, concat, hex, KeyholeError, pack, unhex, utf8, view } from "./bytes.js";
import { batchShape, matchBuckets, Placement } from "./buckets.js";
import { blake2b, ctrStream, gmac, sha256 } from "./hashes.js";
import { checkTop, isRightRow, NODE, pathLevels } from "./merkle.js";
import { correctionBytes, shapeOf, sharePoints } from "./points.js";

const HEAD = 56;
const CHECK = 16;

/** Bytes of what nobody can foresee: the system's generator. */
export function freshBytes(count) {
  const out = new Uint8Array(count);
  for (let at = 0; at < count; at += 65536) crypto.getRandomValues(out.subarray(at, at + 65536));
  return out;
}

/** Returns uniform numbers below a bound: words of 64 bits, drawn again where they favour some. */
export function drawBelow(bound, count, random = freshBytes) {
  const limit = 2n ** 64n - (2n ** 64n % BigInt(bound));
  const out = [];
  while (out.length < count) {
    const missing = count - out.length;
    const words = view(random(8 * missing));
    for (let i = 0; i < missing; i += 1) {
      const word = words.getBigUint64(8 * i, true);
      if (word < limit) out.push(Number(word % BigInt(bound)));
    }
  }
  return out;
}

/** Returns the most keys that a query of a table may be for, as the round says. */
export function maxKeysOf(manifest, table) {
  const told = manifest.settings.keys_per_client ?? {};
  const product = table.factors.reduce((keys, name) => keys * told[name], 1);
  return Math.min(product, table.num_keys);
}

/** Returns the params of a table that a device expects: what both servers must state. */
export function paramsOf(manifest, place) {
  const table = manifest.tables[place];
  const row = table.record_bytes + NODE * pathLevels(table.num_keys);
  const name = blake2b(utf8(`${manifest.id}/tables/${place}`), 16, "keyhole-round");
  const root = unhex(table.root);
  const numbers = pack([8, table.num_keys], [8, row], [8, maxKeysOf(manifest, table)]);
  return concat(utf8("KHT3"), pack([1, 2], [1, 0], [2, 0]), name, manifest.digest, root, numbers);
}

/** Refuses params of a server that are not those of the round. */
export function checkParams(expected, given, server) {
  if (areEqual(expected, given)) return;
  throw new KeyholeError("StaleError", `server ${server} is not set up for this round`, {
    got: `other params of private retrieval (${given.length} bytes)`,
    expected: "the round, root and keys of a query that the manifest names",
    fix: "wait until the round is at both servers; else compare how they were started",
  });
}

/** What asks for rows of one table in private, from what both servers state alike. */
export class PrivateTable {
  /**
   * @param {Uint8Array} params of 112 bytes
   * @param {Uint8Array} top the nodes that rows are compared with
   */
  constructor(params, top) {
    const numbers = view(params);
    [this.numKeys, this.rowBytes, this.maxKeys] = [88, 96, 104].map((at) =>
      Number(numbers.getBigUint64(at, true)),
    );
    this.params = params;
    this.round = params.subarray(8, 24);
    this.top = checkTop(this.numKeys, params.subarray(56, 88), top);
    this.batch = batchShape(this.maxKeys, this.numKeys);
    this.placement = this.batch.buckets ? new Placement(this.numKeys, this.batch.buckets) : null;
    this.inBucket = shapeOf(this.placement?.bucketSize ?? 1);
    this.inTable = shapeOf(this.numKeys);
  }

  /** Returns the bytes of a query, the same for every device. */
  get queryBytes() {
    const { buckets, stash } = this.batch;
    const corrections = correctionBytes(buckets, this.inBucket) + correctionBytes(stash, this.inTable);
    return HEAD + 32 + corrections + CHECK;
  }

  /** Returns the bytes of a reply. */
  get replyBytes() {
    return HEAD + CHECK + (this.batch.buckets + this.batch.stash) * this.rowBytes + CHECK;
  }

  /** Gives keys their queries: buckets as far as there is room, then the stash. */
  assign(keys, random) {
    const { buckets, stash } = this.batch;
    const positions = this.fillBuckets(random);
    const places = keys.map((key) => this.placement?.placesOf(key) ?? []);
    const slots = this.placement
      ? matchBuckets(places.map((three) => three.map(({ bucket }) => bucket)))
      : keys.map(() => -1);
    slots.forEach((slot, i) => {
      if (slot >= 0) positions[slot] = places[i].find(({ bucket }) => bucket === slot).position;
    });
    const stashed = drawBelow(this.numKeys, stash, random);
    let used = 0;
    slots.forEach((slot, i) => {
      if (slot >= 0 || used === stash) return;
      stashed[used] = keys[i];
      slots[i] = buckets + used;
      used += 1;
    });
    return { positions, stashed, slots };
  }

  /** A random key for each bucket, so that a query without a wanted key looks like any other. */
  fillBuckets(random) {
    const { buckets } = this.batch;
    if (!buckets) return [];
    const positions = drawBelow(this.placement.bucketSize, buckets, random);
    for (;;) {
      const empty = positions.flatMap((at, bucket) => (this.placement.keyAt(bucket, at) < 0 ? [bucket] : []));
      if (!empty.length) return positions;
      const again = drawBelow(this.placement.bucketSize, empty.length, random);
      empty.forEach((bucket, i) => { positions[bucket] = again[i]; });
    }
  }

  /**
   * Returns a query: a message for each server, and what opens their replies.
   *
   * @param {number[]} keys all different, no more than the params say
   * @param {(count: number) => Uint8Array} random secret bytes; given by tests alone
   */
  async query(keys, random = freshBytes) {
    const { positions, stashed, slots } = this.assign(keys, random);
    const [nonce, ...roots] = [random(16), random(16), random(16)];
    const streams = await Promise.all(roots.map((root) => ctrStream(root, 32)));
    const of = (from) => streams.map((stream) => stream.slice(from, from + 16));
    const tail = concat(
      await sharePoints(positions, this.inBucket, nonce, of(0)),
      await sharePoints(stashed, this.inTable, nonce, of(16)),
    );
    const messages = await Promise.all(roots.map((root, server) =>
      this.seal(1, server, concat(nonce, root, tail)),
    ));
    return { messages, open: (replies) => this.open(replies, messages, keys, slots) };
  }

  async head(kind, server) {
    const about = await sha256(this.params);
    return concat(utf8("KHP2"), pack([1, kind], [1, server], [2, 0]), this.round, about);
  }

  async seal(kind, server, body) {
    const frame = concat(await this.head(kind, server), body);
    return concat(frame, (await sha256(frame)).slice(0, CHECK));
  }

  /** The rows of a reply, once it is one to this query. */
  async rowsOf(reply, message, server) {
    const frame = reply.subarray(0, reply.length - CHECK);
    const isOne =
      reply.length === this.replyBytes &&
      areEqual(frame.subarray(0, HEAD), await this.head(2, server)) &&
      areEqual(reply.subarray(-CHECK), await gmac("keyhole-pir-repl", frame)) &&
      areEqual(frame.subarray(HEAD, HEAD + CHECK), message.subarray(-CHECK));
    if (isOne) return frame.subarray(HEAD + CHECK);
    throw new KeyholeError("DamageError", `server ${server} did not answer the query`, {
      got: `${reply.length} bytes`,
      expected: `a reply of ${this.replyBytes} bytes to this query`,
      fix: "ask again with a new query",
    });
  }

  /** The records of keys by key; those without a place and those with a wrong row are missing. */
  async open(replies, messages, keys, slots) {
    const shares = [];
    for (const server of [0, 1]) {
      shares.push(await this.rowsOf(replies[server], messages[server], server));
    }
    const rows = shares[0].map((byte, i) => byte ^ shares[1][i]);
    const found = new Map();
    keys.forEach((key, i) => {
      if (slots[i] < 0) return;
      const row = rows.subarray(slots[i] * this.rowBytes, (slots[i] + 1) * this.rowBytes);
      const isRight = isRightRow(this.numKeys, this.top, key, row);
      const cut = this.rowBytes - NODE * pathLevels(this.numKeys);
      if (isRight) found.set(key, row.subarray(0, cut));
    });
    return found;
  }

  /** Shows what everybody sees: keys are private. */
  toString() {
    return `PrivateTable(${hex(this.round)}, ${this.maxKeys} keys a query)`;
  }
}
