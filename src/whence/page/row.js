// One row of a head: its heaviest weights, between what they must lie, and what is proved of them.

import { h, number, replace } from "./dom.js";
import { CERTAIN, rowName, weightBars } from "./bars.js";
import { tokenName } from "./tokens.js";

const NONE = 65535;

// The weights of a row as the block has them; where a certificate or a counter-example has the exact interval of a weight,
// that one: the page never shows two intervals of one weight.
function weightsOf(block, query, certificate, witness) {
  const { keys, weight, effective_weight, lower, upper, exact, alternative_weight } = block.arrays;
  const places = keys.shape[1];
  const proved = new Map();
  if (witness?.lower) witness.keys.forEach((k, i) => proved.set(k, [witness.row[k], witness.lower[i], witness.upper[i]]));
  (certificate?.keys ?? []).forEach((k, i) => proved.set(k, [certificate.weights[i], certificate.lower[i], certificate.upper[i]]));
  const rows = [];
  for (let j = 0; j < places; j++) {
    const key = keys.q[query * places + j];
    if (key === NONE) continue;
    const [w, low, high] = proved.get(key) ?? [weight.at(query, j), lower.at(query, j), upper.at(query, j)];
    rows.push({
      key, effective: effective_weight.at(query, j), other: alternative_weight ? alternative_weight.at(query, j) : undefined,
      weight: w, lower: low, upper: high, exact: proved.has(key) || Boolean(exact?.q[query * places + j]),
    });
  }
  return rows;
}

function isExact(block, query) {
  const { exact } = block.arrays;
  return Boolean(exact?.q[query * exact.shape[1]]);
}

function sentence(keys, rows) {
  const widest = rows.reduce((best, r) => (r.upper - r.lower > best.upper - best.lower ? r : best));
  if (widest.upper - widest.lower < CERTAIN) return "Whatever gives the same output has these weights, within 0.005.";
  return `${tokenName(keys, widest.key)} has ${number(widest.weight, 2)}; any value from ${number(widest.lower, 2)} to ${number(widest.upper, 2)} would give the same output.`;
}

export class Row {
  constructor(stack, { live, onpick }) {
    this.stack = stack;
    this.live = live;
    this.keys = stack.key_tokens ?? stack.tokens;
    this.onpick = onpick;
    this.say = h("p", { class: "row-say" });
    this.note = h("p", { class: "hint" });
    this.bars = weightBars({ keys: this.keys });
    this.missing = h("p", { hidden: true }, "The weights of this row are not in this report.");
    this.el = h("div", {}, this.missing, this.say, this.bars, this.note);
  }

  csv() {
    return this.block ? this.bars.csv() : [];
  }

  // `ask`: the button that proves the row, where a server can.
  set(block, place, { certificate, witness, ask }) {
    this.block = block;
    for (const part of [this.say, this.bars, this.note]) part.hidden = !block;
    this.missing.hidden = Boolean(block);
    if (!block) return;
    const rows = weightsOf(block, place.query, certificate, witness);
    this.bars.set(rows, `Layer ${place.layer}, head ${place.head}: weights from ${rowName(this.stack.tokens, place.query)}`);
    const exact = rows.filter((r) => r.exact).length;
    const rest = 1 - rows.reduce((sum, r) => sum + r.weight, 0);
    const certain = rows.filter((r) => r.upper - r.lower < CERTAIN).length;
    this.say.textContent = [
      certificate ? certificate.sentence : exact === rows.length && rows.length ? sentence(this.keys, rows) : "",
      `${certain} of the ${rows.length} weights shown are certain.`,
      rest > 0.0005 ? `The ${this.keys.text.length - rows.length} keys not shown hold ${number(rest)}.` : "",
    ].join(" ").trim();
    this.current = place.query;
    const words = exact === rows.length ? "Whiskers are the exact intervals, proved by linear programs." : exact ? "Solid whiskers are exact, proved by linear programs; dotted ones are closed-form bounds, always valid and usually wider." : "Dotted whiskers are closed-form bounds: always valid, usually wider than the exact intervals.";
    const key = `${place.layer}/${place.head}/${words}`;
    if (ask || this.asked || this.told !== key || this.toldBlock !== block) replace(this.note, words, " ", ask ?? this.others(block, place));
    [this.told, this.toldBlock, this.asked] = [key, block, ask];
  }

  // Which rows of the head are exact, and how to get the others.
  others(block, { layer, head }) {
    const found = (this.stack.exact_heads ?? []).find((e) => e.layer === layer && e.head === head);
    if (this.live) return "";
    if (!found) return "Exact ones come with the heads that the overview lists; whence serve proves any row when asked.";
    if (found.rows === found.of) return `All ${found.of} rows of this head have them.`;
    const next = () => {
      for (let k = 1; k <= found.of; k++) { const q = (this.current + k) % found.of; if (isExact(block, q)) { this.onpick(q); return; } }
    };
    return [`${found.rows} of the ${found.of} rows of this head have exact ones`, found.rows ? [" (", h("button", { type: "button", class: "link no-export", onclick: next }, "next"), ")"] : "",
      "; for all of them, save the report with ", h("code", {}, "budget=math.inf"), "."];
  }
}
