// An attention map on a canvas: thousands of cells without an element for each, one crosshair over all of them.

import { h, number, replace } from "./dom.js";
import { colour, css, theme } from "./colour.js";
import { tokenLabel, tokenName } from "./tokens.js";

const INSET = 1;
const LABEL = 11; // pixels from one token to the next along a side

// Where a quantised cell lies on the colour scale, for every integer it can be.
export function lookup(array, max, curve, scale) {
  const words = array.q.BYTES_PER_ELEMENT === 1 ? 256 : 65536;
  const signed = array.q instanceof Int8Array || array.q instanceof Int16Array;
  const table = new Uint32Array(words);
  for (let i = 0; i < words; i++) {
    const q = signed && i >= words / 2 ? i - words : i;
    const [r, g, b] = colour(array.value(q) / max, curve, scale);
    table[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return { table, mask: words - 1 };
}

export class Matrix {
  constructor({ title, about, tokens, keys, onhover, onpick }) {
    [this.tokens, this.keys] = [tokens, keys];
    this.onhover = onhover;
    this.onpick = onpick;
    this.base = h("canvas", { class: "base", "aria-hidden": "true" });
    this.marks = Object.fromEntries(["chosen", "row", "column", "cell"].map((name) => [name, h("i", { class: `cross ${name}`, "aria-hidden": "true" })]));
    this.note = h("p", { class: "matrix-note" });
    this.frame = h("div", { class: "matrix-frame", tabindex: "0", role: "group", "aria-roledescription": "attention map", "aria-label": title },
      this.base, Object.values(this.marks), this.note);
    this.title = h("h3", {}, title);
    this.about = h("p", { class: "about" }, about);
    this.sides = { rows: h("div", { class: "side rows", "aria-hidden": "true" }), columns: h("div", { class: "side columns", "aria-hidden": "true" }) };
    this.named = { rows: h("b", { class: "named rows", "aria-hidden": "true" }), columns: h("b", { class: "named columns", "aria-hidden": "true" }) };
    this.el = h("figure", { class: "matrix" }, this.title, this.about, h("div", { class: "matrix-plot" }, this.sides.rows, this.frame, this.sides.columns));
    this.place = { q: 0, k: 0 };
    this.frame.addEventListener("pointermove", (event) => this.pointed(event, this.onhover));
    this.frame.addEventListener("pointerleave", () => this.onhover(null));
    this.frame.addEventListener("click", (event) => this.pointed(event, this.onpick));
    this.frame.addEventListener("keydown", (event) => this.keyed(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  pointed(event, act) {
    if (!this.array) return;
    const box = this.frame.getBoundingClientRect();
    const [rows, columns] = this.array.shape;
    const q = Math.floor(((event.clientY - box.top - INSET) / (box.height - 2 * INSET)) * rows);
    const k = Math.floor(((event.clientX - box.left - INSET) / (box.width - 2 * INSET)) * columns);
    if (q >= 0 && q < rows && k >= 0 && k < columns) { this.place = { q, k }; act({ q, k }); }
  }

  keyed(event) {
    if (!this.array) return;
    const [rows, columns] = this.array.shape;
    const page = event.shiftKey ? 10 : 1;
    const step = { ArrowUp: [-page, 0], ArrowDown: [page, 0], ArrowLeft: [0, -page], ArrowRight: [0, page], Home: [0, -columns], End: [0, columns], PageUp: [-10, 0], PageDown: [10, 0] }[event.key];
    if (step) {
      this.place = {
        q: Math.max(0, Math.min(rows - 1, this.place.q + step[0])),
        k: Math.max(0, Math.min(columns - 1, this.place.k + step[1])),
      };
      this.onhover(this.place);
    } else if (event.key === "Enter" || event.key === " ") this.onpick(this.place);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // `unsearched`: says of a row whether the time was up before it was reached; it is greyed.
  set(array, { max, curve, label, empty, shape, unsearched }) {
    this.array = array;
    this.unsearched = unsearched;
    this.max = max;
    this.curve = curve;
    this.note.textContent = array ? "" : empty ?? "";
    this.frame.classList.toggle("empty", !array);
    this.frame.setAttribute("aria-label", label);
    this.frame.style.aspectRatio = `${shape[1]} / ${shape[0]}`;
    this.draw();
  }

  // One device pixel shows the largest of the cells that fall on it: nothing strong disappears.
  draw() {
    const box = this.frame.getBoundingClientRect();
    const scale = devicePixelRatio || 1;
    const width = Math.max(1, Math.round((box.width - 2) * scale)), height = Math.max(1, Math.round((box.height - 2) * scale));
    if (this.base.width !== width || this.base.height !== height) { this.base.width = width; this.base.height = height; }
    this.size = [box.width - 2, box.height - 2];
    const context = this.base.getContext("2d");
    context.clearRect(0, 0, width, height);
    this.el.classList.toggle("bare", !this.array);
    if (!this.array) { this.cross(null); return; }
    const [rows, columns] = this.array.shape;
    const { table, mask } = lookup(this.array, this.max, this.curve);
    const wide = Math.min(columns, width), tall = Math.min(rows, height);
    const image = new ImageData(wide, tall);
    const pixels = new Uint32Array(image.data.buffer);
    const q = this.array.q;
    if (wide === columns && tall === rows) {
      for (let i = 0; i < pixels.length; i++) pixels[i] = table[q[i] & mask];
    } else {
      for (let y = 0; y < tall; y++) {
        const top = Math.floor((y * rows) / tall), bottom = Math.max(top + 1, Math.floor(((y + 1) * rows) / tall));
        for (let x = 0; x < wide; x++) {
          const left = Math.floor((x * columns) / wide), right = Math.max(left + 1, Math.floor(((x + 1) * columns) / wide));
          let best = 0;
          for (let r = top; r < bottom; r++) for (let c = left; c < right; c++) {
            const v = q[r * columns + c];
            if (Math.abs(v) > Math.abs(best)) best = v;
          }
          pixels[y * wide + x] = table[best & mask];
        }
      }
    }
    const sheet = new OffscreenCanvas(wide, tall);
    sheet.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, 0, 0, width, height);
    if (this.unsearched) {
      context.fillStyle = theme() === "dark" ? "#3a3e45" : "#c9c9c9";
      for (let q = 0; q < rows; q++) if (this.unsearched(q)) context.fillRect(0, Math.floor((q * height) / rows), width, Math.ceil(height / rows));
    }
    this.label();
    this.cross(this.crossed);
  }

  // As many tokens along each side as can be read; the one that is pointed at is named in full.
  label() {
    const [rows, columns] = this.array.shape;
    const key = [rows, columns, ...this.size].join();
    if (this.labelled === key) return;
    this.labelled = key;
    for (const [side, tokens, count, length] of [["rows", this.tokens, rows, this.size[1]], ["columns", this.keys, columns, this.size[0]]]) {
      const cell = length / count, every = Math.max(1, Math.ceil(LABEL / cell));
      const names = [];
      for (let i = 0; i < count; i += every) names.push(h("span", { style: { [side === "rows" ? "top" : "left"]: `${((i + 0.5) * cell + INSET).toFixed(1)}px` } }, tokenLabel(tokens, i)));
      replace(this.sides[side], names, this.named[side]);
    }
  }

  // {q, k, chosen}: the hovered cell and the chosen row. Four elements that are moved, so that nothing is drawn again.
  cross(where) {
    this.crossed = where;
    const { chosen, row, column, cell } = this.marks;
    const there = Boolean(where && this.array);
    const [q, k] = there ? [where.q, where.k] : [-1, -1];
    const [rows, columns] = this.array?.shape ?? [1, 1];
    const [width, height] = this.size ?? [0, 0];
    const tall = height / rows, wide = width / columns;
    const put = (mark, on, x, y, w, t) => {
      mark.style.visibility = on ? "visible" : "hidden";
      if (on) Object.assign(mark.style, { transform: `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`, width: `${w.toFixed(1)}px`, height: `${t.toFixed(1)}px` });
    };
    const band = Math.max(tall, 3), side = Math.max(wide, 6), high = Math.max(tall, 6);
    const x = (k + 0.5) * wide, y = (q + 0.5) * tall;
    put(chosen, there && where.chosen >= 0, 0, (where?.chosen + 0.5) * tall - band / 2, width, band);
    put(row, q >= 0 && (k >= 0 || q !== where.chosen), 0, y - 0.5, width, 1);
    put(column, q >= 0 && k >= 0, x - 0.5, 0, 1, height);
    put(cell, q >= 0 && k >= 0, x - side / 2, y - high / 2, side, high);
    const name = (element, on, tokens, i, at, axis) => {
      element.style.visibility = on ? "visible" : "hidden";
      if (!on) return;
      element.textContent = tokenLabel(tokens, i);
      element.style[axis] = `${at.toFixed(1)}px`;
    };
    name(this.named.rows, q >= 0 && there, this.tokens, q, y, "top");
    name(this.named.columns, k >= 0 && there, this.keys, k, x, "left");
    if (q >= 0 && k >= 0) this.place = { q, k };
  }
}

// The one scale of all maps, with its ticks where the values are.
export function legend(max, curve, negative, clipped, what = "weight") {
  const from = negative ? -max : 0;
  const count = 160;
  const bar = h("div", { class: "legend-bar", "aria-hidden": "true" });
  for (let i = 0; i < count; i++) {
    const value = from + ((max - from) * (i + 0.5)) / count;
    bar.append(h("i", { style: { backgroundColor: css(colour(value / max, curve)) } }));
  }
  const marks = negative ? [-max, 0, max] : [0, max / 2, max];
  return h("div", { class: "legend" }, h("span", { class: "legend-name" }, what), h("div", { class: "legend-body" }, bar,
    h("div", { class: "legend-marks" }, marks.map((m) => h("span", {}, (clipped && m === max ? "≥ " : clipped && m === -max ? "≤ " : "") + number(m, clipped ? 3 : 2))))));
}

export function cellText(tokens, keys, { q, k }) {
  return `from ${tokenName(tokens, q)} (${q}) to ${tokenName(keys, k)} (${k})`;
}
