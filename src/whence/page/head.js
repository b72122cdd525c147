// One head: its attention as computed, as far as it matters, and as it could have been; and one row of it in full.

import { h, number, replace, segmented, choice } from "./dom.js";
import { card } from "./export.js";
import { mapFigure } from "./figure.js";
import { Matrix, cellText, legend } from "./matrix.js";
import { Row } from "./row.js";
import { asNumber, go, note, state } from "./state.js";
import { slider } from "./slide.js";
import { tokenName, tokenText } from "./tokens.js";

const LONG = 400; // tokens: the text is shaded anew when the pointer rests, or every step would be felt

export function chosenHead(stack) {
  const first = stack.worst.find((c) => c.dimension > 0) ?? stack.worst[0] ?? stack.best[0];
  const layer = asNumber(state.layer, stack.layers, first?.layer ?? stack.layers[0]);
  const head = asNumber(state.head, stack.heads, state.layer === "" && first ? first.head : stack.heads[0]);
  const rows = stack.tokens.text.map((_, i) => i);
  const listed = [...stack.worst, ...stack.best, ...(stack.witnesses ?? [])].find((c) => c.layer === layer && c.head === head);
  const query = asNumber(state.query, rows, listed?.query ?? Math.min(1, rows.length - 1));
  return { layer, head, query };
}

function same(entry, { layer, head, query }) {
  return entry.layer === layer && entry.head === head && entry.query === query;
}

// A map that was stopped on its way: some rows as far as the exact programs go, the others from a short search.
function mixed(exact) {
  if (!exact) return "";
  const [rows, places] = exact.shape;
  let solved = 0;
  for (let q = 0; q < rows; q++) solved += exact.q[q * places] ? 1 : 0;
  return solved === 0 || solved === rows ? "" : `; the time was up after ${solved} of ${rows} rows, the rest is from a short search`;
}

function precise(block, array, place) {
  const { keys } = block.arrays;
  const name = { raw: "weight", effective: "effective_weight", alternative: "alternative_weight" }[array];
  if (block.arrays[name]) for (let j = 0; j < keys.shape[1]; j++) if (keys.q[place.q * keys.shape[1] + j] === place.k) return number(block.arrays[name].at(place.q, j), 4);
  const found = block.arrays[array];
  return found ? `≈ ${number(found.at(place.q, place.k), 3)}` : "–";
}

