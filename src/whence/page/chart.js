// Line charts as SVG, with a table of the same numbers for those who do not see them.

import { h, number, scroller, svg, visible } from "./dom.js";
import { DASHES, LINES } from "./colour.js";

const LEFT = 54, RIGHT = 14, BOTTOM = 40;
const UPRIGHT = 26; // letters of a label that fit along the axis; a longer one lies above the chart

function ticks(low, high, count = 5) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) out.push(Math.abs(v) < 1e-12 ? 0 : v);
  return out;
}

// How a line is drawn: by its place, or, in a pair, one colour and the second line dashed; what others published is grey.
function look(s, k) {
  if (s.published) return ["var(--faint)", s.second ? "2 3" : "5 3"];
  if (s.pair === undefined || s.pair === null) return [LINES[k % LINES.length], DASHES[k % DASHES.length]];
  return [LINES[s.pair % LINES.length], s.second ? "6 4" : ""];
}

// series: [{name, values, low?, high?, pair?, second?, published?}], x: labels. Values may be null.
export function lineChart({ title, x, xLabel, yLabel, series, min = 0, max, digits = 2, chance }) {
  const [W, H] = innerWidth < 760 ? [360, 220] : [430, 250];
  const lies = yLabel.length > UPRIGHT, TOP = lies ? 28 : 12;
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
  x.forEach((label, i) => { if (i % every === 0) root.append(svg("text", { x: px(i), y: H - BOTTOM + 17, class: "tick", "text-anchor": i > 0 && i === x.length - 1 && String(label).length > 3 ? "end" : "middle" }, String(label))); });
  root.append(svg("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, class: "axis", "text-anchor": "middle" }, xLabel));
  const middle = TOP + (H - TOP - BOTTOM) / 2;
  root.append(lies ? svg("text", { x: 2, y: 14, class: "axis" }, yLabel) : svg("text", { x: 12, y: middle, class: "axis", "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, yLabel));
  if (chance !== undefined && chance !== null) root.append(svg("line", { x1: LEFT, x2: W - RIGHT, y1: py(chance), y2: py(chance), class: "chance" }, svg("title", {}, `chance ${number(chance, digits)}`)), svg("text", { x: W - RIGHT, y: py(chance) - 5, class: "tick", "text-anchor": "end" }, "chance"));
  series.forEach((s, k) => {
    const [stroke, dash] = look(s, k);
    if (s.low && s.high) {
      const side = (values) => values.map((v, i) => (v === null ? null : `${px(i)},${py(v)}`)).filter(Boolean);
      const edge = [...side(s.high), ...side(s.low).reverse()];
      root.append(svg("polygon", { points: edge.join(" "), fill: stroke, opacity: 0.13 }));
    }
    const points = s.values.map((v, i) => (v === null ? null : [px(i), py(v)])).filter(Boolean);
    root.append(svg("polyline", { points: points.map((p) => p.join(",")).join(" "), fill: "none", stroke, "stroke-width": x.length > 14 ? 1.7 : 2.2, "stroke-dasharray": dash }));
    s.values.forEach((v, i) => { if (v !== null && x.length <= 14) root.append(svg("circle", { cx: px(i), cy: py(v), r: 3, fill: stroke }, svg("title", {}, `${s.name}, ${xLabel} ${x[i]}: ${number(v, digits)}`))); });
  });
  const key = h("ul", { class: "key" }, series.map((s, k) => (s.named === false ? null : h("li", {},
    svg("svg", { width: 34, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 34, y1: 5, y2: 5, stroke: look(s, k)[0], "stroke-width": 2.5, "stroke-dasharray": look(s, k)[1] })),
    s.name))));
  const rows = x.map((label, i) => [label, ...series.map((s) => s.values[i])]);
  const columns = [xLabel, ...series.map((s) => s.full ?? s.name)];
  const table = h("details", { class: "numbers no-export" }, h("summary", {}, "Numbers"), dataTable(columns, rows, digits));
  return { el: h("div", {}, key, root, table), csv: () => [columns, ...rows] };
}

export function dataTable(columns, rows, digits = 3) {
  return scroller("table", h("table", { class: "data" },
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col" }, c)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) =>
      h(i === 0 ? "th" : "td", i === 0 ? { scope: "row" } : {}, typeof cell === "number" && i > 0 ? (Number.isInteger(cell) && !digits ? cell : number(cell, digits)) : typeof cell === "string" ? visible(cell) : cell ?? "–")))))));
}
