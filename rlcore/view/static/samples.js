"use strict";
// The table of samples: filters, orders, pages, and a search in the texts.

const PAGE = 100;
// column, title, explanation
const SAMPLE_COLUMNS = [
  ["step", "step", "that trained the sample"],
  ["draw", "draw", "drawing of the prompt; a number after the dot is the sample of it"],
  ["branch", "branch", "which sample of its rollout; rollouts of a draw are numbered from 0"],
  ["verdict", "verdict", "right or wrong, where the reward says so"],
  ["reward", "reward", "that the sample was given"],
  ["advantage", "advantage", "mean over its tokens"],
  ["length", "length", "trainable tokens"],
  ["trained", "trained", "trainable tokens with a loss weight"],
  ["turns", "turns", "of the model"],
  ["staleness", "stale", "training steps between the weights of its oldest token and those trained"],
  ["entropy", "entropy", "of the policy, mean over its tokens, in nats"],
  ["gap", "gap", "mean difference of the trainer's and the engine's log-probs, without sign"],
  ["finish", "finish", "why the last turn was the last"],
  ["source", "source", "of the prompt, in data.sources"],
  ["flat", "flat", "1: all rewards of its group are equal, so it teaches nothing"],
  ["error", "error", "1: its reward failed"],
];
const NAMED = ["verdict", "finish", "source", "prompt_id"];

Views.samples = {
  title: "Samples",
  key: "3",
  async show(given, place, alive) {
    const run = runOf(given);
    const query = sampleQuery(run, given);
    place.append(filterBar(run, given));
    const holder = el("div", { id: "found", "aria-live": "polite" });
    place.append(holder);
    if (given.text) return searchTexts(run, given, query, holder, alive);
    const found = await ask("samples", { ...query, offset: given.offset ?? 0, limit: PAGE });
    if (!alive()) return;
    holder.append(pages(run, given, found), sampleTable(run, given, found.rows));
    await fillTexts(run, found.rows, holder, alive);
  },
};

function conditions(given) {
  try {
    const found = JSON.parse(given.filter ?? "[]");
    return Array.isArray(found) ? found.filter((one) => Array.isArray(one) && one.length === 3) : [];
  } catch {
    return [];
  }
}

function sampleQuery(run, given) {
  return { run: run.name, steps: given.steps || "newest", sort: given.sort, filter: JSON.stringify(conditions(given)) };
}

// "reward<0.5", "finish=length"
function parseCondition(written, columns) {
  const found = /^\s*([^<>=!]+?)\s*(<=|>=|!=|=|<|>)\s*(.+?)\s*$/.exec(written);
  if (!found) return null;
  const column = found[1] in columns || found[1] === "step" ? found[1] : "part." + found[1];
  if (!(column in columns)) return null;
  if (NAMED.includes(column)) return [column, found[2], found[3]];
  const value = Number(found[3]);
  return Number.isFinite(value) ? [column, found[2], value] : null;
}

// The same words as in the terminal.
function branchOf(row) {
  return row.branches > 1 ? `branch ${row.branch} of ${row.branches} of rollout ${row.rollout}` : "";
}

function verdictMark(word) {
  return word ? el("b", { class: word === "right" ? "good" : "bad" }, word + " ") : null;
}

function titleOf(column) {
  return column.startsWith("part.") ? column.slice(5) : column;
}

