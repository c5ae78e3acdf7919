// The cluster as a picture: the server in the middle, the workers around it, and what flows between them.

import { svg, byId, say } from "./dom.js";
import { counted, duration, megabytes, number, percent, rate, title } from "./format.js";

const MEASURED = ["data", "forward", "backward", "encode", "send", "wait", "apply"];
export const PHASES = [...MEASURED, "other"];
const WAITS = 0.35;
const share = (worker, phase) => worker.process_stats?.[`share/${phase}`];

/** The parts of a step that are known, and what is left of the time. */
export function parts(process_stats) {
  const found = MEASURED.map((phase) => [phase, process_stats?.[`share/${phase}`]]).filter(([, value]) => value > 0);
  const rest = 1 - found.reduce((sum, [, value]) => sum + value, 0);
  return found.length && rest > 0.005 ? [...found, ["other", rest]] : found;
}

/** A pipeline's layers that a worker has, and where they begin; null: it has none. */
export function stage(worker) {
  const stats = worker.process_stats ?? {};
  const starts = Object.keys(stats).filter((name) => /^layers\/\d+\/start$/.test(name)).map((name) => [stats[name], stats[name.replace("start", "end")]]);
  if (!starts.length) return null;
  starts.sort((one, other) => one[0] - other[0]);
  return { first: starts[0][0], ranges: starts.map(([start, end]) => (end - start > 1 ? `${start}–${end - 1}` : `${start}`)).join(", ") };
}

/** Bytes a second that a stage sends to each neighbour, by their ranks. */
export function sends(worker) {
  return Object.entries(worker.process_stats ?? {}).filter(([name]) => name.startsWith("to/")).map(([name, speed]) => [Number(name.slice(3)), speed]);
}

const bubble = (worker) => worker.process_stats.bubble;

export function condition(worker) {
  if (worker.state !== "joined") return worker.state;
  return share(worker, "wait") > WAITS ? "waiting" : "training";
}

function traffic(worker) {
  const { sent_bytes_per_s: up, received_bytes_per_s: down } = worker.process_stats ?? {};
  return up === undefined && down === undefined ? null : { up: up ?? 0, down: down ?? 0 };
}

function ring(x, y, radius, process_stats) {
  const around = 2 * Math.PI * radius;
  let start = 0;
  return parts(process_stats).map(([phase, value]) => {
    const arc = svg("circle", {
      cx: x, cy: y, r: radius, class: `arc phase-${phase}`, transform: `rotate(-90 ${x} ${y})`,
      "stroke-dasharray": `${value * around} ${around}`, "stroke-dashoffset": -start * around,
    }, svg("title", {}, `${phase} ${percent(value)}`));
    start += value;
    return arc;
  });
}

/** Where the workers stand: on an ellipse around the server, whose top and bottom have less room. */
function places(num, width, height, margin) {
  const [rx, ry] = [width / 2 - margin.x, height / 2 - margin.y];
  const first = num === 1 ? Math.PI : -Math.PI / 2 - Math.PI / num;
  return Array.from({ length: num }, (_, index) => {
    const angle = first + (2 * Math.PI * index) / num;
    return { x: width / 2 + rx * Math.cos(angle), y: height / 2 + ry * Math.sin(angle), angle };
  });
}

function link(worker, from, to, server, radius, isOver, isCrowded, isNarrow) {
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  const along = (distance) => ({
    x: from.x + ((to.x - from.x) * distance) / length, y: from.y + ((to.y - from.y) * distance) / length,
  });
  const [a, b] = [along(server + 4), along(length - radius - 8)];
  const flow = traffic(worker);
  const total = flow && !isOver ? flow.up + flow.down : 0;
  const width = 1.5 + Math.min(6, 1.7 * Math.log10(1 + total / 3e4));
  const state = isOver ? "over" : condition(worker);
  const line = { x1: a.x, y1: a.y, x2: b.x, y2: b.y };
  const group = svg("g", { class: `link ${state.replace(" ", "-")}` }, svg("line", { ...line, "stroke-width": width }));
  if (total > 0 && worker.state === "joined") group.append(svg("line", { ...line, class: "flow", "stroke-width": Math.max(1.5, width * 0.6) }));
  let lines = [];
  if (flow && !isOver && worker.state === "joined") {
    const { rtt_s: rtt, codec_ratio: ratio } = worker.process_stats;
    const delay = rtt >= 0 ? duration(rtt) : "", codec = ratio > 0 ? `codec ×${number(ratio, 2)}` : "";
    lines = isNarrow ? [rate(flow.up + flow.down), delay]
      : [`↑ ${megabytes(flow.up)}  ↓ ${rate(flow.down)}`, [delay, codec].filter(Boolean).join(" · ")];
  }
  const label = lines.length && !isCrowded && !stage(worker) ? beside(lines.filter(Boolean), a, b, width, isNarrow) : null;
  group.append(svg("title", {}, lines.join("\n") || worker.state));
  return { group, label };
}

