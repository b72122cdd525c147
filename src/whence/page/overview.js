// The first look: what is true of the text, which heads may be read, and a row that could have been another.

import { h, number, replace, scroller, segmented, small } from "./dom.js";
import { card } from "./export.js";
import { headGrid } from "./grid.js";
import { go, state } from "./state.js";
import { tokenName, tokenText } from "./tokens.js";
import { outputPicture, outputTable } from "./output.js";
import { css, doubt } from "./colour.js";

// The heaviest three weights; where the sentence above is about another, that one instead of the third.
function intervals(certificate, keys, about) {
  const places = [0, 1, Math.max(2, about)].filter((i) => i < certificate.keys.length);
  return h("ul", { class: "mini" }, places.map((i) => {
    const key = certificate.keys[i];
    const [w, lo, hi] = [certificate.weights[i], certificate.lower[i], certificate.upper[i]];
    return h("li", {}, h("bdi", {}, tokenName(keys, key)),
      h("span", { class: "range", role: "img", "aria-label": `weight ${number(w)}, could be ${number(lo)} to ${number(hi)}` },
        h("i", { class: "span", style: { left: `${lo * 100}%`, width: `${Math.max(0.6, (hi - lo) * 100)}%` } }),
        h("i", { class: "dot", style: { left: `${w * 100}%` } })),
      h("span", { class: "num" }, `${number(w, 2)}  [${number(lo, 2)}, ${number(hi, 2)}]`));
  }), h("li", { class: "mini-scale", "aria-hidden": "true" }, h("span", {}), h("span", {}, h("i", {}, "0"), h("i", {}, "1")), h("span", {})));
}

function listed(stack, certificates, kind) {
  const keys = stack.key_tokens ?? stack.tokens;
  return h("ol", { class: `listed ${kind}` }, certificates.map((c) => h("li", {},
    h("button", { type: "button", class: "link", onclick: () => go({ view: "head", stack: stack.name, layer: c.layer, head: c.head, query: c.query }, { push: true }) },
      `Layer ${c.layer}, head ${c.head}`),
    h("p", {}, kind === "worst" ? c.sentence : c.sentences[0]),
    h("p", { class: "verdict-of" }, stack.verdict.sentences[stack.layers.indexOf(c.layer)][stack.heads.indexOf(c.head)]),
    intervals(c, keys, kind === "worst" ? c.sentences.indexOf(c.sentence) : 0))));
}

function hero(stack) {
  const witness = stack.witnesses?.[0];
  if (!witness) return null;
  const keys = stack.key_tokens ?? stack.tokens;
  const ordinary = (v) => v.filter((_, i) => !keys.special[i]);
  const most = Math.max(1e-6, ...ordinary(witness.row), ...ordinary(witness.alternative)); // special tokens may saturate
  const strip = (values) => { const text = tokenText({ tokens: keys, compact: true }); text.shade(values, { max: most, curve: "root" }); return text; };
  const top = (values) => { const i = values.indexOf(Math.max(...values)); return `most on ${tokenName(keys, i)}, ${number(values[i], 2)}`; };
  const last = witness.path?.at(-1), control = witness.control?.at(-1);
  const what = last && last.logits !== null ? "logits" : "final_states";
  return card("The same output from other attention", "counter-example", h("div", { class: "hero" },
    h("p", { class: "lead" }, `Layer ${witness.layer}, head ${witness.head}: what does ${tokenName(stack.tokens, witness.query)} attend to? `,
      "The model cannot tell these two answers apart."),
    h("div", { class: "pair" },
      h("figure", {}, h("figcaption", {}, h("b", {}, "As computed"), h("span", {}, top(witness.row))), strip(witness.row)),
      h("figure", {}, h("figcaption", {}, h("b", {}, "Just as good"), h("span", {}, top(witness.alternative))), strip(witness.alternative))),
    last ? h("p", { class: "verdict" }, h("b", {}, number(witness.total_variation, 2)), " of the attention was moved. With the right row in its place, the model’s ",
      what === "logits" ? "logits" : "final states", " changed by ", h("b", { class: "same" }, small(last[what])), "; a random row as far away changes them by ", h("b", { class: "moved" }, small(control[what])), ". ",
      h("button", { type: "button", class: "link no-export", onclick: () => go({ view: "head", stack: stack.name, layer: witness.layer, head: witness.head, query: witness.query }, { push: true }) }, "Move it yourself")) : null,
  ), { csv: () => [["position", "token", "attention", "alternative"], ...keys.text.map((t, i) => [i, t, witness.row[i], witness.alternative[i]])] });
}