export class HeadView {
  constructor(source, stack) {
    this.source = source;
    this.stack = stack;
    this.keys = stack.key_tokens ?? stack.tokens;
    this.hovered = null;
    this.bar = h("div", { class: "controls" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.legendHolder = h("div", {});
    const hover = (place) => this.hover(place);
    const pick = (place) => go({ query: place.q });
    const common = { tokens: stack.tokens, keys: this.keys, onhover: hover, onpick: pick };
    this.maps = {
      raw: new Matrix({ title: "Raw", about: "as the model computed it", ...common }),
      effective: new Matrix({ title: "Effective", about: "the part that the head output depends on", ...common }),
      alternative: new Matrix({ title: "Alternative", about: "another map with the same output", ...common }),
    };
    this.text = tokenText({ tokens: stack.tokens, label: "Choose the row: the token that attends", onpick: (i) => go({ query: i }), onhover: (i) => this.hover(i < 0 ? null : { q: i, k: -1 }) });
    this.row = new Row(stack, { live: Boolean(source.live), onpick: (i) => go({ query: i }) });
    this.slideHolder = h("div", {});
    this.maps.raw.frame.dataset.map = "raw";
    const pictures = card("Attention maps", "attention-maps", h("div", {}, this.bar,
      this.mapsHolder = h("div", { class: "maps" }, Object.values(this.maps).map((m) => m.el)), this.legendHolder, this.readout), { figure: () => this.figure() });
    this.rowCard = card("One row", "row", h("div", {}, h("p", { class: "hint" }, "Pick the token that attends; rows of the maps can be clicked too."), this.text, this.row.el), { csv: () => this.row.csv() });
    this.slideCard = card("Move it, and watch the output", "alternative-row", this.slideHolder, { csv: () => this.slide?.csv() ?? [["this row has no alternative here"]] });
    this.el = h("div", { class: "view head" }, pictures, this.rowCard, this.slideCard);
    this.live = new Map();
  }

  controls() {
    const { stack } = this, { layer, head } = this.place;
    const step = (by) => {
      const all = stack.layers.flatMap((l) => stack.heads.map((k) => [l, k]));
      const at = all.findIndex(([l, k]) => l === layer && k === head);
      const next = all[(at + by + all.length) % all.length];
      go({ layer: next[0], head: next[1], query: "" });
    };
    this.step = step;
    replace(this.bar,
      choice("Layer", stack.layers.map((l) => [l, l]), layer, (v) => go({ layer: v, head, query: "" })),
      choice("Head", stack.heads.map((k) => [k, k]), head, (v) => go({ layer, head: v, query: "" })),
      h("span", { class: "stepper no-export" },
        h("button", { type: "button", class: "quiet", "aria-label": "Previous head", title: "Previous head ( [ )", onclick: () => step(-1) }, "‹"),
        h("button", { type: "button", class: "quiet", "aria-label": "Next head", title: "Next head ( ] )", onclick: () => step(1) }, "›")),
      segmented("Which maps", [["", "all maps"], ...Object.entries(this.maps).map(([name, m]) => [name, m.title.textContent.toLowerCase()])], state.map in this.maps ? state.map : "", (v) => go({ map: v })),
      segmented("Colour scale", [["root", "shades: square root"], ["linear", "linear"]], state.curve === "linear" ? "linear" : "root", (v) => go({ curve: v })),
      h("span", { class: "facts" }, this.facts()));
  }

  facts() {
    const { stack } = this, { layer, head } = this.place;
    const i = stack.layers.indexOf(layer), j = stack.heads.indexOf(head);
    const free = stack.grid.free[i][j];
    return free === 0 ? "every row of this head is the only one with its output" : `${stack.verdict.names[i][j]} · up to ${free} free directions · r raw–effective ${number(stack.grid.r[i][j], 2)}`;
  }

  async update() {
    const before = this.place;
    this.place = chosenHead(this.stack);
    const { layer, head, query } = this.place;
    note({ layer, head, query });
    const moved = !before || before.layer !== layer || before.head !== head || this.curve !== state.curve || this.painted !== document.documentElement.dataset.theme;
    if (!before || before.layer !== layer || before.head !== head || this.curve !== state.curve || this.alone !== state.map) this.controls();
    [this.curve, this.alone] = [state.curve, state.map];
    const alone = state.map in this.maps;
    this.mapsHolder.classList.toggle("alone", alone);
    for (const [name, map] of Object.entries(this.maps)) map.el.hidden = alone && name !== state.map;
    this.painted = document.documentElement.dataset.theme;
    if (moved) {
      const key = `head/${this.stack.name}/${layer}/${head}`;
      this.el.setAttribute("aria-busy", "true");
      let block = null, problem = null;
      try { block = await this.source.block(key); } catch (error) { problem = error.message; }
      if (this.place.layer !== layer || this.place.head !== head) return;
      this.block = block;
      this.drawMaps(problem);
      this.el.removeAttribute("aria-busy");
    }
    this.drawRow();
  }

  drawMaps(problem) {
    const { block } = this, { layer, head } = this.place;
    const arrays = block?.arrays ?? {};
    const shown = [arrays.raw, arrays.effective, arrays.alternative].filter(Boolean);
    // In a long text a few weights are hundreds of times the others: the scale ends where all but one in a thousand do.
    const largest = Math.max(1e-6, ...shown.map((a) => a.largest));
    const max = arrays.raw && arrays.raw.q.length > 128 ** 2 ? Math.min(largest, Math.max(1e-6, arrays.raw.quantile(0.001))) : largest;
    const negative = shown.some((a) => a.q instanceof Int8Array || a.q instanceof Int16Array);
    const unique = this.stack.grid.free[this.stack.layers.indexOf(layer)][this.stack.heads.indexOf(head)] === 0;
    const searched = arrays.searched ? (q) => Boolean(arrays.searched.q[q]) : () => true;
    const rows = this.stack.tokens.text.length;
    this.scale = { max, negative, clipped: max < largest };
    const missing = problem ?? "Not in this report; save it with detail=\"standard\" or use whence serve.";
    for (const [name, map] of Object.entries(this.maps)) {
      map.set(name === "alternative" && block?.searched === 0 ? null : arrays[name] ?? null, {
        shape: [this.stack.tokens.text.length, this.keys.text.length],
        max, curve: state.curve === "linear" ? "linear" : "root",
        label: `${map.title.textContent} attention of layer ${layer}, head ${head}: ${this.stack.tokens.text.length} rows (queries) by ${this.keys.text.length} columns (keys). Arrow keys move, Enter picks the row.`,
        unsearched: name === "alternative" && arrays.searched && block.searched < rows ? (q) => !searched(q) : null,
        empty: !block ? missing : name === "alternative" ? (unique ? "There is none: every row is the only one with its output." : block.searched === 0 ? "The time was up before any row was searched." : "Not computed for this head in this report.") : "",
      });
    }
    this.maps.alternative.about.textContent = block?.moved === undefined ? "another map with the same output"
      : !block.searched ? "another map with the same output" : block.searched >= rows ? `the same output; ${number(block.moved, 2)} of a row moved on average${mixed(arrays.exact)}`
        : `the time was up after ${block.searched} of ${rows} rows (${number(block.moved, 2)} of each moved on average); grey rows were not searched`;
    replace(this.legendHolder, shown.length ? legend(max, state.curve === "linear" ? "linear" : "root", negative, max < largest) : "");
    this.hover(null);
  }

  figure() {
    const { layer, head } = this.place;
    const shown = Object.entries(this.maps).filter(([, m]) => m.array && !m.el.hidden);
    return mapFigure({
      maps: shown.map(([, m]) => ({ title: m.title.textContent, about: m.about.textContent, array: m.array, unsearched: m.unsearched })),
      tokens: this.stack.tokens, keys: this.keys, ...this.scale, curve: state.curve === "linear" ? "linear" : "root",
      caption: `${this.source.manifest.model}, layer ${layer}, head ${head}`,
    });
  }

  // Whatever is pointed at between two frames, the last of it is drawn, once.
  hover(place) {
    this.pending = { place };
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.point(this.pending.place); });
  }

