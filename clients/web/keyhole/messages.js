/**
 * Queries in the clear and their answers, updates and reports: the bytes of docs/wire.md.
 */

import { concat, KeyholeError, pack, packFloats, packKeys, unhex, utf8, withCrc } from "./bytes.js";
import { checkRecords, NODE, proofNodes } from "./merkle.js";

/**
 * Returns the body of a query for slices of some tables.
 *
 * @param {{place: number, keys: number[]}[]} asks tables by their place in the manifest
 */
export function encodeQuery(asks) {
  const blocks = asks.map(({ place, keys }) => {
    const head = [[2, place], [1, 4], [1, 0], [4, keys.length]];
    return concat(pack(...head), pack(...keys.map((key) => [4, key])));
  });
  return concat(utf8("KHQ2"), pack([2, asks.length], [2, 0]), ...blocks);
}

/** The bytes of the answer to one ask: a proof, where the table has a root, and its records. */
function answerShape(table, keys) {
  const nodes = table.root ? proofNodes(table.num_keys, keys) : 1;
  return { proof: NODE * nodes, records: table.record_bytes * keys.length };
}

/** Returns the bytes of an answer, before it is there. */
export function answerBytes(tables, asks) {
  const shapes = asks.map(({ place, keys }) => answerShape(tables[place], keys));
  return shapes.reduce((sum, { proof, records }) => sum + proof + records, 0);
}

/**
 * Returns the records of an answer, ask by ask, once they are known to be those of the round.
 *
 * Slices that are computed on demand have no root in the manifest: the answer has one of its own
 * records, which finds damage and binds the service to nothing.
 */
export function decodeAnswer(tables, asks, body) {
  if (body.length !== answerBytes(tables, asks)) {
    throw new KeyholeError("DamageError", "the answer does not fit the query", {
      got: `${body.length} bytes`,
      expected: `${answerBytes(tables, asks)} bytes`,
      fix: "ask again",
    });
  }
  let at = 0;
  return asks.map(({ place, keys }) => {
    const table = tables[place];
    const shape = answerShape(table, keys);
    const proof = body.subarray(at, at + shape.proof);
    at += shape.proof;
    const length = table.record_bytes;
    const records = keys.map((_, i) => body.subarray(at + length * i, at + length * (i + 1)));
    at += shape.records;
    if (table.root) checkRecords(table, keys, records, proof, unhex(table.root));
    else checkOnDemand(table, keys, records, proof);
    return records;
  });
}

function checkOnDemand(table, keys, records, root) {
  const distinct = [...new Set(keys)].sort((a, b) => a - b);
  const places = keys.map((key) => distinct.indexOf(key));
  const own = { name: table.name, num_keys: distinct.length };
  checkRecords(own, places, records, new Uint8Array(0), root);
}

/**
 * Returns the body of an update.
 *
 * @param {{digest: Uint8Array, spaces: {name: string}[]}} manifest
 * @param {Map<string, number[]>} keys of each key space
 * @param {Float32Array[][]} parts the rows of each part, in the order of its keys
 */
export function encodeUpdate(manifest, keys, parts) {
  const named = manifest.spaces.map(({ name }) => keys.get(name));
  return withCrc(
    concat(
      utf8("KHU2"),
      pack([2, named.length], [2, parts.length]),
      manifest.digest,
      ...named.flatMap((each) => [pack([4, each.length]), packKeys(each)]),
      ...parts.flatMap((rows) => rows.map(packFloats)),
    ),
  );
}

/**
 * Returns what is sent before an update whose device says more: nothing if it says nothing.
 *
 * @param {number | null} weight what the update was multiplied by
 * @param {Object<string, number>} metrics
 */
export function encodeReport(weight, metrics) {
  if (weight === null && !Object.keys(metrics).length) return new Uint8Array(0);
  const told = Object.entries(metrics).map(([name, value]) => [
    name,
    Number.isFinite(value) ? value : null,
  ]);
  const text = utf8(JSON.stringify({ weight, metrics: Object.fromEntries(told) }));
  return withCrc(concat(utf8("KHR1"), pack([4, text.length]), text));
}

/**
 * Returns an update as the round takes it: weighted where it weighs, and no longer than it may be.
 *
 * @param {object} settings of the manifest
 * @param {Float32Array[][]} parts rows of each part
 * @param {number} examples of this device
 * @returns {{parts: Float32Array[][], weight: number | null}}
 */
export function readyUpdate(settings, parts, examples) {
  let weight = null;
  if ("max_weight" in settings) {
    const most = settings.max_weight;
    weight = most === null ? examples : Math.min(examples, most) / most;
  }
  let scale = weight ?? 1;
  const norm = Math.hypot(...parts.map((rows) => normOf(rows))) * scale;
  const limit = (settings.max_update_norm ?? Infinity) * (weight ?? 1);
  if (norm > limit) scale *= limit / norm / (1 + 1e-6); // so that rounding makes it no longer again
  if (scale === 1) return { parts, weight };
  return { parts: parts.map((rows) => rows.map((row) => row.map((x) => x * scale))), weight };
}

function normOf(rows) {
  let sum = 0;
  for (const row of rows) for (const x of row) sum += x * x;
  return Math.sqrt(sum);
}
