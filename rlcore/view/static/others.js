"use strict";
// Untrained draws, evaluations, and two steps side by side.

const WORDS = {
  dropped: "dropped by the filter", failed: "failed:", requeued: "given back:",
};

Views.untrained = {
  title: "Not trained",
  key: "5",
  async show(given, place, alive) {
    const run = runOf(given);
    const link = (filter, title) => el("a", { href: Address.of("samples", { run: run.name, steps: "all", filter: JSON.stringify(filter) }) }, title);
    place.append(el("h2", {}, "Prompts whose samples no step trained on"));
    if (run.ledger) {
      const found = await ask("ledger", { run: run.name });
      if (!alive()) return;
      place.append(reasons(found), events(run, found, given));
    } else place.append(note("This run has no ledger."));
    place.append(el("h2", {}, "Samples that were trained and taught nothing"),
      el("ul", {}, el("li", {}, link([["flat", "=", 1]], "groups without variance")), el("li", {}, link([["error", "=", 1]], "samples whose reward failed")),
        el("li", {}, link([["trained", "=", 0]], "samples whose tokens all have no loss weight (too old, or masked)")),
        el("li", {}, link([["length", "=", 0]], "samples without a trainable token"))));
  },
};

function reasons(found) {
  if (!found.counts.length) return note("None: every draw that was finished was trained.");
  return table({ class: "rows", label: "Reasons" }, ["what happened", "draws"], found.counts.map(([what, why, count]) =>
    el("tr", {}, el("td", {}, `${WORDS[what] ?? what} ${why || "drawn again, as the run was stopped or had more than it needed"}`), el("td", { class: "n" }, number(count)))));
}

function events(run, found, given) {
  if (!found.events.length) return el("span");
  const wanted = given.why ?? "";
  const choices = [...new Set(found.events.map((event) => `${event.what} ${event.why}`.trim()))];
  const select = el("select", { "aria-label": "Reason", on: { change: () => Address.go("untrained", { ...given, why: select.value }) } },
    el("option", { value: "" }, "every reason"), choices.map((one) => el("option", { value: one, selected: one === wanted }, one)));
  const rows = found.events.filter((event) => !wanted || `${event.what} ${event.why}`.trim() === wanted).slice(0, 500);
  return el("section", {}, el("p", { class: "bar" }, select, ` the newest ${rows.length}`),
    table({ class: "rows", label: "Draws" }, ["step", "draw", "what", "why", ""], rows.map((event) => {
      const line = el("tr", { "data-row": true }, el("td", { class: "n" }, event.step), el("td", { class: "n" }, String(event.draw)), el("td", {}, event.what), el("td", {}, event.why),
        el("td", {}, el("button", { type: "button", on: { click: async (clicked) => {
          clicked.target.disabled = true;
          const life = await ask("draw", { run: run.name, draw: event.draw });
          line.after(el("tr", {}, el("td", { colspan: "5" }, lifeTable(life))));
        } } }, "history")));
      return line;
    })));
}

Views.evaluations = {
  title: "Evaluations",
  key: "4",
  async show(given, place, alive) {
    const run = runOf(given);
    const found = await ask("evaluations", { run: run.name });
    if (!alive()) return;
    if (!found.length) return place.append(note("No evaluation was recorded: tracking.save_rollouts, evaluation.every."));
    const chosen = found.find((one) => String(one.step) === given.step && one.set === (given.set ?? one.set)) ?? found[0];
    const named = found.some((one) => one.set);
    place.append(table({ class: "rows", label: "Evaluations" }, ["after step", ...(named ? ["set"] : []), "answers", "right", "mean reward", "now right", "now wrong"],
      found.map((one) => el("tr", { "data-row": true, class: one === chosen ? "chosen" : "" },
        el("td", { class: "n" }, el("a", { href: Address.of("evaluations", { run: run.name, set: one.set, step: one.step, before: one.before }) }, one.step)),
        named ? el("td", {}, one.set) : null, el("td", { class: "n" }, one.answers), el("td", { class: "n" }, one.right ?? ""), el("td", { class: "n" }, number(one.reward)),
        el("td", { class: one.better ? "n good" : "n" }, one.before === null ? "" : one.better), el("td", { class: one.worse ? "n bad" : "n" }, one.before === null ? "" : one.worse)))));
    const before = given.before || chosen.before;
    await answersOf(run, chosen, before ?? chosen.step, found, place, alive);
  },
};