function filterBar(run, given) {
  const go = (change) => Address.go("samples", { ...given, run: run.name, offset: "", ...change });
  const now = conditions(given);
  const addOne = (one) => go({ filter: JSON.stringify([...now.filter((old) => old[0] !== one[0] || old[1] !== one[1]), one]) });
  const complaint = el("span", { class: "bad", role: "alert" });
  const line = el("input", { type: "text", size: "22", list: "columns", placeholder: "reward<0.5", "aria-label": "Add a condition", "data-search": true });
  const options = el("datalist", { id: "columns" }, Object.keys(run.columns).map((name) => el("option", { value: titleOf(name) })));
  const searched = el("input", { type: "search", value: given.text, placeholder: "text in prompt, answer, label", "aria-label": "Search the texts" });
  const steps = el("input", { type: "text", size: "10", value: given.steps ?? "newest", "aria-label": "Steps: newest, all, 12 or 10-20" });
  const choose = (column) => el("select", { "aria-label": column, on: { change: (event) => {
    if (event.target.value) addOne([column, "=", event.target.value]);
  } } }, el("option", { value: "" }, "any " + column), (run.columns[column] ?? []).filter(Boolean).map((name) => el("option", { value: name }, name)));
  const form = (label, ...children) => el("form", { class: "field", on: { submit: (event) => { event.preventDefault(); label(); } } }, children);
  const neighbour = (by) => {
    const at = given.steps && /^\d+$/.test(given.steps) ? +given.steps : run.steps.last;
    go({ steps: Math.min(run.steps.last, Math.max(run.steps.first, at + by)) });
  };
  return el("section", { class: "bar", "aria-label": "Filters" },
    form(() => go({ steps: steps.value.trim() }), "steps ",
      el("button", { type: "button", "aria-label": "Step before", on: { click: () => neighbour(-1) } }, "\u2039"), steps,
      el("button", { type: "button", "aria-label": "Step after", on: { click: () => neighbour(1) } }, "\u203a"),
      el("button", { type: "button", on: { click: () => go({ steps: "all" }) } }, "all")),
    form(() => {
      const one = parseCondition(line.value, run.columns);
      if (one) addOne(one);
      else complaint.textContent = "expected a column, a comparison and a number, as reward<0.5";
    }, line, options, el("button", { type: "submit" }, "add")),
    (run.columns.verdict ?? []).some(Boolean) ? choose("verdict") : null, choose("finish"), (run.columns.source ?? []).some(Boolean) ? choose("source") : null,
    el("button", { type: "button", title: "all rewards of the group are equal", on: { click: () => addOne(["flat", "=", 1]) } }, "groups without variance"),
    form(() => go({ text: searched.value }), searched),
    now.map((one, k) => el("button", { type: "button", class: "chip", "aria-label": `Remove ${one.join(" ")}`,
      on: { click: () => go({ filter: JSON.stringify(now.filter((_, other) => other !== k)) }) } }, `${titleOf(one[0])} ${one[1]} ${one[2]}`, " \u00d7")),
    complaint);
}

function pages(run, given, found) {
  const offset = +(given.offset ?? 0);
  const go = (to) => Address.go("samples", { ...given, run: run.name, offset: to || "" });
  const last = offset + found.rows.length;
  return el("p", { class: "pages" },
    el("span", { "data-total": found.total }, `${number(found.total)} samples`),
    found.total > PAGE ? [
      el("button", { type: "button", disabled: offset === 0, on: { click: () => go(Math.max(0, offset - PAGE)) } }, "\u2039 before"),
      ` ${offset + 1} to ${last} `,
      el("button", { type: "button", disabled: last >= found.total, on: { click: () => go(offset + PAGE) } }, "after \u203a"),
    ] : null);
}

function shownColumns(rows) {
  const parts = [...new Set(rows.flatMap(Object.keys))].filter((name) => name.startsWith("part.")).sort();
  const known = SAMPLE_COLUMNS.filter(([name]) => rows.some((row) => row[name] !== null && row[name] !== "" && row[name] !== undefined));
  const useful = known.filter(([name]) => name === "branch" ? rows.some(branchOf) : !["error", "flat"].includes(name) || rows.some((row) => row[name]));
  // Where every token is trained, a column that says so is of no use; likewise a single part.
  const more = rows.some((row) => row.trained !== row.length) ? useful : useful.filter(([name]) => name !== "trained");
  return [...more, ...parts.map((name) => [name, titleOf(name), "part of the reward"])];
}

