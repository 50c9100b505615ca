"use strict";
// Draws the curves of the runs in #data as SVG. A live page fetches itself every few seconds and redraws.

const HEIGHT = 300,  // units of a picture
   LEFT = 58, RIGHT = 14, TOP = 18, BOTTOM = 34, COLOURS = 8, MOST_DOTS = 60, REFRESH_MS = 5000;
const SVG = "http://www.w3.org/2000/svg";
const PANELS = [
  {key: "reward", title: "reward"},
  {key: "accuracy", title: "pairs in order", percent: true},
  {key: "stopped", title: "answers that stop by themselves", zero: true, percent: true},
  {key: "answer_tokens", title: "tokens of an answer", zero: true},
  {key: "kl", title: "KL from the reference (nats per token)", zero: true},
  {key: "loss", title: "loss (nats per token)"},
  {key: "lr", title: "learning rate", zero: true},
  {key: "grad_norm", title: "gradient norm", zero: true},
  {key: "tokens_per_second", title: "tokens/s", zero: true},
  {key: "mfu", title: "model FLOPs utilization", zero: true, percent: true},
];
const X_TITLES = {tokens: "training tokens", step: "steps", elapsed_seconds: "training time"};
const DASHES = ["", "5 3", "1.5 3"];  // training, validation; or a task's scores
const narrow = matchMedia("(max-width: 559px)");
const opened = new Map();  // samples that the reader has opened or closed, by `nameSample`
const colours = new Map();  // index of a run's colour by its name
const hidden = new Set();  // names of runs that the reader has left out
let width = 560, requests = 0;
let data = JSON.parse(document.getElementById("data").textContent);
for (const name of data.names) if (!data.runs.some(run => run.name === name)) hidden.add(name);

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function formatNumber(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${+(value / unit).toPrecision(4)}${letter}`;
  return size && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(4)}`;
}

function formatSeconds(value) {
  if (value < 120) return `${+value.toPrecision(3)}s`;
  return value < 7200 ? `${+(value / 60).toPrecision(3)}min` : `${+(value / 3600).toPrecision(3)}h`;
}

function listTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => size >= rough * 0.999) || rough;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function listLogTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of [1, 2, 3, 5, 7]) {
      const tick = digit * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks;
}

function listShown() {
  return data.runs.filter(run => !hidden.has(run.name));
}

// Give each shown run a colour of its own as long as there are enough, and let it keep that.
function chooseColours() {
  const used = new Set();
  for (const {name} of listShown())
    if (used.has(colours.get(name))) colours.delete(name);
    else if (colours.has(name)) used.add(colours.get(name));
  for (const {name} of listShown()) {
    if (colours.has(name)) continue;
    let index = 0;
    while (used.has(index)) index++;
    colours.set(name, index);
    used.add(index);
  }
}

function drawMark(colour, dash, parent) {
  const mark = element("svg", {width: 26, height: 10, "aria-hidden": "true", class: "mark"}, parent);
  element("line", {x1: 1, x2: 25, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash}, mark);
}

// The curves of one panel: {name, colour, x, y, low, high, kind, dots}; `kind` chooses the dashes.
function listCurves(panel, settings) {
  const curves = [];
  for (const run of listShown()) {
    const sources = panel.task
      ? Object.entries(run.tasks[panel.task] || {}).filter(([key]) => key.startsWith("acc"))
        .map(([key, y]) => ({from: run.tasks[panel.task], y, name: `${run.name}, ${key}`, kind: key, dots: true}))
      : [{from: run.train, y: run.train[panel.key], name: run.name, kind: "training"}];
    if (!panel.task && run.val[panel.key])
      sources.push({from: run.val, y: run.val[panel.key], name: `${run.name}, validation`, kind: "validation", dots: true});
    for (const source of sources) {
      const x = source.from[settings.x];
      if (!x || !source.y) continue;
      const last = Math.max(...(run.train[settings.x] || x).filter(value => value !== null));
      const kept = x.map((value, i) => i).filter(
        i => x[i] !== null && source.y[i] !== null && !(panel.key === "loss" && settings.late && x[i] < last / 10));
      if (!kept.length) continue;
      const pick = list => kept.map(i => list[i]);
      const band = panel.key === "loss" && !source.dots ? {low: pick(run.train.low), high: pick(run.train.high)} : {};
      const colour = `var(--c${colours.get(run.name) % COLOURS})`;
      curves.push({...source, colour, x: pick(x), y: pick(source.y), ...band});
    }
  }
  return curves;
}

