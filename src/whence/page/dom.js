// Elements without markup: every text becomes a text node, so that no input is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// What can be scrolled shows it: the side that goes on fades (see style.css).
export function scrollable(element) {
  const update = () => {
    const { scrollLeft: x, scrollTop: y, clientWidth: w, clientHeight: t, scrollWidth: wide, scrollHeight: tall } = element;
    const more = [Math.abs(x) > 2 && "start", Math.abs(x) + w < wide - 2 && "end", y > 2 && "above", y + t < tall - 2 && "below"].filter(Boolean).join(" ");
    if (more !== (element.dataset.more ?? "")) element.dataset.more = more;
  };
  element.addEventListener("scroll", update, { passive: true });
  const watch = new ResizeObserver(update);
  watch.observe(element);
  if (element.firstElementChild) watch.observe(element.firstElementChild);
  return element;
}

export function scroller(label, ...children) {
  return scrollable(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, children));
}

export function choice(label, options, value, onchange, extra) {
  const select = h("select", { onchange: () => onchange(select.value) },
    options.map(([key, title]) => h("option", { value: key, selected: String(key) === String(value) }, title)));
  select.value = String(value);
  return h("label", { class: "field", ...extra }, h("span", {}, label), select);
}

export function segmented(label, options, value, onchange) {
  const name = `seg-${Math.random().toString(36).slice(2)}`;
  return h("fieldset", { class: "segmented" }, h("legend", { class: "hidden" }, label),
    options.map(([key, title]) => h("label", {},
      h("input", { type: "radio", name, value: key, checked: key === value, onchange: () => onchange(key) }),
      h("span", {}, title))));
}

const PICTURES = { "\n": "⏎", "\t": "⇥", "\u00ad": "‧" };

// Control and direction-changing characters, shown instead of obeyed.
export function visible(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (c) =>
    PICTURES[c] ?? (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toFixed(digits).replace("-", "−");
}

export function small(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 0.001) return number(value, 4);
  const [digits, power] = value.toExponential(1).split("e");
  const raised = String(Number(power)).replace("-", "⁻").replace(/\d/g, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]);
  return `${digits} × 10${raised}`;
}
