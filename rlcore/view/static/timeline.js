"use strict";
// The timeline of a step: the activities of each process, and their waits.

const LANE = { width: 1100, left: 150, height: 15, deep: 11, head: 16, foot: 18 };
const COLOURS = [[/^rank /, 0], [/^publication/, 1], [/^engine /, 2], [/^tools/, 3], [/^rewards/, 4]];
const WIDE_ENOUGH = 44; // for a name inside a span

Views.timeline = {
  title: "Timeline",
  key: "7",
  async show(given, place, alive) {
    const run = runOf(given);
    const found = await ask("timeline", { run: run.name, step: given.step });
    if (!alive()) return;
    place.append(stepBar(run, found, given), lanesOf(found));
    if (found.lost) place.append(note(`${found.lost} records are missing: there was no room for them in memory`));
    place.append(el("h2", {}, "Waits"),
      found.waits.length ? table({ class: "rows", label: "Waits" }, ["who", "waited for", "seconds", "of the step"], found.waits.map((wait) =>
        el("tr", { "data-row": true }, el("td", {}, wait.waits), el("td", {}, wait.for), el("td", { class: "n" }, number(wait.seconds)),
          el("td", { class: "n" }, Math.round((100 * wait.seconds) / found.seconds) + " %"))))
        : note("Nobody waited."),
      note("For Perfetto (ui.perfetto.dev), join the files of ", run.path + "/timeline", " by zcat: see docs/trace.md."));
  },
};

function stepBar(run, found, given) {
  const at = found.steps.indexOf(found.step);
  const to = (step) => Address.go("timeline", { ...given, run: run.name, step });
  const select = el("select", { "aria-label": "Step", on: { change: () => to(select.value) } },
    found.steps.map((step) => el("option", { value: String(step), selected: step === found.step }, "step " + step)));
  const move = (by, title, key) => el("button", { type: "button", "data-key": key, disabled: found.steps[at + by] === undefined,
    on: { click: () => to(found.steps[at + by]) } }, title);
  return el("p", { class: "bar" }, move(-1, "\u2039 before", "["), select, move(1, "after \u203a", "]"), `${number(found.seconds)} seconds, with its evaluation and log`);
}

function deepest(lane) {
  return lane.spans.reduce((most, span) => Math.max(most, span.deep), 0);
}

function lanesOf(found) {
  let y = 4;
  const parts = [];
  const x = scale(0, found.seconds, LANE.left, LANE.width - 6);
  for (const group of found.groups) {
    const colour = (COLOURS.find(([name]) => name.test(group.name)) ?? [null, 7])[1];
    parts.push(svg("text", { class: "group-name", x: 4, y: y + 11 }, group.name));
    y += LANE.head;
    for (const lane of group.lanes) {
      parts.push(svg("text", { class: "tick", x: LANE.left - 6, y: y + 10, "text-anchor": "end" }, lane.name));
      for (const span of lane.spans) parts.push(...spanOf(group, lane, span, x, y, colour));
      y += LANE.height + deepest(lane) * LANE.deep;
    }
    if (group.more) {
      parts.push(svg("text", { class: "tick", x: LANE.left, y: y + 10 }, `and ${group.more} lanes more`));
      y += LANE.height;
    }
  }
  const height = y + LANE.foot;
  const rules = ticks(0, found.seconds, 8).flatMap((tick) => [
    svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: y }),
    svg("text", { class: "tick", x: x(tick), y: height - 5, "text-anchor": "middle" }, number(tick, 3) + " s"),
  ]);
  return el("div", { class: "lanes scroll", tabindex: "0", role: "region", "aria-label": "Lanes" },
    svg("svg", { viewBox: `0 0 ${LANE.width} ${height}`, role: "img", "aria-label": `Timeline of step ${found.step}` }, rules, parts));
}

function spanOf(group, lane, span, x, y, colour) {
  const width = Math.max(1, x(span.to) - x(span.at));
  const top = y + span.deep * LANE.deep;
  const idle = lane.name === "idle" || span.name.startsWith("waits for ");
  const box = svg("rect", { class: idle ? "span idle" : `span c${colour}`, x: x(span.at), y: top, width, height: LANE.deep });
  Tip.on(box, () => [el("b", {}, span.count > 1 ? `${span.count} spans, the first: ${span.name}` : span.name),
    el("div", {}, `${group.name}, ${lane.name}: from ${number(span.at)} s, ${number(span.to - span.at)} s`),
    Object.entries(span.args).map(([name, value]) => el("div", { class: "why" }, `${name}: ${typeof value === "number" ? number(value) : value}`))]);
  if (width < WIDE_ENOUGH) return [box];
  const most = Math.floor(width / 5.5);
  const name = span.name.length > most ? span.name.slice(0, most - 1) + "\u2026" : span.name;
  return [box, svg("text", { class: "inside", x: x(span.at) + 3, y: top + 8.5 }, name)];
}
