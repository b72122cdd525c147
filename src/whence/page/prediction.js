// What the output came from: several methods' attributions, line by line.

import { choice, h, number, replace } from "./dom.js";
import { card } from "./export.js";
import { dataTable } from "./chart.js";
import { chartCard, tableCard } from "./run.js";
import { outputPicture, outputTable } from "./output.js";
import { spearman } from "./rank.js";
import { go } from "./state.js";
import { tokenName, tokenText } from "./tokens.js";

// A method that is not there yet, asked of the server; its line joins the others.
function another(source) {
  const { prediction } = source.manifest;
  const open = (source.live?.attributions ?? []).filter((m) => !prediction.attributions.some((a) => a.name === m.name));
  if (!open.length) return null;
  const say = h("span", { class: "facts", role: "status" });
  return h("div", { class: "controls no-export" }, choice("Compute another", [["", "…"], ...open.map((m) => [m.name, m.title])], "", async (method) => {
    if (!method) return;
    replace(say, "Working …");
    try {
      prediction.attributions.push(await source.live.ask("attribution", { method }));
      go({});
    } catch (error) { replace(say, error.message); }
  }), say);
}

// For a text on which other attention gives the same outputs: each contribution with its proved bounds.
function certain(about) {
  if (!about) return null;
  return about.reason ? card("Which contributions are determined?", "certain", h("p", { class: "hint" }, `Not bounded here: ${about.reason}`)) : tableCard(about);
}

// The explanations put to the test: words removed in their order, and whether other attention would explain otherwise.
function tested(removal) {
  if (!removal) return null;
  if (removal.reason) return card("Does the model react as they say?", "removal", h("p", { class: "hint" }, `Not tested here: ${removal.reason}`));
  const [table, ...curves] = removal.cards;
  const element = tableCard(table);
  element.querySelector(".card-body").append(h("p", { class: "hint" }, removal.sentences.join(" ")));
  return [element, h("div", { class: "columns" }, curves.map(chartCard)), certain(removal.certain)];
}

export function predictionView(source) {
  const { prediction } = source.manifest;
  const known = prediction.attributions.filter((a) => !a.reason);
  const missing = prediction.attributions.filter((a) => a.reason);
  const lines = known.map((a) => {
    const { tokens } = a;
    const text = tokenText({ tokens, compact: true });
    text.shade(a.values, { curve: "root" });
    const top = a.values.map((v, i) => [v, i]).sort((x, y) => Math.abs(y[0]) - Math.abs(x[0])).slice(0, 3);
    return h("div", { class: "attribution" }, h("h3", {}, a.title, h("small", {}, a.paper ? ` ${a.paper}` : "")), text,
      h("p", { class: "hint" }, "Most: ", top.map(([v, i]) => `${tokenName(tokens, i)} ${number(v)}`).join(", "), a.signed ? ". Blue speaks for it, orange against." : "."));
  });
  const tokens = known[0]?.tokens ?? { text: [], special: [] };
  const alike = known.filter((a) => a.values.length === tokens.text.length);
  const table = dataTable(["position", "token", ...alike.map((a) => a.title)], tokens.text.map((t, i) => [i, tokenName(tokens, i), ...alike.map((a) => a.values[i])]));
  const agree = [["Spearman ρ", ...alike.map((a) => a.title)], ...alike.map((a) => [a.title, ...alike.map((b) => spearman(a.values, b.values))])];
  const scores = () => [["position", "token", ...alike.map((a) => a.name)], ...tokens.text.map((t, i) => [i, t, ...alike.map((a) => a.values[i])])];
  return h("div", { class: "view prediction" },
    card(`The model’s ${prediction.output.what}`, "output", outputPicture(prediction.output), { csv: () => outputTable(prediction.output) }),
    card("What it came from", "attributions", h("div", {}, another(source), lines,
      missing.length ? h("p", { class: "hint" }, "Not available here: ", missing.map((m) => `${m.title} (${m.reason})`).join("; ")) : null), {
      csv: scores }),
    tested(prediction.removal),
    h("div", { class: "columns" }, card("Do the methods agree?", "agreement", dataTable(agree[0], agree.slice(1), 2), { csv: () => agree }), card("Token by token", "attribution-table", h("div", { class: "tall" }, table), { csv: scores })));
}
