// Draws the map of widths, and bars and table of the experts of a chosen layer, from the JSON in the page.

const plan = JSON.parse(document.getElementById("plan").textContent);
const layerChoice = document.getElementById("layer");
const filterChoice = document.getElementById("filter");
const expertTable = document.getElementById("expert-table");
const tip = document.getElementById("tip");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const chosenLayer = () => Number(layerChoice.value);

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function describe(layer, expert) {
  const width = plan.widths[layer][expert];
  const lines = [`Layer ${layer}, expert ${expert}`];
  lines.push(width ? `${width} of ${plan.channels} channels` : `removed, had ${plan.channels} channels`);
  if (plan.coverage) lines.push(`coverage ${percent(plan.coverage[layer][expert])}`);
  if (plan.prior) lines.push(`attribution ${plan.prior[layer][expert]}`);
  if (plan.tokens) lines.push(`${plan.tokens[layer][expert].toLocaleString("en")} calibration tokens`);
  return lines.join("\n");
}

function showTip(event) {
  const cell = event.target.closest("[data-expert]");
  tip.hidden = !cell;
  if (!cell) return;
  tip.textContent = describe(Number(cell.dataset.layer), Number(cell.dataset.expert));
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 4);
  const below = event.clientY + 16;
  const top = below + box.height > window.innerHeight ? event.clientY - box.height - 10 : below;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function tickStep(count, room, each) {
  const steps = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 128];
  return steps.find((step) => (count / step) * each <= room) || count;
}

// --- the map of widths

function colourOf(width) {
  return plan.colours[Math.round((width / plan.channels) * (plan.colours.length - 1))];
}

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => ((parseInt(colour.slice(at, at + 2), 16) / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

function drawMap() {
  const map = document.getElementById("width-map");
  const [layers, experts] = [plan.widths.length, plan.widths[0].length];
  const [left, bottom, top] = [58, 40, 4];
  const room = map.parentElement.clientWidth - 20 - left;
  const cellWidth = Math.max(6, Math.min(72, room / experts));
  const cellHeight = layers <= 32 ? 24 : 12;
  const [width, height] = [cellWidth * experts, cellHeight * layers];
  const parts = [];
  plan.widths.forEach((row, layer) => row.forEach((kept, expert) => {
    const place = { x: left + expert * cellWidth, y: top + layer * cellHeight };
    const look = kept ? { fill: colourOf(kept) } : { class: "dead" };
    const size = { width: cellWidth - 0.75, height: cellHeight - 0.75 };
    parts.push(svg("rect", { ...place, ...size, ...look, "data-layer": layer, "data-expert": expert }));
    if (cellWidth < 30) return;
    const ink = kept ? inkOn(colourOf(kept)) : "#000";
    const middle = { x: place.x + cellWidth / 2, y: place.y + cellHeight / 2 + 4 };
    const text = svg("text", { ...middle, "text-anchor": "middle", "pointer-events": "none" }, kept);
    text.style.fill = ink;
    parts.push(text);
  }));
  parts.push(...expertTicks(experts, left, cellWidth, top + height), ...layerTicks(layers, left, top, cellHeight));
  const frame = { x: left - 1, y: top + chosenLayer() * cellHeight - 1, width: width + 1.25, height: cellHeight + 1.25 };
  parts.push(svg("rect", { ...frame, class: "chosen", "pointer-events": "none" }));
  map.replaceChildren(...parts);
  resize(map, left + width + 12, top + height + bottom);
}

function expertTicks(experts, left, each, below) {
  const step = tickStep(experts, experts * each, 30);
  const ticks = [];
  for (let expert = 0; expert < experts; expert += step) {
    ticks.push(svg("text", { x: left + (expert + 0.5) * each, y: below + 15, "text-anchor": "middle" }, expert));
  }
  ticks.push(svg("text", { x: left + (experts * each) / 2, y: below + 33, "text-anchor": "middle" }, "expert"));
  return ticks;
}

function layerTicks(layers, left, top, each) {
  const step = tickStep(layers, layers * each, 16);
  const ticks = [];
  for (let layer = 0; layer < layers; layer += step) {
    ticks.push(svg("text", { x: left - 6, y: top + (layer + 0.5) * each + 4, "text-anchor": "end" }, layer));
  }
  ticks.push(turned("layer", 14, top + (layers * each) / 2));
  return ticks;
}

function turned(label, x, y) {
  return svg("text", { transform: `translate(${x} ${y}) rotate(-90)`, "text-anchor": "middle" }, label);
}

function resize(drawing, width, height) {
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
}

function legendItem(label, width, ...shapes) {
  const item = document.createElement("li");
  const picture = svg("svg", { width, height: 14, "aria-hidden": "true" });
  picture.append(...shapes);
  item.append(picture, label);
  return item;
}

function colourBar(colours) {
  const each = 160 / colours.length;
  return colours.map((fill, index) => svg("rect", { x: index * each, width: each + 0.5, height: 14, fill }));
}

function drawMapLegend() {
  const items = [legendItem(`0 to ${plan.channels} channels kept`, 160, ...colourBar(plan.colours))];
  const removed = plan.widths.flat().filter((width) => width === 0).length;
  if (removed) items.push(legendItem(`removed experts (${removed})`, 14, svg("rect", { width: 14, height: 14, class: "dead" })));
  document.getElementById("width-legend").replaceChildren(...items);
}

// --- the bars of a layer

function drawBars() {
  const bars = document.getElementById("expert-bars");
  const layer = chosenLayer();
  const experts = plan.widths[layer].length;
  const [left, gap, priorHeight, height] = [58, 18, plan.prior ? 84 : 0, 240];
  const room = bars.parentElement.clientWidth - 20 - left;
  const each = Math.max(8, Math.min(72, room / experts));
  const top = 8 + (priorHeight ? priorHeight + gap : 0);
  const parts = [hatching()];
  for (let share = 0; share <= 100; share += 20) {
    const y = top + height * (1 - share / 100);
    parts.push(svg("line", { x1: left, x2: left + each * experts, y1: y, y2: y, class: "rule" }));
    parts.push(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, share));
  }
  parts.push(turned(plan.shares ? "% of its score" : "% of its channels", 14, top + height / 2));
  if (plan.prior) parts.push(...priorParts(plan.prior[layer], left, each, 8, priorHeight));
  for (let expert = 0; expert < experts; expert += 1) {
    parts.push(...barParts(layer, expert, left + (expert + 0.06) * each, each * 0.88, top, height));
    const area = { x: left + expert * each, y: 8, width: each, height: top + height - 8 };
    parts.push(svg("rect", { ...area, class: "hit", "data-layer": layer, "data-expert": expert }));
  }
  parts.push(...expertTicks(experts, left, each, top + height));
  bars.replaceChildren(...parts);
  resize(bars, left + each * experts + 12, top + height + 40);
  drawBarLegend(layer);
}

function hatching() {
  const pattern = svg("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svg("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "hatch" }));
  return pattern;
}

