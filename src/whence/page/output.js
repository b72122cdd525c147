// What the model said: classes or tokens with their probabilities, or the embedding as a strip of colours.

import { h, number, visible } from "./dom.js";
import { colour, css } from "./colour.js";

export function outputPicture(output) {
  if (output.kind === "classes" || output.kind === "tokens") {
    return h("ol", { class: "classes", "aria-label": output.what }, output.items.map((item) => h("li", {},
      h("bdi", {}, visible(item.label)), h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${item.probability * 100}%` } })),
      h("span", { class: "num" }, number(item.probability, 4)))));
  }
  if (output.kind === "embedding") return strip(output);
  return h("p", {}, "This model gives no output that can be shown.");
}

export function outputTable(output) {
  if (output.items) return [[output.what, "probability"], ...output.items.map((item) => [item.label, item.probability])];
  return [["component", "value"], ...(output.values ?? []).map((v, i) => [i, v])];
}

const COLUMNS = 96;

function strip(output) {
  const rows = Math.ceil(output.values.length / COLUMNS);
  const canvas = h("canvas", { width: COLUMNS, height: rows, class: "strip", role: "img", "aria-label": `The embedding, ${output.values.length} of ${output.size} components` });
  const most = Math.max(1e-9, ...output.values.map(Math.abs));
  const context = canvas.getContext("2d");
  output.values.forEach((v, i) => {
    context.fillStyle = css(colour(v / most, "root"));
    context.fillRect(i % COLUMNS, Math.floor(i / COLUMNS), 1, 1);
  });
  return canvas;
}