/** Words beside the middle of a line: above it, or to its right where it is steep. */
function beside(lines, a, b, width, isNarrow) {
  const middle = { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 };
  const slope = Math.abs(b.y - a.y) / Math.max(1, Math.abs(b.x - a.x));
  const isSteep = slope > (isNarrow ? 0.35 : 0.7), side = isNarrow && b.x < a.x - 1 ? -1 : 1;
  const x = middle.x + (isSteep ? side * (width / 2 + 10 + Math.min(24, 15 / slope)) : 0);
  const away = isSteep && slope < 1 ? 14 * Math.sign(a.y - b.y) : 0;
  const y = middle.y + (isSteep ? away : -width / 2 - 20 - 66 * slope);
  const text = svg("text", { class: `flow-label ${isSteep ? (side > 0 ? "right" : "left") : ""}` });
  lines.forEach((words, index) => text.append(svg("tspan", { x, y: y + 14 * index }, words)));
  return text;
}

/** What flows between stages of a pipeline that are neighbours, both ways together: lines, and words on them. */
function neighbours(state, spots, center, clear) {
  if (state.is_over) return [];
  const at = new Map(state.workers.map((worker, index) => [worker.rank, index]));
  const flows = new Map();
  for (const worker of state.workers) for (const [rank, speed] of sends(worker)) {
    if (!at.has(rank)) continue;
    const key = [worker.rank, rank].sort((one, other) => one - other).join("-");
    flows.set(key, (flows.get(key) ?? 0) + speed);
  }
  return [...flows].map(([key, speed]) => {
    const [one, other] = key.split("-").map((rank) => spots[at.get(Number(rank))]);
    const { d, ...place } = around(one, other, center, clear);
    const width = 1.5 + Math.min(6, 1.7 * Math.log10(1 + speed / 3e4));
    const group = svg("g", { class: "link training" }, svg("path", { d, "stroke-width": width }),
      svg("path", { d, class: "flow", "stroke-width": Math.max(1.5, width * 0.6) }),
      svg("title", {}, `activations and gradients: ${rate(speed)}`));
    const label = svg("text", place, rate(speed));
    return { group, label };
  });
}

/** A line between workers that passes the server at a distance of `clear`, and the place of words on its outer side. */
function around(one, other, center, clear) {
  const middle = { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2 };
  const length = Math.hypot(other.x - one.x, other.y - one.y) || 1;
  const normal = { x: (other.y - one.y) / length, y: (one.x - other.x) / length };
  const distance = normal.x * (middle.x - center.x) + normal.y * (middle.y - center.y);
  const side = distance < 0 ? -1 : 1, bow = Math.max(0, clear - Math.abs(distance));
  const [right, down] = [side * normal.x, side * normal.y];
  const anchor = Math.abs(right) < 0.3 ? "" : right > 0 ? " right" : " left";
  return {
    d: `M ${one.x} ${one.y} Q ${middle.x + 2 * bow * right} ${middle.y + 2 * bow * down} ${other.x} ${other.y}`,
    class: `flow-label${anchor}`, x: middle.x + (bow + 12) * right, y: middle.y + (bow + 14) * down + 4,
  };
}

function drawWorker(worker, at, radius, isOver, isCrowded) {
  const state = isOver && worker.state === "joined" ? "over" : condition(worker);
  const waits = share(worker, "wait");
  const group = svg("g", { class: `node ${state.replace(" ", "-")}` });
  group.append(
    svg("circle", { cx: at.x, cy: at.y, r: radius, class: "body" }),
    ...ring(at.x, at.y, radius + 4, worker.process_stats),
    svg("text", { x: at.x, y: at.y + 5, class: "rank" }, String(worker.role === "rank" ? worker.rank : worker.rank + 1)),
  );
  const below = Math.sin(at.angle) > -0.3;
  const y = below ? at.y + radius + 22 : at.y - radius - 26;
  const words = isOver ? "" : state === "training" && worker.samples_per_s > 0 ? `${number(worker.samples_per_s, 3)} samples/s`
    : state === "waiting" ? `waits ${percent(waits)}` : state;
  group.append(svg("text", { x: at.x, y, class: "name" }, worker.node.length > 18 ? `${worker.node.slice(0, 17)}…` : worker.node));
  const held = stage(worker);
  if (!isCrowded) group.append(svg("text", { x: at.x, y: y + 15, class: `said ${state}` }, held ? `layers ${held.ranges}` : words));
  group.append(svg("title", {}, `${title(worker, worker.role)}: ${state}`));
  return group;
}

