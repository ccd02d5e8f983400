"use strict";
// All content of a run is hostile. It enters the page only as text nodes, which are made here;
// no markup is ever parsed, and the policy of the page forbids it too.

// Characters that hide or reorder text are spelled out.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb\ud800-\udfff]|[\u{e0000}-\u{e0fff}]/gu;

function spelled(character) {
  const number = character.codePointAt(0);
  const digits = number.toString(16);
  if (number < 256) return "\\x" + digits.padStart(2, "0");
  return number < 65536 ? "\\u" + digits.padStart(4, "0") : "\\u{" + digits + "}";
}

function plain(value) {
  return String(value ?? "").replace(HIDDEN, spelled);
}

// Nodes of a text; spelled-out characters are marked.
function text(value) {
  const given = String(value ?? "");
  const nodes = [];
  let end = 0;
  for (const found of given.matchAll(HIDDEN)) {
    if (found.index > end) nodes.push(document.createTextNode(given.slice(end, found.index)));
    const mark = document.createElement("span");
    mark.className = "escape";
    mark.textContent = spelled(found[0]);
    nodes.push(mark);
    end = found.index + found[0].length;
  }
  if (end < given.length) nodes.push(document.createTextNode(given.slice(end)));
  return nodes;
}

const ATTRIBUTES = new Set([
  "class", "title", "id", "type", "value", "placeholder", "href", "role", "tabindex", "for", "name",
  "scope", "colspan", "open", "checked", "selected", "disabled", "list", "size", "min", "max", "step",
]);

function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "href" && !String(value).startsWith("#")) throw new Error("links stay on the page");
  if (!ATTRIBUTES.has(name) && !name.startsWith("aria-") && !name.startsWith("data-")) {
    throw new Error("unknown attribute " + name);
  }
  node.setAttribute(name, value === true ? "" : name === "href" ? value : plain(value));
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) node.append(child);
    else node.append(...text(child));
  }
  return node;
}

// el("td", {class: "x", on: {click: f}}, "text", node, [more])
function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else setAttribute(node, name, value);
  }
  return add(node, children);
}

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set([
  "class", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "viewBox",
  "points", "transform", "role", "aria-label", "preserveAspectRatio", "text-anchor", "tabindex",
]);

function svg(tag, options = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(options)) {
    if (!DRAWN.has(name)) throw new Error("unknown attribute " + name);
    node.setAttribute(name, typeof value === "string" ? plain(value) : value);
  }
  return add(node, children);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e6 ? String(value) : value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}

// Heads of numeric columns, which are right-aligned.
const NUMBERS = new Set([
  "step", "steps", "samples", "reward", "evaluation", "length", "entropy", "KL", "staleness", "flat groups", "seconds",
  "seconds a step", "answers", "right", "mean reward", "now right", "now wrong", "after step", "draws", "draw", "change",
  "line of the ledger", "rewound by line",
]);

function table(options, heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": options.label },
    el("table", { class: options.class },
      el("thead", {}, el("tr", {}, heads.map((head) => (head instanceof Node ? head : el("th", { scope: "col", class: NUMBERS.has(head) ? "n" : null }, head))))),
      el("tbody", {}, rows)));
}

function note(...children) {
  return el("p", { class: "note" }, ...children);
}

// A small panel next to the hovered or focused node.
const Tip = {
  show(anchor, ...children) {
    const tip = document.getElementById("tip");
    tip.replaceChildren();
    add(tip, children);
    tip.hidden = false;
    const at = anchor.getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const left = Math.max(4, Math.min(at.left, innerWidth - size.width - 8));
    const below = at.bottom + 6;
    tip.style.left = left + "px";
    tip.style.top = (below + size.height > innerHeight ? Math.max(4, at.top - size.height - 6) : below) + "px";
  },
  hide() {
    Tip.again = null;
    document.getElementById("tip").hidden = true;
  },
  // Shows the result of `make` while `node` is hovered or focused.
  on(node, make) {
    const show = () => {
      Tip.again = show;
      Tip.show(node, make());
    };
    node.addEventListener("mouseenter", show);
    node.addEventListener("focus", show);
    node.addEventListener("mouseleave", Tip.hide);
    node.addEventListener("blur", Tip.hide);
    return node;
  },
};
