// Line charts as SVG, with a table of the same numbers for those who do not see them.

import { h, number, scroller, svg } from "./dom.js";
import { DASHES, LINES } from "./colour.js";

const LEFT = 46, RIGHT = 14, TOP = 12, BOTTOM = 40;

function ticks(low, high, count = 5) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) out.push(Math.abs(v) < 1e-12 ? 0 : v);
  return out;
}

// series: [{name, values, low?, high?}], x: labels. Values may be null.
export function lineChart({ title, x, xLabel, yLabel, series, min = 0, max, digits = 2, chance }) {
  const [W, H] = innerWidth < 760 ? [360, 220] : [430, 250];
  const all = series.flatMap((s) => [...s.values, ...(s.high ?? [])]).filter((v) => v !== null && v !== undefined);
  const high = max ?? Math.max(1e-9, ...all) * 1.05;
  const px = (i) => LEFT + (x.length === 1 ? 0.5 : i / (x.length - 1)) * (W - LEFT - RIGHT);
  const py = (v) => TOP + (1 - (v - min) / (high - min)) * (H - TOP - BOTTOM);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "chart", role: "img", "aria-label": `${title}. The same numbers are in the table below.`, "data-native": true });
  for (const v of ticks(min, high)) {
    root.append(svg("line", { x1: LEFT, x2: W - RIGHT, y1: py(v), y2: py(v), class: "gridline" }),
      svg("text", { x: LEFT - 7, y: py(v) + 4, class: "tick", "text-anchor": "end" }, String(Number(v.toFixed(4)))));
  }
  const every = Math.ceil(x.length / 14);
  x.forEach((label, i) => { if (i % every === 0) root.append(svg("text", { x: px(i), y: H - BOTTOM + 17, class: "tick", "text-anchor": "middle" }, String(label))); });
  root.append(svg("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, class: "axis", "text-anchor": "middle" }, xLabel));
  root.append(svg("text", { x: 12, y: TOP + (H - TOP - BOTTOM) / 2, class: "axis", "text-anchor": "middle", transform: `rotate(-90 12 ${TOP + (H - TOP - BOTTOM) / 2})` }, yLabel));
  if (chance !== undefined && chance !== null) root.append(svg("line", { x1: LEFT, x2: W - RIGHT, y1: py(chance), y2: py(chance), class: "chance" }, svg("title", {}, `chance ${number(chance, digits)}`)), svg("text", { x: W - RIGHT, y: py(chance) - 5, class: "tick", "text-anchor": "end" }, "chance"));
  series.forEach((s, k) => {
    const stroke = LINES[k % LINES.length];
    if (s.low && s.high) {
      const side = (values) => values.map((v, i) => (v === null ? null : `${px(i)},${py(v)}`)).filter(Boolean);
      const edge = [...side(s.high), ...side(s.low).reverse()];
      root.append(svg("polygon", { points: edge.join(" "), fill: stroke, opacity: 0.13 }));
    }
    const points = s.values.map((v, i) => (v === null ? null : [px(i), py(v)])).filter(Boolean);
    root.append(svg("polyline", { points: points.map((p) => p.join(",")).join(" "), fill: "none", stroke, "stroke-width": 2.2, "stroke-dasharray": DASHES[k % DASHES.length] }));
    s.values.forEach((v, i) => { if (v !== null) root.append(svg("circle", { cx: px(i), cy: py(v), r: 3, fill: stroke }, svg("title", {}, `${s.name}, ${xLabel} ${x[i]}: ${number(v, digits)}`))); });
  });
  const key = h("ul", { class: "key" }, series.map((s, k) => h("li", {},
    svg("svg", { width: 34, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 34, y1: 5, y2: 5, stroke: LINES[k % LINES.length], "stroke-width": 2.5, "stroke-dasharray": DASHES[k % DASHES.length] })),
    s.name)));
  const rows = x.map((label, i) => [label, ...series.map((s) => s.values[i])]);
  const columns = [xLabel, ...series.map((s) => s.name)];
  const table = h("details", { class: "numbers no-export" }, h("summary", {}, "Numbers"), dataTable(columns, rows, digits));
  return { el: h("div", {}, key, root, table), csv: () => [columns, ...rows] };
}

export function dataTable(columns, rows, digits = 3) {
  return scroller("table", h("table", { class: "data" },
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col" }, c)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) =>
      h(i === 0 ? "th" : "td", i === 0 ? { scope: "row" } : {}, typeof cell === "number" && i > 0 ? number(cell, digits) : cell ?? "–")))))));
}
