/**
 * The task `so_tag`: which tags a post has, from its words, by one logistic regression for each tag.
 *
 * A key is a word. A device chooses the words that most of its posts have, fetches their rows and the
 * bias, trains on its posts with all other words left out, and sends start minus end of both.
 */

import { KeyholeError, view } from "./bytes.js";
import { freshBytes } from "./retrieval.js";

const SPEC_VERSION = 6;
const TASK = "so_tag"; // has no identity: its name and the version of the spec say what it is
const PLAIN = ["FedAvg", "FedAdagrad", "FedAdam", "FedYogi"]; // algorithms whose clients run SGD

function refuse(got, expected) {
  throw new KeyholeError("ViolationError", "the round trains in a way that this device does not know", {
    got,
    expected,
    fix: "take part with keyhole device, or ask the trainer for another run",
  });
}

/**
 * Returns how a round is trained, from the `spec` of its settings.
 *
 * @returns {{words: number, tags: number, count: number, rate: number, batch: number,
 *   epochs: number, most: number}}
 */
export function readSpec(manifest) {
  const spec = manifest.settings.spec ?? {};
  if (spec.version !== SPEC_VERSION) refuse(`a spec of version ${spec.version}`, `version ${SPEC_VERSION}`);
  if (spec.task !== TASK) refuse(shownTask(spec.task), `the task ${TASK}`);
  const { client, keys, sizes } = spec;
  if (!PLAIN.includes(client.algorithm)) {
    refuse(`algorithm ${client.algorithm}`, "one whose clients take plain steps");
  }
  if (client.momentum !== 0 || client.clip_norm !== null) {
    refuse("momentum or clipped gradients", "plain steps");
  }
  const { choice } = keys.word;
  if (choice !== "top" && choice !== "all") refuse(`keys by ${JSON.stringify(choice)}`, "top or all");
  const count = choice === "all" ? sizes.words : manifest.settings.keys_per_client.word;
  checkTables(manifest, sizes);
  return {
    words: sizes.words,
    tags: sizes.tags,
    count,
    isAll: choice === "all",
    rate: client.lr,
    batch: client.batch_size,
    epochs: client.epochs,
    most: client.max_examples ?? Infinity,
  };
}

/** A task of somebody's own is code, and another language cannot know that it has the same. */
function shownTask(task) {
  const { name, identity } = task ?? {};
  return identity ? `the task ${name}, code with the identity ${identity}` : `the task ${JSON.stringify(task)}`;
}

function checkTables(manifest, { words, tags }) {
  const shapes = manifest.tables.map((table) =>
    `${table.factors.join()}: ${table.fields.map(({ path, shape }) => `${path} ${shape.join("x")}`)}`,
  );
  const expected = [`: bias ${tags}`, `word: kernel ${words}x${tags}`];
  if (shapes.join("; ") !== expected.join("; ")) refuse(shapes.join("; "), expected.join("; "));
}

/** Returns posts with the words and tags that the model has, each once and rising. */
export function bagsOf(posts, { words, tags }) {
  const within = (numbers, bound) =>
    [...new Set(numbers)].filter((number) => number < bound).sort((a, b) => a - b);
  return posts.map((post) => ({ words: within(post.words, words), tags: within(post.tags, tags) }));
}

/** Returns the words that most posts have, at most `count`, ties to the smaller one; or all. */
export function chooseWords(bags, { count, words, isAll }) {
  if (isAll) return Array.from({ length: words }, (_, word) => word);
  const counts = new Map();
  for (const bag of bags) for (const word of bag.words) counts.set(word, (counts.get(word) ?? 0) + 1);
  const order = [...counts].sort(([a, m], [b, n]) => n - m || a - b);
  return order.slice(0, count).map(([word]) => word);
}

