// From the row to another one with the same output, with what the model gave at every stop.

import { h, number, replace, segmented, small } from "./dom.js";
import { weightBars } from "./bars.js";
import { outputPicture } from "./output.js";
import { tokenName } from "./tokens.js";

function bars(witness, end, keys) {
  const rows = witness.keys.map((key, i) => ({ key, weight: witness.row[key], other: end[key], exact: Boolean(witness.lower), lower: witness.lower?.[i], upper: witness.upper?.[i] }));
  const made = weightBars({ keys });
  made.set(rows, "The row as it is, and as far as the slider has moved it");
  return made;
}

export function slider({ witness, tokens, keys }) {
  let toControl = false;
  const output = h("div", { class: "slide-output" });
  const left = h("div", { class: "slide-bars" });
  const id = `slide-${Math.random().toString(36).slice(2)}`;
  const input = h("input", { type: "range", min: 0, max: 100, value: 0, step: 1, id, list: `${id}-marks` });
  const marks = h("datalist", { id: `${id}-marks` }, (witness.path ?? []).map((s) => h("option", { value: String(s.a * 100) })));
  const status = h("output", { class: "slide-status", for: input.id, "aria-live": "polite" });
  const far = h("span", {});
  let chart = null;
  let shownStop = null;

  function move() {
    const share = Number(input.value) / 100;
    chart.move(share);
    const path = toControl ? witness.control : witness.path;
    if (!path) { replace(output, h("p", {}, witness.reason ?? "The model was not run on it.")); return; }
    const stop = path.reduce((best, s) => (Math.abs(s.a - share) < Math.abs(best.a - share) ? s : best));
    const what = stop.logits !== null && stop.logits !== undefined ? "logits" : "final_states";
    const change = stop[what];
    const same = change <= 1e-5;
    if (stop !== shownStop) {
      shownStop = stop;
      replace(output, h("h4", {}, `The model’s ${stop.output.what}`), outputPicture(stop.output),
        h("p", { class: "change" }, `change of the ${what.replace("_", " ")}: `, h("b", { class: same ? "same" : "moved" }, small(change)),
          h("span", { class: `badge ${same ? "certain" : "warn"}` }, same ? "not moving" : "moving")));
    }
    const moved = share * witness.total_variation;
    status.textContent = `${number(moved, 2)} of the attention moved. Model run at ${Math.round(stop.a * 100)} % of the way: ${what.replace("_", " ")} changed by ${small(change)}.`;
  }

  function draw() {
    shownStop = null;
    far.textContent = toControl ? "a random row" : "the other row";
    chart = bars(witness, toControl ? witness.control_row : witness.alternative, keys);
    replace(left, chart);
    move();
  }

  input.addEventListener("input", move);
  draw();
  const element = h("div", { class: "slide", "data-witness": `${witness.layer}/${witness.head}/${witness.query}` },
    h("p", {}, `Another attention row from ${tokenName(tokens, witness.query)}, ${number(witness.total_variation, 2)} away in total variation, gives the same head output. Move the row towards it: the model was run at each mark.`),
    witness.control ? segmented("Where the slider leads", [["other", "to the other row"], ["random", "control: to a random row as far away"]], "other", (v) => { toControl = v === "random"; draw(); }) : null,
    h("div", { class: "slide-input" }, h("label", { for: input.id }, "as it is"), input, marks, far),
    status,
    h("div", { class: "slide-body" }, left, output));
  element.csv = () => chart.csv();
  return element;
}