function plainText(stack) {
  return card("The text", "text", tokenText({ tokens: stack.key_tokens ?? stack.tokens, compact: true }));
}

function intervalTable(certificates, keys) {
  return [["layer", "head", "query", "key", "token", "weight", "lower", "upper"], ...certificates.flatMap((c) => c.keys.map((key, i) => [c.layer, c.head, c.query, key, keys.text[key], c.weights[i], c.lower[i], c.upper[i]]))];
}

// One line that says what the colours of the grid mean.
function gridLegend({ verdict, bad }, epsilon) {
  const bar = h("i", { style: { background: `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((v) => css(doubt(v))).join(",")})` }, "aria-hidden": "true" });
  if (!verdict) return h("p", { class: "bad-scale" }, bad === "low" ? "high" : "low", bar, bad === "low" ? "low" : "high", h("span", {}, "· a fact about the head; whether it may be read is under “Certain rows”"));
  return h("p", { class: "bad-scale" }, "all rows certain", bar, "none",
    h("span", {}, `· from .95 on: read it · below .5: do not · –: no weight above ε · ε = ${epsilon}`));
}

export function overviewView(source, stack) {
  const about = source.manifest.quantities;
  const quantity = about[state.quantity] ? state.quantity : "certain";
  const info = h("p", { class: "grid-info", "aria-live": "polite" }, about[quantity].about, about[quantity].verdict ? (source.live ? " ε can be set beside the text." : [" ε is set with ", h("code", {}, "epsilon="), " of whence.report, ", h("code", {}, "--epsilon"), " of whence look."]) : "");
  const body = h("div", {});
  const pick = (layer, head) => go({ view: "head", stack: stack.name, layer, head, query: "" }, { push: true });
  const hover = (layer, head) => {
    const i = stack.layers.indexOf(layer), j = stack.heads.indexOf(head);
    const value = stack.grid[quantity][i][j];
    info.textContent = `Layer ${layer}, head ${head}: ${about[quantity].title.toLowerCase()} ${quantity === "free" ? value : number(value)}. ${stack.verdict.sentences[i][j]} Open it with a click or Enter.`;
  };
  const scale = gridLegend(about[quantity], stack.verdict.epsilon);
  replace(body,
    segmented("Colour the heads by", Object.entries(about).map(([k, v]) => [k, v.title]), quantity, (k) => go({ quantity: k })),
    scroller("grid of heads", headGrid({ stack, quantity, about: about[quantity], onpick: pick, onhover: hover, chosen: null })),
    scale, info);
  const grid = card("Every head", "heads", body, {
    csv: () => [["layer", "head", ...Object.keys(about)], ...stack.layers.flatMap((layer, i) => stack.heads.map((head, j) => [layer, head, ...Object.keys(about).map((k) => stack.grid[k][i][j])]))],
  });
  const keys = stack.key_tokens ?? stack.tokens;
  const worst = stack.worst;
  const count = (n) => ["", "One head", "Two heads", "Three heads"][n] ?? "Heads";
  const readable = stack.best.length ? listed(stack, stack.best, "best")
    : h("p", {}, `None: in no head are 95 % of the rows with a weight above ${stack.verdict.epsilon} certain.`);
  const lists = h("div", { class: worst.length ? "columns" : "columns single all-fine" },
    worst.length ? card(`${count(worst.length)} you should not read`, "do-not-read", listed(stack, worst, "worst"), { csv: () => intervalTable(worst, keys) }) : null,
    card(stack.best.length ? `${count(stack.best.length)} you may read${stack.verdict.readable > stack.best.length ? `, of ${stack.verdict.readable}` : ""}` : "Heads you may read", "may-read", readable, { csv: () => intervalTable(stack.best, keys) }));
  const prediction = source.manifest.prediction;
  return h("div", { class: "view overview" },
    h("div", { class: `findings${worst.length ? "" : " fine"}` }, stack.findings.map((s, i) => h("p", { class: i === 0 ? "first" : "" }, s))),
    prediction ? card(`The model’s ${prediction.output.what}`, "output", outputPicture(prediction.output), { csv: () => outputTable(prediction.output) }) : null,
    hero(stack) ?? plainText(stack), grid, lists);
}