function sampleTable(run, given, rows, options = {}) {
  if (!rows.length) return note("no samples");
  const columns = shownColumns(rows);
  const head = ([name, title, explanation]) => {
    const is = (given.sort ?? "").replace(/^-/, "") === name;
    const down = is && given.sort.startsWith("-");
    const next = is && down ? name : is ? "" : "-" + name;
    const sorted = is ? (down ? "descending" : "ascending") : null;
    const kind = NAMED.includes(name) ? null : "n";
    if (options.fixed || name === "step") return el("th", { scope: "col", class: kind, title: explanation }, title);
    return el("th", { scope: "col", class: kind, "aria-sort": sorted }, el("button", { type: "button", title: explanation, on: { click: () =>
      Address.go("samples", { ...given, run: run.name, sort: next, offset: "" }) } }, title, is ? (down ? " \u2193" : " \u2191") : ""));
  };
  const cell = (row, name) => {
    if (name === "draw") return el("td", { class: "n" }, el("a", { href: sampleAddress(run.name, row) }, `${row.draw}.${row.index}`));
    if (name === "branch") return el("td", { title: branchOf(row) }, row.branches > 1 ? `${row.rollout}: ${row.branch} of ${row.branches}` : "");
    if (name === "verdict") return el("td", {}, verdictMark(row.verdict));
    return el("td", { class: typeof row[name] === "number" ? "n" : "" }, typeof row[name] === "number" ? number(row[name]) : row[name]);
  };
  return table({ class: "rows samples", label: "Samples" },
    [...columns.map(head), el("th", { scope: "col" }, "prompt"), el("th", { scope: "col" }, "response")],
    rows.map((row) => el("tr", { "data-row": true, "data-at": `${row.step}:${row.row}` },
      columns.map(([name]) => cell(row, name)), el("td", { class: "text prompt" }), el("td", { class: "text response" }))));
}

function endOf(words) {
  return words.length > 60 ? "\u2026" + words.slice(-59) : words;
}

async function fillTexts(run, rows, holder, alive) {
  const byStep = new Map();
  for (const row of rows) byStep.set(row.step, [...(byStep.get(row.step) ?? []), `${row.step}:${row.row}`]);
  // Texts are fetched for up to 200 samples of a few steps at a time: the first are there at once.
  const groups = [];
  for (const at of byStep.values()) for (let k = 0; k < at.length; k += 25) groups.push(at.slice(k, k + 25));
  for (let k = 0; k < groups.length && alive(); k += 8) {
    const found = await ask("texts", { run: run.name, at: groups.slice(k, k + 8).flat() });
    if (!alive()) return;
    for (const line of holder.querySelectorAll("tr[data-at]")) {
      const of = found[line.dataset.at];
      if (!of || line.dataset.filled) continue;
      line.dataset.filled = "1";
      add(line.querySelector(".prompt"), [of.missing ? el("i", { title: of.missing }, "not on the disk") : endOf(of.prompt.trim())]);
      add(line.querySelector(".response"), [of.missing ? "" : of.response.trim()]);
    }
  }
}

// Steps are searched newest first; after a moment the server answers with the step to continue from.
async function searchTexts(run, given, query, holder, alive) {
  const summary = el("p", { class: "pages", role: "status" });
  const found = el("div");
  holder.append(summary, found);
  const rows = [];
  let before;
  let on = true;
  let missing = 0;
  const stop = el("button", { type: "button", on: { click: () => { on = false; } } }, "stop");
  while (on && alive()) {
    const answer = await ask("search", { ...query, text: given.text, before, limit: PAGE });
    if (!alive()) return;
    rows.push(...answer.rows);
    missing += answer.missing;
    before = answer.before;
    on = on && before > 0 && rows.length < PAGE;
    summary.replaceChildren();
    add(summary, [`${rows.length} samples with \u201c${given.text}\u201d`, before ? `, down to step ${before} ` : " ",
      missing ? `(${missing} steps are not on the disk) ` : "", on ? stop : ""]);
    if (answer.rows.length || !on) found.replaceChildren(sampleTable(run, { ...given, sort: "" }, rows, { fixed: true }));
  }
  if (alive() && rows.length) await fillTexts(run, rows, found, alive);
}
