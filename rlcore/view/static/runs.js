"use strict";
// Runs, their steps, and the curves of metrics.

const FIRST_METRICS = [
  "rollout/reward", "eval/score", "eval/accuracy", "rollout/zero_std_groups", "val/sequence_lengths",
  "val/stop_token_rate", "policy/entropy_avg", "policy/step_kl", "policy/approxkl_avg", "policy/clipfrac_avg", "train/grad_norm",
  "objective/kl", "rollout/train_rollout_logprob_diff", "rollout/ess", "rollout/staleness_mean",
  "perf/trainer_idle_fraction", "time/step",
];

const MAX_CHARTS = 50; // curves per answer of the server

const STEP_HEADS = [
  ["rollout/reward", "reward"], ["eval/score", "evaluation"], ["val/sequence_lengths", "length"],
  ["policy/entropy_avg", "entropy"], ["objective/kl", "KL"], ["rollout/staleness_mean", "staleness"],
  ["rollout/zero_std_groups", "flat groups"], ["time/step", "seconds"],
];

Views.runs = {
  title: "Runs",
  key: "1",
  async show(given, place) {
    const chosen = runOf(given);
    place.append(await runTable(chosen));
    const steps = await ask("steps", { run: chosen.name });
    const shown = STEP_HEADS.filter(([name]) => steps.some((row) => name in row));
    place.append(el("h2", {}, `Steps of ${chosen.name}`),
      steps.length ? table({ class: "rows", label: "Steps" }, ["step", ...shown.map(([, title]) => title)],
        steps.map((row) => el("tr", { "data-row": true },
          el("td", { class: "n" }, row.recorded
            ? el("a", { href: Address.of("samples", { run: chosen.name, steps: row.step }) }, row.step) : row.step),
          shown.map(([name]) => el("td", { class: "n" }, number(row[name]))))))
        : note("no step yet"));
  },
};

async function runTable(chosen) {
  const rewards = (await ask("curves", { metric: ["rollout/reward"] }))["rollout/reward"];
  const heads = ["run", "status", "steps", "samples", "reward", "over the steps", "evaluation", "seconds a step"];
  const rows = State.runs.map((run) => {
    const curve = rewards[run.name];
    return el("tr", { class: run === chosen ? "chosen" : "" },
      el("td", {}, el("a", { href: Address.of("runs", { run: run.name }), title: run.path }, run.name)),
      el("td", { title: run.reason }, run.status, run.reason ? el("div", { class: "why" }, run.reason) : null),
      el("td", { class: "n" }, number(run.newest.step ?? run.steps.last)),
      el("td", { class: "n" }, number(run.samples)),
      el("td", { class: "n" }, number(run.newest["rollout/reward"])),
      el("td", {}, curve ? sparkline(curve.steps, curve.values, "reward over the steps") : ""),
      el("td", { class: "n" }, number(run.evaluated)),
      el("td", { class: "n" }, number(run.newest["time/step"])));
  });
  return table({ class: "rows", label: "Runs" }, heads, rows);
}

// The first request for definitions takes seconds, so it is made once, after the curves.
const Definitions = { found: null, asked: false };

async function defineMetrics() {
  if (Definitions.asked) return;
  Definitions.asked = true;
  try {
    Definitions.found = await ask("definitions");
  } catch {
    Definitions.asked = false; // the server is asked again at the next view
  }
  Tip.again?.();
}

function definition(name) {
  const found = Definitions.found?.[name];
  if (!found) return [el("b", {}, name), el("div", {}, Definitions.found ? "no definition: a metric of your own" : "the definition is being read")];
  return [el("b", {}, name), el("div", {}, found.text), el("div", { class: "why" }, `averaged over ${found.over}; unit ${found.unit}`)];
}

Views.curves = {
  title: "Curves",
  key: "2",
  async show(given, place, alive) {
    const known = [...new Set(State.runs.flatMap((run) => run.metrics))].filter((name) => name !== "step").sort();
    const first = FIRST_METRICS.filter((name) => known.includes(name));
    const chosen = given.metrics ? given.metrics.split(",").filter((name) => known.includes(name)) : first;
    const charts = el("div", { class: "charts" });
    const legend = State.runs.length > 1
      ? el("p", { class: "legend" }, State.runs.map((run, k) => el("span", { class: "c" + (k % 8) }, " \u25a0 " + run.name))) : null;
    place.append(el("div", { class: "split" }, metricList(known, chosen, given), el("div", {}, legend, charts)));
    const shown = chosen.slice(0, MAX_CHARTS);
    const curves = await ask("curves", { metric: shown });
    if (!alive()) return;
    if (chosen.length > shown.length) charts.append(note(`the first ${shown.length} of ${chosen.length} metrics that are chosen`));
    for (const name of shown) {
      const lines = State.runs.map((run, colour) => ({ name: run.name, colour, ...curves[name][run.name] })).filter((line) => line.values);
      charts.append(lineChart(name, lines, () => definition(name)));
    }
    if (!chosen.length) charts.append(note("no metric chosen"));
    defineMetrics();
  },
};

function metricList(known, chosen, given) {
  const boxes = known.map((name) => {
    const box = el("input", { type: "checkbox", checked: chosen.includes(name), on: { change: () => {
      const now = boxes.filter(({ input }) => input.checked).map((one) => one.name);
      Address.go("curves", { ...given, metrics: now.join(",") });
    } } });
    return { name, input: box, row: Tip.on(el("label", { class: "metric" }, box, " " + name), () => definition(name)) };
  });
  const search = el("input", { type: "search", placeholder: "find a metric", "aria-label": "Find a metric", "data-search": true, on: {
    input: () => boxes.forEach(({ name, row }) => { row.hidden = !name.includes(search.value); }) } });
  return el("aside", { class: "metrics", "aria-label": "Metrics" }, search,
    el("div", { class: "list" }, boxes.map(({ row }) => row)));
}
