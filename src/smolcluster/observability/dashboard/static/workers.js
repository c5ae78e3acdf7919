// A row a worker. Cells are changed in place, so that a selection in them stays.

import { el, byId, say, rankColour } from "./dom.js";
import { bytes, count, duration, megabytes, NONE, number, percent, rate, title } from "./format.js";
import { condition, parts, PHASES, sends, stage } from "./cluster.js";

const vital = (name) => (worker) => worker.process_stats?.[name];

/** Bytes a second while it runs; those of its sessions when it is over. */
function flow(name, total) {
  return (worker, state) => (state.is_over ? optional(worker[total], bytes) : optional(vital(name)(worker), rate));
}

/** Bytes a second of those that the link was measured to carry, where it was: `1.2 of 12 MB/s`. */
const used = (speed, capacity) => (capacity === undefined ? rate(speed) : `${megabytes(speed)} of ${rate(capacity)}`);
const carries = (capacity) => (capacity === undefined ? "" : `link ${rate(capacity)}`);

/** Seconds of a pipeline's step, by what a stage computes. */
function op(name) {
  return (worker) => optional(vital(`op_s/${name}`)(worker), duration);
}

/** A column that is hidden where no worker has a GPU that tells it. */
function gpu(name, format) {
  return (worker) => optional(vital(`gpu/${name}`)(worker), format);
}

const OF_STAGES = ["layers", "forward", "backward", "input gradients", "weight gradients", "bubble", "to neighbours"];
const COLUMNS = [
  ["worker", (worker) => title(worker, worker.role)],
  ["state", (worker, state) => (state.is_over ? worker.state : condition(worker))],
  ["device", (worker) => worker.device ?? ""],
  ["step", (worker) => count(worker.step)],
  ["loss", (worker) => optional(worker.loss, number)],
  ["samples", (worker) => count(worker.samples), (worker) => (worker.share > 0 ? percent(worker.share) : "")],
  ["samples/s", (worker, state) => (state.is_over ? "" : number(worker.samples_per_s, 3))],
  ["staleness", (worker, state) => (state.has_staleness ? number(worker.mean_staleness, 3) : "")],
  ["local steps", (worker) => optional(vital("local_steps")(worker), count)],
  ["drift", (worker) => optional(vital("drift")(worker), percent)],
  ["layers", (worker) => stage(worker)?.ranges ?? ""],
  ["forward", op("forward")],
  ["backward", op("backward")],
  ["input gradients", op("backward_input")],
  ["weight gradients", op("backward_weight")],
  ["bubble", (worker) => optional(vital("bubble")(worker), percent)],
  ["to neighbours", (worker, state) => (state.is_over ? "" : sends(worker).map(([rank, speed]) => `${used(speed, worker.process_stats[`capacity/${rank}`])} to ${rank + 1}`).join(", "))],
  ["time of a step", null],
  ["CPU cores", (worker) => optional(vital("cpu")(worker), (value) => number(value, 2))],
  ["memory", (worker) => optional(vital("memory_bytes")(worker), bytes)],
  ["GPU", gpu("utilization", percent)],
  ["GPU memory", gpu("memory_bytes", bytes)],
  ["GPU °C", gpu("temperature_c", (value) => number(value, 3))],
  ["GPU W", gpu("power_w", (value) => number(value, 3))],
  ["up", flow("sent_bytes_per_s", "sent_bytes"), (worker) => carries(worker.capacity?.up_bytes_s)],
  ["down", flow("received_bytes_per_s", "received_bytes"), (worker) => carries(worker.capacity?.down_bytes_s)],
  ["round trip", (worker) => optional(vital("rtt_s")(worker), duration)],
  ["queue", (worker) => optional(vital("queue")(worker), count)],
  ["last seen", (worker) => optional(worker.silent_s, (silent) => (silent < 1.5 ? "now" : `${duration(silent)} ago`))],
];
const RIGHT = new Set(["step", "loss", "samples", "samples/s", "staleness", "local steps", "drift", ...OF_STAGES, "CPU cores", "memory", "GPU", "GPU memory", "GPU °C", "GPU W", "up", "down", "round trip", "queue", "last seen"]);

