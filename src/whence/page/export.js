// Any card as SVG or PNG, any table as CSV. Nothing leaves the machine: the browser saves what it drew.

import { h } from "./dom.js";

const XHTML = "http://www.w3.org/1999/xhtml";
const SVG = "http://www.w3.org/2000/svg";
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor"];

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A formula of a spreadsheet begins with one of these; a quote in front keeps it text.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function saveCSV(rows, name) {
  save(new Blob(["\ufeff", rows.map((row) => row.map(cell).join(",")).join("\r\n"), "\r\n"], { type: "text/csv" }), `${name}.csv`);
}

function styles() {
  return [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText).join("\n");
}

function native(chart) {
  const copy = chart.cloneNode(true);
  const pairs = [[chart, copy], ...[...chart.querySelectorAll("*")].map((e, i) => [e, copy.querySelectorAll("*")[i]])];
  for (const [from, to] of pairs) {
    const seen = getComputedStyle(from);
    for (const name of DRAWN) if (seen.getPropertyValue(name)) to.setAttribute(name, seen.getPropertyValue(name));
  }
  const [, , width, height] = chart.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const paper = document.createElementNS(SVG, "rect");
  paper.setAttribute("width", "100%");
  paper.setAttribute("height", "100%");
  paper.setAttribute("fill", getComputedStyle(document.documentElement).getPropertyValue("--card").trim());
  copy.prepend(paper);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function copied(element) {
  const copy = element.cloneNode(true);
  const canvases = [...element.querySelectorAll("canvas")];
  [...copy.querySelectorAll("canvas")].forEach((canvas, i) => {
    const picture = document.createElement("img");
    picture.className = canvas.className;
    picture.alt = "";
    picture.src = canvases[i].toDataURL("image/png");
    canvas.replaceWith(picture);
  });
  const fields = [...element.querySelectorAll("input, select, textarea")];
  [...copy.querySelectorAll("input, select, textarea")].forEach((field, i) => {
    if (field.tagName === "SELECT") [...field.options].forEach((o, k) => o.toggleAttribute("selected", k === fields[i].selectedIndex));
    else if (fields[i].type === "radio" || fields[i].type === "checkbox") field.toggleAttribute("checked", fields[i].checked);
    else field.setAttribute("value", fields[i].value);
  });
  for (const left of copy.querySelectorAll(".no-export, script")) left.remove();
  return copy;
}

function drawn(element) {
  if (element.figure) {
    const figure = element.figure();
    return { text: new XMLSerializer().serializeToString(figure), width: Number(figure.getAttribute("width")), height: Number(figure.getAttribute("height")) };
  }
  const charts = element.querySelectorAll("svg[data-native]");
  if (charts.length === 1 && element.classList.contains("chart-card")) return native(charts[0]);
  const box = element.getBoundingClientRect();
  const width = Math.ceil(box.width) + 32, height = Math.ceil(box.height) + 32;
  const root = document.createElementNS(SVG, "svg");
  root.setAttribute("width", width);
  root.setAttribute("height", height);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const holder = document.createElementNS(SVG, "foreignObject");
  holder.setAttribute("width", "100%");
  holder.setAttribute("height", "100%");
  const body = document.createElementNS(XHTML, "div");
  body.className = "exported";
  const seen = getComputedStyle(document.documentElement);
  // The variables go along, so that the picture has the colours of the page whatever the reader's own setting is.
  const names = [...new Set(styles().match(/--[\w-]+(?=\s*:)/g) ?? [])];
  body.setAttribute("style", names.map((n) => `${n}:${seen.getPropertyValue(n)}`).join(";") + ";padding:16px");
  const style = document.createElementNS(XHTML, "style");
  style.textContent = styles();
  body.append(style, copied(element));
  holder.append(body);
  root.append(holder);
  return { text: new XMLSerializer().serializeToString(root), width, height };
}

export function saveSVG(element, name) {
  save(new Blob([drawn(element).text], { type: "image/svg+xml" }), `${name}.svg`);
}

export async function savePNG(element, name, scale = 2) {
  const { text, width, height } = drawn(element);
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const canvas = h("canvas", { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.drawImage(picture, 0, 0, width, height);
  save(await new Promise((done) => canvas.toBlob(done, "image/png")), `${name}.png`);
}

// The buttons of a card; `csv`: a function that gives rows, where there is a table behind it.
export function exporter(element, name, csv) {
  const button = (label, act) => h("button", { type: "button", class: "quiet", title: `Save as ${label}`, "aria-label": `Save ${name.replaceAll("-", " ")} as ${label}`, onclick: act }, label);
  return h("div", { class: "exporter no-export" },
    button("SVG", () => saveSVG(element, name)),
    button("PNG", () => savePNG(element, name)),
    csv ? button("CSV", () => saveCSV(csv(), name)) : null);
}

// `figure`: a function that draws the card for a paper; without it the card is saved as it looks.
export function card(title, name, body, { csv, chart = false, extra, figure, level = 2 } = {}) {
  const element = h("section", { class: `card${chart ? " chart-card" : ""}`, "aria-label": title, "data-name": name });
  element.figure = figure;
  element.append(h("header", {}, h(`h${level}`, {}, title), ...(extra ? [extra] : []), exporter(element, `whence-${name}`, csv)), h("div", { class: "card-body" }, body));
  return element;
}