export function drawCluster(state) {
  const box = byId("cluster");
  const width = Math.max(300, box.clientWidth);
  const num = state.workers.length;
  const isNarrow = width < 560, isCrowded = num > (isNarrow ? 5 : 10);
  const height = !num ? 160 : isNarrow ? 400 : Math.min(520, 350 + 8 * num);
  const radius = isCrowded ? 13 : isNarrow ? 19 : 23, server = isNarrow ? 30 : 40;
  const middle = { x: width / 2, y: height / 2 };
  const role = state.grid ? state.algorithm : state.algorithm === "single" ? "trainer" : "server";
  const beneath = state.grid ? counted(state.num_ranks, "rank") : state.server.node ?? "", kind = state.grid ? "ranks" : "workers";
  const told = state.workers.map((worker) => `${title(worker, worker.role)} ${state.is_over ? worker.state : condition(worker)}`);
  const label = `Cluster: ${role} ${beneath}${num ? ` and ${num} ${kind}: ${told.join(", ")}` : ""}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const spots = places(num, width, height, { x: isNarrow ? 58 : 96, y: 66 });
  const links = state.workers.map((worker, index) => link(worker, middle, spots[index], server, radius, state.is_over, isCrowded, isNarrow));
  const between = neighbours(state, spots, middle, server + 20);
  picture.append(...[...links, ...between].map(({ group }) => group));
  state.workers.forEach((worker, index) => picture.append(drawWorker(worker, spots[index], radius, state.is_over, isCrowded)));
  picture.append(svg("g", { class: `node server ${state.is_over ? "over" : state.state}` },
    svg("circle", { ...circle(middle), r: server, class: "body" }),
    ...ring(middle.x, middle.y, server + 5, state.grid ? null : state.server.process_stats),
    svg("text", { x: middle.x, y: middle.y - 2, class: "rank" }, role),
    svg("text", { x: middle.x, y: middle.y + 14, class: "said" }, beneath.slice(0, 12))));
  picture.append(...[...links, ...(isCrowded ? [] : between)].map(({ label: words }) => words).filter(Boolean));
  box.replaceChildren(picture);
  say(byId("insight"), insight(state));
}

const circle = ({ x, y }) => ({ cx: x, cy: y });

/** Who waits for whom, in a sentence. */
function insight(state) {
  if (state.is_over) return "";
  const here = state.workers.filter((worker) => worker.state === "joined" && worker.process_stats);
  const gone = state.workers.filter((worker) => worker.state === "lost");
  const said = gone.length ? [`Lost: ${gone.map((worker) => title(worker, worker.role)).join(", ")}.`] : [];
  const stages = here.filter(stage);
  if (stages.length > 1) {
    const slowest = stages.reduce((one, other) => (bubble(other) < bubble(one) ? other : one));
    return [...said, `${title(slowest, slowest.role)} sets the pace: it computes ${percent(1 - bubble(slowest))} of a step.`].join(" ");
  }
  const waiting = here.filter((worker) => share(worker, "wait") > WAITS);
  const busiest = [...here].sort((a, b) => (share(a, "wait") ?? 1) - (share(b, "wait") ?? 1))[0];
  if (waiting.length && state.is_synchronous && busiest && !waiting.includes(busiest)) {
    said.push(`${waiting.map((worker) => title(worker, worker.role)).join(", ")} wait${waiting.length > 1 ? "" : "s"} for ${title(busiest, busiest.role)}, the slowest.`);
  } else if (waiting.length) {
    const most = Math.max(...waiting.map((worker) => share(worker, "wait")));
    said.push(`${waiting.map((worker) => title(worker, worker.role)).join(", ")}: up to ${percent(most)} of the time goes into waiting for ${state.grid ? "other ranks" : "the server and its link"}.`);
  }
  return said.join(" ");
}

