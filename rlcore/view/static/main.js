"use strict";
// The frame: the current view, keys, the theme, and following a running run.

const FOLLOW_MS = 2000;
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
let drawn = ""; // the marks of the runs as they were drawn last
let turn = 0; // counts what was shown, so that a late answer to an earlier one is dropped

async function show() {
  const own = ++turn;
  const alive = () => own === turn;
  const { view, given } = Address.read();
  const found = Views[view] ?? Views.runs;
  Tip.hide();
  drawTabs(view, given);
  const place = el("div", { class: "view " + view });
  try {
    await refresh();
    if (!alive()) return;
    drawn = marks();
    if (!State.runs.length) throw new Error("there is no run");
    drawRuns(given);
    main.replaceChildren(place);
    await found.show(given, place, alive);
    if (alive()) main.dataset.shown = view;
  } catch (error) {
    if (!alive()) return;
    place.append(el("p", { class: "bad", role: "alert" }, error instanceof Error ? error.message : String(error)));
    main.replaceChildren(place);
    main.dataset.shown = "error";
  }
}

async function refresh() {
  const found = await ask("runs");
  State.runs = found.runs;
  State.follow = found.follow;
  document.getElementById("state").textContent = State.follow ? "following" : "";
}

function drawTabs(view, given) {
  const at = ["sample"].includes(view) ? "samples" : view;
  document.getElementById("tabs").replaceChildren(...Object.entries(Views).filter(([, one]) => !one.hidden).map(([name, one]) =>
    el("a", { href: Address.of(name, { run: given.run ?? given.a }), "aria-current": name === at ? "page" : null }, one.title)));
}

function drawRuns(given) {
  const select = document.getElementById("run");
  const chosen = runOf(given);
  // The runs stay the same, and an open list stays open.
  if (!select.options.length) select.append(...State.runs.map((run) => el("option", { value: run.name }, run.name)));
  select.value = chosen.name;
  select.parentElement.hidden = State.runs.length < 2;
}

document.getElementById("run").addEventListener("change", (event) => {
  const { view } = Address.read();
  Address.go(view === "sample" ? "samples" : view, { run: event.target.value });
});

// --- following --------------------------------------------------------------------------------------

function marks() {
  return State.runs.map((run) => [run.newest.step, run.steps.count, run.status].join()).join(";");
}

async function follow() {
  const { view } = Address.read();
  if (document.hidden || Offline) return;
  try {
    await refresh();
  } catch {
    document.getElementById("state").textContent = "the server has ended";
    return;
  }
  const busy = document.activeElement?.matches("input, select:not(#run), textarea");
  if (marks() !== drawn && !busy && view !== "sample") {
    const top = scrollY;
    await show();
    scrollTo(0, top);
  }
}

setInterval(() => {
  if (State.follow || marks() !== drawn) follow();
}, FOLLOW_MS);

// --- keys -------------------------------------------------------------------------------------------

const KEYS = [
  ["1 to 7", "the views"], ["j k", "next, previous row"], ["Enter", "open the row"], ["/", "to the search field"],
  ["Esc", "out of a field; back from a sample"], ["[ ]", "previous, next sample of a group"], ["g c t", "group, conversation, tokens of a sample"],
  ["\u2190 \u2192 \u2191 \u2193", "from token to token"], ["?", "these keys"],
];

function moveRow(by) {
  const rows = [...main.querySelectorAll("tr[data-row]")].filter((row) => !row.hidden);
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("here"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  rows[at]?.classList.remove("here");
  next.classList.add("here");
  const target = next.querySelector("a, button") ?? next;
  if (target === next) next.tabIndex = -1;
  target.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function toTab(tab) {
  const { view, given } = Address.read();
  if (view === "sample") Address.go("sample", { ...given, tab });
}

const ACTIONS = {
  j: () => moveRow(1),
  k: () => moveRow(-1),
  g: () => toTab("group"),
  c: () => toTab("talk"),
  t: () => toTab("tokens"),
  "?": () => openKeys(),
  "/": () => main.querySelector("[data-search], input[type=search]")?.focus(),
  "[": () => main.querySelector('[data-key="["]')?.click(),
  "]": () => main.querySelector('[data-key="]"]')?.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = event.target.matches("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape") {
    Tip.hide();
    if (writing) event.target.blur();
    else if (Address.read().view === "sample") history.back();
    return;
  }
  if (writing) return;
  const view = Object.entries(Views).find(([, one]) => one.key === event.key);
  if (view) Address.go(view[0], { run: Address.read().given.run });
  else if (ACTIONS[event.key]) ACTIONS[event.key]();
  else return;
  event.preventDefault();
});

function openKeys() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, key), el("dd", {}, what)])),
    el("button", { type: "button", on: { click: () => dialog.close() } }, "close"));
  if (!dialog.open) dialog.showModal();
}

document.getElementById("help").addEventListener("click", openKeys);

// --- theme ------------------------------------------------------------------------------------------

document.getElementById("theme").addEventListener("click", (event) => {
  const next = THEMES[(THEMES.indexOf(event.target.textContent) + 1) % THEMES.length];
  event.target.textContent = next;
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
});

addEventListener("hashchange", show);
show();
