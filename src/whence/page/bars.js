// One attention row as bars with whiskers: each weight, and between which two numbers it must lie.

import { h, number, svg, visible } from "./dom.js";
import { tokenName } from "./tokens.js";

export const CERTAIN = 0.005;

// rows: [{key, weight, lower, upper, exact, effective, other}]; other: the weight in the alternative.
export function weightBars({ keys, rows, caption }) {
  const known = rows.flatMap((r) => [r.weight, r.upper ?? 0, r.other ?? 0]);
  const most = Math.min(1, Math.max(0.05, ...known) * 1.04);
  const x = (v) => `${(Math.max(0, Math.min(most, v)) / most) * 100}%`;
  const bars = [];
  const body = rows.map((r) => {
    const bar = svg("rect", { x: 0, y: 6, width: x(r.weight), height: 8, rx: 1.5, class: "bar" });
    bars.push({ bar, row: r, cell: null });
    const certain = r.upper !== undefined && r.upper - r.lower < CERTAIN;
    const low = r.lower ?? null, high = r.upper ?? null;
    const picture = svg("svg", { class: `bar-picture${r.exact ? " exact" : ""}`, height: 20, width: "100%", "aria-hidden": "true" },
      svg("line", { x1: 0, x2: "100%", y1: 10, y2: 10, class: "bar-track" }), bar,
      low !== null ? [
        svg("line", { x1: x(low), x2: x(high), y1: 10, y2: 10, class: "whisker" }),
        svg("line", { x1: x(low), x2: x(low), y1: 4, y2: 16, class: "whisker" }),
        svg("line", { x1: x(high), x2: x(high), y1: 4, y2: 16, class: "whisker" }),
      ] : null,
      svg("line", { x1: x(r.weight), x2: x(r.weight), y1: 3, y2: 17, class: "bar-mark" }));
    const weight = h("td", { class: "num weight" }, number(r.weight));
    bars.at(-1).cell = weight;
    return h("tr", { "data-key": r.key },
      h("th", { scope: "row", class: "bar-token", title: `${r.key}: ${visible(keys.raw[r.key] ?? "")}` }, h("bdi", {}, visible(keys.text[r.key] ?? "?")), h("small", {}, ` ${r.key}`)),
      h("td", { class: "bar-cell" }, picture),
      weight,
      h("td", { class: "num interval" }, low === null ? "–" : [`[${number(low)}, ${number(high)}]`]),
      h("td", { class: "mark" }, low === null ? "" : certain ? h("span", { class: "badge certain" }, "certain") : r.exact ? h("span", { class: "badge exact" }, "exact") : h("span", { class: "badge" }, "bound")));
  });
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "weights of the row" },
    h("table", { class: "bars" }, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ["to", h("span", {}, "weight", h("small", {}, ` 0 – ${number(most, 2)}`)), "weight", "could be", ""].map((t, i) => h(i === 4 ? "td" : "th", i === 4 ? {} : { scope: "col" }, t)))),
      h("tbody", {}, body)));
  // Move the bars a share of the way to the other row.
  element.move = (share) => {
    for (const { bar, row, cell } of bars) {
      const value = row.weight + share * ((row.other ?? row.weight) - row.weight);
      bar.setAttribute("width", x(value));
      cell.textContent = number(value);
    }
  };
  element.csv = () => [["key", "token", "weight", "lower", "upper", "exact", "effective", "alternative"],
    ...rows.map((r) => [r.key, keys.text[r.key], r.weight, r.lower ?? null, r.upper ?? null, r.exact ? "yes" : "no", r.effective ?? null, r.other ?? null])];
  return element;
}

export function rowName(tokens, query) {
  return `${tokenName(tokens, query)} (token ${query})`;
}