function barParts(layer, expert, x, width, top, height) {
  const shares = plan.shares ? plan.shares[layer][expert] : [1];
  const colours = plan.shares ? plan.groupColours : [colourOf(plan.channels / 3)];
  const total = shares.reduce((sum, share) => sum + share, 0);
  if (total === 0) {
    const empty = svg("rect", { x, y: top + 1, width, height: height - 1, class: "unscored" });
    return plan.widths[layer][expert] ? [empty] : [empty, cross(x + width / 2, top + height - 10)];
  }
  const parts = [];
  let low = 0;
  shares.forEach((share, group) => {
    const high = low + share / total;
    const y = top + height * (1 - high);
    parts.push(svg("rect", { x, y, width, height: height * (high - low), fill: colours[group], class: "share" }));
    low = high;
  });
  const kept = plan.shares ? plan.coverage[layer][expert] : plan.widths[layer][expert] / plan.channels;
  const end = top + height * (1 - kept);
  parts.push(svg("rect", { x, y: top, width, height, class: "outline" }));
  parts.push(svg("rect", { x, y: top, width, height: end - top, class: "cut" }));
  parts.push(svg("rect", { x, y: top, width, height: end - top, fill: "url(#hatching)" }));
  for (const name of ["casing", "end"]) parts.push(svg("line", { x1: x, x2: x + width, y1: end, y2: end, class: name }));
  if (plan.widths[layer][expert] === 0) parts.push(cross(x + width / 2, top + height - 10));
  return parts;
}

function cross(x, y) {
  const arm = 4;
  const d = `M${x - arm} ${y - arm}L${x + arm} ${y + arm}M${x - arm} ${y + arm}L${x + arm} ${y - arm}`;
  const path = svg("path", { d, "stroke-width": 3 });
  path.style.stroke = "var(--removed)";
  return path;
}

