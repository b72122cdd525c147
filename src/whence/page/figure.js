// Attention maps as a figure for a paper: light, with the tokens along both sides, in SVG that every program can read.

import { h, number, svg } from "./dom.js";
import { colour, css } from "./colour.js";
import { lookup } from "./matrix.js";
import { tokenLabel } from "./tokens.js";

const FONT = "Helvetica, Arial, sans-serif", SIZE = 8, GUTTER = 64, GAP = 26, TOP = 54;

// A picture of whole pixels for each cell, so that no program can blur it.
function picture(array, { max, curve, unsearched }, side) {
  const [rows, columns] = array.shape;
  const { table, mask } = lookup(array, max, curve, "light");
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = unsearched?.(Math.floor(i / columns)) ? 0xffc8c8c8 : table[array.q[i] & mask];
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d").putImageData(image, 0, 0);
  const times = Math.max(1, Math.ceil((2 * side) / Math.max(rows, columns)));
  const large = h("canvas", { width: columns * times, height: rows * times });
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, large.width, large.height);
  return large.toDataURL("image/png");
}

function text(x, y, words, { size = SIZE, anchor = "start", turn, weight, fill = "#1b1d21" } = {}) {
  return svg("text", { x, y, "font-family": FONT, "font-size": size, "text-anchor": anchor, "font-weight": weight, fill, transform: turn ? `rotate(${turn} ${x} ${y})` : undefined }, words);
}

// A sentence in two lines of at most `length` letters, or so many as it takes.
function folded(words, length) {
  const lines = [""];
  for (const word of words.split(" ")) {
    if (lines.at(-1).length + word.length > length && lines.length < 2) lines.push("");
    lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines;
}

// maps: [{title, about, array, unsearched}]; every label where there is room for it, else every second, third, …
// low: there may be far fewer rows than columns, and each is as high as its label.
export function mapFigure({ maps, tokens, keys, max, curve, negative, clipped, caption, axes = "rows attend, columns are attended to", what = "weight", low = false }) {
  const count = Math.max(tokens.text.length, keys.text.length);
  const side = Math.max(220, Math.min(840, count * (SIZE + 1)));
  const cell = side / count, every = Math.ceil((SIZE + 0.5) / cell);
  const high = low ? Math.max(cell, SIZE + 2) : cell, everyRow = low ? 1 : every;
  const [wide, tall] = [cell * keys.text.length, high * tokens.text.length];
  const step = GUTTER + wide + GAP;
  const about = `${what}, ${curve === "root" ? "shades by square root" : "linear shades"}; ${axes}${every > 1 ? `; every ${every}${["th", "st", "nd", "rd"][every] ?? "th"} token is named` : ""}`;
  const width = 200; // of the scale; what it says stands beside it, and the picture is wide enough for that
  const [W, H] = [Math.max(maps.length * step, GUTTER + width + 32 + about.length * SIZE * 0.55), TOP + tall + GUTTER + 52];
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${W} ${H}`, width: W, height: H }, svg("rect", { width: W, height: H, fill: "#ffffff" }));
  const short = (t, i) => { const name = tokenLabel(t, i); return name.length > 12 ? `${name.slice(0, 11)}…` : name; };
  maps.forEach(({ title, about, array, unsearched }, m) => {
    const left = m * step + GUTTER;
    root.append(text(left, 16, title, { size: 13, weight: 600 }), ...folded(about, wide / 4.6).map((line, i) => text(left, 30 + 12 * i, line, { size: 9, fill: "#565b63" })),
      svg("image", { x: left, y: TOP, width: wide, height: tall, href: picture(array, { max, curve, unsearched }, side), preserveAspectRatio: "none" }),
      svg("rect", { x: left, y: TOP, width: wide, height: tall, fill: "none", stroke: "#8a8f97", "stroke-width": 0.6 }));
    for (let q = 0; q < tokens.text.length; q += everyRow) root.append(text(left - 4, TOP + (q + 0.5) * high + SIZE * 0.35, short(tokens, q), { anchor: "end" }));
    for (let k = 0; k < keys.text.length; k += every) root.append(text(left + (k + 0.5) * cell + SIZE * 0.35, TOP + tall + 5, short(keys, k), { anchor: "end", turn: -90 }));
  });
  const bottom = TOP + tall + GUTTER + 14, from = negative ? -max : 0;
  for (let i = 0; i < 100; i++) root.append(svg("rect", { x: GUTTER + i * (width / 100), y: bottom, width: width / 100 + 0.2, height: 8, fill: css(colour((from + ((max - from) * (i + 0.5)) / 100) / max, curve, "light")).replace(/rgb\((\d+) (\d+) (\d+)\)/, "rgb($1,$2,$3)") }));
  (negative ? [-max, 0, max] : [0, max / 2, max]).forEach((v, i) => root.append(text(GUTTER + (i * width) / 2, bottom + 19, (clipped && i === 2 ? "≥ " : clipped && negative && i === 0 ? "≤ " : "") + number(v, clipped ? 3 : 2), { anchor: ["start", "middle", "end"][i] })));
  root.append(text(GUTTER + width + 16, bottom + 8, caption, { size: 9 }),
    text(GUTTER + width + 16, bottom + 20, about, { fill: "#565b63" }));
  return root;
}
