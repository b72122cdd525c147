// One attention row as bars with whiskers: each weight, and between which two numbers it must lie.
// The elements are made once and moved from row to row: pointing at a map changes them at every step.

import { h, number, scroller, svg, visible } from "./dom.js";
import { tokenName } from "./tokens.js";

export const CERTAIN = 0.005;

const BADGES = {
  certain: ["badge certain", "certain", "Proved: no alternative moves it by more than 0.005"],
  exact: ["badge exact", "exact", "Both ends are reached by some alternative: proved by linear programs"],
  bound: ["badge", "bound", "A closed-form bound: always valid, usually wider than the exact interval"],
};

function line(keys) {
  const part = (name, attributes) => svg(name, attributes);
  const bar = part("rect", { x: 0, y: 6, height: 8, rx: 1.5, class: "bar" });
  const whisker = part("line", { y1: 10, y2: 10, class: "whisker" }), left = part("line", { y1: 4, y2: 16, class: "whisker" }), right = part("line", { y1: 4, y2: 16, class: "whisker" });
  const mark = part("line", { y1: 3, y2: 17, class: "bar-mark" });
  const picture = svg("svg", { class: "bar-picture", height: 20, width: "100%", "aria-hidden": "true" }, svg("line", { x1: 0, x2: "100%", y1: 10, y2: 10, class: "bar-track" }), bar, whisker, left, right, mark);
  const text = h("bdi", {}), place = h("small", {}), weight = h("td", { class: "num weight" }), interval = h("td", { class: "num interval" }), badge = h("span", {});
  const token = h("th", { scope: "row", class: "bar-token" }, text, " ", place);
  const el = h("tr", {}, token, h("td", { class: "bar-cell" }, picture), weight, interval, h("td", { class: "mark" }, badge));
  const at = (element, x1, x2) => { element.setAttribute("x1", x1); element.setAttribute("x2", x2); };
  const show = (x, value) => { bar.setAttribute("width", x(value)); weight.textContent = number(value); };
  const set = (r, x) => {
    el.dataset.key = r.key;
    text.textContent = visible(keys.text[r.key] ?? "?");
    place.textContent = r.key;
    token.title = `${r.key}: ${visible(keys.raw[r.key] ?? "")}`;
    picture.classList.toggle("exact", Boolean(r.exact));
    const known = r.lower !== undefined;
    for (const w of [whisker, left, right]) w.style.display = known ? "" : "none";
    if (known) { const [low, high] = [x(r.lower), x(r.upper)]; at(whisker, low, high); at(left, low, low); at(right, high, high); }
    at(mark, x(r.weight), x(r.weight));
    show(x, r.weight);
    interval.textContent = known ? `[${number(r.lower)}, ${number(r.upper)}]` : "–";
    const [style, word, why] = known ? BADGES[r.upper - r.lower < CERTAIN ? "certain" : r.exact ? "exact" : "bound"] : ["", "", ""];
    badge.className = style;
    badge.textContent = word;
    badge.title = why;
  };
  return { el, set, show };
}

// set(rows, caption); rows: [{key, weight, lower, upper, exact, effective, other}]; other: the weight in the alternative.
export function weightBars({ keys }) {
  const lines = [];
  const caption = h("caption", {}), range = h("small", {}), body = h("tbody", {});
  let rows = [], x = null;
  const element = scroller("weights of the row",
    h("table", { class: "bars" }, caption,
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "bar-token" }, "to"), h("th", { scope: "col", class: "bar-cell" }, h("span", { class: "hidden" }, "as a bar, "), range), h("th", { scope: "col", class: "num weight" }, "weight"), h("th", { scope: "col", class: "num interval" }, "could be"), h("td", { class: "mark" }))),
      body));
  element.set = (given, title) => {
    rows = given;
    const most = Math.min(1, rows.reduce((m, r) => Math.max(m, r.weight, r.upper ?? 0, r.other ?? 0), 0.05) * 1.04);
    x = (v) => `${((Math.max(0, Math.min(most, v)) / most) * 100).toFixed(2)}%`;
    caption.textContent = title;
    range.textContent = `0 – ${number(most, 2)}`;
    while (lines.length < rows.length) lines.push(line(keys));
    rows.forEach((r, i) => lines[i].set(r, x));
    if (body.childElementCount !== rows.length) body.replaceChildren(...lines.slice(0, rows.length).map((l) => l.el));
  };
  // Move the bars a share of the way to the other row.
  element.move = (share) => rows.forEach((r, i) => lines[i].show(x, r.weight + share * ((r.other ?? r.weight) - r.weight)));
  element.csv = () => [["key", "token", "weight", "lower", "upper", "exact", "effective", "alternative"],
    ...rows.map((r) => [r.key, keys.text[r.key], r.weight, r.lower ?? null, r.upper ?? null, r.exact ? "yes" : "no", r.effective ?? null, r.other ?? null])];
  return element;
}

export function rowName(tokens, query) {
  return `${tokenName(tokens, query)} (token ${query})`;
}
