// Is a token still itself? Its own share through the layers, and whether it can be found again.

import { h, number, choice, scroller } from "./dom.js";
import { card } from "./export.js";
import { lineChart } from "./chart.js";
import { colour, css, ink } from "./colour.js";
import { go, state } from "./state.js";
import { direction } from "./tokens.js";
import { usable } from "./provenance.js";
import { visible } from "./dom.js";

function chartCard(title, name, about, options) {
  const chart = lineChart({ title, ...options });
  return card(title, name, h("div", {}, h("p", { class: "hint" }, about), chart.el), { csv: chart.csv, chart: true });
}

function heat(method) {
  const own = method.own_by_token;
  const rows = method.layers.map((layer, i) => h("tr", {}, h("th", { scope: "row" }, String(layer)),
    method.tokens.text.map((t, j) => {
      const found = colour(own[i][j]);
      return h("td", { style: { backgroundColor: css(found), color: ink(found) }, title: `${visible(t)}, layer ${layer}: ${number(own[i][j])}` }, own[i][j].toFixed(2).replace(/^0/, ""));
    }))).reverse();
  return scroller("own share by token and layer",
    h("table", { class: "heat", dir: direction(method.tokens) }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"), method.tokens.text.map((t) => h("th", { scope: "col" }, h("span", {}, visible(t)))))), h("tbody", {}, rows)));
}

export function identityView(source) {
  const { identity } = source.manifest;
  const methods = usable(source.manifest);
  const cards = [];
  if (methods.length) {
    const layers = methods.reduce((best, m) => (m.layers.length > best.length ? m.layers : best), []);
    const along = (m, values) => layers.map((l) => { const i = m.layers.indexOf(l); return i < 0 ? null : values[i]; });
    cards.push(
      chartCard("How much of itself is left", "own-share", "Own-token share after each layer, rolled out from the embeddings: the median over the tokens of this text, and for the first method the middle half.", {
        x: layers, xLabel: "after layer", yLabel: "own share",
        series: methods.map((m, k) => ({ name: m.title, values: along(m, m.own.median), ...(k === 0 ? { low: along(m, m.own.q25), high: along(m, m.own.q75) } : {}) })),
      }),
      chartCard("Tokens that are no longer mostly themselves", "not-largest", "P̃: the percentage of tokens that are not the largest contributor to their own hidden state (Brunner et al. 2020).", {
        x: layers, xLabel: "after layer", yLabel: "P̃, %", max: Math.max(10, ...methods.flatMap((m) => m.own.not_largest)) * 1.05, digits: 1,
        series: methods.map((m) => ({ name: m.title, values: along(m, m.own.not_largest) })),
      }));
  }
  const curves = [];
  // Learned maps count the states, of which the first are the embeddings; here they are counted by the layer they come after.
  const after = (identity.trained?.layers ?? []).map((l) => l - 1);
  const passed = [...new Set([...(identity.naive?.layers ?? []), ...after])].sort((a, b) => a - b);
  const spread = (layers, values) => passed.map((l) => { const i = layers.indexOf(l); return i < 0 ? null : values[i]; });
  if (identity.naive) curves.push({ name: "naive, cosine, this text", values: spread(identity.naive.layers, identity.naive.rate) });
  for (const c of identity.trained?.curves ?? []) {
    const on = (values) => spread(after, values);
    curves.push({ name: `${c.map}, ${c.distance}`, values: on(c.rate), low: on(c.low), high: on(c.high) });
  }
  if (curves.length) {
    cards.push(chartCard("Can the token be found again?", "identifiability", identity.trained
      ? "How often the nearest input embedding is the token’s own, after a learned map of its hidden state; bands are bootstrap intervals. The line at the bottom is chance."
      : "How often the nearest input embedding of this text is the token’s own, without a learned map: a lower bound. Learned maps need a corpus (whence.token_identifiability).", {
      x: passed.map((l) => (l < 0 ? "input" : l)), xLabel: "after layer", yLabel: "rate", max: 1.03, chance: identity.naive?.chance ?? identity.trained?.chance, series: curves,
    }));
  }
  const view = h("div", { class: "view identity" }, h("div", { class: "columns" }, cards));
  if (methods.length) {
    const method = methods.find((m) => m.name === state.method) ?? methods[0];
    view.append(card("Token by token", "own-by-token", h("div", {},
      h("div", { class: "controls" }, choice("Method", methods.map((m) => [m.name, m.title]), method.name, (v) => go({ method: v }))),
      h("p", { class: "hint" }, "Own share of every token after every layer: the stronger the colour, the more of it is still itself."), heat(method)),
    { csv: () => [["layer", ...method.tokens.text], ...method.layers.map((l, i) => [l, ...method.own_by_token[i]])] }));
  }
  if (!methods.length && !curves.length) view.append(h("p", {}, "This model’s hidden states could not be followed, so there is nothing to show here."));
  return view;
}
