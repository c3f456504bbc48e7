// The page of `keyhole watch`: asks for numbers every two seconds and draws them. Names of runs and
// whatever else is told are put in as text, never as HTML.
"use strict";

const EVERY = 2000; // milliseconds between two questions
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 4"];
const OUTCOMES = { // of a cohort: list of a record -> words, colour
  added: ["counted", "--good"], late: ["late", "--late"], stale: ["too old", "--stale"],
  refused: ["refused", "--refused"], empty: ["without examples", "--empty"],
  lost: ["lost", "--lost"],
};
const H = 260, LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 38; // of a chart
const phone = matchMedia("(max-width: 760px)");
let W = 640; // less on a phone, where letters would be too small

const state = { overview: null, runs: new Map(), texts: new Map(), chosen: [], against: "rounds", at: {}, drawn: new Map() };
const at = (id) => document.getElementById(id);

// --- elements

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "text", "g", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "css") Object.entries(value).forEach(([n, v]) => made.style.setProperty(n, v));
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// On a phone a table is a list of its rows, each cell behind the name of its column: the roles keep
// it a table for screen readers. One that is wide by nature is scrolled instead.
function table(caption, head, rows, numbers, wide = false) {
  const cell = (name, role, value, i) => make(name, { role, class: numbers.includes(i) ? "n" : null, "data-of": i ? head[i] : null }, make("span", {}, value));
  const line = (row) => make("tr", { role: "row", class: row.chosen ? "chosen" : null }, row.map((value, i) => (i ? cell("td", "cell", value, i) : cell("th", "rowheader", value, i))));
  const heads = make("tr", { role: "row" }, head.map((h, i) => make("th", { role: "columnheader", class: numbers.includes(i) ? "n" : null }, h)));
  return make("div", wide ? { class: "scroll", tabindex: 0, role: "region", "aria-label": caption } : {},
    make("table", { role: "table", class: wide ? null : "list", "aria-label": caption }, make("thead", { role: "rowgroup" }, heads), make("tbody", { role: "rowgroup" }, rows.map(line))));
}

function section(id, title, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), children);
}

// --- numbers

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const some = (value, digits = 4) => value === null || value === undefined ? "-" : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
const metric = (value, share) => value === null || value === undefined ? "-" : share ? `${(100 * value).toFixed(2)} %` : some(value);

function bytes(value) {
  if (!value) return "-"; // not known here
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) if (value >= unit) return `${some(value / unit, 3)} ${name}`;
  return `${plain.format(value)} B`;
}

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

const small = (value) => value === null || value === undefined ? "-" : value < 1e-3 ? value.toExponential(0) : some(value, 2);
const count = (number, what) => `${plain.format(number)} ${what}${number === 1 ? "" : "s"}`;

function ticks(low, high, most = 5, least = 0) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= raw));
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// --- charts: a focusable figure, a cursor that arrow keys move, a line that says what is there

