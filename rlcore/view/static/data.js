"use strict";
// The source of the data: the server, or the block inside an exported page.

const embedded = document.getElementById("embedded");
const Offline = embedded ? JSON.parse(embedded.textContent) : null;

async function ask(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null) query.append(key, one);
  }
  if (Offline) return offline(name, parameters, query);
  const answer = await fetch("api/" + name + "?" + query, { headers: { accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function offline(name, parameters, query) {
  const key = name + "?" + [...query].map(([name, value]) => name + "=" + value).sort().join("&");
  if (key in Offline.answers) return Offline.answers[key];
  const run = Offline.runs[parameters.run] ?? { rows: [], texts: {}, samples: {} };
  if (name === "samples") return offlineSamples(run, parameters);
  if (name === "texts") return run.texts;
  if (name === "search") {
    const { rows } = offlineSamples(run, { ...parameters, limit: Infinity, offset: 0 });
    const wanted = parameters.text.toLowerCase();
    const holds = (row) => Object.values(run.texts[row.step + ":" + row.row] ?? {}).join("\n").toLowerCase().includes(wanted);
    return { rows: rows.filter(holds), before: 0, missing: 0 };
  }
  if (name === "curves") {
    return Object.fromEntries([parameters.metric].flat().map((metric) => [metric, Offline.curves[metric] ?? {}]));
  }
  if (name === "sample") {
    const found = run.samples[[parameters.step, parameters.draw, parameters.index].join(":")];
    if (found) return found;
  }
  if (name === "group") {
    const rows = run.rows.filter((row) => row.step === +parameters.step && row.draw === +parameters.draw);
    return { rows, samples: rows.map((row) => run.samples[[row.step, row.draw, row.index].join(":")]).filter(Boolean) };
  }
  if (name === "prompt" && run.prompts?.[parameters.draw]) return run.prompts[parameters.draw];
  throw new Error("This file holds one step of each run; the rest is with `rlcore view` on the run itself.");
}

const COMPARE = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, "=": (a, b) => a === b,
  "!=": (a, b) => a !== b, ">=": (a, b) => a >= b, ">": (a, b) => a > b,
};

function offlineSamples(run, parameters) {
  const filters = JSON.parse(parameters.filter ?? "[]");
  const [first, last] = stepsBetween(parameters.steps);
  const passes = (row) => row.step >= first && row.step <= last
    && filters.every(([column, how, value]) => row[column] !== null && COMPARE[how](row[column], value));
  const rows = run.rows.filter(passes);
  const order = parameters.sort ?? "";
  if (order) {
    const column = order.replace(/^-/, "");
    const sign = order.startsWith("-") ? -1 : 1;
    const key = (row) => row[column] ?? sign * Infinity;
    rows.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
  }
  const offset = +(parameters.offset ?? 0);
  return { total: rows.length, rows: rows.slice(offset, offset + +(parameters.limit ?? 100)) };
}

function stepsBetween(steps = "newest") {
  const found = /^(\d+)(?:-(\d+))?$/.exec(steps);
  return found ? [+found[1], +(found[2] ?? found[1])] : [0, Infinity];
}

// The address determines what the page shows: "#view?key=value&...".
const Address = {
  read() {
    const [view, query] = location.hash.slice(1).split("?");
    return { view: view || "runs", given: Object.fromEntries(new URLSearchParams(query ?? "")) };
  },
  of(view, given = {}) {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(given)) {
      if (value !== "" && value !== undefined && value !== null) query.set(key, value);
    }
    const text = query.toString();
    return "#" + view + (text ? "?" + text : "");
  },
  go(view, given) {
    location.hash = Address.of(view, given);
  },
  // Changes the address of the current view without adding an entry to the history.
  replace(view, given) {
    history.replaceState(null, "", Address.of(view, given));
  },
};

function sampleAddress(run, row, more = {}) {
  return Address.of("sample", { run, step: row.step, draw: row.draw, index: row.index, ...more });
}

// The views, by their name in the address; main.js shows them.
const Views = {};
// The newest list of runs from the server, for every view.
const State = { runs: [], follow: false };

function runOf(given) {
  return State.runs.find((run) => run.name === given.run) ?? State.runs[0];
}
