/**
 * Distributed point functions: shares the unit vector of a secret point between two servers.
 *
 * A tree for each point, whose nodes are a seed and a control bit. Both servers grow it from a root of
 * their own and correct what they grow wherever a control bit is set, by words that are alike at both:
 * off the path to the point their nodes become equal, on it they differ. docs/wire.md has the bytes.
 */

import { concat } from "./bytes.js";
import { ctrStream, fixedKeyXof } from "./hashes.js";

const SEED = 16;

/**
 * Returns the shape of a point function: levels of its tree, bytes of a leaf.
 *
 * A level costs 16 bytes and 2 bits and halves the leaf: the depth with the shortest key.
 */
export function shapeOf(numPoints) {
  let best = { depth: 0, leafBytes: Math.ceil(numPoints / 8), cost: Infinity };
  for (let depth = 0; depth < 32 && 2 ** depth <= numPoints; depth += 1) {
    const leafBytes = Math.ceil(numPoints / (8 * 2 ** depth));
    const cost = 65 * depth + 4 * leafBytes;
    if (cost < best.cost) best = { depth, leafBytes, cost };
  }
  return { numPoints, depth: best.depth, leafBytes: best.leafBytes };
}

/** Returns the bytes of the corrections of some points. */
export function correctionBytes(count, { depth, leafBytes }) {
  return Math.ceil((2 * depth * count) / 8) + count * (depth * SEED + leafBytes);
}

function clearBit(seed) {
  seed[0] &= 0xfe;
  return seed;
}

/** Returns the seeds of the roots of some trees, control bits clear. */
async function rootSeeds(root, count) {
  const stream = await ctrStream(root, SEED * count);
  return Array.from({ length: count }, (_, i) => clearBit(stream.slice(SEED * i, SEED * (i + 1))));
}

function xor(one, other) {
  return one.map((byte, i) => byte ^ other[i]);
}

/** Both children of nodes before correction: `[left, right]` of `{seed, bit}` for each. */
async function childrenOf(grow, seeds) {
  return (await grow(seeds, 2)).map((both) =>
    [both.slice(0, SEED), both.slice(SEED)].map((child) => {
      const bit = child[0] & 1;
      return { seed: clearBit(child), bit };
    }),
  );
}

function corrected(child, side, control, word) {
  if (!control) return { ...child, control: child.bit };
  return { seed: xor(child.seed, word.seed), control: child.bit ^ word.bits[side] };
}

/** One level of one path: its correction, and where both servers stand below it. */
function step(children, controls, side) {
  const lost = children.map((pair) => pair[1 - side].seed);
  const bits = [0, 1].map((each) => children[0][each].bit ^ children[1][each].bit ^ (each === side));
  const word = { seed: xor(lost[0], lost[1]), bits };
  return { word, ends: children.map((pair, party) => corrected(pair[side], side, controls[party], word)) };
}

/** The bits of all points, two a level, and then the seeds and the leaves. */
function encode(words, leaves) {
  const bits = words.flatMap((levels) => levels.flatMap((word) => word.bits));
  const packed = new Uint8Array(Math.ceil(bits.length / 8));
  bits.forEach((bit, i) => { packed[i >> 3] |= bit << (i & 7); });
  return concat(packed, ...words.flatMap((levels) => levels.map((word) => word.seed)), ...leaves);
}

/**
 * Returns the corrections of points, which both servers receive alike.
 *
 * @param {number[]} points each of [0, numPoints)
 * @param {{numPoints: number, depth: number, leafBytes: number}} shape
 * @param {Uint8Array} nonce 16 bytes that belong to this query alone; no secret
 * @param {Uint8Array[]} roots 16 secret bytes for each server
 */
export async function sharePoints(points, shape, nonce, roots) {
  const { depth, leafBytes } = shape;
  const grow = await fixedKeyXof(nonce, "keyhole-tree");
  const leaf = await fixedKeyXof(nonce, "keyhole-leaf");
  const goals = points.map((point) => Math.floor(point / (8 * leafBytes)));
  let seeds = await Promise.all(roots.map((root) => rootSeeds(root, points.length)));
  let controls = [points.map(() => 0), points.map(() => 1)];
  const words = points.map(() => []);
  for (let level = 0; level < depth; level += 1) {
    const grown = [await childrenOf(grow, seeds[0]), await childrenOf(grow, seeds[1])];
    const steps = points.map((_, n) => {
      const side = (goals[n] >> (depth - 1 - level)) & 1;
      return step([grown[0][n], grown[1][n]], [controls[0][n], controls[1][n]], side);
    });
    steps.forEach(({ word }, n) => words[n].push(word));
    seeds = [0, 1].map((party) => steps.map(({ ends }) => ends[party].seed));
    controls = [0, 1].map((party) => steps.map(({ ends }) => ends[party].control));
  }
  const blocks = Math.ceil(leafBytes / SEED);
  const ends = [await leaf(seeds[0], blocks), await leaf(seeds[1], blocks)];
  const leaves = points.map((point, n) => {
    const made = xor(ends[0][n], ends[1][n]).slice(0, leafBytes);
    const place = point % (8 * leafBytes);
    made[place >> 3] ^= 1 << (place & 7);
    if (depth === 0 && shape.numPoints % 8) made[leafBytes - 1] &= (1 << shape.numPoints % 8) - 1;
    return made;
  });
  return encode(words, leaves);
}

function decode(corrections, count, { depth, leafBytes }) {
  const seedsAt = Math.ceil((2 * depth * count) / 8);
  const leavesAt = seedsAt + SEED * depth * count;
  const bitAt = (i) => (corrections[i >> 3] >> (i & 7)) & 1;
  return Array.from({ length: count }, (_, n) => ({
    levels: Array.from({ length: depth }, (_, level) => {
      const i = n * depth + level;
      const seed = corrections.slice(seedsAt + SEED * i, seedsAt + SEED * (i + 1));
      return { seed, bits: [bitAt(2 * i), bitAt(2 * i + 1)] };
    }),
    leaf: corrections.slice(leavesAt + n * leafBytes, leavesAt + (n + 1) * leafBytes),
  }));
}

/**
 * Returns one server's share of each unit vector, 8 points a byte from the lowest bit.
 *
 * A device has no use for it: it is what a server does, beside what it is asked for, so that tests
 * compare both with those of Python.
 */
export async function expandPoints(corrections, count, shape, party, root, nonce) {
  const grow = await fixedKeyXof(nonce, "keyhole-tree");
  const leaf = await fixedKeyXof(nonce, "keyhole-leaf");
  const keys = decode(corrections, count, shape);
  const seeds = await rootSeeds(root, count);
  const shares = [];
  for (let n = 0; n < count; n += 1) {
    let nodes = [{ seed: seeds[n], control: party }];
    for (const word of keys[n].levels) {
      const grown = await childrenOf(grow, nodes.map((node) => node.seed));
      nodes = grown.flatMap((pair, i) =>
        pair.map((child, side) => corrected(child, side, nodes[i].control, word)),
      );
    }
    const ends = await leaf(nodes.map((node) => node.seed), Math.ceil(shape.leafBytes / SEED));
    const whole = concat(...ends.map((end, i) => {
      const made = end.slice(0, shape.leafBytes);
      return nodes[i].control ? xor(made, keys[n].leaf) : made;
    }));
    const share = whole.slice(0, Math.ceil(shape.numPoints / 8));
    if (shape.numPoints % 8) share[share.length - 1] &= (1 << shape.numPoints % 8) - 1;
    shares.push(share);
  }
  return shares;
}
