"use strict";
// Tokens, coloured by a vector.

const HUES = ["95, 140, 225", "225, 130, 60", "70, 165, 110", "190, 95, 165", "190, 165, 50", "70, 165, 180", "150, 110, 220", "140, 140, 140"];
const LOW = "70, 120, 230";
const HIGH = "230, 120, 50";
const SHOWN_TOKENS = 6000; // the rest of a long sample comes on demand

function percentile(values, share) {
  const sorted = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}

// Returns a function from a value to a colour, and the values at the ends of the scale.
function colours(vector) {
  const middle = vector.scale === "around 1" ? 1 : 0;
  if (vector.scale === "steps") {
    const known = [...new Set(vector.values)].sort((a, b) => a - b);
    return {
      of: (value) => `rgba(${HUES[known.indexOf(value) % HUES.length]}, 0.4)`,
      legend: known.slice(0, 12).map((value) => [value, `rgba(${HUES[known.indexOf(value) % HUES.length]}, 0.4)`]),
    };
  }
  const moved = vector.values.map((value) => (value === null ? NaN : value - middle));
  const most = percentile(moved, 0.98) || Math.max(...moved.filter(Number.isFinite).map(Math.abs), 0) || 1;
  const of = (value) => {
    if (value === null || !Number.isFinite(value)) return "transparent";
    const share = Math.min(1, Math.abs(value - middle) / most);
    return `rgba(${value < middle ? LOW : HIGH}, ${(share * 0.65).toFixed(3)})`;
  };
  const ends = { "up to 0": [-most, 0], "from 0": [0, most] }[vector.scale] ?? [middle - most, middle, middle + most];
  return { of, legend: ends.map((value) => [number(value, 3), of(value)]) };
}

function legendOf(scale) {
  return el("span", { class: "scale", "aria-label": "Scale" }, scale.legend.map(([value, colour]) => {
    const mark = el("span", {}, value);
    mark.style.backgroundColor = colour;
    return mark;
  }));
}

function tokenView(page, given, changed) {
  const vectors = page.vectors;
  const chosen = vectors.find((vector) => vector.name === given.vector) ?? vectors[0];
  const holder = el("section", { class: "tokens", "aria-label": "Tokens", "data-vector": chosen?.name });
  if (!chosen) return add(holder, [note("no vector was recorded")]);
  const scale = colours(chosen);
  const select = el("select", { "aria-label": "Colour by", on: { change: () => changed(select.value) } },
    vectors.map((vector) => el("option", { value: vector.name, selected: vector === chosen, title: vector.text }, vector.title)));
  const details = el("div", { class: "token-details", role: "status", "aria-live": "off" }, "point at a token, or move with the arrow keys");
  const box = el("div", { class: "text", tabindex: "0", role: "textbox", "aria-readonly": "true", "aria-label": "Tokens; arrow keys move" });
  add(holder, [el("p", { class: "bar" }, el("label", {}, "colour by ", select), " ", legendOf(scale), " ", el("span", { class: "why" }, chosen.text)),
    page.trouble ? note(page.trouble) : null, details, box]);
  const places = placesOf(page.mask);
  const spans = [];
  const more = el("button", { type: "button", on: { click: () => fill(page.tokens.length) } }, "show all tokens");
  const fill = (until) => {
    more.remove();
    const piece = document.createDocumentFragment();
    for (let t = spans.length; t < until; t++) spans.push(piece.appendChild(tokenSpan(page, t, places[t], chosen, scale)));
    box.append(piece);
    if (until < page.tokens.length) box.append(more);
  };
  fill(Math.min(SHOWN_TOKENS, page.tokens.length));
  let at = -1;
  const point = (t) => {
    if (t < 0 || t >= spans.length) return;
    spans[at]?.classList.remove("at");
    at = t;
    spans[t].classList.add("at");
    details.replaceChildren();
    add(details, describe(page, t, places[t], chosen));
  };
  box.addEventListener("mouseover", (event) => {
    const found = event.target.closest("[data-t]");
    if (found) point(+found.dataset.t);
  });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    point(Math.max(0, Math.min(spans.length - 1, at + by)));
    spans[at].scrollIntoView({ block: "nearest" });
  });
  return holder;
}

// The index of each token among the trainable tokens; -1 for context.
function placesOf(mask) {
  let next = 0;
  return mask.map((bit) => (bit ? next++ : -1));
}

function tokenSpan(page, t, place, vector, scale) {
  const shown = page.texts[t];
  const node = el("span", { class: place < 0 ? "token context" : "token", "data-t": t });
  if (shown === "") node.classList.add("joined");
  // A line end is visible and breaks the line.
  shown.split("\n").forEach((part, k) => {
    if (k) node.append(el("span", { class: "newline" }, "\u21b5"), document.createTextNode("\n"));
    node.append(...text(part));
  });
  if (place >= 0) node.style.backgroundColor = scale.of(vector.values[place]);
  return node;
}

function describe(page, t, place, chosen) {
  const head = [el("b", {}, JSON.stringify(page.texts[t])), ` token ${page.tokens[t]} at ${t}`];
  if (place < 0) return [...head, el("span", { class: "why" }, " context: not trained")];
  return [...head, ` trainable ${place} `, page.vectors.map((vector) =>
    el("span", { class: vector === chosen ? "value chosen" : "value" }, vector.title, " ", el("b", {}, number(vector.values[place], 6) || "-")))];
}
