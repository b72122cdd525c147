// Layers × heads: one cell per head, to be walked with the arrow keys.

import { h, number } from "./dom.js";
import { css, doubt, ink } from "./colour.js";

export function cellShare(value, values, { bad, full }) {
  if (value === null) return 0;
  const known = values.flat().filter((v) => v !== null);
  // The scale ends where all but the top twentieth do, so that one extreme head does not bleach the others; and not
  // before `full`, so that heads which are all fine do not look as if some were not.
  const sorted = known.map(Math.abs).sort((a, b) => a - b);
  const most = Math.max(full ?? 0, sorted[Math.floor(0.95 * (sorted.length - 1))]);
  // Darker always means: read less into it.
  if (bad === "low") return -Math.max(0, Math.min(1, (1 - value) / Math.max(1e-9, 1 - Math.min(...known, 0.0))));
  return -Math.min(1, Math.abs(value) / Math.max(most, 1e-9));
}

export function headGrid({ stack, quantity, about, chosen, onpick, onhover }) {
  const values = stack.grid[quantity];
  const whole = quantity === "free";
  const short = (v) => (v === null ? "–" : whole ? String(v) : v.toFixed(Math.abs(v) >= 1 ? 1 : 2).replace(/^(-?)0\./, "$1.").replace("-", "−"));
  const wide = stack.heads.length <= 16;
  const cells = [];
  const rows = stack.layers.map((layer, i) => h("div", { role: "row", class: "grid-row" },
    h("span", { role: "rowheader", class: "grid-label" }, String(layer)),
    stack.heads.map((head, j) => {
      const value = values[i][j];
      const found = doubt(-cellShare(value, values, about));
      const cell = h("button", {
        type: "button", role: "gridcell", class: "grid-cell", tabindex: "-1",
        "aria-label": `Layer ${layer} head ${head}: ${about.title} ${whole ? value : number(value)}`,
        title: `Layer ${layer}, head ${head}: ${whole ? value : number(value)}`,
        style: { backgroundColor: css(found), color: ink(found) },
        onclick: () => onpick(layer, head),
        onpointerenter: () => onhover?.(layer, head),
        onfocus: () => onhover?.(layer, head),
        "data-short": wide ? short(value) : undefined,
      });
      if (chosen && chosen.layer === layer && chosen.head === head) { cell.classList.add("chosen"); cell.setAttribute("aria-selected", "true"); cell.tabIndex = 0; }
      cells.push(cell);
      return cell;
    })));
  if (!cells.some((c) => c.tabIndex === 0)) cells[0].tabIndex = 0;
  const count = stack.heads.length;
  const header = h("div", { role: "row", class: "grid-row heads" }, h("span", { role: "columnheader", class: "grid-label corner" }, "layer"),
    stack.heads.map((head, j) => h("span", { role: "columnheader", class: "grid-label" }, j === 0 ? h("span", { class: "axis-word" }, "head ") : "", String(head))));
  const element = h("div", {
    role: "grid", class: `grid${wide ? "" : " dense"}`, style: { "--columns": count }, "aria-label": `${about.title} by layer (rows) and head (columns)`,
    onkeydown: (event) => {
      const from = cells.indexOf(event.target);
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -count, ArrowDown: count, Home: -(from % count), End: count - 1 - (from % count) }[event.key];
      if (from < 0 || step === undefined) return;
      const next = from + step;
      if (next < 0 || next >= cells.length) return;
      event.preventDefault();
      event.stopPropagation();
      cells[from].tabIndex = -1;
      cells[next].tabIndex = 0;
      cells[next].focus();
    },
  }, header, rows);
  element.style.setProperty("--columns", count);
  return element;
}