async function answersOf(run, chosen, before, found, place, alive) {
  const answers = await ask("evaluation", { run: run.name, set: chosen.set, step: chosen.step, before });
  if (!alive()) return;
  const select = el("select", { "aria-label": "Compared with", on: { change: () =>
    Address.go("evaluations", { run: run.name, set: chosen.set, step: chosen.step, before: select.value }) } },
  found.filter((one) => one.set === chosen.set).map((one) => el("option", { value: one.step, selected: one.step === +before }, one.step)));
  const side = (answer) => answer === null ? el("td", {}, "") : el("td", { class: "text" },
    verdictMark(answer.verdict), el("span", { class: "why" }, `reward ${number(answer.reward)}, ${answer.length} tokens, ${answer.finish}${answer.branches > 1 ? `, ${answer.branches} branches` : ""}`),
    el("div", {}, answer.response));
  place.append(el("h2", {}, `Answers after step ${chosen.step} `, el("label", {}, "next to those after step ", select)),
    table({ class: "rows answers", label: "Answers" }, ["", "prompt", "label", `after step ${before}`, `after step ${chosen.step}`], answers.rows.map((row) =>
      el("tr", { "data-row": true, class: row.flip },
        el("td", { title: row.flip ? `flipped: ${row.flip}` : "" }, { better: "\u2197 right", worse: "\u2198 wrong" }[row.flip] ?? ""),
        el("td", { class: "text", title: row.prompt_id }, endOf(row.now.prompt.trim())), el("td", { class: "text" }, row.now.label), side(row.then), side(row.now)))));
}

Views.compare = {
  title: "Compare",
  key: "6",
  async show(given, place, alive) {
    const a = State.runs.find((run) => run.name === given.a) ?? runOf(given);
    const b = State.runs.find((run) => run.name === given.b) ?? State.runs.find((run) => run !== a) ?? a;
    const steps = { a: given.a_step || (a === b ? a.steps.first : a.steps.last), b: given.b_step || b.steps.last };
    const go = (change) => Address.go("compare", { a: a.name, b: b.name, a_step: steps.a, b_step: steps.b, ...change });
    const pick = (side, run) => el("label", { class: "pick c" + (side === "a" ? 0 : 1) }, "\u25a0 ",
      el("select", { "aria-label": "Run " + side, on: { change: (event) => go({ [side]: event.target.value, [side + "_step"]: "" }) } },
        State.runs.map((one) => el("option", { value: one.name, selected: one === run }, one.name))), " step ",
      el("input", { type: "number", min: "0", value: steps[side], "aria-label": "Step " + side, on: { change: (event) => go({ [side + "_step"]: event.target.value }) } }));
    place.append(el("p", { class: "bar" }, pick("a", a), pick("b", b)));
    const found = await ask("compare", { a: a.name, a_step: steps.a, b: b.name, b_step: steps.b });
    if (!alive()) return;
    const names = [`${a.name} ${steps.a}`, `${b.name} ${steps.b}`];
    place.append(el("div", { class: "split wide" }, el("div", {}, metricPairs(found.metrics, names)), el("div", {}, histogram(found.edges, found.histograms, names))),
      el("h2", {}, "Prompts that both trained on"), promptPairs(found, [[a, steps.a], [b, steps.b]]));
  },
};

function metricPairs(metrics, names) {
  const rows = metrics.map(([name, one, other]) => {
    const part = Number.isFinite(one) && Number.isFinite(other) && one !== 0 ? (other - one) / Math.abs(one) : null;
    return el("tr", { "data-row": true, "data-name": name }, el("td", {}, Tip.on(el("span", { tabindex: "0" }, name), () => definition(name))),
      el("td", { class: "n" }, number(one)), el("td", { class: "n" }, number(other)),
      el("td", { class: "n" }, part === null ? "" : (part > 0 ? "+" : "") + number(part * 100, 3) + " %"));
  });
  const search = el("input", { type: "search", placeholder: "find a metric", "aria-label": "Find a metric", "data-search": true, on: {
    input: () => rows.forEach((row) => { row.hidden = !row.dataset.name.includes(search.value); }) } });
  defineMetrics();
  return [search, table({ class: "rows short", label: "Metrics" }, ["metric", ...names, "change"], rows)];
}

function promptPairs({ prompts, missing }, sides) {
  if (!prompts.length) return note(missing || "None.");
  const cell = (sample, [run, step]) => el("td", { class: "text" },
    el("a", { href: sampleAddress(run.name, { step, draw: sample.draw, index: sample.index }) }, `${sample.draw}.${sample.index}`), el("span", { class: "why" }, ` mean reward ${number(sample.reward)} of ${sample.samples}`), el("div", {}, sample.response));
  return table({ class: "rows answers", label: "Prompts" }, ["prompt", ...sides.map(([run, step]) => `${run.name} ${step}`)],
    prompts.map((row) => el("tr", { "data-row": true }, el("td", { class: "text", title: row.prompt_id }, endOf(row.a.prompt.trim())), cell(row.a, sides[0]), cell(row.b, sides[1]))));
}
