// The curves. All of them share the horizontal axis, the cursor and the zoom.

import { el, byId, colour, rankColour } from "./dom.js";
import { bytes, clock, compact, count, duration, megabytes, number, percent, title } from "./format.js";

const HEIGHT = 190;

const steps = (data, name) => ({ table: data.steps, values: data.steps[name] });
const evaluations = (data, name) => ({ table: data.evaluations, values: data.evaluations[name] });

/** A curve: what it is called, its colour, its points, and how it is drawn. */
const raw = (label, name) => (data) => [{ label, colour: "faint", ...steps(data, name), width: 1 }];
const smoothed = (label, name, shade) => (data) => [{ label, colour: shade, table: data.steps, values: data.smoothed[name], width: 2 }];
const evaluated = (label, name, shade) => (data) => [{ label, colour: shade, ...evaluations(data, name), width: 2, points: true }];
const perProcess = (name, withServer = true) => (data) => data.processes
  .filter((process) => withServer || process.rank !== null)
  .map((process) => ({
    gaps: true,
    label: title(process, process.role),
    colour: rankColour(process.rank), table: process, values: process[name], width: 1.5,
  }));

/** Where the validation loss was lowest. */
function best(data) {
  const { step, t, val_loss: losses } = data.evaluations;
  const place = (losses ?? []).reduce((least, loss, index) => (loss !== null && (least < 0 || loss < losses[least]) ? index : least), -1);
  if (place < 0) return [];
  return [{ label: `best, at step ${count(step[place])}`, colour: "good", table: { step: [step[place]], t: [t[place]] }, values: [losses[place]], width: 0, points: true, size: 11 }];
}

/** Whether the losses span more than a factor of ten, so that a logarithmic axis shows them better. */
export function spansDecade({ smoothed, evaluations }) {
  const known = [...(smoothed.loss ?? []), ...(evaluations.val_loss ?? [])].filter((value) => value !== null);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  return low > 0 && high > 10 * low;
}

const PANELS = [
  { title: "Loss", curves: [raw("each step", "loss"), smoothed("smoothed", "loss", "accent"), evaluated("validation", "val_loss", "second"), best], isLog: true, wide: true },
  { title: "Validation accuracy", curves: [evaluated("accuracy", "val_accuracy", "second")] },
  { title: "Validation perplexity", curves: [evaluated("perplexity", "val_perplexity", "second")] },
  { title: "Throughput", unit: "samples/s", curves: [raw("each step", "samples_per_s"), smoothed("smoothed", "samples_per_s", "accent")], fromZero: true },
  { title: "Learning rate", curves: [raw("each step", "lr"), smoothed("smoothed", "lr", "accent")], fromZero: true },
  { title: "Staleness", unit: "steps", curves: [raw("each step", "staleness"), smoothed("smoothed", "staleness", "accent")], fromZero: true },
  { title: "Drift", unit: "of the weights' norm", curves: [raw("each change", "drift"), smoothed("smoothed", "drift", "accent")], format: percent, fromZero: true },
  { title: "Gradient norm", curves: [raw("each step", "grad_norm"), smoothed("smoothed", "grad_norm", "accent")], fromZero: true },
  { title: "Throughput by process", unit: "samples/s", curves: [perProcess("samples_per_s", false)], fromZero: true },
  { title: "CPU", unit: "cores", curves: [perProcess("cpu")], fromZero: true },
  { title: "Memory", curves: [perProcess("memory_bytes")], format: bytes, fromZero: true },
  { title: "GPU", curves: [perProcess("gpu/utilization")], format: percent, fromZero: true },
  { title: "GPU memory", curves: [perProcess("gpu/memory_bytes")], format: bytes, fromZero: true },
  { title: "GPU temperature", unit: "°C", curves: [perProcess("gpu/temperature_c")] },
  { title: "GPU power", unit: "W", curves: [perProcess("gpu/power_w")], fromZero: true },
  { title: "Sent", unit: "MB/s to the server", curves: [perProcess("sent_bytes_per_s", false)], format: megabytes, fromZero: true },
  { title: "Round trip", curves: [perProcess("rtt_s", false)], format: duration, fromZero: true },
];

