"use strict";
// One sample: its conversation, its tokens, its group, its prompt over the steps, its history.

const SAMPLE_TABS = [["talk", "Conversation"], ["tokens", "Tokens"], ["group", "Group"], ["prompt", "Same prompt"], ["history", "Why"]];

Views.sample = {
  title: "Sample",
  hidden: true,
  async show(given, place, alive) {
    const run = runOf(given);
    const where = { run: run.name, step: given.step, draw: given.draw, index: given.index };
    const page = await ask("sample", where);
    if (!alive()) return;
    const tab = SAMPLE_TABS.some(([name]) => name === given.tab) ? given.tab : "talk";
    place.append(sampleHead(page, given),
      el("nav", { class: "tabs", "aria-label": "Sample" }, SAMPLE_TABS.map(([name, title]) =>
        el("a", { href: Address.of("sample", { ...given, tab: name }), "aria-current": name === tab ? "page" : null }, title))));
    const body = el("div", { class: "body" });
    place.append(body);
    if (tab === "talk") body.append(conversation(page));
    if (tab === "tokens") body.append(tokenView(page, given, (vector) => Address.go("sample", { ...given, vector })));
    if (tab === "group") await showGroup(run, where, body, alive);
    if (tab === "prompt") await showPrompt(run, where, body, alive);
    if (tab === "history") await showHistory(run, page, where, body, alive);
  },
};

function fact(name, value) {
  return value === null || value === undefined || value === "" ? null
    : el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "number" ? number(value) : value));
}

function sampleHead(page, given) {
  const { record, scalars } = page;
  const parts = Object.entries(record.reward_parts ?? {});
  const group = page.group;
  const at = group.indexOf(scalars.index);
  const other = (by, key, title, shown) => group[at + by] === undefined ? null
    : el("a", { href: Address.of("sample", { ...given, index: group[at + by] }), "data-key": key, "aria-label": title }, shown);
  return el("section", { class: "head", "aria-label": "Sample" },
    el("h2", {}, `Sample ${record.draw}.${record.index} `, el("span", { class: "why" }, `of step ${record.step}, ${record.prompt_id}`), " ",
      other(-1, "[", "Sample before of the group", "\u2039"), ` ${at + 1} of ${group.length} `, other(1, "]", "Sample after of the group", "\u203a")),
    el("dl", {}, fact("branch", branchOf(scalars)), scalars.verdict ? fact("verdict", verdictMark(scalars.verdict)) : null, fact("reward", record.reward), parts.length > 1 ? parts.map(([name, value]) => fact(name, value)) : null,
      fact("advantage", scalars.advantage), fact("tokens", `${scalars.length} of ${scalars.tokens}`), fact("turns", scalars.turns),
      fact("staleness", scalars.staleness), fact("finish", scalars.finish), fact("source", scalars.source),
      fact("label", typeof record.label === "object" ? JSON.stringify(record.label) : record.label),
      fact("baseline", record.baseline_reward), fact("policy version", record.policy_version), scalars.flat ? fact("group", "without variance") : null),
    record.metadata?.reward_error ? el("p", { class: "bad" }, record.metadata.reward_error) : null);
}

function conversation(page) {
  const trained = new Map(page.turns.map((turn) => [turn.message, turn]));
  const results = new Map();
  const calls = new Set(page.messages.flatMap((message) => callsOf(message).map((call) => call.id)).filter(Boolean));
  for (const message of page.messages) {
    if (message.role === "tool" && calls.has(message.tool_call_id)) results.set(message.tool_call_id, message);
  }
  const paired = new Set(results.values());
  // Results without an id of their call belong to the calls before them, in order.
  let waiting = [];
  const loose = new Map();
  page.messages.forEach((message) => {
    const own = callsOf(message).filter((call) => !results.has(call.id));
    if (own.length) waiting = own;
    else if (message.role === "tool" && !paired.has(message) && waiting.length) {
      loose.set(waiting.shift(), message);
      paired.add(message);
    }
  });
  return el("ol", { class: "talk" }, page.messages.map((message, k) =>
    paired.has(message) ? null : turnOf(message, trained.get(k), (call) => results.get(call.id) ?? loose.get(call))));
}

