// A run over many texts, a survey or a comparison of explanations: what it found in words, then its charts and tables.

import { h, number, scroller, visible } from "./dom.js";
import { lineChart } from "./chart.js";
import { card } from "./export.js";

const SECOND = "least important first";

export function chartCard(about) {
  const paired = about.lines.some((l) => l.second);
  const series = about.lines.map((l) => ({ ...l, named: !(paired && l.second && about.lines.some((o) => o !== l && o.name === l.name)), full: l.second && about.id.startsWith("curves") ? `${l.name}, ${SECOND}` : l.name }));
  const chart = lineChart({ title: about.title, x: about.x, xLabel: about.x_label, yLabel: about.y_label, series, min: about.least ?? 0, max: about.most ?? undefined, digits: 3 });
  return card(about.title, about.id, h("div", {}, about.note ? h("p", { class: "hint" }, about.note) : null, chart.el), { csv: chart.csv, chart: true });
}

// A column is of numbers, whole or not, or of words: its cells look alike.
function kindOf(rows, i) {
  const values = rows.map((row) => row[i]).filter((v) => v !== null);
  if (!values.every((v) => typeof v === "number")) return "words";
  return values.every(Number.isInteger) ? "whole" : "number";
}

function cell(value, first, kind) {
  const text = value === null ? "–" : kind === "number" ? number(value) : visible(String(value));
  return h(first ? "th" : "td", { scope: first ? "row" : undefined, class: kind === "words" ? undefined : "num" }, h("bdi", {}, text));
}

export function tableCard(about) {
  const kinds = about.columns.map((_, i) => kindOf(about.rows, i));
  const table = h("table", { class: `data run-table${about.wraps ? " wide" : ""}` },
    h("thead", {}, h("tr", {}, about.columns.map((c, i) => h("th", { scope: "col", class: kinds[i] === "words" ? undefined : "num" }, visible(c))))),
    h("tbody", {}, about.rows.map((row) => h("tr", {}, row.map((value, i) => cell(value, i === 0, kinds[i]))))));
  const holder = scroller(about.title, table);
  if (about.rows.length > 14) holder.classList.add("tall");
  return card(about.title, about.id, h("div", {}, about.note ? h("p", { class: "hint" }, about.note) : null, holder), { csv: () => [about.columns, ...about.rows] });
}

export function runView(run) {
  const cards = run.cards.map((about) => (about.kind === "chart" ? chartCard(about) : tableCard(about)));
  const groups = [];
  run.cards.forEach((about, i) => { // charts stand side by side, tables alone
    if (about.kind === "chart" && groups.at(-1)?.charts) groups.at(-1).items.push(cards[i]);
    else groups.push({ charts: about.kind === "chart", items: [cards[i]] });
  });
  return h("div", { class: "view run" },
    h("div", { class: "findings fine" }, run.findings.map((s, i) => h("p", { class: i === 0 ? "first" : "" }, visible(s)))),
    groups.map((g) => (g.charts ? h("div", { class: "columns" }, g.items) : g.items)));
}
