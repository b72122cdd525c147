// Where a hidden token comes from: its shares by input token, and the way they took through the layers.

import { h, number, replace, choice, svg, visible } from "./dom.js";
import { card } from "./export.js";
import { dataTable } from "./chart.js";
import { asNumber, go, note, state } from "./state.js";
import { direction, tokenName, tokenText } from "./tokens.js";

const EDGES = 48, ROW = 50, TOP = 34, BOTTOM = 84, SIDE = 54;

export function usable(manifest) {
  return manifest.mixtures.filter((m) => !m.reason);
}

// Shares from the embeddings to hidden token `i` after layer number `upto` (a place in method.layers), and all masses between.
async function traceBack(source, method, upto, i) {
  const block = async (k) => (await source.block(`mix/${method.name}/${method.layers[k]}`)).arrays.values;
  if (method.origin === "embeddings") {
    const steps = [];
    for (let k = upto; k >= 0; k--) steps.push({ mass: (await block(k)).row(i), edges: [] });
    return { shares: steps[0].mass, steps };
  }
  const n = method.tokens.text.length;
  let mass = new Float64Array(n);
  mass[i] = 1;
  const steps = [{ mass, edges: [] }];
  for (let k = upto; k >= 0; k--) {
    const matrix = await block(k);
    const below = new Float64Array(n);
    let edges = [];
    for (let a = 0; a < n; a++) {
      if (mass[a] < 1e-7) continue;
      for (let b = 0; b < n; b++) {
        const share = mass[a] * matrix.at(a, b);
        below[b] += share;
        if (share > 0.002) edges.push([a, b, share]);
      }
    }
    edges = edges.sort((x, y) => y[2] - x[2]).slice(0, EDGES);
    steps.push({ mass: below, edges });
    mass = below;
  }
  return { shares: mass, steps };
}

function flow(method, found, upto, hidden, W) {
  const inputs = method.input_tokens ?? method.tokens;
  const embeddings = method.origin === "embeddings";
  const { steps, shares } = found;
  const columns = inputs.text.length;
  const step = steps.length > 12 ? Math.max(20, 600 / steps.length) : ROW; // thirty layers still fit on a screen
  const height = TOP + step * (steps.length - 1 || 1) + BOTTOM;
  const rtl = direction(inputs) === "rtl";
  const x = (j) => SIDE + ((rtl ? columns - 1 - j : j) + 0.5) * ((W - 2 * SIDE) / columns);
  const y = (s) => TOP + s * step;
  const root = svg("svg", { viewBox: `0 0 ${W} ${height}`, class: "flow", role: "img", "data-native": true, "aria-label": `Flow from ${tokenName(method.tokens, hidden)} after layer ${method.layers[upto]} back to the input tokens` });
  const names = embeddings ? steps.map((_, s) => `${method.layers[upto - s]}`) : [...steps.slice(0, -1).map((_, s) => `${method.layers[upto - s]}`), "input"];
  names.forEach((name, s) => root.append(svg("text", { x: SIDE - 22, y: y(s) + 4, class: "tick", "text-anchor": "end" }, name), svg("line", { x1: SIDE - 14, x2: W - SIDE, y1: y(s), y2: y(s), class: "gridline" })));
  for (let s = 1; s < steps.length; s++) for (const [a, b, share] of steps[s].edges.slice().reverse()) {
    const [x1, y1, x2, y2] = [x(a), y(s - 1), x(b), y(s)];
    root.append(svg("path", { d: `M${x1},${y1} C${x1},${y1 + step / 2} ${x2},${y2 - step / 2} ${x2},${y2}`, class: "edge", "stroke-width": Math.max(0.5, 14 * share), opacity: Math.min(0.85, 0.15 + 1.6 * share) },
      svg("title", {}, `${tokenName(method.tokens, a)} ← ${tokenName(inputs, b)}: ${number(share)}`)));
  }
  steps.forEach(({ mass }, s) => {
    for (let j = 0; j < mass.length; j++) {
      if (Math.abs(mass[j]) < 0.003) continue;
      root.append(svg("circle", { cx: x(j), cy: y(s), r: Math.max(0.8, 9 * Math.sqrt(Math.abs(mass[j]))), opacity: Math.min(1, 0.25 + 8 * Math.abs(mass[j])), class: mass[j] < 0 ? "node negative" : "node" }, svg("title", {}, `${tokenName(inputs, j)}: ${number(mass[j])}`)));
    }
  });
  const bottom = y(steps.length - 1);
  const order = [...shares].map((v, j) => [v, j]).sort((a, b) => b[0] - a[0]);
  const taken = [];
  for (const [value, j] of order.slice(0, 26)) {
    if (value < 0.004 || taken.some((t) => Math.abs(t - x(j)) < 19)) continue;
    taken.push(x(j));
    root.append(svg("text", { x: 0, y: 0, class: "flow-label", "text-anchor": "end", transform: `translate(${x(j) + 4} ${bottom + 16}) rotate(-48)` }, visible(inputs.text[j])));
  }
  if (!embeddings) root.append(svg("text", { x: x(hidden), y: TOP - 16, class: "flow-label", "text-anchor": "middle" }, visible(method.tokens.text[hidden])));
  return root;
}

// The word that keeps least of itself: the most telling one to begin with.
function leastItself(method) {
  const own = method.own_by_token.at(-1);
  const words = own.map((_, i) => i).filter((i) => method.tokens.kind[i] === "rest" && method.tokens.text[i].length > 3);
  return words.length ? words.reduce((best, i) => (own[i] < own[best] ? i : best)) : Math.min(1, own.length - 1);
}