const KNOWN = new Set(["t", "step", "val_loss", "val_accuracy", "val_perplexity"]);

/** All panels; those of a workload's own metrics stand behind the other validations. */
function panels() {
  const own = Object.keys(data.evaluations).filter((name) => !KNOWN.has(name)).map((name) => name.slice(4))
    .map((name) => ({ title: `Validation ${name}`, curves: [evaluated(name, `val_${name}`, "second")] }));
  return [...PANELS.slice(0, 3), ...own, ...PANELS.slice(3)];
}

const drawn = new Map();
let data = null, over = "step", isLogLoss = false, isChosen = false, zoom = null, extent = [0, 1];

/** From where to where there are points of any curve, so that panels lie over one another. */
function extentOf({ steps, evaluations, processes }) {
  let [low, high] = [Infinity, -Infinity];
  for (const table of [steps, evaluations, ...processes]) {
    for (const place of table[over] ?? []) [low, high] = [Math.min(low, place), Math.max(high, place)];
  }
  return low < high ? [low, high] : low === high ? [low - 1, high + 1] : [0, 1];
}

/** The curves of a panel that have points. */
function found(panel) {
  return panel.curves.flatMap((curve) => curve(data)).filter((curve) => curve.values?.some((value) => value !== null));
}

/** Tables of columns over one axis, with gaps where one of them has no point there. */
function aligned(curves) {
  const tables = curves.map((curve) => (curve.gaps ? interrupted(curve) : sorted(curve.table[over], curve.values)));
  const whole = 2; // a null is a gap up to the neighbours of its own curve
  return uPlot.join(tables, tables.map((table) => table.map(() => whole)));
}

/** A process's points, with a gap where it has said nothing for long. */
function interrupted({ table, values }) {
  const { t } = table, places = table[over];
  const pauses = t.slice(1).map((each, index) => each - t[index]).sort((a, b) => a - b);
  const long = Math.max(15, 4 * (pauses[pauses.length >> 1] ?? 0));
  const [xs, ys] = [[], []];
  t.forEach((each, index) => {
    if (index && each - t[index - 1] > long) { xs.push((places[index] + places[index - 1]) / 2); ys.push(null); }
    xs.push(places[index]);
    ys.push(values[index]);
  });
  return sorted(xs, ys);
}

function sorted(places, values) {
  const order = places.map((_, index) => index).sort((a, b) => places[a] - places[b]);
  const unique = order.filter((index, rank) => rank + 1 === order.length || places[order[rank + 1]] !== places[index]);
  return [unique.map((index) => places[index]), unique.map((index) => values[index])];
}