function drawPanel(panel, settings) {
  const curves = listCurves(panel, settings);
  if (!curves.length) return null;
  const isLog = panel.key === "loss" && settings.log && curves.every(curve => Math.min(...curve.y) > 0);
  const scale = isLog ? Math.log : value => value;
  const all = curves.flatMap(curve => curve.low ? curve.y.concat(curve.low, curve.high) : curve.y)
    .filter(value => value !== null && (!isLog || value > 0));
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (panel.zero) low = Math.min(0, low);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const hasPowers = isLog && high > 10 * low;
  if (!hasPowers) {  // the axis ends at ticks
    const [first, second] = listTicks(low, high, 8), step = second - first;
    [low, high] = [Math.floor(low / step + 1e-9) * step || low, Math.ceil(high / step - 1e-9) * step];
  }
  const from = settings.late && panel.key === "loss" ? Math.min(...curves.map(curve => curve.x[0])) : 0;
  const ends = listShown().map(run => run.train[settings.x]?.findLast(value => value !== null) ?? 0);
  const to = Math.max(...curves.map(curve => curve.x[curve.x.length - 1]), ...ends, from + 1e-9);
  const px = x => LEFT + (x - from) / (to - from) * (width - LEFT - RIGHT);
  const py = y => HEIGHT - BOTTOM - (scale(y) - scale(low)) / (scale(high) - scale(low)) * (HEIGHT - TOP - BOTTOM);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const kinds = panel.task ? [...new Set(curves.map(curve => curve.kind))] : ["training", "validation"];
  caption.textContent = panel.title;
  if (curves.some(curve => curve.dots))
    kinds.forEach((kind, i) => {
      const key = document.createElement("span");
      drawMark("var(--muted)", DASHES[i], key);
      key.append(kind.replaceAll("_", " "));
      caption.append(" ", key);
    });
  const formatY = panel.percent ? value => `${+(100 * value).toPrecision(3)}%` : formatNumber;
  const spans = curves.map(curve => `${curve.name}: ${formatY(curve.y[0])} to ${formatY(curve.y[curve.y.length - 1])}`);
  const svg = element("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0,
    "aria-label": `${panel.title} over ${X_TITLES[settings.x]}. ${spans.join("; ")}. Arrow keys read values.`});
  const formatX = settings.x === "elapsed_seconds" ? formatSeconds : formatNumber;
  for (const tick of hasPowers ? listLogTicks(low, high) : listTicks(low, high, 8)) {
    element("line", {x1: LEFT, x2: width - RIGHT, y1: py(tick), y2: py(tick), stroke: "var(--line)"}, svg);
    element("text", {x: LEFT - 6, y: py(tick) + 4, "text-anchor": "end"}, svg).textContent = formatY(tick);
  }
  for (const tick of listTicks(from, to, 5)) {
    element("line", {x1: px(tick), x2: px(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, stroke: "var(--line)"}, svg);
    element("text", {x: px(tick), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle"}, svg).textContent = formatX(tick);
  }
  element("text", {x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end"}, svg).textContent = X_TITLES[settings.x];
  for (const curve of curves) {
    const {colour} = curve;
    const point = (x, y) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`;
    if (curve.low) {
      const usable = curve.x.map((x, i) => i).filter(i => curve.low[i] !== null && (!isLog || curve.low[i] > 0));
      const edge = usable.map(i => point(curve.x[i], curve.high[i]))
        .concat(usable.reverse().map(i => point(curve.x[i], curve.low[i])));
      element("polygon", {points: edge.join(" "), fill: colour, opacity: 0.18}, svg);
    }
    if (!curve.dots || curve.x.length > 1)
      element("polyline", {points: curve.x.map((x, i) => point(x, curve.y[i])).join(" "), fill: "none", stroke: colour,
        "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-dasharray": DASHES[kinds.indexOf(curve.kind)]}, svg);
    if (curve.dots && curve.x.length <= MOST_DOTS)
      curve.x.forEach((x, i) => element("circle", {cx: px(x), cy: py(curve.y[i]), r: 3, fill: colour, stroke: "var(--panel)"}, svg));
  }
  const cursor = element("line", {y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--muted)", visibility: "hidden"}, svg);
  const output = document.createElement("output");
  const longest = curves.reduce((best, curve) => curve.x.length > best.x.length ? curve : best);
  let place = -1;
  const read = x => {
    const values = curves.map(curve => {
      const nearest = curve.x.reduce((best, value, i) => Math.abs(value - x) < Math.abs(curve.x[best] - x) ? i : best, 0);
      return `${curve.name} ${formatY(curve.y[nearest])}`;
    });
    output.textContent = `${formatX(x)}: ${values.join(", ")}`;
  };
  const show = index => {
    place = Math.min(Math.max(index, 0), longest.x.length - 1);
    const x = longest.x[place];
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    cursor.setAttribute("visibility", "visible");
    read(x);
  };
  read(to);  // the last values, until the reader chooses others
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = from + ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT) * (to - from);
    show(longest.x.reduce((best, value, i) => Math.abs(value - x) < Math.abs(longest.x[best] - x) ? i : best, 0));
  });
  svg.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50}[event.key];
    if (!step) return;
    event.preventDefault();
    show(place < 0 ? longest.x.length - 1 : place + step);
  });
  figure.append(caption, svg, output);
  return figure;
}

function draw() {
  width = narrow.matches ? 360 : 560;  // letters stay readable on a telephone
  const form = document.getElementById("controls");
  const settings = {x: form.elements.x.value, log: form.elements.log.checked, late: form.elements.late.checked};
  chooseColours();
  const hasTime = listShown().some(run => (run.train.elapsed_seconds || []).some(value => value !== null));
  form.querySelector("[value=elapsed_seconds]").disabled = !hasTime;
  const tasks = [...new Set(listShown().flatMap(run => Object.keys(run.tasks)))];
  const panels = PANELS.concat(tasks.map(task => ({key: task, task, title: task, percent: true})));
  const charts = document.getElementById("charts");
  const focused = [...charts.children].findIndex(figure => figure.contains(document.activeElement));
  charts.replaceChildren(...panels.map(panel => drawPanel(panel, settings)).filter(Boolean));
  if (focused >= 0) charts.children[focused]?.querySelector("[tabindex]").focus();
  drawLegend();
}

// A checkbox per run. The elements stay as long as the runs do, and so does the focus.
function drawLegend() {
  const legend = document.getElementById("legend");
  const {names} = data;
  if (legend.dataset.names !== JSON.stringify(names)) {
    legend.dataset.names = JSON.stringify(names);
    legend.replaceChildren(...names.map(name => {
      const item = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = !hidden.has(name);
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(name);
        else hidden.add(name);
        draw();
        if (data.live) refresh();
      });
      label.append(box);
      drawMark("none", "", label);
      label.append(name);
      item.append(label);
      return item;
    }));
  }
  legend.querySelectorAll("line").forEach((line, i) => line.setAttribute("stroke",
    hidden.has(names[i]) ? "var(--line)" : `var(--c${colours.get(names[i]) % COLOURS})`));
}

function nameSample(details) {
  let head = details;
  while (head && head.tagName !== "H3") head = head.previousElementSibling;  // the run's name, where there are several
  return `${head ? head.textContent : ""} ${details.querySelector("summary").textContent}`;
}

// Replace the sections that have changed; what the reader has opened and scrolled stays.
function replaceSections(page) {
  const next = page.querySelectorAll("main > section");
  document.querySelectorAll("main > section").forEach((section, i) => {
    if (section.querySelector("#charts") || section.textContent === next[i].textContent) return;
    for (const each of next[i].querySelectorAll("details")) each.open = opened.get(nameSample(each)) ?? each.open;
    const scrolled = section.querySelector(".wide")?.scrollLeft;
    section.replaceWith(document.adoptNode(next[i]));
    next[i].querySelector(".wide")?.scrollTo(scrolled, 0);
  });
}

async function refresh() {
  if (document.hidden) return;
  const state = document.getElementById("state"), request = ++requests;
  try {
    // A page without `hide` has the newest runs only, and no run has the name "/".
    const query = new URLSearchParams(["/", ...hidden].map(name => ["hide", name]));
    const response = await fetch(`?${query}`, {cache: "no-store"});
    if (!response.ok) throw new Error(response.statusText);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    if (request !== requests) return;  // the reader has chosen other runs since
    data = JSON.parse(page.getElementById("data").textContent);
    document.title = page.title;
    document.querySelector("h1").textContent = page.querySelector("h1").textContent;
    replaceSections(page);
    draw();
    state.textContent = `updated ${new Date().toLocaleTimeString()}`;
  } catch {
    state.textContent = "no connection to the server; the page stays as it was";
  }
}

document.getElementById("controls").addEventListener("change", draw);
narrow.addEventListener("change", draw);
document.querySelector("main").addEventListener("click", event => {
  const summary = event.target.closest("summary");
  if (summary) opened.set(nameSample(summary.parentElement), !summary.parentElement.open);
});
draw();
if (data.live) {
  setInterval(refresh, REFRESH_MS);
  document.addEventListener("visibilitychange", refresh);
}
