// Draws the layers, the map of widths, and bars and table of the experts of a chosen layer, from the JSON in the page.

const plan = JSON.parse(document.getElementById("plan").textContent);
const layerChoice = document.getElementById("layer");
const filterChoice = document.getElementById("filter");
const expertTable = document.getElementById("expert-table");
const tip = document.getElementById("tip");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const chosenLayer = () => Number(layerChoice.value);
const keepRatios = plan.widths.map((row) => sum(row) / (row.length * plan.channels));

// left edge of all drawings, in pixels
const LEFT = 58;

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function describeLayer(layer) {
  const row = plan.widths[layer];
  const lines = [`Layer ${plan.labels[layer]}`];
  if (plan.layerCoverage) lines.push(`coverage ${percent(plan.layerCoverage[layer])}`);
  lines.push(`${percent(keepRatios[layer])} of the channels kept`);
  lines.push(`${row.filter((width) => width > 0).length} of ${row.length} experts kept`);
  if (plan.layerLoss) lines.push(`loss rise ${plan.layerLoss[layer]} nats per token`);
  return lines.join("\n");
}

function describeExpert(layer, expert) {
  const width = plan.widths[layer][expert];
  const lines = [`Layer ${plan.labels[layer]}, expert ${expert}`];
  lines.push(width ? `${width} of ${plan.channels} channels kept` : `removed, had ${plan.channels} channels`);
  if (plan.coverage) lines.push(`coverage ${percent(plan.coverage[layer][expert])}`);
  if (plan.prior) lines.push(`prior ${plan.prior[layer][expert]}`);
  if (plan.tokens) lines.push(`${plan.tokens[layer][expert].toLocaleString("en")} calibration tokens`);
  return lines.join("\n");
}

function showTip(event) {
  const cell = event.target.closest("[data-layer]");
  tip.hidden = !cell;
  if (!cell) return;
  const { layer, expert } = cell.dataset;
  tip.textContent = expert === undefined ? describeLayer(Number(layer)) : describeExpert(Number(layer), Number(expert));
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 4);
  const below = event.clientY + 16;
  const top = below + box.height > window.innerHeight ? event.clientY - box.height - 10 : below;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// --- axes and legends

// width of each of `count` columns in a drawing, so that it fits the page
function columnWidth(drawing, count) {
  return Math.max(2, Math.min(72, (drawing.parentElement.clientWidth - 28 - LEFT) / count));
}

function tickStep(count, room, each) {
  const steps = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 128];
  return steps.find((step) => (count / step) * each <= room) || count;
}

function columnTicks(labels, name, each, below) {
  const step = tickStep(labels.length, labels.length * each, 30);
  const ticks = labels.map((label, index) => [LEFT + (index + 0.5) * each, label]).filter((_, index) => index % step === 0);
  return [
    ...ticks.map(([x, label]) => svg("text", { x, y: below + 15, "text-anchor": "middle" }, label)),
    svg("text", { x: LEFT + (labels.length * each) / 2, y: below + 33, "text-anchor": "middle" }, name),
  ];
}

function rowTicks(labels, name, top, each) {
  const step = tickStep(labels.length, labels.length * each, 16);
  const ticks = labels.map((label, index) => [top + (index + 0.5) * each + 4, label]).filter((_, index) => index % step === 0);
  return [
    ...ticks.map(([y, label]) => svg("text", { x: LEFT - 6, y, "text-anchor": "end" }, label)),
    turned(name, 14, top + (labels.length * each) / 2),
  ];
}

function turned(label, x, y) {
  return svg("text", { transform: `translate(${x} ${y}) rotate(-90)`, "text-anchor": "middle" }, label);
}

// horizontal lines with their labels; `ticks` are pairs of a label and a y coordinate
function rules(ticks, width) {
  return ticks.flatMap(([label, y]) => [
    svg("line", { x1: LEFT, x2: LEFT + width, y1: y, y2: y, class: "rule" }),
    svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, label),
  ]);
}

