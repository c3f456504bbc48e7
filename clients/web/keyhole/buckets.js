/**
 * Buckets: many keys into a batch of small queries, one for each bucket.
 *
 * Every key lies in three buckets, by three public permutations of all keys; a device gives each of
 * its keys one of the three, no two the same, and what is left over goes into the stash.
 */

import { pack, view } from "./bytes.js";
import { blake2b } from "./hashes.js";

const TURNS = 8;
const HASHES = 3;
const FEW_KEYS = 32;
const FEW_READS = 1 << 17;
const MANY_KEYS = 100;
const MASK = (1n << 64n) - 1n;

/** SplitMix64's finalizer. */
function mix(word) {
  let x = ((word ^ (word >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/** Returns how many queries of a batch are for buckets, and how many for the stash: public. */
export function batchShape(maxKeys, numKeys) {
  if (maxKeys <= FEW_KEYS || maxKeys * numKeys <= FEW_READS) return { buckets: 0, stash: maxKeys };
  if (maxKeys < MANY_KEYS) return { buckets: Math.ceil((13 * maxKeys) / 10) + 2, stash: 2 };
  const hundredths = 109 * maxKeys + Math.floor(Math.sqrt(44100 * maxKeys));
  return { buckets: Math.ceil(hundredths / 100) - 1, stash: 1 };
}

/** Where keys lie: public, and the same for everyone. */
export class Placement {
  constructor(numKeys, numBuckets) {
    this.numKeys = numKeys;
    this.numBuckets = numBuckets;
    const borders = Array.from({ length: HASHES + 1 }, (_, i) => Math.floor((i * numBuckets) / HASHES));
    this.starts = borders.slice(0, HASHES);
    this.counts = this.starts.map((start, i) => borders[i + 1] - start);
    /** Positions of a bucket; the last ones of some are empty. */
    this.bucketSize = Math.ceil(numKeys / Math.min(...this.counts));
    const low = Math.ceil(Math.sqrt(numKeys));
    this.sides = [BigInt(low), BigInt(Math.ceil(numKeys / low))];
    const facts = pack([8, numKeys], [8, HASHES], [8, numBuckets]);
    const start = view(blake2b(facts, 8, "keyhole-cuckoo")).getBigUint64(0, true);
    this.seeds = Array.from({ length: HASHES }, (_, i) =>
      Array.from({ length: TURNS }, (_, turn) => mix(mix(BigInt(i * TURNS + turn)) ^ start)),
    );
  }

  /** A permutation of keys, or its inverse: through the network until the result is a key. */
  walk(which, from, isBack) {
    const turns = Array.from({ length: TURNS }, (_, turn) => (isBack ? TURNS - 1 - turn : turn));
    let rank = BigInt(from);
    do {
      const halves = [rank % this.sides[0], rank / this.sides[0]];
      for (const turn of turns) {
        const mine = turn % 2;
        const side = this.sides[mine];
        const move = ((mix(halves[1 - mine] ^ this.seeds[which][turn]) >> 32n) * side) >> 32n;
        halves[mine] = (halves[mine] + (isBack ? side - move : move)) % side;
      }
      rank = halves[1] * this.sides[0] + halves[0];
    } while (rank >= BigInt(this.numKeys));
    return Number(rank);
  }

  /** Returns the three places of a key, each a bucket and a position in it. */
  placesOf(key) {
    return this.counts.map((count, which) => {
      const rank = this.walk(which, key, false);
      return { bucket: this.starts[which] + (rank % count), position: Math.floor(rank / count) };
    });
  }

  /** Returns the key at a place, or -1 where it is empty. */
  keyAt(bucket, position) {
    const which = this.starts.findLastIndex((start) => start <= bucket);
    const rank = position * this.counts[which] + bucket - this.starts[which];
    return rank < this.numKeys ? this.walk(which, rank, true) : -1;
  }
}

/**
 * Returns a bucket for each key, no two the same and for as many keys as can be; -1 for the others.
 *
 * Augmenting paths, the shortest first: a key that once has a bucket keeps one.
 *
 * @param {number[][]} choices the buckets that hold each key
 */
export function matchBuckets(choices) {
  const keyIn = new Map();
  const placed = choices.map(() => -1);
  choices.forEach((_, first) => {
    const cameFrom = new Map();
    const queue = [first];
    let free = -1;
    for (let head = 0; head < queue.length && free < 0; head += 1) {
      for (const bucket of choices[queue[head]]) {
        if (cameFrom.has(bucket)) continue;
        cameFrom.set(bucket, queue[head]);
        if (!keyIn.has(bucket)) {
          free = bucket;
          break;
        }
        queue.push(keyIn.get(bucket));
      }
    }
    while (free >= 0) { // back along the path: each key leaves its bucket to the one before it
      const key = cameFrom.get(free);
      const left = placed[key];
      placed[key] = free;
      keyIn.set(free, key);
      free = left;
    }
  });
  return placed;
}
