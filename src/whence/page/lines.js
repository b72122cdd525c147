"use strict";
// Attention as lines between two columns of tokens; solid as far as a weight is certain, pale beyond.
(() => {
  const COLOURS = ["#2f7dbd", "#b35806", "#1b9e77", "#7b3294", "#c51b7d", "#8c6d1f", "#4d9221", "#5e6bc4", "#a6611a", "#00848a"];
  const ROW = 20, LEFT = 150, GAP = 190;
  const data = JSON.parse(document.getElementById("lines-data").textContent);
  const root = document.getElementById("lines");
  const make = (name, about = {}, ...inside) => {
    const one = document.createElement(name);
    for (const [key, value] of Object.entries(about)) key === "text" ? (one.textContent = value) : one.setAttribute(key, value);
    one.append(...inside);
    return one;
  };
  const draw = (name, about) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(about)) one.setAttribute(key, value);
    return one;
  };
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const decoded = new Map();
  const tensor = (kind, stack, place) => {
    const key = `${kind}/${stack}/${place}`;
    if (!decoded.has(key)) decoded.set(key, bytes(data.stacks[stack][kind][place]));
    return decoded.get(key);
  };

  const names = Object.keys(data.stacks);
  const state = { stack: names[0], place: 0, heads: new Set(), filter: "all", token: null };
  const start = data.stacks[state.stack];
  state.place = Math.max(0, start.layers.indexOf(data.layer ?? start.layers[0]));
  state.heads = new Set((data.heads ?? start.heads).filter((h) => start.heads.includes(h)));

  const chosen = (label, options, value, change) => {
    const select = make("select", { "aria-label": label });
    for (const [key, text] of options) select.append(make("option", { value: key, text, ...(String(key) === String(value) ? { selected: "" } : {}) }));
    select.addEventListener("change", () => { change(select.value); show(); });
    return make("label", { text: `${label} ` }, select);
  };

  const allowed = (q, k) => {
    if (data.split === null || state.filter === "all") return true;
    const side = (i) => (i < data.split ? "a" : "b");
    return state.filter === side(q) + side(k);
  };

  function lines(stack, place, heads) {
    const part = data.stacks[stack], n = part.tokens.length, m = part.keys.length;
    const svg = draw("svg", { width: 2 * LEFT + GAP, height: ROW * (Math.max(n, m) + 1), role: "group", "aria-label": "attention as lines" });
    const weights = tensor("weights", stack, place), certain = part.certified ? tensor("certain", stack, place) : null;
    const group = draw("g", {});
    for (const head of heads) {
      const at = part.heads.indexOf(head), colour = COLOURS[head % COLOURS.length];
      for (let q = 0; q < n; q++) for (let k = 0; k < m; k++) {
        const i = (at * n + q) * m + k, weight = weights[i] / 255;
        if (weight < 0.02 || !allowed(q, k)) continue;
        if (state.token && !(state.token[0] === "query" ? state.token[1] === q : state.token[1] === k)) continue;
        const sure = certain ? Math.min(certain[i] / 255, weight) : 0;
        const seen = certain ? sure + 0.15 * (weight - sure) : weight;
        const line = draw("line", { x1: LEFT, y1: ROW * (q + 0.75), x2: LEFT + GAP, y2: ROW * (k + 0.75), stroke: colour, "stroke-width": 2, "stroke-opacity": seen.toFixed(3), "data-weight": weight.toFixed(3), "data-certain": sure.toFixed(3) });
        if (certain && sure < 0.5 * weight) line.setAttribute("stroke-dasharray", "3 3");
        group.append(line);
      }
    }
    svg.append(group);
    const column = (tokens, kind, x, anchor) => tokens.forEach((token, i) => {
      const text = draw("text", { x, y: ROW * (i + 1), "text-anchor": anchor, tabindex: 0, role: "button", "aria-label": `${kind} ${token}` });
      text.textContent = token.length > 16 ? token.slice(0, 15) + "…" : token;
      const focus = (on) => { const next = on ? [kind, i] : null; if (String(next) !== String(state.token)) { state.token = next; redraw(); } };
      text.addEventListener("mouseenter", () => focus(true));
      text.addEventListener("mouseleave", () => focus(false));
      text.addEventListener("keydown", (e) => { if (e.key === "Enter") focus(!state.token); });
      svg.append(text);
    });
    column(part.tokens, "query", LEFT - 8, "end");
    column(part.keys, "key", LEFT + GAP + 8, "start");
    const redraw = () => { const again = lines(stack, place, heads).querySelector("g"); svg.replaceChild(again, svg.querySelector("g")); };
    return svg;
  }

  function headView() {
    const part = data.stacks[state.stack];
    const bar = make("div");
    if (names.length > 1) bar.append(chosen("Attention", names.map((n) => [n, n]), state.stack, (v) => { state.stack = v; state.place = 0; state.heads = new Set(data.stacks[v].heads); }));
    bar.append(chosen("Layer", part.layers.map((l, i) => [i, l]), state.place, (v) => { state.place = Number(v); }));
    if (data.split !== null) bar.append(chosen("Between", [["all", "all"], ["aa", "A → A"], ["ab", "A → B"], ["ba", "B → A"], ["bb", "B → B"]], state.filter, (v) => { state.filter = v; }));
    const heads = make("div", { class: "heads", role: "group", "aria-label": "heads" });
    for (const head of part.heads) {
      const button = make("button", { text: head, "aria-pressed": state.heads.has(head), title: "Click: on or off. Double click: this one alone.", style: `border-color:${COLOURS[head % COLOURS.length]}` });
      button.addEventListener("click", () => { state.heads.has(head) ? state.heads.delete(head) : state.heads.add(head); show(); });
      button.addEventListener("dblclick", () => { state.heads = new Set([head]); show(); });
      heads.append(button);
    }
    return [bar, heads, make("div", { class: "view" }, lines(state.stack, state.place, state.heads))];
  }

  function modelView() {
    const part = data.stacks[state.stack], n = part.tokens.length, m = part.keys.length, size = 56;
    const bar = make("div");
    if (names.length > 1) bar.append(chosen("Attention", names.map((x) => [x, x]), state.stack, (v) => { state.stack = v; }));
    const grid = make("div", { class: "grid", style: `grid-template-columns: 4em repeat(${part.heads.length}, ${size + 4}px)` });
    grid.append(make("span", { text: "layer" }), ...part.heads.map((h) => make("span", { text: `head ${h}` })));
    part.layers.forEach((layer, place) => {
      grid.append(make("span", { text: layer }));
      const weights = tensor("weights", state.stack, place), certain = part.certified ? tensor("certain", state.stack, place) : null;
      part.heads.forEach((head, at) => {
        const canvas = make("canvas", { width: size, height: size });
        const ink = canvas.getContext("2d");
        ink.strokeStyle = COLOURS[head % COLOURS.length];
        for (let q = 0; q < n; q++) for (let k = 0; k < m; k++) {
          const i = (at * n + q) * m + k, weight = weights[i] / 255;
          if (weight < 0.05) continue;
          const sure = certain ? Math.min(certain[i] / 255, weight) : 0;
          ink.globalAlpha = certain ? sure + 0.15 * (weight - sure) : weight;
          ink.beginPath();
          ink.moveTo(2, (size * (q + 0.5)) / n);
          ink.lineTo(size - 2, (size * (k + 0.5)) / m);
          ink.stroke();
        }
        const button = make("button", { "aria-label": `layer ${layer}, head ${head}` }, canvas);
        button.addEventListener("click", () => { state.place = place; state.heads = new Set([head]); data.view = "head"; show(); });
        grid.append(button);
      });
    });
    return [bar, grid];
  }

  function show() {
    state.token = null;
    const other = data.view === "head" ? "model" : "head";
    const swap = make("button", { text: other === "head" ? "Head view" : "Model view" });
    swap.addEventListener("click", () => { data.view = other; show(); });
    root.replaceChildren(make("p", { class: "note", text: data.note }), swap, ...(data.view === "head" ? headView() : modelView()));
  }
  show();
})();