const optional = (value, format) => (value === undefined || value === null || value === 0 && format === bytes ? "" : format(value));

const rows = new Map();

export function drawWorkers(state) {
  const table = byId("workers");
  if (!table.tBodies.length) {
    table.append(el("thead", {}, el("tr", {}, ...COLUMNS.map(([name]) => el("th", { scope: "col", class: RIGHT.has(name) ? "right" : null }, name)))), el("tbody"));
    byId("phases").append(...PHASES.map((phase) => el("li", { class: `phase-${phase}` }, phase)));
  }
  say(table.tHead.rows[0].cells[0], state.grid ? "rank" : "worker");
  const body = table.tBodies[0];
  const keys = new Set(state.workers.map((worker) => String(worker.rank)));
  for (const [key, row] of rows) if (!keys.has(key)) { row.remove(); rows.delete(key); }
  for (const worker of state.workers) {
    const key = String(worker.rank);
    if (!rows.has(key)) rows.set(key, body.appendChild(newRow(worker)));
    fillRow(rows.get(key), worker, state);
  }
  hideEmpty(table);
  fitWorkers();
  const empty = state.workers.length === 0;
  body.classList.toggle("empty", empty);
  byId("phases").hidden = !state.workers.some((worker) => parts(worker.process_stats).length);
  if (empty && !body.rows.length) rows.set("none", body.appendChild(el("tr", {}, el("td", { colspan: COLUMNS.length, class: "quiet" }, `no ${state.grid ? "ranks" : "workers"} ${state.is_over ? "took part" : "yet"}`))));
}

/** Show rows as cards where the table is wider than its place: how wide it is depends on what the machines tell. */
export function fitWorkers() {
  const table = byId("workers");
  table.classList.remove("cards");
  table.classList.toggle("cards", table.scrollWidth > table.parentNode.clientWidth);
}

/** Columns of what not every machine or algorithm has. */
function hideEmpty(table) {
  COLUMNS.forEach(([name], index) => {
    if (name === "worker" || name === "state" || name === "time of a step") return;
    const cells = [...table.rows].map((row) => row.cells[index]).filter(Boolean);
    const isEmpty = cells.slice(1).every((cell) => ["", NONE].includes(cell.textContent));
    for (const cell of cells) cell.hidden = isEmpty;
  });
}

function newRow(worker) {
  return el("tr", {}, ...COLUMNS.map(([name], index) => {
    const cell = el(index ? "td" : "th", { "data-label": name, class: RIGHT.has(name) ? "right" : null, scope: index ? null : "row" });
    if (name === "worker") cell.append(el("i", { class: `dot ${rankColour(worker.rank)}` }));
    if (name === "time of a step") cell.append(el("div", { class: "split" }));
    else cell.append(el("span"), el("small"));
    return cell;
  }));
}

function fillRow(row, worker, state) {
  row.className = state.is_over ? "" : condition(worker).replace(" ", "-");
  COLUMNS.forEach(([name, main, beside], index) => {
    const cell = row.cells[index];
    if (name === "time of a step") return drawSplit(cell, worker);
    say(cell.querySelector("span"), main(worker, state) ?? "");
    if (name === "device") cell.title = worker.device ?? "";
    say(cell.querySelector("small"), beside ? beside(worker) ?? "" : "");
    cell.classList.toggle("blank", cell.textContent === "");
    return undefined;
  });
}

function drawSplit(cell, worker) {
  const bar = cell.firstChild, found = parts(worker.process_stats);
  const step = worker.process_stats?.step_s;
  const told = found.map(([phase, value]) => `${phase} ${percent(value)}`).join(", ");
  bar.title = step > 0 ? `${duration(step)} a step: ${told}` : told;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", bar.title);
  cell.classList.toggle("blank", !found.length);
  if (bar.children.length !== found.length) bar.replaceChildren(...found.map(() => el("i")));
  found.forEach(([phase, value], index) => {
    bar.children[index].className = `phase-${phase}`;
    bar.children[index].style.flexGrow = value;
  });
}
