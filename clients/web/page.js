/** The page: takes what a person gives, starts a device in a worker, and shows what it does. */

import { readPosts } from "./keyhole/posts.js";

const TITLE = document.title;
const SHOWN = 20; // rounds in the table, and tags in a line
const UNITS = ["B", "KB", "MB", "GB"];
const TRAINER_KEY = /^(?:keyhole-trainer-key )?([0-9a-f]{64})$/; // as in sign.pub of a kit, or its digits

const at = (id) => document.getElementById(id);
const given = (id) => at(id).value.trim();
const many = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

const host = await toldByHost();
let worker = null;
let run = null; // what is counted since the last start

/** What the host of this page says: words and tags by their numbers, and what may be filled in. */
async function toldByHost() {
  try {
    const answer = await fetch("page.json");
    if (answer.ok) return await answer.json();
  } catch {
    // said below
  }
  at("start").disabled = true;
  fail("This page does not know which word has which number: its host must put page.json beside it, see README.md.");
  return { words: [], tags: [] };
}

function fail(line) {
  at("error").textContent = line;
  at("error").hidden = !line;
}

function say(text) {
  if (at("status").textContent !== text) at("status").textContent = text; // else it is read aloud again
}

function bytes(count) {
  const power = count < 1000 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log10(count) / 3));
  return `${power ? (count / 1000 ** power).toPrecision(3) : count} ${UNITS[power]}`;
}

/** Reads the posts, and says how many of them the model can be trained on. */
function count() {
  const found = readPosts(at("posts").value, host);
  at("counted").textContent = found.posts.length
    ? `${many(found.posts.length, "post")}, ${found.tagged} with a tag that the model has; ` +
      `${many(found.words, "word")} that it has.`
    : `The model has ${many(host.words.length, "word")} and ${many(host.tags.length, "tag")}: ` +
      `${host.tags.slice(0, SHOWN).join(", ")}${host.tags.length > SHOWN ? ", …" : "."}`;
  return found;
}

/** What cannot be started with, in one line. */
function refusal(found) {
  if (!window.isSecureContext) {
    return "Browsers give a page over plain http no cryptography: open it over https, or from this machine.";
  }
  if (!given("url")) return "The address of the service is missing: its operator has it, or the line of keyhole up.";
  if (!found.posts.length) return "There are no posts: write one in each line, open a file, or choose an example.";
  if (!found.words) return "The model has no word of your posts: write about what its tags are about.";
  if (given("trainer-key") && !TRAINER_KEY.test(given("trainer-key"))) {
    return "That is no public key of a trainer: expected 64 hexadecimal digits, as in its sign.pub.";
  }
  return "";
}

function start() {
  const found = count();
  const wrong = refusal(found);
  fail(wrong);
  if (wrong) return;
  run = { posts: found.posts.length, rounds: 0, down: 0, up: 0 };
  for (const id of ["asked", "taken"]) at(id).hidden = true;
  at("table").replaceChildren();
  at("whole").textContent = "–";
  showNumbers();
  say("Asks the service for a round.");
  worker = new Worker("worker.js", { type: "module" });
  worker.addEventListener("message", ({ data }) => hear[data.what](data));
  worker.addEventListener("error", () => hear.ended({
    error: "worker.js cannot be run: it is missing beside this page, or the browser is too old",
  }));
  worker.postMessage({
    url: given("url"),
    token: given("token"),
    second: given("second"),
    secondToken: given("second-token"),
    trainerKey: TRAINER_KEY.exec(given("trainer-key"))?.[1] ?? "",
    posts: found.posts,
  });
  setBusy(true);
}

function setBusy(isBusy) {
  at("given").disabled = isBusy;
  at("start").disabled = isBusy;
  at("stop").disabled = !isBusy;
  at(isBusy ? "stop" : "start").focus();
}

function showNumbers() {
  at("rounds").textContent = run.rounds;
  at("down").textContent = bytes(run.down);
  at("up").textContent = bytes(run.up);
  document.title = run.rounds ? `${many(run.rounds, "round")} – ${TITLE}` : TITLE;
}

function showStep(now) {
  for (const item of at("steps").children) item.classList.toggle("now", item.dataset.step === now);
}

function showWords(words, isPrivate) {
  at("words").textContent = words.map((word) => host.words[word] ?? `word ${word}`).join(", ");
  at("learned").textContent = isPrivate
    ? "Neither service learns from the fetch which words these are, unless both work together. " +
      "The update that is sent names them to the first."
    : "The service sees which words these are, and what this tab changed in them. It sees no post.";
  at("asked").hidden = false;
}

function showRow(cells) {
  const row = document.createElement("tr");
  for (const text of cells) row.insertCell().textContent = text;
  at("table").prepend(row);
  while (at("table").children.length > SHOWN) at("table").lastChild.remove();
  at("taken").hidden = false;
}

/** What the device tells, by its first word. */
const hear = {
  bytes({ down, up }) {
    run.down += down;
    run.up += up;
    showNumbers();
  },
  wait() {
    say("Waits: there is no round for this tab now. It asks again every few seconds.");
  },
  again({ reason }) {
    say(`${sentence(reason)} It asks again.`);
  },
  step({ step, number, words, isPrivate }) {
    showStep(step);
    if (step === "check in") run.before = { down: run.down, up: run.up };
    if (step === "train") say(`Round ${run.number}: trains on ${many(run.posts, "post")}.`);
    if (step === "send") say(`Round ${run.number}: sends what changed.`);
    if (step !== "fetch") return;
    run.number = number;
    say(`Round ${number}: fetches the rows of ${many(words.length, "word")}.`);
    showWords(words, isPrivate);
  },
  round({ number, words, missing, wholeBytes, loss, recall }) {
    run.rounds += 1;
    showNumbers();
    say(`Round ${number} is done.`);
    at("whole").textContent = bytes(wholeBytes);
    const moved = [run.down - run.before.down, run.up - run.before.up].map(bytes);
    const found = Number.isNaN(recall) ? "–" : `${Math.round(100 * recall)} %`;
    showRow([number, words - missing, ...moved, loss.toFixed(2), found]);
  },
  ended({ error }) {
    worker.terminate();
    worker = null;
    showStep("");
    say(`Stopped, after ${many(run.rounds, "round")}.`);
    fail(error && sentence(error));
    setBusy(false);
  },
};

function fillIn(text) {
  at("posts").value = text;
  count();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("start").disabled) start();
});
at("stop").addEventListener("click", () => {
  say("Stops.");
  worker.postMessage({ stop: true });
});
at("posts").addEventListener("input", count);
at("file").addEventListener("change", async ({ target }) => {
  if (target.files.length) fillIn(await target.files[0].text());
});
at("example").addEventListener("change", ({ target }) => {
  if (target.value) fillIn(host.examples[target.value]);
});
(host.examples ?? []).forEach((_, i) => at("example").add(new Option(`example ${i + 1}`, i)));
at("has-examples").hidden = !host.examples?.length;
at("url").value ||= host.service ?? "";
at("second").value ||= host.second ?? "";
at("trainer-key").value ||= host.trainer_key ?? "";
count();