function overlap(a, b) {
  const sum = (v) => [...v].reduce((x, y) => x + Math.max(0, y), 0) || 1;
  const [s, t] = [sum(a), sum(b)];
  let same = 0;
  for (let i = 0; i < a.length; i++) same += Math.min(Math.max(0, a[i]) / s, Math.max(0, b[i]) / t);
  return same;
}

export class ProvenanceView {
  constructor(source) {
    this.source = source;
    this.bar = h("div", { class: "controls" });
    this.textHolder = h("div", {});
    this.results = h("div", { class: "columns" });
    this.say = h("p", { class: "row-say", "aria-live": "polite" });
    this.el = h("div", { class: "view provenance" },
      card("A hidden token", "hidden-token", h("div", {}, this.bar, h("p", { class: "hint" }, "Pick the position; the shading further down shows what its hidden state is made of."), this.textHolder, this.say)), this.results);
  }

  async update() {
    const methods = usable(this.source.manifest);
    const missing = this.source.manifest.mixtures.filter((m) => m.reason);
    if (!methods.length) {
      replace(this.results, h("p", {}, "No method could follow this model’s hidden states. ", missing.map((m) => `${m.title}: ${m.reason}`).join(" ")));
      return;
    }
    const method = methods.find((m) => m.name === state.method) ?? methods[0];
    const other = state.compare === "none" ? null : methods.find((m) => m.name === state.compare && m !== method) ?? (state.compare === "" ? methods.find((m) => m !== method) ?? null : null);
    const tokens = method.tokens;
    const layer = asNumber(state.at, method.layers, method.layers.at(-1));
    const upto = method.layers.indexOf(layer);
    const hidden = asNumber(state.hidden, tokens.text.map((_, i) => i), leastItself(method));
    note({ method: method.name, at: layer, hidden });
    const titles = methods.map((m) => [m.name, m.title]);
    const extra = (this.source.live?.methods ?? []).filter((m) => !methods.some((k) => k.name === m.name) && !missing.some((k) => k.name === m.name));
    replace(this.bar,
      choice("After layer", method.layers.map((l) => [l, l]), layer, (v) => go({ at: v })),
      choice("Method", titles, method.name, (v) => go({ method: v })),
      choice("Compare with", [["none", "nothing"], ...titles.filter(([k]) => k !== method.name)], other?.name ?? "none", (v) => go({ compare: v })),
      extra.length ? choice("Compute another", [["", "…"], ...extra.map((m) => [m.name, m.title])], "", (v) => v && this.compute(v)) : null);
    if (this.shownTokens !== tokens) {
      this.shownTokens = tokens;
      this.text = tokenText({ tokens, label: "Choose the hidden token", onpick: (i) => go({ hidden: i }) });
      replace(this.textHolder, this.text);
    }
    this.text.select(hidden);
    const ticket = (this.ticket = {});
    const chosen = [method, other].filter(Boolean);
    const found = await Promise.all(chosen.map((m) => traceBack(this.source, m, Math.min(upto, m.layers.length - 1), hidden)));
    if (ticket !== this.ticket) return;
    const most = Math.max(1e-9, ...found.flatMap((f) => [...f.shares].map(Math.abs)));
    replace(this.say, `What ${tokenName(tokens, hidden)} (token ${hidden}) is made of after layer ${layer}: ${number(100 * found[0].shares[hidden + found[0].shares.length - tokens.text.length], 1)} % itself by ${method.title}`,
      other ? `, ${number(100 * found[1].shares[hidden + found[1].shares.length - tokens.text.length], 1)} % by ${other.title}. The two agree on ${number(100 * overlap(found[0].shares, found[1].shares), 0)} % of it.` : ".",
      missing.length ? h("small", {}, " Not available here: ", missing.map((m) => `${m.title} (${m.reason})`).join("; ")) : "");
    this.results.classList.toggle("single", chosen.length === 1);
    replace(this.results, chosen.map((m, k) => this.panel(m, found[k], Math.min(upto, m.layers.length - 1), hidden, most, chosen.length === 1)));
  }

  panel(method, found, upto, hidden, most, wide) {
    const inputs = method.input_tokens ?? method.tokens;
    const text = tokenText({ tokens: inputs, compact: true });
    text.shade([...found.shares], { max: most, curve: "root" });
    const rows = [...found.shares].map((v, j) => [j, v]).sort((a, b) => b[1] - a[1]);
    const table = dataTable(["input", "token", "share"], rows.slice(0, 8).map(([j, v]) => [j, tokenName(inputs, j), v]), 4);
    table.querySelector("table").dataset.method = method.name;
    return card(method.title, `provenance-${method.name}`, h("div", {}, h("p", { class: "hint" }, method.paper), text, table, h("h3", {}, "Through the layers"), flow(method, found, upto, hidden, innerWidth < 760 ? 360 : wide ? 1120 : 560)),
      { csv: () => [["input", "token", "share"], ...rows.map(([j, v]) => [j, inputs.text[j], v])] });
  }

  async compute(name) {
    replace(this.say, `Computing ${name} …`);
    try {
      const entry = await this.source.live.ask("contributions", { method: name }, (job) => replace(this.say, `${job.message}: ${number(100 * job.progress, 0)} % …`));
      this.source.manifest.mixtures.push(entry);
      go({ method: name });
    } catch (error) { replace(this.say, `${name}: ${error.message}`); }
  }
}
