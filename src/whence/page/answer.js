// A prompt and its answer: what each token of the answer came from, by token, sentence or document.

import { choice, h, number, replace, scroller, segmented, svg, visible } from "./dom.js";
import { card } from "./export.js";
import { dataTable } from "./chart.js";
import { mapFigure } from "./figure.js";
import { Matrix, legend } from "./matrix.js";
import { spearman } from "./rank.js";
import { asNumber, go, state } from "./state.js";
import { tokenName, tokenText } from "./tokens.js";

const UNITS = [["token", "Tokens"], ["sentence", "Sentences"], ["document", "Documents"]];
const LISTED = 12;

// Some tokens of a list of tokens, as a list of their own.
function slice(tokens, from, to) {
  return Object.fromEntries(Object.entries(tokens).map(([name, values]) => [name, values.slice(from, to)]));
}

// Units look like tokens to a map: their names are labels.
function named(units) {
  const none = units.map(() => false);
  return { text: units.map((u) => u.name), raw: units.map((u) => u.name), special: none, glued: none, kind: units.map(() => "rest"), word: units.map(() => null) };
}

// Digits enough to tell scores apart, whatever their size.
function digitsFor(most) {
  return Math.max(1, Math.min(8, 2 - Math.floor(Math.log10(Math.max(most, 1e-9)))));
}

// The scores of one token of the answer, or the mean over all of them.
function scores(array, at) {
  const [rows, columns] = array.shape;
  if (at >= 0) return [...array.row(at)];
  return Array.from({ length: columns }, (_, j) => { let sum = 0; for (let t = 0; t < rows; t++) sum += array.at(t, j); return sum / rows; });
}

// A bar from the middle (signed) or from the left.
function bar(value, most, signed) {
  const share = Math.max(-1, Math.min(1, value / most)) * (signed ? 50 : 100), from = signed ? 50 : 0;
  return svg("svg", { class: "bar-picture", width: "100%", height: 14, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: "100%", y1: 7, y2: 7, class: "bar-track" }),
    svg("rect", { x: `${Math.min(from, from + share)}%`, y: 2, width: `${Math.abs(share)}%`, height: 10, class: value < 0 ? "bar against" : "bar" }),
    signed ? svg("line", { x1: "50%", x2: "50%", y1: 0, y2: 14, class: "bar-mark" }) : null);
}

export class AnswerView {
  constructor(source) {
    this.source = source;
    this.answer = source.manifest.answer;
    const { tokens } = this.answer;
    this.text = tokenText({ tokens, label: "Choose a token of the answer", onpick: (i) => go({ answer: i }) });
    this.whole = h("button", { type: "button", class: "quiet whole", onclick: () => go({ answer: "" }) }, "The whole answer");
    this.say = h("p", { class: "row-say", "aria-live": "polite" });
    this.bar = h("div", { class: "controls no-export" });
    this.result = h("div", { class: "view" });
    this.el = h("div", { class: "view answer" },
      card("The answer", "answer", h("div", {}, h("p", { class: "hint" }, "Pick a token (arrows move), or take ", this.whole, "."), this.text, this.say), { csv: () => this.choices() }), this.result);
  }

  choices() {
    const { tokens, choices } = this.answer;
    return [["position", "token", "probability", "rank", "the model’s first choice", "its probability"], ...choices.map((c, i) => [i, tokens.text[i], c.probability, c.rank, c.first, c.first_probability])];
  }

  // What was said about the token: how likely it was, and what the model would have said.
  likely(at) {
    const { tokens, choices } = this.answer;
    if (at < 0) {
      const own = choices.filter((c) => c.rank === 1).length;
      return `The whole answer: the mean over its ${tokens.text.length} tokens. ${own === choices.length ? "All of them are" : `${own} of them ${own === 1 ? "is" : "are"}`} the model’s own first choice.`;
    }
    const { probability, rank, first, first_probability: best } = choices[at];
    return `${tokenName(tokens, at)} had probability ${number(probability)}${rank === 1 ? ": the model’s first choice." : `, number ${rank} of all tokens; the model’s first choice was ‘${visible(first)}’ (${number(best)}).`}`;
  }