function frame(xs, ys, xName, format, least = 0) {
  const [x0, x1] = xs, [y0, y1] = ys;
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (W - LEFT - RIGHT);
  const y = (value) => H - BOTTOM - ((value - y0) / (y1 - y0 || 1)) * (H - TOP - BOTTOM);
  const parts = ticks(y0, y1, 5, least).map((v) => [
    make("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }),
    make("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, format(v))]);
  parts.push(ticks(x0, x1, 6, least).map((v) => make("text", { x: x(v), y: H - BOTTOM + 17, "text-anchor": "middle" }, some(v, 6))));
  parts.push(make("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, xName));
  return { x, y, parts: parts.flat(2) };
}

function figure(id, label, drawn, places, say) {
  const cursor = make("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const told = make("output", { "aria-live": "polite" });
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, "aria-hidden": "true" }, drawn, cursor);
  const last = places.length - 1;
  const move = (place) => {
    if (last < 0) return;
    state.at[id] = Math.min(last, Math.max(0, place));
    cursor.setAttribute("x1", places[state.at[id]].at);
    cursor.setAttribute("x2", places[state.at[id]].at);
    cursor.setAttribute("visibility", "visible");
    told.textContent = say(places[state.at[id]].value);
  };
  const keys = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const box = make("div", {
    id, class: "chart", tabindex: 0, role: "img", "aria-label": `${label} Arrow keys read it point by point.`,
    onkeydown: (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      move((state.at[id] ?? (keys[event.key] > 0 ? -1 : last + 1)) + keys[event.key]);
    },
    onpointermove: (event) => {
      const area = svg.getBoundingClientRect(), here = ((event.clientX - area.left) / area.width) * W;
      let best = 0;
      places.forEach((place, i) => { if (Math.abs(place.at - here) < Math.abs(places[best].at - here)) best = i; });
      move(best);
    },
  }, svg);
  if (state.at[id] !== undefined) move(state.at[id]);
  return [box, told];
}

const hue = (i) => `var(--c${i % 6})`;
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function legend(runs) {
  return make("ul", { class: "legend" }, runs.map((run, i) => make("li", {},
    make("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, make("path", { d: "M0 6H30", stroke: hue(i), "stroke-width": 3, "stroke-dasharray": DASHES[i % 6] })),
    make("span", {}, run.short))));
}

function placed(run, curve) { // the curve against rounds, or against the bytes that a client has moved by then
  const per = state.against === "bytes" ? ((run.bytes_down ?? 0) + (run.bytes_up ?? 0)) / 1e6 : 1;
  return curve.rounds.map((round, i) => [round * per, curve.mean[i], curve.low[i], curve.high[i]]).filter((p) => p[1] !== null);
}

function metricChart(name, runs) {
  const first = runs.find((run) => run.curves[name]).curves[name];
  const format = (value) => (first.is_share ? `${some(100 * value, 3)} %` : some(value, 3));
  const curves = runs.map((run) => (run.curves[name] ? placed(run, run.curves[name]) : []));
  const all = curves.flat();
  const values = all.flatMap((p) => [p[2] ?? p[1], p[3] ?? p[1]]);
  if (!all.length) return null;
  const top = Math.max(...values), bottom = Math.min(...values), pad = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1;
  const low = bottom >= 0 ? Math.max(0, bottom - pad) : bottom - pad;
  const unit = state.against === "bytes" ? "MB that a client has received and sent" : "rounds";
  const { x, y, parts } = frame([0, Math.max(...all.map((p) => p[0]))], [low, top + pad], unit, format);
  runs.forEach((run, i) => {
    const line = curves[i];
    if (!line.length) return;
    const band = [...line.map((p) => [x(p[0]), y(p[3])]), ...line.map((p) => [x(p[0]), y(p[2])]).reverse()];
    if (line.some((p) => p[3] > p[2])) parts.push(make("path", { d: `${path(band)}Z`, fill: hue(i), opacity: 0.18 }));
    const scale = line[0][0] / run.curves[name].rounds[0];
    if (run.curves[name].trials.length > 1) for (const trial of run.curves[name].trials) {
      const points = trial.rounds.map((r, j) => [r * scale, trial.values[j]]).filter((p) => p[1] !== null);
      parts.push(make("path", { d: path(points.map((p) => [x(p[0]), y(p[1])])), stroke: hue(i), fill: "none", opacity: 0.35, "stroke-width": 1 }));
    }
    parts.push(make("path", { d: path(line.map((p) => [x(p[0]), y(p[1])])), stroke: hue(i), fill: "none", "stroke-width": 2.2, "stroke-dasharray": DASHES[i % 6] }));
    if (line.length < 40) line.forEach((p) => parts.push(make("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: hue(i) })));
  });
  const xs = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
  const reads = (value) => {
    const said = runs.map((run, i) => [run, curves[i].find((p) => p[0] === value)]).filter(([, p]) => p);
    const interval = (p) => (p[3] > p[2] ? ` (${format(p[2])} to ${format(p[3])})` : "");
    return `${some(value, 5)} ${state.against === "bytes" ? "MB" : "rounds"}: ${said.map(([run, p]) => `${run.short} ${format(p[1])}${interval(p)}`).join("; ")}`;
  };
  const title = `${first.title}, ${runs[0].split_of_curves[name] || "by round"}`;
  const ends = runs.map((run, i) => (curves[i].length ? `${run.short} ends at ${format(curves[i].at(-1)[1])}.` : "")).join(" ");
  const rows = xs.map((value) => [some(value, 5), ...curves.map((c) => { const p = c.find((q) => q[0] === value); return p ? format(p[1]) : ""; })]);
  return section(`metric-${name}`, title,
    figure(`chart-${name}`, `${title}. ${ends}`, parts, xs.map((v) => ({ at: x(v), value: v })), reads), legend(runs),
    make("details", { id: `table-${name}` }, make("summary", {}, "The numbers"),
      table(`${title}, as a table`, [unit, ...runs.map((run) => run.short)], rows, rows.length ? [...rows[0].keys()] : [], true)));
}

function cohortChart(run) {
  const c = run.cohorts, n = c.round.length; // one bar for each round
  if (!n) return null;
  const lists = { ...c, lost: c.lost_before.map((v, i) => v + c.lost_after[i]) };
  const most = Math.max(1, ...c.asked, ...c.round.map((_, i) => Object.keys(OUTCOMES).reduce((sum, k) => sum + lists[k][i], 0)));
  const first = c.round[0], { x, y, parts } = frame([first - 0.5, c.round[n - 1] + 0.5], [0, 1.06 * most], "round", (v) => some(v, 6), 1);
  const wide = x(1) - x(0), gap = wide > 5 ? wide * 0.15 : 0;
  for (let i = 0; i < n; i += 1) {
    let under = 0;
    for (const [key, [, colour]] of Object.entries(OUTCOMES)) {
      const value = lists[key][i];
      if (value) parts.push(make("rect", { x: x(c.round[i] - 0.5) + gap / 2, width: Math.max(0.5, wide - gap), y: y(under + value), height: y(under) - y(under + value), fill: `var(${colour})` }));
      under += value;
    }
    if (c.is_skipped[i]) parts.push(make("text", { x: x(c.round[i]), y: y(under) - 3, "text-anchor": "middle" }, "∅"));
  }
  const said = (i) => Object.entries(OUTCOMES).filter(([key]) => lists[key][i]).map(([key, [words]]) => `${lists[key][i]} ${words}`).join(", ") || "nobody";
  const reads = (i) => `round ${c.round[i]}: ${c.asked[i]} asked, ${said(i)}; closed by ${c.closed[i]}${c.is_skipped[i] ? ", empty" : ""}; ${bytes(c.bytes_down[i])} down, ${bytes(c.bytes_up[i])} up a client`;
  const empty = c.is_skipped.filter(Boolean).length, name = run.name.replaceAll(/[^\w-]/g, "_");
  const used = Object.entries(OUTCOMES).filter(([key]) => key === "added" || lists[key].some(Boolean));
  return section(`cohorts-${name}`, "Cohorts, round by round",
    make("p", { class: "soft" }, `${run.short}${run.trials > 1 ? ", trial 0" : ""}: ${count(n, "round")}, ${empty ? `${empty} of them empty (∅)` : "none of them empty"}`),
    figure(`cohort-${name}`, `What became of the clients of each round of ${run.short}. The last, ${reads(n - 1)}.`, parts, c.round.map((r, i) => ({ at: x(r), value: i })), reads),
    make("ul", { class: "legend" }, used.map(([, [words, colour]]) => make("li", {},
      make("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, make("rect", { width: 30, height: 12, fill: `var(${colour})` })), words))));
}

// --- parts of the page

function roundCard(round) {
  const goal = round.goal ?? round.cohort, done = round.updates ?? 0, id = `round-${round.name.replaceAll(/[^\w-]/g, "_")}`;
  const facts = [
    ["cohort", round.cohort === null ? "-" : count(round.cohort, "device")],
    ["checked in", round.checked_in === null ? "-" : plain.format(round.checked_in)],
    ["waiting to be drawn", round.waiting === null ? "-" : plain.format(round.waiting)],
    ["refused", plain.format(round.refused)],
    ["bytes of updates", bytes(round.bytes)],
    ["open for", round.seconds_open === null ? "-" : ago(round.seconds_open)],
    ["closes in", round.seconds_left ? ago(round.seconds_left) : "-"],
    ["trainer was here", round.trainer_away === null ? "-" : `${ago(round.trainer_away)} ago`],
  ].filter(([, value]) => value !== "-");
  return section(id, `Round ${round.number} of ${round.name}, ${round.phase}`,
    make("p", {}, round.told),
    goal ? make("progress", { max: goal, value: Math.min(done, goal), "aria-label": `${done} of ${goal} updates` }) : null,
    round.empty ? make("p", { class: "warn" }, `${count(round.empty, "round")} of ${round.closed} closed empty, the last of them round ${round.last_empty}.`) : null,
    round.phase === "open" && round.trainer_away > 30 ? make("p", { class: "warn" }, `The trainer has not looked for ${ago(round.trainer_away)}: it has stopped, or is busy. The command that started it goes on with this round.`) : null,
    make("dl", {}, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}

function seenCard(seen) {
  if (!seen || seen.length < 2) return null;
  const rows = seen.slice(-20).reverse().map((r) => [`${r.run ? `${r.run} ` : ""}${plain.format(r.number)}`, `${r.updates ?? "-"} of ${r.goal ?? "-"}`, r.cohort ?? "-", r.checked_in ?? "-", r.refused, ago(r.seconds_open ?? 0)]);
  return section("seen", "Rounds seen from here", table("Rounds seen since the page was started", ["round", "updates", "cohort", "checked in", "refused", "open for"], rows, [0, 1, 2, 3, 4, 5]));
}

function stateOf(run, now) {
  if (run.rounds >= run.planned && run.finished === run.trials) return "finished";
  return `last change ${ago(now - run.changed)} ago`;
}

function share(run) {
  if (!run.bytes) return "-";
  const part = run.bytes / run.broadcast_bytes;
  return part < 0.001 ? "< 0.1 %" : `${run.are_maxima ? "≤ " : ""}${some(100 * part, 3)} %`;
}

const most = (run, value) => `${run.are_maxima && value ? "≤ " : ""}${bytes(value)}`; // of devices that hide their keys

function runList(overview) {
  const head = ["run (tick to show and compare)", "state", "rounds", "metric", "a client's round", "of broadcast", "epsilon"];
  const rows = overview.runs.map((run) => {
    const chosen = state.chosen.includes(run.name);
    const box = make("input", { type: "checkbox", id: `run-${run.name}`, checked: chosen, onchange: (event) => choose(run.name, event.target.checked) });
    const half = run.half_width ? ` ± ${metric(run.half_width, run.is_share)}` : "";
    const ways = `${run.delivery}, ${run.aggregation}${run.trials > 1 ? `, ${run.trials} trials` : ""}`;
    return Object.assign([
      make("label", {}, box, make("span", {}, run.label, make("br"), make("span", { class: "soft" }, ways))),
      stateOf(run, overview.now),
      `${run.rounds} of ${run.planned}${run.empty ? `, ${run.empty} empty` : ""}`,
      run.reached === null ? "-" : [`${metric(run.reached, run.is_share)}${half}`, make("br"), make("span", { class: "soft" }, `${run.split} ${run.metric_title}`)],
      most(run, run.bytes), share(run),
      run.is_private ? (run.epsilon === null ? "no bound" : some(run.epsilon, 3)) : "-",
    ], { chosen });
  });
  const title = make("h2", { id: "runs-title" }, "Runs");
  if (!rows.length) return [title, make("p", { class: "soft" }, "Nothing is here yet: runs and rounds show as soon as there are some.")];
  return [title, table("Runs", head, rows, [2, 3, 4, 5, 6])];
}

function bytesPart(runs) {
  const longest = Math.max(...runs.map((run) => Math.max(run.broadcast_bytes, run.bytes ?? 0)));
  const bar = (parts) => make("div", { class: "track", "aria-hidden": "true" }, parts.map(([value, colour]) => make("i", { css: { width: `${(100 * value) / longest}%`, background: colour } })));
  const rows = runs.flatMap((run, i) => [
    [make("span", {}, run.short, bar([[run.bytes_down ?? 0, hue(i)], [run.bytes_up ?? 0, `color-mix(in srgb, ${hue(i)} 55%, transparent)`]])), most(run, run.bytes_down), most(run, run.bytes_up), share(run)],
  ]);
  const largest = runs.reduce((a, b) => (a.broadcast_bytes > b.broadcast_bytes ? a : b));
  rows.push([make("span", {}, "the whole model (broadcast)", bar([[largest.broadcast_bytes / 2, "var(--lost)"], [largest.broadcast_bytes / 2, "color-mix(in srgb, var(--lost) 55%, transparent)"]])), bytes(largest.broadcast_bytes / 2), bytes(largest.broadcast_bytes / 2), "100 %"]);
  return section("bytes", "What a client receives and sends in a round",
    table("Bytes of a client in a round, beside broadcast", ["run", "down", "up", "of broadcast"], rows, [1, 2, 3]),
    make("p", { class: "soft" }, `Means over clients and rounds. A dash: devices do not tell.${runs.some((run) => run.are_maxima) ? " ≤: devices hide their keys, and this is the public length for all of them." : ""}`));
}

function learnedPart(runs) {
  const own = runs.length > 1, head = ["party", "of keys, when slices were delivered", "when updates were added"];
  const rows = runs.flatMap((run) => run.learned.map((row) => (own ? [run.short, ...row] : row)));
  return rows.length ? section("learned", "Who learned what", table("Who learned what", own ? ["run", ...head] : head, rows, [])) : null;
}

function privacyPart(runs) {
  const own = runs.filter((run) => Object.keys(run.privacy).length);
  if (!own.length) return section("privacy", "Privacy spent", make("p", { class: "soft" }, "No promise was made about a single client: these runs add no noise."));
  const bound = (value) => (value === null ? "no bound" : some(value, 4));
  const rows = own.map(({ short, privacy: p }) => [short,
    p.epsilon_unseen === undefined ? bound(p.epsilon) : `${bound(p.epsilon)}; ${bound(p.epsilon_unseen)} for those who do not see who takes part`,
    small(p.delta), p.rounds, `${p.unit}, ${p.neighbours}`, `${p.sampling}, cohorts ${p.drawn}`]);
  return section("privacy", "Privacy spent", table("Privacy spent", ["run", "epsilon", "delta", "after rounds", "of one", "counted as"], rows, [1, 2, 3]));
}

function endsPart(runs) {
  const found = runs.flatMap((run) => run.ends.map((words) => make("li", {}, runs.length > 1 ? `${run.short}, ${words}` : words)));
  return found.length ? section("ends", "Best model, and why the run ended", make("ul", { class: "plain" }, found)) : null;
}

function incidentsPart(runs) {
  const found = runs.flatMap((run) => run.incidents.map(([round, words]) => [round, runs.length > 1 ? `${run.short}, round ${round}: ${words}` : words.startsWith(`round ${round}`) ? words : `round ${round}: ${words}`]));
  if (!found.length) return section("incidents", "Incidents", make("p", { class: "soft" }, "None."));
  const some_ = found.slice(0, 50).map(([, words]) => make("li", {}, words));
  return section("incidents", "Incidents", make("ul", { class: "plain" }, some_), found.length > 50 ? make("p", { class: "soft" }, `and ${found.length - 50} more`) : null);
}

function differPart(runs) {
  const told = runs.map((run) => ({ delivery: run.delivery, aggregation: run.aggregation, ...run.settings }));
  const names = [...new Set(told.flatMap(Object.keys))].filter((name) => new Set(told.map((t) => t[name])).size > 1);
  if (runs.length < 2 || !names.length) return null;
  return section("differ", "In what the runs differ", table("Settings that differ", ["setting", ...runs.map((r) => r.short)], names.map((name) => [name, ...told.map((t) => t[name] ?? "-")]), []));
}

function detail(runs) {
  const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const pick = (value, words) => make("label", {}, make("input", { type: "radio", name: "against", id: `against-${value}`, checked: state.against === value,
    onchange: () => { state.against = value; state.at = {}; draw(); } }), words);
  const against = metrics.length ? make("fieldset", { id: "against" }, make("legend", {}, "Curves against"), pick("rounds", "rounds"), pick("bytes", "what a client has moved")) : null;
  const none = metrics.length ? null : section("curves", "Curves", make("p", { class: "soft" }, "No metric was measured between rounds: runs are evaluated every few of them (evaluate_every), and at their end, which the list of runs shows."));
  const charts = [...metrics.map((name) => metricChart(name, runs)), ...runs.map(cohortChart)].filter(Boolean);
  const words = [endsPart(runs), privacyPart(runs), learnedPart(runs), incidentsPart(runs), differPart(runs), none].filter(Boolean);
  const sent = bytesPart(runs);
  [...words, ...(charts.length % 2 ? [] : [sent])].forEach((part) => part.classList.add("wide"));
  return [against, ...charts, sent, ...words].filter(Boolean);
}

// --- drawing and asking

// Draws a part anew where what it shows has changed, with the focus and the open tables where they were.
function put(box, shown, parts) {
  const version = JSON.stringify([W, shown]);
  if (state.drawn.get(box) === version) return;
  state.drawn.set(box, version);
  const focus = document.activeElement?.id, open = [...box.querySelectorAll("details[open]")].map((d) => d.id);
  const left = [...box.querySelectorAll(".scroll")].map((s) => s.scrollLeft);
  box.replaceChildren(...parts().flat().filter(Boolean));
  open.forEach((id) => at(id)?.setAttribute("open", ""));
  box.querySelectorAll(".scroll").forEach((s, i) => { s.scrollLeft = left[i] ?? 0; });
  if (focus && document.activeElement?.id !== focus && box.querySelector(`[id="${CSS.escape(focus)}"]`)) at(focus).focus({ preventScroll: true });
}

function draw() {
  const { overview } = state;
  if (!overview) return;
  W = phone.matches ? 380 : 640;
  at("folder").textContent = overview.folder;
  document.title = `${overview.folder} - keyhole watch`;
  at("summary").textContent = [overview.unread ? `reading ${count(overview.unread, "more run")}` : "", overview.runs.length || !overview.rounds.length ? count(overview.runs.length, "run") : "", overview.rounds.length ? `rounds in ${count(overview.rounds.length, "place")}` : ""].filter(Boolean).join(", ");
  put(at("troubles"), overview.troubles, () => overview.troubles.map((words) => make("p", { class: "warn", role: "alert" }, words)));
  put(at("rounds"), [overview.rounds, overview.seen], () => [...overview.rounds.map(roundCard), seenCard(overview.seen)]);
  at("runs").hidden = !overview.runs.length && overview.rounds.length > 0;
  put(at("runs"), [overview.runs, state.chosen, overview.runs.map((run) => stateOf(run, overview.now))], () => runList(overview));
  const short = new Map(overview.runs.map((run) => [run.name, run.short]));
  const runs = state.chosen.map((name) => state.runs.get(name)).filter(Boolean).map((run) => ({ ...run, short: short.get(run.name) ?? run.label }));
  put(at("detail"), [runs, state.against], () => (runs.length ? detail(runs) : []));
}

function choose(name, on) {
  state.chosen = on ? [...state.chosen, name].slice(-6) : state.chosen.filter((other) => other !== name);
  history.replaceState(null, "", `#${state.chosen.map(encodeURIComponent).join("&")}`);
  draw();
  ask();
}

async function get(path) { // null where nothing has changed since the last time
  const got = await fetch(path, { cache: "no-cache" });
  if (!got.ok) throw new Error((await got.json()).error?.wrong ?? got.statusText);
  const text = await got.text();
  if (state.texts.get(path) === text) return null;
  state.texts.set(path, text);
  return JSON.parse(text);
}

async function ask() {
  let changed = false;
  try {
    const overview = await get("/api/overview");
    if (overview) {
      if (!state.overview && !state.chosen.length) state.chosen = overview.runs.slice(0, 1).map((run) => run.name);
      state.overview = overview;
      changed = true;
    }
    for (const name of state.chosen) {
      const run = await get(`/api/run?name=${encodeURIComponent(name)}`).catch(() => { state.runs.delete(name); return null; });
      if (run) { state.runs.set(name, run); changed = true; }
    }
    if (at("state").textContent) at("state").textContent = "";
    at("clock").textContent = `looked at ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    const words = error instanceof TypeError ? "keyhole watch does not answer any more: start it again, and this page goes on." : error.message;
    if (at("state").textContent !== words) at("state").textContent = words;
  }
  if (changed) state.isDue = true;
  drawDue();
}

// While a button or a key is down nothing is drawn: what was pressed must be there when it is let go.
function drawDue() {
  if (!state.isDue || state.isHeld) return;
  state.isDue = false;
  draw();
}

for (const [name, held] of [["pointerdown", true], ["keydown", true], ["pointerup", false], ["pointercancel", false], ["keyup", false], ["blur", false]]) {
  window.addEventListener(name, () => { state.isHeld = held; if (!held) setTimeout(drawDue); });
}

async function watch() {
  if (!document.hidden) await ask();
  setTimeout(watch, EVERY);
}

state.chosen = location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
window.addEventListener("hashchange", () => {
  state.chosen = location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
  draw();
  ask();
});
phone.addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
watch();