function callsOf(message) {
  return Array.isArray(message.tool_calls) ? message.tool_calls.filter((call) => call && typeof call === "object") : [];
}

function turnOf(message, turn, resultOf) {
  const facts = turn ? [turn.end - turn.start + " tokens",
    turn.reward !== null ? "reward " + number(turn.reward) : null,
    turn.advantage !== null ? "advantage " + number(turn.advantage) : null,
    turn.entropy !== null ? "entropy " + number(turn.entropy) : null].filter(Boolean).join(", ") : "";
  const content = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content) : "";
  const known = ["system", "user", "assistant", "tool", "prompt"].includes(message.role);
  return el("li", { class: "turn " + (known ? message.role : "other") },
    el("div", { class: "who" }, el("b", {}, message.role), message.name ? " " + message.name : "", turn ? el("span", { class: "why" }, ` turn ${turn.turn + 1}: ${facts}`) : null),
    thought(message.reasoning_content ?? message.reasoning), withThoughts(content),
    callsOf(message).map((call) => callBox(call, resultOf(call))));
}

function thought(words) {
  return words ? el("details", { class: "thought" }, el("summary", {}, `thinking, ${String(words).length} characters`), el("pre", {}, words)) : null;
}

// Folds the text between <think> and </think>; an end without a beginning folds all text before it.
function withThoughts(content) {
  const found = /^([\s\S]*?)<\/think>([\s\S]*)$/.exec(content);
  if (!found) {
    const open = /^([\s\S]*?)<think>([\s\S]*)$/.exec(content);
    return open ? [said(open[1]), thought(open[2])] : said(content);
  }
  const [before, inside] = found[1].includes("<think>") ? [found[1].slice(0, found[1].indexOf("<think>")), found[1].slice(found[1].indexOf("<think>") + 7)] : ["", found[1]];
  return [said(before), thought(inside), withThoughts(found[2])];
}

function said(words) {
  return words.trim() === "" ? null : el("pre", {}, words);
}

function callBox(call, result) {
  const given = call.function ?? {};
  const shown = typeof given.arguments === "string" ? given.arguments : JSON.stringify(given.arguments ?? {});
  return el("div", { class: "call" },
    el("div", {}, el("b", {}, "calls "), el("code", {}, `${given.name ?? "?"}(${shown})`)),
    el("div", { class: "result" }, el("b", {}, "result "), result ? el("code", {}, typeof result.content === "string" ? result.content : JSON.stringify(result.content)) : el("i", {}, "none: no turn was left")));
}

async function showHistory(run, page, where, body, alive) {
  const masked = Object.entries(page.masked).filter(([, count]) => count);
  add(body, [el("h3", {}, "What the update learned from"),
    el("ul", {}, masked.map(([reason, count]) => el("li", {}, reason === "trainable" ? `${count} trainable tokens` : `${count} of them: ${reason}`))),
    page.scalars.flat ? note("All rewards of its group are equal, so most estimators give it no advantage.") : null]);
  if (!run.ledger) return body.append(note("This run has no ledger."));
  const life = await ask("draw", { run: run.name, draw: where.draw });
  if (alive()) body.append(el("h3", {}, `What happened to draw ${where.draw}`), lifeTable(life));
}

function lifeTable(life) {
  return table({ class: "rows", label: "History of the draw" }, ["line of the ledger", "what", "detail", "rewound by line"],
    life.map((moment) => el("tr", { class: moment.rewound_by ? "gone" : "" },
      el("td", { class: "n" }, String(moment.line)), el("td", {}, moment.what), el("td", {}, moment.detail), el("td", { class: "n" }, moment.rewound_by))));
}