/** Returns the places of each post's words among the keys; words that are no key are left out. */
export function localize(bags, keys) {
  const place = new Map(keys.map((key, i) => [key, i]));
  return bags.map(({ words, tags }) => ({
    places: words.flatMap((word) => (place.has(word) ? [place.get(word)] : [])),
    tags,
  }));
}

/** Returns 0 to count - 1 in an order that nobody can foresee. */
export function shuffled(count) {
  const order = Array.from({ length: count }, (_, i) => i);
  const words = view(freshBytes(8 * count));
  const sorted = order.map((i) => [words.getBigUint64(8 * i, true), i]);
  return sorted.sort(([a], [b]) => (a < b ? -1 : Number(a > b))).map(([, i]) => i);
}

/** Returns the examples of each step: every epoch visits each once, in an order of its own. */
export function drawBatches(count, { batch, epochs, most }) {
  const chosen = shuffled(count).slice(0, most);
  const batches = [];
  for (let epoch = 0; epoch < epochs; epoch += 1) {
    const order = shuffled(chosen.length).map((i) => chosen[i]);
    for (let at = 0; at < order.length; at += batch) batches.push(order.slice(at, at + batch));
  }
  return batches;
}

/** The scores of a post become probabilities minus tags; returns the loss of the post. */
function errorsOf(scores, tags) {
  const wanted = new Set(tags);
  let loss = 0;
  for (let t = 0; t < scores.length; t += 1) {
    const score = scores[t];
    const has = wanted.has(t);
    const signed = has ? -score : score;
    loss += Math.max(signed, 0) + Math.log1p(Math.exp(-Math.abs(signed)));
    scores[t] = 1 / (1 + Math.exp(-score)) - (has ? 1 : 0);
  }
  return loss;
}

function scoresOf(places, kernel, bias) {
  const scores = Float32Array.from(bias);
  for (const place of places) {
    const row = kernel[place];
    for (let t = 0; t < scores.length; t += 1) scores[t] += row[t];
  }
  return scores;
}

/**
 * Returns start minus end of one gradient step for each batch, and the mean loss of the examples as
 * their steps met them. Rows of words that occur nowhere are left as they are, at no cost.
 *
 * @param {{kernel: Float32Array[], bias: Float32Array}} start a row for each key; not changed
 * @param {{places: number[], tags: number[]}[]} examples
 * @param {number[][]} batches examples of each step
 * @param {number} rate
 */
export function train(start, examples, batches, rate) {
  const kernel = start.kernel.map((row) => Float32Array.from(row));
  const bias = Float32Array.from(start.bias);
  let loss = 0;
  for (const batch of batches) {
    const errors = batch.map((i) => scoresOf(examples[i].places, kernel, bias));
    batch.forEach((i, at) => { loss += errorsOf(errors[at], examples[i].tags); });
    const step = Math.fround(Math.fround(rate) / batch.length);
    batch.forEach((i, at) => {
      const error = errors[at];
      for (let t = 0; t < bias.length; t += 1) {
        error[t] *= step;
        bias[t] -= error[t];
      }
      for (const place of examples[i].places) {
        const row = kernel[place];
        for (let t = 0; t < bias.length; t += 1) row[t] -= error[t];
      }
    });
  }
  const less = (one, other) => one.map((x, t) => x - other[t]);
  const visits = batches.reduce((sum, batch) => sum + batch.length, 0);
  return {
    kernel: start.kernel.map((row, i) => less(row, kernel[i])),
    bias: less(start.bias, bias),
    loss: loss / Math.max(1, visits),
  };
}

/** Returns the share of posts' tags that are among the five with the highest scores. */
export function recallAt5(model, examples) {
  let found = 0;
  let all = 0;
  for (const { places, tags } of examples) {
    const scores = scoresOf(places, model.kernel, model.bias);
    const best = [...scores.keys()].sort((a, b) => scores[b] - scores[a]).slice(0, 5);
    found += tags.filter((tag) => best.includes(tag)).length;
    all += tags.length;
  }
  return all ? found / all : NaN;
}
