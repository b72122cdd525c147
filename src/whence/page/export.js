// Any card as SVG or PNG, any table as CSV. Nothing leaves the machine: the browser saves what it drew.

import { h, svg } from "./dom.js";

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

const EDGE = 12, LETTER = 6.4; // around a chart; the width of a letter in the names of its lines

// A chart with its title and the names of its lines above it, in SVG that other programs than browsers can show.
function native(element, chart) {
  const copy = chart.cloneNode(true);
  const pairs = [[chart, copy], ...[...chart.querySelectorAll("*")].map((e, i) => [e, copy.querySelectorAll("*")[i]])];
  for (const [from, to] of pairs) {
    const seen = getComputedStyle(from);
    for (const name of DRAWN) if (seen.getPropertyValue(name)) to.setAttribute(name, seen.getPropertyValue(name));
  }
  const [, , across, down] = chart.getAttribute("viewBox").split(" ").map(Number);
  const width = across + 2 * EDGE;
  const { fontFamily } = getComputedStyle(chart), page = getComputedStyle(document.documentElement);
  const ink = { fill: page.getPropertyValue("--ink").trim(), "font-family": fontFamily };
  const above = [svg("text", { x: EDGE, y: EDGE + 13, "font-size": 14, "font-weight": 600, ...ink }, element.getAttribute("aria-label"))];
  let x = EDGE, y = EDGE + 34;
  for (const line of element.querySelectorAll(".key li")) {
    const name = line.textContent.trim(), seen = getComputedStyle(line.querySelector("line"));
    const room = 30 + LETTER * name.length;
    if (x > EDGE && x + room > width - EDGE) [x, y] = [EDGE, y + 16];
    above.push(svg("line", { x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: seen.stroke, "stroke-width": 2.5, "stroke-dasharray": seen.strokeDasharray }),
      svg("text", { x: x + 30, y, "font-size": 11, ...ink }, name));
    x += room + 16;
  }
  const top = y + EDGE, height = top + down + EDGE;
  for (const [name, value] of Object.entries({ x: EDGE, y: top, width: across, height: down })) copy.setAttribute(name, value);
  const root = svg("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width: "100%", height: "100%", fill: page.getPropertyValue("--card").trim() }), above, copy);
  return { text: new XMLSerializer().serializeToString(root), width, height };
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

const LARGEST = 16000; // pixels: what browsers still draw as one picture

// Width and height with nothing left to scroll to. A card grows until its tables are complete; a view keeps its width, and
// what is wider goes on fading at the side.
function whole(element, grows) {
  let { width, height } = element.getBoundingClientRect();
  element.classList.add("exporting");
  element.style.maxWidth = "none";
  for (let i = 0; i < (grows ? 6 : 1); i++) {
    element.style.width = `${width}px`;
    height = element.getBoundingClientRect().height;
    const beyond = Math.max(0, ...[...element.querySelectorAll(".scroll")].map((s) => s.scrollWidth - s.clientWidth));
    if (beyond < 1) break;
    width += grows ? beyond : 0;
  }
  element.style.maxWidth = element.style.width = "";
  element.classList.remove("exporting");
  return { width: Math.ceil(width), height: Math.ceil(height) };
}

function drawn(element, heading) {
  if (element.figure) {
    const figure = element.figure();
    return { text: new XMLSerializer().serializeToString(figure), width: Number(figure.getAttribute("width")), height: Number(figure.getAttribute("height")) };
  }
  const charts = element.querySelectorAll("svg[data-native]");
  if (charts.length === 1 && element.classList.contains("chart-card")) return native(element, charts[0]);
  const box = whole(element, !heading);
  const above = heading ? Math.ceil(heading.getBoundingClientRect().height) : 0;
  const width = box.width + 32, height = box.height + above + 32;
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
  const copy = copied(element);
  for (const one of copy.querySelectorAll("[data-more]")) one.dataset.more = heading && one.dataset.more.includes("end") ? "end" : "";
  body.append(style, ...(heading ? [copied(heading)] : []), copy);
  holder.append(body);
  root.append(holder);
  return { text: new XMLSerializer().serializeToString(root), width, height };
}

// `heading`: what stands above a whole view.
export function saveSVG(element, name, heading) {
  save(new Blob([drawn(element, heading).text], { type: "image/svg+xml" }), `${name}.svg`);
}

export async function savePNG(element, name, heading) {
  const { text, width, height } = drawn(element, heading);
  const scale = Math.min(2, LARGEST / Math.max(width, height));
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const canvas = h("canvas", { width: Math.floor(width * scale), height: Math.floor(height * scale) });
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
