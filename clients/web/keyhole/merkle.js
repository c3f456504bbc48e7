/**
 * Roots and proofs: whether records are those that the manifest of a round names.
 *
 * Leaf k is the hash of record k; nodes of a level are paired from the left, and one that is left over
 * moves up as it is. Which nodes a proof has follows from the keys alone.
 */

import { areEqual, concat, KeyholeError } from "./bytes.js";
import { blake3Keyed } from "./hashes.js";

/** Bytes of a node. */
export const NODE = 32;

const TOP_NODES = 4096;

/** Hashes a record to its leaf. */
export const leafOf = blake3Keyed("keyhole leaf");
const nodeOf = blake3Keyed("keyhole node");

function above(one, other) {
  return nodeOf(concat(one, other));
}

/** Returns the number of nodes of each level, from the leaves to the root. */
export function levelSizes(numKeys) {
  const sizes = [numKeys];
  while (sizes.at(-1) > 1) sizes.push(Math.ceil(sizes.at(-1) / 2));
  return sizes;
}

/** Walks up from known places: calls `missing(level, place)` for the nodes that a proof has. */
function climbLevels(numKeys, keys, missing, paired) {
  let places = [...new Set(keys)].sort((a, b) => a - b);
  levelSizes(numKeys).slice(0, -1).forEach((size, level) => {
    const known = new Set(places);
    const parents = new Set();
    for (const place of places) {
      const sibling = place ^ 1;
      if (sibling < size && !known.has(sibling)) missing(level, sibling);
      parents.add(place >> 1);
    }
    places = [...parents];
    paired(level, size, places);
  });
}

/** Returns the number of nodes of the proof for some keys. */
export function proofNodes(numKeys, keys) {
  let count = 0;
  climbLevels(numKeys, keys, () => { count += 1; }, () => {});
  return keys.length ? count : 0;
}

/**
 * Returns the root that a proof leads to.
 *
 * @param {number} numKeys
 * @param {Map<number, Uint8Array>} leaves by key
 * @param {Uint8Array} proof nodes, one behind the other
 */
export function rootFrom(numKeys, leaves, proof) {
  let level = new Map(leaves);
  let at = 0;
  climbLevels(
    numKeys,
    [...leaves.keys()],
    (_, place) => {
      level.set(place, proof.subarray(at, at + NODE));
      at += NODE;
    },
    (_, size, parents) => {
      const next = new Map();
      for (const place of parents) {
        const left = level.get(2 * place);
        next.set(place, 2 * place + 1 < size ? above(left, level.get(2 * place + 1)) : left);
      }
      level = next;
    },
  );
  return level.get(0);
}

/**
 * Refuses records that are not those of the root.
 *
 * @param {{name: string, num_keys: number, root: string}} table of the manifest
 * @param {number[]} keys of the records; repeats must hold the same bytes
 * @param {Uint8Array[]} records
 * @param {Uint8Array} proof
 * @param {Uint8Array} root
 */
export function checkRecords(table, keys, records, proof, root) {
  const leaves = new Map();
  let isWhole = true;
  keys.forEach((key, i) => {
    const leaf = leafOf(records[i]);
    isWhole &&= !leaves.has(key) || areEqual(leaves.get(key), leaf);
    leaves.set(key, leaf);
  });
  if (isWhole && (!keys.length || areEqual(rootFrom(table.num_keys, leaves, proof), root))) return;
  throw new KeyholeError("DamageError", `slices of table ${table.name} are not those of the round`, {
    got: "records that do not lead to the root of its manifest",
    expected: "the records that were published",
    fix: "ask again; a service that goes on like this lies or is damaged",
  });
}

/** Returns how many levels a row of private retrieval brings with it. */
export function pathLevels(numKeys) {
  return levelSizes(numKeys).findIndex((size) => size <= TOP_NODES);
}

/** Returns the nodes of a top, once they are known to lead to the root of the round. */
export function checkTop(numKeys, root, data) {
  const size = levelSizes(numKeys)[pathLevels(numKeys)];
  let level = Array.from({ length: size }, (_, i) => data.subarray(NODE * i, NODE * (i + 1)));
  const top = level;
  if (data.length === NODE * size) {
    while (level.length > 1) {
      const pairs = Array.from({ length: Math.ceil(level.length / 2) }, (_, i) => i);
      level = pairs.map((i) =>
        2 * i + 1 < level.length ? above(level[2 * i], level[2 * i + 1]) : level[2 * i],
      );
    }
    if (areEqual(level[0], root)) return top;
  }
  throw new KeyholeError("StaleError", "the top of a table is not that of its root", {
    got: `${data.length} bytes`,
    expected: `${NODE * size} bytes that lead to the root of the round`,
    fix: "take part in the next round; a server that goes on like this lies or is damaged",
  });
}

/** Returns whether a row, a record with its path behind it, is that of its key under a top. */
export function isRightRow(numKeys, top, key, row) {
  const sizes = levelSizes(numKeys);
  const levels = pathLevels(numKeys);
  const cut = row.length - NODE * levels;
  let node = leafOf(row.subarray(0, cut));
  let place = key;
  for (let level = 0; level < levels; level += 1) {
    const sibling = row.subarray(cut + NODE * level, cut + NODE * (level + 1));
    if ((place ^ 1) < sizes[level]) node = place & 1 ? above(sibling, node) : above(node, sibling);
    place >>= 1;
  }
  return areEqual(node, top[place]);
}