  async update() {
    const { tokens, methods } = this.answer;
    const known = methods.filter((m) => !m.reason), missing = methods.filter((m) => m.reason);
    const at = asNumber(state.answer, tokens.text.map((_, i) => i), -1);
    this.text.select(at);
    this.whole.setAttribute("aria-pressed", at < 0 ? "true" : "false");
    const lacking = missing.length ? h("p", { class: "hint" }, "Not available here: ", missing.map((m) => `${m.title} (${m.reason})`).join("; ")) : null;
    replace(this.say, this.likely(at));
    if (!known.length) { replace(this.result, lacking); return; }
    const method = known.find((m) => m.name === state.explain) ?? known[0];
    const ticket = (this.ticket = {});
    const found = await Promise.all(known.map((m) => this.source.block(`answer/${m.name}`)));
    if (ticket !== this.ticket) return;
    const block = found[known.indexOf(method)];
    const offered = UNITS.filter(([unit]) => unit === "token" || block.arrays[unit]);
    const unit = offered.some(([name]) => name === state.unit) ? state.unit : "token";
    this.controls(known, method, offered, unit);
    const array = unit === "token" ? block.arrays.values : block.arrays[unit];
    const view = { method, unit, array, at, inputs: method.inputs ?? this.answer.inputs, units: unit === "token" ? null : this.answer.units[unit] };
    replace(this.result, this.origin(view), lacking, this.map(view), h("div", { class: "columns" }, this.agreement(known, found, view), this.table(view)));
  }

  controls(known, method, offered, unit) {
    const live = (this.source.live?.attributions ?? []).filter((m) => !this.answer.methods.some((k) => k.name === m.name));
    replace(this.bar,
      choice("Method", known.map((m) => [m.name, m.title]), method.name, (v) => go({ explain: v })),
      offered.length > 1 ? segmented("Gathered by", offered, unit, (v) => go({ unit: v })) : null,
      live.length ? choice("Compute another", [["", "…"], ...live.map((m) => [m.name, m.title])], "", (v) => v && this.compute(v)) : null);
  }

  async compute(method) {
    replace(this.say, `Computing ${method} …`);
    try {
      this.answer.methods.push(await this.source.live.ask("answer", { method }));
      go({ explain: method });
    } catch (error) { replace(this.say, `${method}: ${error.message}`); }
  }

  subject(at) {
    return at < 0 ? "the answer" : tokenName(this.answer.tokens, at);
  }

