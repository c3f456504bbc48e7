/**
 * Manifests: what a round holds, checked before anything is asked for.
 *
 * The name of a round has the SHA-256 of its manifest, and the manifest has the root of every table:
 * what a device computes is bound to that name, and with a pinned key to the trainer's signature of it.
 */

import { concat, hex, KeyholeError, unhex, utf8 } from "./bytes.js";
import { sha256 } from "./hashes.js";

const VERSION = 2;
const MAX_KEYS = 2 ** 31 - 1;
const NAMES = ["number", "settings", "spaces", "step", "structure", "tables", "version"];
const TABLE_NAMES = [
  "coding", "coding_seed", "factors", "fields", "frozen", "name", "num_keys", "record_bytes", "root",
  "segments",
];
const FIELD_NAMES = ["axes", "dtype", "path", "shape"];

function malformed(got) {
  return new KeyholeError("InputError", "not the manifest of a round that this device can read", {
    got,
    expected: `JSON of version ${VERSION}, as docs/wire.md describes it`,
    fix: "ask the trainer for another round; it may come from another version of keyhole",
  });
}

function demand(holds, got) {
  if (!holds) throw malformed(got);
}

function isCount(value) {
  return Number.isSafeInteger(value) && value >= 0;
}

function onlyNames(thing, names) {
  demand(thing !== null && typeof thing === "object", "something that is no object");
  const unknown = Object.keys(thing).filter((name) => !names.includes(name));
  demand(!unknown.length, `the name ${unknown[0]}, which is unknown`);
}

/** The shape of an array in a slice: that of the parameter without the axes that are cut. */
function sliceShape(field) {
  return field.shape.filter((_, axis) => !(field.axes ?? []).includes(axis));
}

/** Returns the numbers of an array in a slice. */
export function sizeOf(field) {
  return sliceShape(field).reduce((product, size) => product * size, 1);
}

/** Returns the numbers of a whole slice of a table. */
export function sliceSize(table) {
  return table.fields.reduce((sum, field) => sum + sizeOf(field), 0);
}

const CODED_BYTES = {
  plain: (n) => 4 * n,
  half: (n) => 2 * n,
  uint8: (n) => n + 8,
  uint4: (n) => Math.ceil(n / 2) + 8,
};

function checkTable(table, spaces) {
  onlyNames(table, TABLE_NAMES);
  demand(typeof table.name === "string" && Array.isArray(table.fields), "a table without fields");
  demand(isCount(table.num_keys) && table.num_keys >= 1, "a table without keys");
  demand(table.num_keys <= MAX_KEYS, `a table of more than ${MAX_KEYS} keys`);
  demand(Array.isArray(table.factors), "a table of a select function");
  for (const field of table.fields) {
    onlyNames(field, FIELD_NAMES);
    demand(Array.isArray(field.shape) && field.shape.every(isCount), "an array of no shape");
    demand(field.dtype === "<f4", `an array of ${field.dtype}`);
    demand(field.axes?.length === table.factors.length, "an array that is cut otherwise");
  }
  const keys = table.factors.map((name) => spaces.get(name));
  demand(!keys.includes(undefined), "a table of a key space that is not there");
  demand(keys.reduce((product, count) => product * count, 1) === table.num_keys, "other keys");
  demand(table.coding in CODED_BYTES, `coding ${table.coding}`);
  const sizes = table.fields.map(sizeOf);
  const length = sizes.reduce((sum, n) => sum + CODED_BYTES[table.coding](n), 0);
  demand(length === table.record_bytes, "records of another length");
  demand(table.root === "" || /^[0-9a-f]{64}$/.test(table.root), "a root that is none");
}

/**
 * Returns the manifest of a round.
 *
 * @param {string} round its identifier, which names the digest of these bytes
 * @param {Uint8Array} bytes
 */
export async function readManifest(round, bytes) {
  const digest = await sha256(bytes);
  if (hex(digest) !== round.slice(round.indexOf("-") + 1)) {
    throw new KeyholeError("DamageError", "a manifest was damaged on its way", {
      got: `${bytes.length} bytes of another digest`,
      expected: "the manifest that the round is named after",
      fix: "ask again; a service that goes on like this lies or is damaged",
    });
  }
  let told;
  try {
    told = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    throw malformed("something that is no JSON");
  }
  onlyNames(told, NAMES);
  demand(told.version === VERSION, `version ${told.version}`);
  demand(isCount(told.number) && isCount(told.step), "a round without a number");
  if (`${told.number}-${hex(digest)}` !== round) {
    throw new KeyholeError("ViolationError", "a round under another number", {
      got: `round ${told.number} as ${round.slice(0, round.indexOf("-"))}`,
      expected: "the number that it was published with",
      fix: "nothing was fetched; the service lies",
    });
  }
  demand(Array.isArray(told.spaces) && Array.isArray(told.tables), "a round without tables");
  const spaces = new Map(told.spaces.map(({ name, num_keys }) => [name, num_keys]));
  for (const table of told.tables) checkTable(table, spaces);
  return { ...told, id: round, digest, settings: told.settings ?? {} };
}

/**
 * Refuses a manifest that the trainer did not sign.
 *
 * @param {{digest: Uint8Array}} manifest
 * @param {string} trainerKey 64 hex digits: the public key that this device pins
 * @param {string | null} signature 128 hex digits, from the answer that had the manifest
 */
export async function checkSignature(manifest, trainerKey, signature) {
  const text = concat(utf8("keyhole manifest 1\0"), manifest.digest);
  let isSigned = false;
  if (signature !== null && /^[0-9a-f]{128}$/.test(signature)) {
    const key = await crypto.subtle.importKey("raw", unhex(trainerKey), "Ed25519", false, ["verify"]);
    isSigned = await crypto.subtle.verify("Ed25519", key, unhex(signature), text);
  }
  if (isSigned) return;
  throw new KeyholeError("ViolationError", "the round is not signed by the trainer of this device", {
    got: signature === null ? "no signature" : "a signature of somebody else, or of other bytes",
    expected: "the signature of the pinned key over this manifest",
    fix: "compare the key with the trainer's; else a service lies",
  });
}

/** Returns the slice that a record holds, its arrays side by side, as numbers of 32 bits. */
export function decodeRecord(table, record) {
  const out = new Float32Array(sliceSize(table));
  const source = new DataView(record.buffer, record.byteOffset, record.byteLength);
  let at = 0;
  let start = 0;
  for (const field of table.fields) {
    const n = sizeOf(field);
    decodeArray(table.coding, source, at, n, out.subarray(start, start + n));
    at += CODED_BYTES[table.coding](n);
    start += n;
  }
  return out;
}

function decodeArray(coding, source, at, n, out) {
  if (coding === "plain") for (let i = 0; i < n; i += 1) out[i] = source.getFloat32(at + 4 * i, true);
  else if (coding === "half") for (let i = 0; i < n; i += 1) out[i] = half(source.getUint16(at + 2 * i, true));
  else {
    const codes = coding === "uint8" ? n : Math.ceil(n / 2);
    const scale = source.getFloat32(at + codes, true);
    const offset = source.getFloat32(at + codes + 4, true);
    for (let i = 0; i < n; i += 1) {
      const byte = source.getUint8(at + (coding === "uint8" ? i : i >> 1));
      const code = coding === "uint8" ? byte : (byte >> (4 * (i % 2))) & 15;
      out[i] = offset + Math.fround(scale * code);
    }
  }
}

/** The number that 16 bits of IEEE 754 stand for. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
