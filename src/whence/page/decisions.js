// What was decided from attention, and whether the model's computation fixes it.

import { h, number, scroller, visible } from "./dom.js";
import { card } from "./export.js";
import { go } from "./state.js";

const COLUMNS = "“Decided by” is the number that the rule looks at (for the largest weight: its lead over the next), “could be” where it lies in every attention row with the same output, “margin” by how much the decision holds in all of them (below 0: by how much another row decides otherwise).";
const VERDICTS = {
  certified: ["badge certain", "Proved: every attention row with the same output decides the same"],
  refuted: ["badge warn", "Another attention row with the same output decides otherwise; it was put into the model, which did not notice"],
  open: ["badge", "Neither a proof nor a counter-example that the model accepts"],
};

function range(line) {
  if (line.lower === null || line.upper === null) return h("td", {}, "–");
  return h("td", { class: "num" }, `[${number(line.lower)}, ${number(line.upper)}]`);
}

function ruleCard(found, i) {
  const [one] = found.heads;
  const open = (query) => go({ view: "head", stack: found.stack, layer: one[0], head: one[1], query }, { push: true });
  const rows = found.lines.map((line) => h("tr", { title: visible(line.sentence) },
    h("th", { scope: "row" }, found.heads.length === 1 ? h("button", { type: "button", class: "link", onclick: () => open(line.query) }, h("bdi", {}, visible(line.name))) : h("bdi", {}, visible(line.name)), " ", h("small", {}, line.query)),
    h("td", {}, h("bdi", {}, visible(line.answer))),
    h("td", {}, h("span", { class: VERDICTS[line.verdict][0], title: VERDICTS[line.verdict][1] }, line.verdict)),
    h("td", { class: "num" }, number(line.value)), range(line), h("td", { class: "num" }, number(line.margin))));
  const table = h("table", { class: "data decisions" },
    h("thead", {}, h("tr", {}, ["token that attends", "decision", "verdict", "decided by", "could be", "margin"].map((c) => h("th", { scope: "col" }, c)))), h("tbody", {}, rows));
  return card(`${found.rule[0].toUpperCase()}${found.rule.slice(1)}`, `decisions-${i + 1}`, h("div", {}, h("p", { class: "row-say" }, found.summary, found.checked ? " The proofs were checked again without a solver." : ""),
    h("div", { class: "tall" }, scroller("decisions", table))),
  { csv: () => [["query", "name", "decision", "verdict", "value", "lower", "upper", "margin"], ...found.lines.map((l) => [l.query, l.name, l.answer, l.verdict, l.value, l.lower, l.upper, l.margin])] });
}

export function decisionsView(source) {
  const words = Object.entries(VERDICTS).map(([word, [style, why]]) => h("span", {}, h("span", { class: style }, word), ` ${why[0].toLowerCase()}${why.slice(1)}. `));
  return h("div", { class: "view decisions" }, h("p", { class: "hint" }, words, COLUMNS), source.manifest.decisions.map(ruleCard));
}
