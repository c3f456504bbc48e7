// Calls functions of the device in clients/web for tests: a line of JSON in, a line of JSON out.
// Bytes travel as {"hex": "..."}, numbers of 32 bits as {"f4": [...]}.

import { createInterface } from "node:readline";

import * as buckets from "../../clients/web/keyhole/buckets.js";
import { crc32, hex, unhex } from "../../clients/web/keyhole/bytes.js";
import * as hashes from "../../clients/web/keyhole/hashes.js";
import * as manifests from "../../clients/web/keyhole/manifest.js";
import * as messages from "../../clients/web/keyhole/messages.js";
import * as merkle from "../../clients/web/keyhole/merkle.js";
import { readPosts, splitWords } from "../../clients/web/keyhole/posts.js";
import * as points from "../../clients/web/keyhole/points.js";
import * as retrieval from "../../clients/web/keyhole/retrieval.js";
import * as tags from "../../clients/web/keyhole/tags.js";
import { updateOf } from "../../clients/web/keyhole/device.js";

/** Gives out bytes that were drawn beforehand. */
function from(stream) {
  let at = 0;
  return (count) => {
    at += count;
    if (at > stream.length) throw new Error("the stream is over");
    return stream.slice(at - count, at);
  };
}

const queries = [];

const known = {
  crc32,
  blake2b: hashes.blake2b,
  blake3: (word, bytes) => hashes.blake3Keyed(word)(bytes),
  levelSizes: merkle.levelSizes,
  shapeOf: points.shapeOf,
  sharePoints: points.sharePoints,
  expandPoints: points.expandPoints,
  batchShape: buckets.batchShape,
  matchBuckets: buckets.matchBuckets,
  placesOf(numKeys, numBuckets, keys) {
    const placement = new buckets.Placement(numKeys, numBuckets);
    const places = keys.map((key) => placement.placesOf(key));
    const back = places.map((three) => three.map((one) => placement.keyAt(one.bucket, one.position)));
    return { size: placement.bucketSize, places, back };
  },
  readManifest: (round, bytes) => manifests.readManifest(round, bytes).then(() => "read"),
  async checkSignature(round, bytes, key, signature) {
    await manifests.checkSignature(await manifests.readManifest(round, bytes), key, signature);
    return "signed";
  },
  encodeQuery: messages.encodeQuery,
  async decodeAnswer(round, bytes, asks, body) {
    const { tables } = await manifests.readManifest(round, bytes);
    const found = messages.decodeAnswer(tables, asks, body);
    return found.map((records, i) => records.map((r) => manifests.decodeRecord(tables[asks[i].place], r)));
  },
  decodeRecord: manifests.decodeRecord,
  async encodeUpdate(round, bytes, words, bias, kernel, loss, examples) {
    const manifest = await manifests.readManifest(round, bytes);
    return updateOf(manifest, words, { bias, kernel, loss }, examples);
  },
  async paramsOf(round, bytes, place) {
    return retrieval.paramsOf(await manifests.readManifest(round, bytes), place);
  },
  async ask(params, top, keys, stream) {
    const table = new retrieval.PrivateTable(params, top);
    const random = stream ? from(stream) : retrieval.freshBytes;
    const query = await table.query(keys, random);
    queries.push(query);
    return { messages: query.messages, number: queries.length - 1, replyBytes: table.replyBytes };
  },
  async open(number, replies) {
    return [...(await queries[number].open(replies))];
  },
  readPosts,
  splitWords,
  chooseWords: (posts, spec) => tags.chooseWords(tags.bagsOf(posts, spec), spec),
  localize: (posts, spec, keys) => tags.localize(tags.bagsOf(posts, spec), keys),
  drawBatches: tags.drawBatches,
  train: tags.train,
  recallAt5: tags.recallAt5,
};

function read(_, value) {
  if (value?.hex !== undefined) return unhex(value.hex);
  return value?.f4 === undefined ? value : Float32Array.from(value.f4);
}

function shown(value) {
  if (value instanceof Uint8Array) return { hex: hex(value) };
  if (value instanceof Float32Array) return { f4: [...value] };
  if (Array.isArray(value)) return value.map(shown);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, shown(each)]));
}

for await (const line of createInterface({ input: process.stdin })) {
  const { call, args } = JSON.parse(line, read);
  let told;
  try {
    told = { found: shown(await known[call](...args)) };
  } catch (error) {
    told = { kind: error.kind ?? error.name, error: error.message };
  }
  process.stdout.write(`${JSON.stringify(told)}\n`);
}
