"use strict";
// The samples of a draw side by side, and the samples of a prompt over the steps.

async function showGroup(run, where, body, alive) {
  const { rows, samples } = await ask("group", { run: where.run, step: where.step, draw: where.draw });
  if (!alive()) return;
  const answers = samples.map((page) => answerOf(page));
  const common = commonPrefix(answers.map((answer) => answer.tokens));
  body.append(note(`${samples.length} samples; their answers share the first ${common} tokens, which are `, el("span", { class: "common" }, "marked"), "."),
    el("div", { class: "group", tabindex: "0", role: "region", "aria-label": "Group" }, samples.map((page, k) =>
      el("article", { class: String(rows[k].index) === String(where.index) ? "chosen" : "" },
        el("h3", {}, el("a", { href: sampleAddress(run.name, rows[k], { tab: "talk" }) }, `${rows[k].draw}.${rows[k].index}`),
          " ", verdictMark(rows[k].verdict), `reward ${number(rows[k].reward)}`, branchOf(rows[k]) ? el("span", { class: "why" }, ` ${branchOf(rows[k])}`) : null),
        el("p", { class: "why" }, `${rows[k].length} tokens, advantage ${number(rows[k].advantage)}, ${rows[k].finish}`),
        el("pre", {}, el("span", { class: "common" }, answers[k].texts.slice(0, common).join("")),
          answers[k].texts.slice(common).map((shown, t) => answers[k].trained[common + t] ? shown : el("span", { class: "context" }, shown)))))));
}

// The tokens after the prompt, from the first trainable token on.
function answerOf(page) {
  const first = page.mask.indexOf(1);
  const from = first < 0 ? page.tokens.length : first;
  return { tokens: page.tokens.slice(from), texts: page.texts.slice(from), trained: page.mask.slice(from) };
}

function commonPrefix(lists) {
  if (lists.length < 2) return 0;
  const shortest = Math.min(...lists.map((list) => list.length));
  for (let t = 0; t < shortest; t++) if (lists.some((list) => list[t] !== lists[0][t])) return t;
  return shortest;
}

async function showPrompt(run, where, body, alive) {
  const found = await ask("prompt", where);
  if (!alive()) return;
  body.append(note(`${found.total} samples of ${found.prompt_id}`, found.rows.length < found.total ? `, the newest ${found.rows.length} of them` : ""));
  const points = found.rows.filter((row) => Number.isFinite(row.reward)).map((row) => ({ step: row.step, value: row.reward }));
  if (points.length) body.append(dots(points, "reward of each sample over the steps"));
  const holder = el("div");
  body.append(holder);
  holder.append(sampleTable(run, {}, found.rows, { fixed: true }));
  await fillTexts(run, found.rows, holder, alive);
}