// bars that begin at zero; shares are drawn on the scale from 0 to 100 %
function barPanel(label, values, isShare, each, top, height, low = []) {
  const [least, most] = isShare ? [0, 1] : [Math.min(0, ...values), Math.max(0, ...values) || 1];
  const y = (value) => top + height * (1 - (value - least) / (most - least));
  const marks = isShare ? [[0, 0], [50, 0.5], [100, 1]] : [...new Set([least, 0, most])].map((value) => [Number(value.toPrecision(2)), value]);
  const bars = values.map((value, index) => svg("rect", {
    x: LEFT + (index + 0.08) * each,
    y: Math.min(y(0), y(value)),
    width: 0.84 * each,
    height: Math.abs(y(0) - y(value)),
    class: low.includes(index) ? "bar low" : "bar",
  }));
  const ticks = marks.map(([text, value]) => [text, y(value)]);
  return [...rules(ticks, each * values.length), turned(label, 14, top + height / 2), ...bars];
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

function square(attributes) {
  return svg("rect", { width: 14, height: 14, ...attributes });
}

function colourBar(colours) {
  const each = 120 / colours.length;
  return colours.map((fill, index) => svg("rect", { x: index * each, width: each + 0.5, height: 14, fill }));
}

// --- the layers

function drawLayers() {
  const drawing = document.getElementById("layer-bars");
  const each = columnWidth(drawing, plan.labels.length);
  const [height, gap] = [96, 22];
  const panels = [
    ["coverage, %", plan.layerCoverage, true, plan.lowLayers],
    ["channels, %", keepRatios, true, []],
    ["loss rise", plan.layerLoss, false, []],
  ].filter(([, values]) => values);
  const parts = panels.flatMap(([label, values, isShare, low], index) => (
    barPanel(label, values, isShare, each, 8 + index * (height + gap), height, low)
  ));
  const bottom = 8 + panels.length * (height + gap) - gap;
  plan.labels.forEach((_, layer) => {
    parts.push(svg("rect", { x: LEFT + layer * each, y: 4, width: each, height: bottom - 4, class: "hit", "data-layer": layer }));
  });
  const frame = { x: LEFT + chosenLayer() * each, y: 4, width: each, height: bottom - 3 };
  parts.push(svg("rect", { ...frame, class: "chosen", "pointer-events": "none" }));
  parts.push(...columnTicks(plan.labels, "layer", each, bottom));
  drawing.replaceChildren(...parts);
  resize(drawing, LEFT + each * plan.labels.length + 12, bottom + 40);
}

function drawLayerLegend() {
  const items = [legendItem("the layer shown below", 14, svg("rect", { x: 1, y: 1, width: 12, height: 12, class: "chosen" }))];
  if (plan.lowLayers.length) items.push(legendItem(`stands out: coverage over ${plan.lowPoints} points below the median layer`, 14, square({ class: "bar low" })));
  document.getElementById("layer-legend").replaceChildren(...items);
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
  const top = 4;
  const cellWidth = columnWidth(map, experts);
  const cellHeight = layers <= 32 ? 24 : 12;
  const gap = cellWidth < 6 ? 0 : 0.75;
  const [width, height] = [cellWidth * experts, cellHeight * layers];
  const parts = [];
  plan.widths.forEach((row, layer) => row.forEach((kept, expert) => {
    const place = { x: LEFT + expert * cellWidth, y: top + layer * cellHeight };
    const look = kept ? { fill: colourOf(kept) } : { class: "removed" };
    const size = { width: cellWidth - gap, height: cellHeight - 0.75 };
    parts.push(svg("rect", { ...place, ...size, ...look, "data-layer": layer, "data-expert": expert }));
    if (cellWidth < 30) return;
    const middle = { x: place.x + cellWidth / 2, y: place.y + cellHeight / 2 + 4 };
    const text = svg("text", { ...middle, "text-anchor": "middle", "pointer-events": "none" }, kept);
    text.style.fill = kept ? inkOn(colourOf(kept)) : "#000";
    parts.push(text);
  }));
  parts.push(...columnTicks([...plan.widths[0].keys()], "expert", cellWidth, top + height));
  parts.push(...rowTicks(plan.labels, "layer", top, cellHeight));
  const frame = { x: LEFT - 1, y: top + chosenLayer() * cellHeight - 1, width: width + 1.25, height: cellHeight + 1.25 };
  parts.push(svg("rect", { ...frame, class: "chosen", "pointer-events": "none" }));
  map.replaceChildren(...parts);
  resize(map, LEFT + width + 12, top + height + 40);
}

function drawMapLegend() {
  const items = [legendItem(`0 to ${plan.channels} channels kept`, 120, ...colourBar(plan.colours))];
  const removed = plan.widths.flat().filter((width) => width === 0).length;
  if (removed) items.push(legendItem(`removed experts (${removed})`, 14, square({ class: "removed" })));
  document.getElementById("width-legend").replaceChildren(...items);
}

// --- the bars of the experts of a layer

function drawBars() {
  const bars = document.getElementById("expert-bars");
  const layer = chosenLayer();
  const experts = plan.widths[layer].length;
  const each = columnWidth(bars, experts);
  const [height, priorHeight, gap] = [240, 84, 18];
  const top = 8 + (plan.prior ? priorHeight + gap : 0);
  const ticks = [0, 20, 40, 60, 80, 100].map((share) => [share, top + height * (1 - share / 100)]);
  const parts = [hatching(), ...rules(ticks, each * experts)];
  parts.push(turned(plan.shares ? "importance, %" : "channels, %", 14, top + height / 2));
  if (plan.prior) parts.push(...barPanel("prior", plan.prior[layer], false, each, 8, priorHeight));
  for (let expert = 0; expert < experts; expert += 1) {
    parts.push(...expertBar(layer, expert, LEFT + (expert + 0.06) * each, each * 0.88, top, height));
    const area = { x: LEFT + expert * each, y: 8, width: each, height: top + height - 8 };
    parts.push(svg("rect", { ...area, class: "hit", "data-layer": layer, "data-expert": expert }));
  }
  parts.push(...columnTicks([...plan.widths[layer].keys()], "expert", each, top + height));
  bars.replaceChildren(...parts);
  resize(bars, LEFT + each * experts + 12, top + height + 40);
  drawBarLegend(layer);
}

function hatching() {
  const pattern = svg("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svg("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "hatch" }));
  return pattern;
}