function options(panel, curves, width) {
  const format = panel.format ?? ((value) => number(value));
  const axis = { stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const inTime = over === "t";
  return {
    width, height: HEIGHT, padding: [8, 18, 0, 0],
    cursor: { sync: { key: "run", scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => () => zoomTo(null) } },
    select: { show: true },
    legend: { live: true, markers: { stroke: (_, index) => `var(--${curves[index - 1]?.colour})` } }, // follows the theme
    scales: {
      x: { time: inTime, range: () => zoom ?? extent },
      y: { distr: panel.isLog && isLogLoss ? 3 : 1, range: (u, low, high) => heights(panel, low, high) },
    },
    axes: [
      { ...axis, size: 26, ...(inTime ? {} : { values: (_, splits) => splits.map((split) => (Number.isInteger(split) ? compact(split) : "")) }) },
      { ...axis, size: 54, values: (_, splits) => splits.map((split) => (split === null ? "" : format(split))) },
    ],
    series: [
      { label: inTime ? "time" : "step", value: (_, value) => (value === null ? "" : inTime ? clock(value) : count(value)) },
      ...curves.map((curve) => ({
        label: curve.label, stroke: () => colour(curve.colour), width: curve.width, spanGaps: false,
        points: { show: Boolean(curve.points) && curve.values.length < 80, size: curve.size ?? 5, fill: () => colour("card") },
        value: (_, value) => (value === null ? "" : format(value)),
      })),
    ],
    hooks: { setSelect: [(u) => {
      if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }] },
  };
}

function heights(panel, low, high) {
  if (panel.isLog && isLogLoss) return high > 0 ? uPlot.rangeLog(Math.max(low, high * 1e-9), high, 10, false) : [0.1, 1];
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [panel.fromZero && low >= 0 ? 0 : low - room, high + room];
}

function zoomTo(range) {
  zoom = range;
  for (const each of drawn.values()) each.plot.setData(each.plot.data, true);
}

export function drawCharts(next) {
  data = next;
  if (!isChosen) setLogLoss(spansDecade(data));
  extent = extentOf(data);
  const box = byId("curves");
  for (const panel of panels()) drawPanel(panel, box);
  byId("curves-title").closest("section").classList.toggle("empty", drawn.size === 0);
}

function drawPanel(panel, box) {
  const curves = found(panel);
  const key = `${over} ${isLogLoss && panel.isLog} ${curves.map((curve) => curve.label).join("|")} ${curves.some((curve) => curve.points) && curves.some((curve) => curve.points && curve.values.length < 80)}`;
  const old = drawn.get(panel.title);
  if (!curves.length) { remove(panel.title); return; }
  if (old && old.key === key) { old.plot.setData(aligned(curves), true); return; }
  const place = old?.figure.nextSibling ?? after(panel, box);
  remove(panel.title);
  const figure = el("figure", { class: panel.wide ? "card wide-curve" : "card" }, el("figcaption", {}, panel.title, panel.unit ? el("small", {}, ` ${panel.unit}`) : null));
  box.insertBefore(figure, place);
  const plot = new uPlot(options(panel, curves, inner(figure)), aligned(curves), figure);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", `${panel.title} over ${over === "t" ? "time" : "steps"}`);
  drawn.set(panel.title, { plot, figure, key });
}

/** The figure of the next panel that is drawn. */
function after(panel, box) {
  const all = panels(), place = all.findIndex((each) => each.title === panel.title);
  const later = all.slice(place + 1).find((each) => drawn.has(each.title));
  return later && drawn.get(later.title).figure.parentNode === box ? drawn.get(later.title).figure : null;
}

function remove(title) {
  const old = drawn.get(title);
  if (!old) return;
  old.plot.destroy();
  old.figure.remove();
  drawn.delete(title);
}

const inner = (figure) => Math.max(200, figure.clientWidth - 24);

export function clearCharts() {
  for (const title of [...drawn.keys()]) remove(title);
  [data, zoom] = [null, null];
}

export function redrawCharts() {
  for (const { plot } of drawn.values()) plot.redraw(false, true);
}

function setLogLoss(isOn) {
  isLogLoss = isOn;
  byId("log-scale").setAttribute("aria-pressed", String(isOn));
}

export function setUpCharts() {
  for (const button of document.querySelectorAll("[data-x]")) {
    button.addEventListener("click", () => {
      [over, zoom] = [button.dataset.x, null];
      for (const other of document.querySelectorAll("[data-x]")) other.setAttribute("aria-pressed", String(other === button));
      if (data) drawCharts(data);
    });
  }
  byId("log-scale").addEventListener("click", () => {
    isChosen = true;
    setLogLoss(!isLogLoss);
    if (data) drawCharts(data);
  });
  new ResizeObserver(() => {
    for (const { plot, figure } of drawn.values()) {
      const width = inner(figure);
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }).observe(byId("curves"));
}