function priorParts(prior, left, each, top, height) {
  const [low, high] = [Math.min(0, ...prior), Math.max(0, ...prior) || 1];
  const at = (value) => top + 6 + (height - 6) * (1 - (value - low) / (high - low));
  const parts = [turned("attribution", 14, top + height / 2)];
  for (const value of [low, high]) {
    parts.push(svg("line", { x1: left, x2: left + each * prior.length, y1: at(value), y2: at(value), class: "rule" }));
    parts.push(svg("text", { x: left - 6, y: at(value) + 4, "text-anchor": "end" }, Number(value.toPrecision(2))));
  }
  prior.forEach((value, expert) => {
    const x = left + (expert + 0.5) * each;
    parts.push(svg("line", { x1: x, x2: x, y1: at(0), y2: at(value), class: "stem" }));
    parts.push(svg("circle", { cx: x, cy: at(value), r: 3, class: "dot" }));
  });
  return parts;
}

function drawBarLegend(layer) {
  const items = [];
  if (plan.shares) items.push(legendItem("channels by rank, best to worst", 160, ...colourBar(plan.groupColours)));
  items.push(legendItem("kept up to here", 20, svg("line", { x1: 0, x2: 20, y1: 7, y2: 7, class: "end" })));
  items.push(legendItem("removed channels", 20, svg("rect", { width: 20, height: 14, fill: "url(#hatching)" })));
  const removed = plan.widths[layer].filter((width) => width === 0).length;
  if (removed) items.push(legendItem(`removed experts (${removed})`, 14, cross(7, 7)));
  if (plan.shares && plan.shares[layer].some((shares) => shares.every((share) => share === 0))) {
    items.push(legendItem("no score", 14, svg("rect", { x: 1, y: 1, width: 12, height: 12, class: "unscored" })));
  }
  document.getElementById("expert-legend").replaceChildren(...items);
}

// --- the table of a layer

const columns = [
  { name: "expert", of: (layer, expert) => [expert, expert] },
  { name: "channels kept", of: (layer, expert) => [plan.widths[layer][expert], plan.widths[layer][expert]] },
  { name: "keep ratio", of: (layer, expert) => shareCell(plan.widths[layer][expert] / plan.channels) },
  plan.coverage && { name: "coverage", of: (layer, expert) => shareCell(plan.coverage[layer][expert]) },
  plan.prior && { name: "attribution", of: (layer, expert) => [plan.prior[layer][expert], plan.prior[layer][expert]] },
  plan.tokens && {
    name: "tokens",
    of: (layer, expert) => [plan.tokens[layer][expert], plan.tokens[layer][expert].toLocaleString("en")],
  },
].filter(Boolean);

function shareCell(share) {
  return [share, percent(share)];
}

const filters = {
  all: () => true,
  whole: (layer, expert) => plan.widths[layer][expert] === plan.channels,
  cut: (layer, expert) => plan.widths[layer][expert] > 0 && plan.widths[layer][expert] < plan.channels,
  removed: (layer, expert) => plan.widths[layer][expert] === 0,
  unreached: (layer, expert) => plan.tokens[layer][expert] === 0,
};

function drawHeader() {
  expertTable.tHead.rows[0].append(...columns.map(({ name }) => {
    const header = document.createElement("th");
    header.scope = "col";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    header.append(button);
    return header;
  }));
}

function drawTable() {
  const layer = chosenLayer();
  const all = [...plan.widths[layer].keys()];
  const shown = all.filter((expert) => filters[filterChoice.value](layer, expert));
  expertTable.tBodies[0].replaceChildren(...shown.map((expert) => {
    const row = document.createElement("tr");
    if (plan.widths[layer][expert] === 0) row.className = "removed";
    columns.forEach(({ of }, index) => {
      const cell = document.createElement(index ? "td" : "th");
      if (!index) cell.scope = "row";
      const [value, text] = of(layer, expert);
      cell.dataset.value = value;
      cell.textContent = text;
      row.append(cell);
    });
    return row;
  }));
  document.getElementById("shown").textContent = `${shown.length} of ${all.length} experts`;
  const sorted = expertTable.querySelector("[aria-sort]");
  if (sorted) sortTable(expertTable, sorted.cellIndex, sorted.getAttribute("aria-sort") === "descending");
}

function drawLayer() {
  drawMap();
  drawBars();
  drawTable();
}

layerChoice.addEventListener("change", drawLayer);
filterChoice.addEventListener("change", drawTable);
document.getElementById("width-map").addEventListener("click", (event) => {
  const cell = event.target.closest("[data-layer]");
  if (!cell) return;
  layerChoice.value = cell.dataset.layer;
  drawLayer();
});
for (const id of ["width-map", "expert-bars"]) {
  const drawing = document.getElementById(id);
  for (const kind of ["pointermove", "pointerdown"]) drawing.addEventListener(kind, showTip);
  drawing.addEventListener("pointerleave", () => { tip.hidden = true; });
}
let drawnAt = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnAt) return;
  drawnAt = window.innerWidth;
  drawMap();
  drawBars();
});

drawHeader();
drawMapLegend();
drawLayer();