function expertBar(layer, expert, x, width, top, height) {
  const shares = plan.shares ? plan.shares[layer][expert] : [1];
  const colours = plan.shares ? plan.groupColours : [colourOf(plan.channels / 3)];
  const removed = plan.widths[layer][expert] === 0 ? [cross(x + width / 2, top + height - 10)] : [];
  const total = sum(shares);
  if (total === 0) return [svg("rect", { x, y: top + 1, width, height: height - 1, class: "unscored" }), ...removed];
  const parts = [];
  let low = 0;
  shares.forEach((share, group) => {
    const high = low + share / total;
    const y = top + height * (1 - high);
    parts.push(svg("rect", { x, y, width, height: height * (high - low), fill: colours[group] }));
    low = high;
  });
  const kept = plan.shares ? plan.coverage[layer][expert] : plan.widths[layer][expert] / plan.channels;
  const end = top + height * (1 - kept);
  if (width > 5) parts.push(svg("rect", { x, y: top, width, height, class: "outline" }));
  parts.push(svg("rect", { x, y: top, width, height: end - top, class: "cut" }));
  parts.push(svg("rect", { x, y: top, width, height: end - top, fill: "url(#hatching)" }));
  for (const name of ["casing", "end"]) parts.push(svg("line", { x1: x, x2: x + width, y1: end, y2: end, class: name }));
  return [...parts, ...removed];
}

function cross(x, y) {
  const arm = 4;
  const d = `M${x - arm} ${y - arm}L${x + arm} ${y + arm}M${x - arm} ${y + arm}L${x + arm} ${y - arm}`;
  const path = svg("path", { d, "stroke-width": 3 });
  path.style.stroke = "var(--removed)";
  return path;
}

function drawBarLegend(layer) {
  const items = [];
  if (plan.shares) items.push(legendItem("channels, best to worst", 120, ...colourBar(plan.groupColours)));
  items.push(legendItem("kept below this line", 20, svg("line", { x1: 0, x2: 20, y1: 7, y2: 7, class: "end" })));
  items.push(legendItem("removed channels", 20, svg("rect", { width: 20, height: 14, fill: "url(#hatching)" })));
  const removed = plan.widths[layer].filter((width) => width === 0).length;
  if (removed) items.push(legendItem(`removed experts (${removed})`, 14, cross(7, 7)));
  if (plan.shares && plan.shares[layer].some((shares) => sum(shares) === 0)) {
    items.push(legendItem("all scores are 0", 14, svg("rect", { x: 1, y: 1, width: 12, height: 12, class: "unscored" })));
  }
  document.getElementById("expert-legend").replaceChildren(...items);
}

// --- the table of the experts of a layer

const columns = [
  { name: "expert", of: (layer, expert) => [expert, expert] },
  { name: "channels kept", of: (layer, expert) => [plan.widths[layer][expert], plan.widths[layer][expert]] },
  plan.coverage && { name: "coverage", of: (layer, expert) => [plan.coverage[layer][expert], percent(plan.coverage[layer][expert])] },
  plan.prior && { name: "prior", of: (layer, expert) => [plan.prior[layer][expert], plan.prior[layer][expert]] },
  plan.tokens && {
    name: "tokens",
    of: (layer, expert) => [plan.tokens[layer][expert], plan.tokens[layer][expert].toLocaleString("en")],
  },
].filter(Boolean);

const filters = {
  all: () => true,
  unpruned: (layer, expert) => plan.widths[layer][expert] === plan.channels,
  partly: (layer, expert) => plan.widths[layer][expert] > 0 && plan.widths[layer][expert] < plan.channels,
  removed: (layer, expert) => plan.widths[layer][expert] === 0,
  rare: (layer, expert) => plan.tokens[layer][expert] < plan.tokenFloor,
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

function drawCharts() {
  drawLayers();
  drawMap();
  drawBars();
}

function drawLayer() {
  drawCharts();
  drawTable();
}

layerChoice.addEventListener("change", drawLayer);
filterChoice.addEventListener("change", drawTable);
for (const id of ["layer-bars", "width-map"]) {
  document.getElementById(id).addEventListener("click", (event) => {
    const cell = event.target.closest("[data-layer]");
    if (!cell) return;
    layerChoice.value = cell.dataset.layer;
    drawLayer();
  });
}
for (const id of ["layer-bars", "width-map", "expert-bars"]) {
  const drawing = document.getElementById(id);
  for (const kind of ["pointermove", "pointerdown"]) drawing.addEventListener(kind, showTip);
  drawing.addEventListener("pointerleave", () => { tip.hidden = true; });
}
let drawnAt = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnAt) return;
  drawnAt = window.innerWidth;
  drawCharts();
});

drawHeader();
drawLayerLegend();
drawMapLegend();
drawLayer();
