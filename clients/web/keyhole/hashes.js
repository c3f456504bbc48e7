/**
 * Hashes and ciphers: BLAKE3 and BLAKE2b, which WebCrypto does not have, and what is made of its AES.
 *
 * Secret bytes meet WebCrypto alone. The two hashes below read what the service knows anyway, records
 * and nonces, so that the time they take tells nobody anything.
 */

import { concat, utf8, view } from "./bytes.js";

const IV = Uint32Array.of(
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
);
const ORDER = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, KEYED = 16;
const CHUNK = 1024, BLOCK = 64;

/** The word that each round of BLAKE3 reads in each place: the same order, again and again. */
const SCHEDULE = [Array.from({ length: 16 }, (_, i) => i)];
while (SCHEDULE.length < 7) SCHEDULE.push(ORDER.map((place) => SCHEDULE.at(-1)[place]));

const STATE = new Uint32Array(16);
const WORDS = new Uint32Array(16);

function mix(a, b, c, d, x, y) {
  const v = STATE;
  v[a] = v[a] + v[b] + x;
  let t = v[d] ^ v[a];
  v[d] = (t >>> 16) | (t << 16);
  v[c] += v[d];
  t = v[b] ^ v[c];
  v[b] = (t >>> 12) | (t << 20);
  v[a] = v[a] + v[b] + y;
  t = v[d] ^ v[a];
  v[d] = (t >>> 8) | (t << 24);
  v[c] += v[d];
  t = v[b] ^ v[c];
  v[b] = (t >>> 7) | (t << 25);
}

/** The chaining value after one block, 8 words; WORDS holds the block. */
function compress(chain, counter, length, flags) {
  STATE.set(chain);
  STATE.set(IV.subarray(0, 4), 8);
  STATE[12] = counter;
  STATE[13] = 0; // chunks of a record: far fewer than 2^32
  STATE[14] = length;
  STATE[15] = flags;
  for (const s of SCHEDULE) {
    mix(0, 4, 8, 12, WORDS[s[0]], WORDS[s[1]]);
    mix(1, 5, 9, 13, WORDS[s[2]], WORDS[s[3]]);
    mix(2, 6, 10, 14, WORDS[s[4]], WORDS[s[5]]);
    mix(3, 7, 11, 15, WORDS[s[6]], WORDS[s[7]]);
    mix(0, 5, 10, 15, WORDS[s[8]], WORDS[s[9]]);
    mix(1, 6, 11, 12, WORDS[s[10]], WORDS[s[11]]);
    mix(2, 7, 8, 13, WORDS[s[12]], WORDS[s[13]]);
    mix(3, 4, 9, 14, WORDS[s[14]], WORDS[s[15]]);
  }
  return Uint32Array.from({ length: 8 }, (_, i) => STATE[i] ^ STATE[i + 8]);
}

function loadBlock(bytes, start, length) {
  const block = new Uint8Array(BLOCK);
  block.set(bytes.subarray(start, start + length));
  const words = view(block);
  for (let i = 0; i < 16; i += 1) WORDS[i] = words.getUint32(4 * i, true);
}

function chunkOf(key, bytes, counter, ending) {
  let chain = key;
  const blocks = Math.max(1, Math.ceil(bytes.length / BLOCK));
  for (let i = 0; i < blocks; i += 1) {
    const length = Math.min(BLOCK, bytes.length - i * BLOCK);
    loadBlock(bytes, i * BLOCK, length);
    const flags = KEYED | (i === 0 ? CHUNK_START : 0) | (i === blocks - 1 ? CHUNK_END | ending : 0);
    chain = compress(chain, counter, length, flags);
  }
  return chain;
}

function subtree(key, bytes, counter, ending) {
  if (bytes.length <= CHUNK) return chunkOf(key, bytes, counter, ending);
  let left = CHUNK; // the largest power of two of chunks that leaves something to the right
  while (2 * left < bytes.length) left *= 2;
  const one = subtree(key, bytes.subarray(0, left), counter, 0);
  const other = subtree(key, bytes.subarray(left), counter + left / CHUNK, 0);
  WORDS.set(one);
  WORDS.set(other, 8);
  return compress(key, 0, BLOCK, KEYED | PARENT | ending);
}

/** Returns what hashes bytes with keyed BLAKE3 to 32 bytes, under a word that is filled with zeros. */
export function blake3Keyed(word) {
  const padded = new Uint8Array(32);
  padded.set(utf8(word));
  const from = view(padded);
  const key = Uint32Array.from({ length: 8 }, (_, i) => from.getUint32(4 * i, true));
  return (bytes) => {
    const out = new Uint8Array(32);
    const target = view(out);
    subtree(key, bytes, 0, ROOT).forEach((word, i) => target.setUint32(4 * i, word, true));
    return out;
  };
}

