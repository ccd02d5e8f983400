"use strict";
// Curves and histograms as SVG.

const WIDTH = 420;
const HEIGHT = 170;
const EDGE = { left: 46, right: 10, top: 8, bottom: 20 };

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// lines: [{name, steps, values}]; returns a figure with a crosshair.
function lineChart(title, lines, about) {
  const there = lines.filter((line) => line.values.length);
  const heading = el("h3", { tabindex: "0", class: "metric" }, title);
  if (about) Tip.on(heading, about);
  const all = there.flatMap((line) => line.values).filter(Number.isFinite);
  const figure = el("figure", { class: "chart" }, heading);
  if (!all.length) return add(figure, [note("no numbers")]);
  const bounds = (numbers) => numbers.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  let [low, high] = bounds(all);
  if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const [first, last] = bounds(there.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]));
  const x = scale(first, last, EDGE.left, WIDTH - EDGE.right);
  const y = scale(low, high, HEIGHT - EDGE.bottom, EDGE.top);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} over the steps` });
  for (const tick of ticks(low, high, 4)) {
    picture.append(svg("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: EDGE.left - 5, y: y(tick) + 3, "text-anchor": "end" }, number(tick, 3)));
  }
  for (const tick of ticks(first, last, 5).filter(Number.isInteger)) {
    picture.append(svg("text", { class: "tick", x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, String(tick)));
  }
  there.forEach((line) => {
    const d = pathOf(line, x, y);
    const style = "line c" + (line.colour % 8);
    picture.append(svg("path", { class: style, d }));
    if (line.values.length === 1) picture.append(svg("circle", { class: style + " dot", cx: x(line.steps[0]), cy: y(line.values[0]), r: 2.5 }));
  });
  add(figure, [picture]);
  crosshair(figure, picture, there, x, first, last);
  return figure;
}

function pathOf(line, x, y) {
  let d = "";
  let down = false;
  line.values.forEach((value, k) => {
    if (!Number.isFinite(value)) return void (down = false);
    d += (down ? "L" : "M") + x(line.steps[k]).toFixed(1) + " " + y(value).toFixed(1);
    down = true;
  });
  return d;
}

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - steps[low] <= steps[high] - wanted ? low : high;
}

function crosshair(figure, picture, lines, x, first, last) {
  const rule = svg("line", { class: "rule", x1: -9, x2: -9, y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
  const caption = el("figcaption", {}, "\u00a0");
  picture.append(rule);
  figure.append(caption);
  const showAt = (step) => {
    const found = lines.map((line) => ({ line, k: nearest(line.steps, step) }));
    const at = found[0].line.steps[found[0].k];
    rule.setAttribute("x1", x(at));
    rule.setAttribute("x2", x(at));
    caption.replaceChildren();
    add(caption, [`step ${at}`, found.map(({ line, k }) =>
      el("span", { class: "c" + (line.colour % 8) }, ` ${lines.length > 1 ? line.name + " " : ""}${line.values[k] === null ? "not finite" : number(line.values[k])}`))]);
  };
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    showAt(first + ((at - EDGE.left) / (WIDTH - EDGE.left - EDGE.right)) * (last - first));
  });
  showAt(last);
}

function sparkline(steps, values, label) {
  const numbers = values.filter(Number.isFinite);
  if (numbers.length < 2) return el("span", {}, "");
  const x = scale(steps[0], steps[steps.length - 1], 1, 119);
  const y = scale(Math.min(...numbers), Math.max(...numbers), 22, 2);
  return svg("svg", { class: "spark", viewBox: "0 0 120 24", role: "img", "aria-label": label },
    svg("path", { class: "line c0", d: pathOf({ steps, values }, x, y) }));
}

// Two histograms over the same edges, one above the other.
function histogram(edges, sides, names) {
  const most = Math.max(1, ...sides.flat());
  const width = 420 / (edges.length - 1);
  const picture = svg("svg", { viewBox: "0 0 420 140", role: "img", "aria-label": "Rewards of both steps" });
  sides.forEach((counts, side) => counts.forEach((count, k) => {
    const height = (count / most) * 100;
    const half = width / 2 - 1;
    picture.append(svg("rect", { class: "bar c" + side, x: k * width + side * half, y: 112 - height, width: half, height }));
  }));
  for (const k of [0, Math.floor((edges.length - 1) / 2), edges.length - 1]) {
    const anchor = k === 0 ? "start" : k === edges.length - 1 ? "end" : "middle";
    picture.append(svg("text", { class: "tick", x: k * width, y: 128, "text-anchor": anchor }, number(edges[k], 3)));
  }
  return el("figure", { class: "chart" }, el("h3", {}, "reward"), picture,
    el("figcaption", {}, names.map((name, side) => el("span", { class: "c" + side }, " \u25a0 " + name))));
}

// Points of (step, value), as links.
function dots(points, label) {
  const steps = points.map((point) => point.step);
  const values = points.map((point) => point.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = scale(Math.min(...steps), Math.max(...steps), 40, 410);
  const y = scale(low, high === low ? low + 1 : high, 80, 10);
  const picture = svg("svg", { viewBox: "0 0 420 100", role: "img", "aria-label": label });
  for (const value of new Set([low, high])) picture.append(svg("text", { class: "tick", x: 34, y: y(value) + 3, "text-anchor": "end" }, number(value, 3)));
  for (const step of new Set([Math.min(...steps), Math.max(...steps)])) picture.append(svg("text", { class: "tick", x: x(step), y: 97, "text-anchor": "middle" }, String(step)));
  for (const point of points) picture.append(svg("circle", { class: "point c0", cx: x(point.step), cy: y(point.value), r: 3 }));
  return el("figure", { class: "chart" }, el("h3", {}, label), picture);
}