  // The prompt, shaded, and what of it counts most.
  origin({ method, unit, array, at, inputs, units }) {
    const values = scores(array, at), { prompt } = this.answer;
    const most = values.reduce((m, v) => Math.max(m, Math.abs(v)), 1e-12), digits = digitsFor(most);
    const isAnswer = (i) => (units ? units[i].inputs.length > 0 && units[i].inputs.every((j) => j >= prompt) : i >= prompt);
    const size = (keep) => values.reduce((s, v, i) => s + (keep(i) ? Math.abs(v) : 0), 0);
    const all = size(() => true) || 1, answered = size(isAnswer);
    const meaning = method.signed ? "Blue speaks for it, orange against it; the stronger, the more." : "The darker, the more of it comes from there.";
    const share = answered > 0 ? ` ${number(100 * (1 - answered / all), 0)} % of ${method.signed ? "all scores, by size," : "it"} is in the ${method.inputs ? "source" : "prompt"}, ${number((100 * answered) / all, 0)} % in the answer so far.` : "";
    const parts = [];
    if (!units) {
      const before = tokenText({ tokens: slice(inputs, 0, prompt) });
      before.shade(values.slice(0, prompt), { max: most, curve: "root", digits });
      parts.push(h("h3", {}, this.source.manifest.prompt_length === null ? "Source" : "Prompt"), before);
      const last = at < 0 ? inputs.text.length : Math.min(inputs.text.length, prompt + at + (method.inputs ? 1 : 0));
      if (inputs.text.length > prompt && last > prompt) {
        const after = tokenText({ tokens: slice(inputs, prompt, last) });
        after.shade(values.slice(prompt, last), { max: most, curve: "root", digits });
        parts.push(h("h3", {}, "Answer so far"), after);
      }
    }
    const ranked = values.map((v, i) => [i, v]).filter(([, v]) => v !== 0).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const listed = units ? values.map((v, i) => [i, v]) : ranked.slice(0, LISTED);
    const name = (i) => (units ? units[i].name : tokenName(inputs, i));
    const rows = listed.map(([i, v]) => h("tr", {}, h("th", { scope: "row", class: units ? "unit-name" : "bar-token" }, h("bdi", {}, visible(name(i))), " ", units ? (isAnswer(i) && !name(i).startsWith("(") ? h("small", {}, "answer so far") : null) : h("small", {}, i)),
      h("td", { class: "bar-cell" }, bar(v, most, method.signed)), h("td", { class: "num weight" }, number(v, digits))));
    parts.push(units ? null : h("h3", {}, "What counts most"), scroller("scores", h("table", { class: `bars scores${units ? " by-unit" : ""}`, "data-method": method.name },
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: units ? "unit-name" : "bar-token" }, unit), h("th", { scope: "col", class: "bar-cell" }, h("span", { class: "hidden" }, "as a bar")), h("th", { scope: "col", class: "num weight" }, "score"))), h("tbody", {}, rows))));
    return card(`Where ${this.subject(at)} comes from`, "answer-origin", h("div", {}, this.bar, h("p", { class: "hint" }, `${method.title}${method.paper ? `, ${method.paper}` : ""}. ${meaning}${share}`), parts),
      { csv: () => [[unit === "token" ? "position" : "number", unit, "score"], ...values.map((v, i) => [i, units ? units[i].name : inputs.text[i], v])] });
  }

  map({ method, array, at, inputs, units }) {
    const { tokens } = this.answer, keys = units ? named(units) : inputs;
    const [rows, columns] = array.shape;
    const most = Math.max(array.quantile(units ? 0 : 0.002), 1e-9), clipped = most < array.largest;
    const negative = array.q.some((q) => q < 0);
    const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a cell, or move with the arrows.");
    const digits = digitsFor(array.largest);
    const matrix = new Matrix({ title: "The whole answer", about: "", tokens, keys, onhover: (place) => {
      matrix.cross(place ? { ...place, chosen: at } : { q: -1, k: -1, chosen: at });
      replace(readout, place ? `${tokenName(tokens, place.q)} from ${units ? `“${visible(keys.text[place.k])}”` : tokenName(keys, place.k)}: ${number(array.at(place.q, place.k), digits)}` : "Point at a cell, or move with the arrows.");
    }, onpick: (place) => go({ answer: place.q }) });
    matrix.title.remove();
    matrix.about.remove();
    matrix.frame.setAttribute("aria-roledescription", "map of scores");
    matrix.set(array, { max: most, curve: "root", label: `Scores of ${columns} inputs (across) for ${rows} tokens of the answer (downwards)`, shape: [1, 1] });
    Object.assign(matrix.frame.style, { aspectRatio: "auto", height: `${Math.max(90, Math.min(620, 24 * rows))}px` }); // rows as high as a line of text
    matrix.cross({ q: -1, k: -1, chosen: at });
    const figure = () => mapFigure({
      maps: [{ title: `Where the answer comes from: ${method.title}`, about: "Every token of the answer (downwards) and its inputs (across).", array }], tokens, keys, max: most, curve: "root", negative, clipped,
      caption: `${this.source.manifest.model}`, axes: "rows are the answer, columns what it comes from", what: "score", low: true,
    });
    return card("The whole answer at once", "answer-map", h("div", {}, h("p", { class: "hint" }, "Each row is a token of the answer, each column what it may come from. A row is chosen with a click or the Enter key."), matrix.el, legend(most, "root", negative, clipped, "score"), readout),
      { figure, csv: () => [["token", ...keys.text], ...tokens.text.map((t, i) => [t, ...array.row(i)])] });
  }

  agreement(known, found, { unit, at, inputs }) {
    const alike = known.map((m, i) => [m, unit === "token" ? found[i].arrays.values : found[i].arrays[unit]]).filter(([m, a]) => a && (m.inputs ?? this.answer.inputs).text.length === inputs.text.length);
    const values = alike.map(([, a]) => scores(a, at));
    const rows = alike.map(([m], i) => [m.title, ...values.map((v) => spearman(values[i], v))]);
    const head = ["Spearman ρ", ...alike.map(([m]) => m.title)];
    return card("Do the methods agree?", "answer-agreement", h("div", {}, h("p", { class: "hint" }, `Over the ${unit}s, for ${this.subject(at)}. They ask different questions: agreement is no proof, disagreement is a warning.`), dataTable(head, rows, 2)), { csv: () => [head, ...rows] });
  }

  table({ method, array, inputs, units }) {
    const { tokens, choices } = this.answer;
    const name = (i) => (units ? units[i].name : inputs.text[i]);
    const short = (text) => { const seen = visible(text); return units ? `“${seen.length > 40 ? `${seen.slice(0, 39)}…` : seen}”` : seen; };
    const digits = digitsFor(array.largest);
    const rows = tokens.text.map((_, t) => {
      const top = [...array.row(t)].map((v, i) => [i, v]).filter(([, v]) => v !== 0).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 3);
      return [t, tokenName(tokens, t), choices[t].probability, top.map(([i, v]) => `${short(name(i))} ${number(v, digits)}`).join(units ? "; " : ", ") || "–"];
    });
    const head = ["", "token", "probability", `comes most from (${method.title})`];
    const table = dataTable(head, rows);
    table.querySelector("table").classList.add("run-table", "wide", "by-token");
    return card("Token by token", "answer-table", h("div", { class: "tall" }, table), { csv: () => [["position", ...head.slice(1)], ...rows] });
  }
}