const MASK = (1n << 64n) - 1n;
const IV_64 = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];

function turnRight(word, bits) {
  return ((word >> bits) | (word << (64n - bits))) & MASK;
}

/** BLAKE2b of up to 128 bytes: all that this device hashes with it are nonces and a few numbers. */
export function blake2b(bytes, size, person = "") {
  const block = new Uint8Array(128);
  block.set(bytes);
  const about = new Uint8Array(64);
  about.set([size, 0, 1, 1]);
  about.set(utf8(person), 48);
  const told = view(about);
  const words = view(block);
  const h = IV_64.map((word, i) => word ^ told.getBigUint64(8 * i, true));
  const m = Array.from({ length: 16 }, (_, i) => words.getBigUint64(8 * i, true));
  const v = [...h, ...IV_64];
  v[12] ^= BigInt(bytes.length);
  v[14] ^= MASK; // the last block, which is the first
  const g = (a, b, c, d, x, y) => {
    v[a] = (v[a] + v[b] + x) & MASK;
    v[d] = turnRight(v[d] ^ v[a], 32n);
    v[c] = (v[c] + v[d]) & MASK;
    v[b] = turnRight(v[b] ^ v[c], 24n);
    v[a] = (v[a] + v[b] + y) & MASK;
    v[d] = turnRight(v[d] ^ v[a], 16n);
    v[c] = (v[c] + v[d]) & MASK;
    v[b] = turnRight(v[b] ^ v[c], 63n);
  };
  for (let round = 0; round < 12; round += 1) {
    const s = SIGMA[round % 10];
    for (let i = 0; i < 4; i += 1) g(i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
    for (let i = 0; i < 4; i += 1) {
      g(i, 4 + ((i + 1) % 4), 8 + ((i + 2) % 4), 12 + ((i + 3) % 4), m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
  }
  const out = new Uint8Array(64);
  const target = view(out);
  h.forEach((word, i) => target.setBigUint64(8 * i, word ^ v[i] ^ v[i + 8], true));
  return out.slice(0, size);
}

/** Returns the SHA-256 of bytes. */
export async function sha256(bytes) {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
}

/** Returns the first bytes of AES-128-CTR under a seed, with a counter from zero. */
export async function ctrStream(seed, count) {
  const key = await crypto.subtle.importKey("raw", seed, "AES-CTR", false, ["encrypt"]);
  const how = { name: "AES-CTR", counter: new Uint8Array(16), length: 128 };
  return new Uint8Array(await crypto.subtle.encrypt(how, key, new Uint8Array(count)));
}

/** Returns the GMAC of bytes under a key of 16 letters, with a nonce of twelve zeros. */
export async function gmac(key, bytes) {
  const made = await crypto.subtle.importKey("raw", utf8(key), "AES-GCM", false, ["encrypt"]);
  const how = { name: "AES-GCM", iv: new Uint8Array(12), additionalData: bytes };
  return new Uint8Array(await crypto.subtle.encrypt(how, made, new Uint8Array(0)));
}

const AT_ONCE = 512; // calls of WebCrypto that wait for each other's threads

/**
 * Returns what stretches seeds by XofFixedKeyAes128: `(seeds, blocks) -> 16 * blocks bytes of each`.
 *
 * Block i of seed s is AES(sigma(s xor i)) xor sigma(s xor i), sigma(low, high) = (high, high xor low).
 * WebCrypto has no single blocks. One block of CTR over zeros is the cipher of the counter, which is
 * all that is needed: secrets never meet a table in this script's memory.
 */
export async function fixedKeyXof(nonce, person) {
  const secret = blake2b(nonce, 16, person);
  const key = await crypto.subtle.importKey("raw", secret, "AES-CTR", false, ["encrypt"]);
  const zeros = new Uint8Array(16);
  async function block(seed, i) {
    const mixed = concat(seed.subarray(8, 16), seed.subarray(0, 8));
    mixed[8] ^= i;
    for (let at = 0; at < 8; at += 1) mixed[8 + at] ^= mixed[at];
    const how = { name: "AES-CTR", counter: mixed, length: 128 };
    const made = new Uint8Array(await crypto.subtle.encrypt(how, key, zeros));
    return made.map((byte, at) => byte ^ mixed[at]);
  }
  return async (seeds, blocks) => {
    const out = [];
    for (let start = 0; start < seeds.length; start += AT_ONCE) {
      const some = seeds.slice(start, start + AT_ONCE);
      const made = some.map((seed) =>
        Promise.all(Array.from({ length: blocks }, (_, i) => block(seed, i))),
      );
      for (const pieces of await Promise.all(made)) out.push(concat(...pieces));
    }
    return out;
  };
}
