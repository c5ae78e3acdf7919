// What has happened, on an axis of time; a lane for each sort of event, and a low one for each kind that is frequent.

import { el, svg, byId, say } from "./dom.js";
import { clock, moment, sentence } from "./format.js";

const LANES = [
  ["run", ["run_started", "run_resumed", "run_ended"]],
  ["workers", ["worker_joined", "worker_left", "worker_lost", "worker_parked", "worker_stalled", "worker_rejected"]],
  ["work", ["push_dropped", "lease_returned", "step_overdue", "layers_moved", "beginning_ended", "steps_undone"]],
  ["epochs", ["epoch_finished"], "frequent"],
  ["model", ["evaluated"], "frequent"],
  ["saved", ["checkpoint_saved"], "frequent"],
].map(([name, kinds, isFrequent]) => ({ name, kinds, isFrequent: Boolean(isFrequent), height: isFrequent ? 16 : 26 }));
const LEFT = 64, RIGHT = 14, APART = 4;
const OTHER = { name: "other", kinds: [], isFrequent: true, height: 16 };
const known = new Map(LANES.flatMap((lane) => lane.kinds.map((kind) => [kind, lane])));
/** The lane of a kind; one of its own for kinds that this page does not know. */
const laneOf = (kind) => known.get(kind) ?? OTHER;
const hidden = new Set();
let events = [], counts = {}, hasOlder = false, shown = [], chosen = null;

export function drawTimeline(next) {
  const before = chosen === null ? null : shown[chosen];
  ({ events, counts, has_older: hasOlder } = next);
  drawKinds();
  redrawTimeline();
  if (before) choose(shown.findIndex((event) => event.t === before.t && event.kind === before.kind));
}

function drawKinds() {
  const box = byId("kinds");
  const kinds = [...new Set([...known.keys(), ...Object.keys(counts)])].filter((kind) => counts[kind]);
  const key = kinds.join();
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(...kinds.map((kind) => {
      const chip = el("button", { type: "button", class: `chip kind-${kind}`, "data-kind": kind, "aria-pressed": String(!hidden.has(kind)) }, el("i"), el("span"), el("small"));
      chip.addEventListener("click", () => {
        if (!hidden.delete(kind)) hidden.add(kind);
        chip.setAttribute("aria-pressed", String(!hidden.has(kind)));
        redrawTimeline();
      });
      return chip;
    }));
  }
  for (const chip of box.children) {
    say(chip.querySelector("span"), sentence(chip.dataset.kind));
    say(chip.querySelector("small"), `${hasOlder ? "≥ " : ""}${counts[chip.dataset.kind]}`);
  }
}

export function redrawTimeline() {
  const box = byId("timeline");
  [shown, chosen] = [[], null];
  say(byId("event"), "");
  if (!events.length) { box.replaceChildren(el("p", { class: "quiet" }, "nothing has happened yet")); return; }
  const used = new Set(events.map(({ kind }) => laneOf(kind)));
  const lanes = [...LANES, OTHER].filter((lane) => used.has(lane));
  const width = Math.max(280, box.clientWidth), height = lanes.reduce((sum, lane) => sum + lane.height, 26);
  const [first, last] = [events[0].t, Math.max(events.at(-1).t, events[0].t + 1)];
  const x = (t) => LEFT + ((t - first) / (last - first)) * (width - LEFT - RIGHT);
  shown = fitting(events.filter((event) => !hidden.has(event.kind)), x);
  if (shown.length) say(byId("event"), "Point at a mark, or use the arrow keys.");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "application", tabindex: "0", "aria-label": "Events over time; arrow keys go from one to the next" });
  const middles = new Map();
  let top = 0;
  for (const lane of lanes) {
    const y = top + lane.height / 2;
    middles.set(lane, y);
    top += lane.height;
    picture.append(svg("text", { x: 0, y: y + 4, class: "lane" }, lane.name), svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "rail" }));
  }
  const num = Math.max(1, Math.min(width < 500 ? 3 : 6, Math.floor(last - first)));
  for (let tick = 0; tick <= num; tick += 1) {
    const t = first + ((last - first) * tick) / num;
    picture.append(svg("text", { x: x(t), y: height - 6, class: `tick ${tick === 0 ? "first" : tick === num ? "last" : ""}` }, clock(t)));
  }
  const spots = shown.map(({ t, kind }) => ({ x: x(t), y: middles.get(laneOf(kind)) }));
  picture.append(...spots.map((spot, index) => mark(spot, shown[index].kind, index)));
  picture.addEventListener("pointermove", (event) => choose(nearest(spots, event, picture)));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    choose(chosen === null ? (move > 0 ? 0 : shown.length - 1) : (chosen + move + shown.length) % shown.length);
  });
  box.replaceChildren(picture);
}

/** Of the frequent kinds only what fits: the newest, and before it each that stands apart from those that are kept. */
function fitting(all, x) {
  const kept = {};
  return all.toReversed().filter(({ kind, t }) => {
    if (laneOf(kind).isFrequent && x(t) > kept[kind] - APART) return false;
    kept[kind] = x(t);
    return true;
  }).reverse();
}

function mark({ x, y }, kind, index) {
  const own = { class: `mark kind-${kind}`, "data-index": index };
  return laneOf(kind).isFrequent ? svg("rect", { x: x - 1, y: y - 5, width: 2, height: 10, ...own }) : svg("circle", { cx: x, cy: y, r: 5, ...own });
}

function nearest(spots, event, picture) {
  const box = picture.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  let best = -1, least = 18;
  spots.forEach(({ x, y }, index) => {
    const distance = Math.hypot(x - px, y - py);
    if (distance < least) [best, least] = [index, distance];
  });
  return best;
}

function choose(index) {
  if (index < 0 || index === chosen || !shown[index]) return;
  byId("timeline").querySelector(".chosen")?.classList.remove("chosen");
  byId("timeline").querySelector(`[data-index="${index}"]`)?.classList.add("chosen");
  chosen = index;
  const event = shown[index];
  byId("event").replaceChildren(
    el("time", { datetime: moment(event.t), title: moment(event.t) }, clock(event.t, true)), " ",
    el("b", {}, sentence(event.kind)), ` – ${event.text}`);
}