  point(place) {
    const where = { q: place?.q ?? -1, k: place?.k ?? -1, chosen: this.place.query };
    for (const map of Object.values(this.maps)) map.cross(where);
    if (!this.block) { this.readout.textContent = ""; return; }
    this.readout.textContent = place && place.k >= 0
      ? `${cellText(this.stack.tokens, this.keys, place)}: raw ${precise(this.block, "raw", place)}, effective ${precise(this.block, "effective", place)}${this.block.arrays.alternative ? `, alternative ${this.maps.alternative.unsearched?.(place.q) ? "not searched" : precise(this.block, "alternative", place)}` : ""}`
      : "Rows attend, columns are attended to. Point at a cell, or use the arrow keys.";
    const row = place ? place.q : this.place.query;
    if (this.shown !== row || this.shownBlock !== this.block) this.preview(row);
  }

  // The row that is pointed at, in full, for as long as it is.
  preview(row) {
    this.shown = row;
    this.shownBlock = this.block;
    clearTimeout(this.resting);
    const shade = () => { if (this.stack.key_tokens === null && this.block) this.text.shade(this.block.arrays.raw.row(row), { curve: "root" }); };
    if (this.stack.tokens.text.length > LONG && row !== this.place.query) this.resting = setTimeout(shade, 60); else shade();
    this.drawBars(row);
  }

  certificate(place) {
    return this.live.get(`certify/${place.layer}/${place.head}/${place.query}`) ?? [...this.stack.worst, ...this.stack.best].find((c) => same(c, place));
  }

  witness(place) {
    const asked = this.live.get(`witness/${place.layer}/${place.head}/${place.query}`);
    return asked === undefined ? this.stack.witnesses?.find((w) => same(w, place)) : asked;
  }

  drawRow() {
    this.text.select(this.place.query);
    this.hover(null);
    this.preview(this.place.query);
    this.drawSlide(this.certificate(this.place));
  }

  drawBars(query) {
    const place = { ...this.place, query };
    const certificate = this.certificate(place);
    const ask = this.source.live && this.block && !certificate && query === this.place.query ? this.ask("certify", "Prove the exact intervals", { top: 16 }) : null;
    this.row.set(this.block, place, { certificate, witness: this.witness(place), ask });
  }

  drawSlide(certificate) {
    const { stack, place } = this;
    const witness = this.witness(place);
    const others = (stack.witnesses ?? []).filter((w) => !same(w, place));
    const links = others.length ? h("p", { class: "hint no-export" }, "Rows for which an alternative was put into the model: ", others.map((w, i) => [i ? ", " : "", h("button", { type: "button", class: "link", onclick: () => go({ layer: w.layer, head: w.head, query: w.query }, { push: true }) }, `layer ${w.layer} head ${w.head} ${tokenName(stack.tokens, w.query)}`)])) : null;
    this.slide = null;
    if (witness && witness.row) {
      this.slide = slider({ witness, tokens: stack.tokens, keys: this.keys });
      replace(this.slideHolder, this.slide, links);
      return;
    }
    const { free } = stack.grid;
    const unique = witness === null || certificate?.dimension === 0 || free[stack.layers.indexOf(place.layer)][stack.heads.indexOf(place.head)] === 0;
    replace(this.slideHolder, h("p", {}, unique ? "This row is the only one with its output: there is nothing to move it to." : this.source.live ? "Look for another row with the same output, and put it into the model. " : "For this row no alternative was put into the model.",
      !unique && this.source.live ? this.ask("witness", "Find another row") : ""), links);
  }

  ask(what, label, extra = {}) {
    const { layer, head, query } = this.place;
    const button = h("button", { type: "button", class: "action", onclick: async () => {
      button.disabled = true;
      button.textContent = "Working …";
      try {
        const found = await this.source.live.ask(what, { attention: this.stack.name, layer, head, query, ...extra }, (job) => { button.textContent = `${job.message} …`; });
        this.live.set(`${what}/${layer}/${head}/${query}`, found);
        this.drawRow();
      } catch (error) { button.disabled = false; button.textContent = `${label} (${error.message})`; }
    } }, label);
    return button;
  }
}
