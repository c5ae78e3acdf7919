// The page: which run is shown, what comes from it, and the parts that draw it.

import { ask, follow } from "./ask.js";
import { el, byId, say } from "./dom.js";
import { compact, count, counted, duration, NONE, number, percent } from "./format.js";
import { drawCluster } from "./cluster.js";
import { drawWorkers, fitWorkers } from "./workers.js";
import { clearCharts, drawCharts, redrawCharts, setUpCharts } from "./charts.js";
import { drawTimeline, redrawTimeline } from "./timeline.js";
import { closeLogs, newLines, offerSources, openLogs, setUpLogs } from "./logs.js";

const SERIES_EVERY_MS = 2000, SILENT_MS = 5000;
let run = null, source = null, state = null, heardAt = 0, timer = 0, isLoading = false;
let have = { series: -1, events: -1 };

const read = async (path) => (await ask(path)).json();

const own = (what) => `/api/runs/${encodeURIComponent(run)}/${what}`;

// --- choosing a run

async function offerRuns() {
  const { chosen, runs } = await read("/api/runs");
  const select = byId("run");
  const names = runs.map((each) => each.run_id);
  const first = run ?? new URLSearchParams(location.search).get("run") ?? chosen;
  if (!names.includes(first)) runs.unshift({ run_id: first });
  select.replaceChildren(...runs.map((each) => el("option", { value: each.run_id }, optionText(each))));
  select.value = first;
  return first;
}

const optionText = ({ run_id: name, state: how }) => (how ? `${name} · ${how}` : name);

function show(name) {
  source?.close();
  clearTimeout(timer);
  [run, state, have, timer] = [name, null, { series: -1, events: -1 }, 0];
  document.title = `${name} · smolcluster`;
  document.body.classList.add("unread");
  byId("chat").hidden = true;
  drawProblems([]);
  clearCharts();
  closeLogs();
  drawTimeline({ events: [], counts: {} });
  heardAt = Date.now();
  // The first state says that the log files are followed from here on; what was written before is read, again after a break.
  let isNew = false;
  source = follow(own("stream"), {
    opened: () => { isNew = true; },
    state: (next) => {
      heardAt = Date.now();
      take(next);
      if (isNew) openLogs(name);
      isNew = false;
    },
    lines: newLines,
    broken: (reason) => {
      if (reason) drawProblems([reason]);
      drawFreshness();
    },
  });
}

function take(next) {
  if (next.run_id !== run && run !== "latest") return;
  state = next;
  document.body.classList.remove("unread");
  drawHead();
  drawProblems(state.problems);
  drawFigures();
  byId("staleness-title").closest("section").hidden = !state.has_pushes;
  byId("staleness-title").hidden = byId("staleness").hidden = !state.has_staleness;
  say(byId("workers-title"), state.grid ? "Ranks" : "Workers");
  byId("workers-title").closest("section").hidden = state.algorithm === "single";
  drawStaleness();
  drawCluster(state);
  drawWorkers(state);
  offerSources(state);
  drawFreshness();
  if (!timer && !isLoading) load();
}

/** Fetch the points and events that are new, not too often. */
async function load() {
  const name = run;
  const { series, events } = state.versions;
  if (series === have.series && events === have.events) return;
  isLoading = true;
  try {
    const [points, happened] = await Promise.all([read(own("series")), events === have.events ? null : read(own("events"))]);
    if (name !== run) return;
    have = { series: points.version, events: happened ? happened.version : have.events };
    drawCharts(points);
    if (happened) drawTimeline(happened);
    byId("curves").dataset.version = have.series;
  } catch (error) {
    if (name === run) drawProblems([error.message]);
  } finally {
    isLoading = false;
    timer = setTimeout(() => { timer = 0; }, SERIES_EVERY_MS);
  }
}

// --- the head

function drawHead() {
  const pill = byId("state");
  say(pill, state.state);
  const option = [...byId("run").options].find(({ value }) => value === state.run_id);
  if (option) say(option, optionText(state));
  pill.className = `pill ${state.state.replace(" ", "-")}`;
  byId("chat").hidden = !state.writes_text;
  byId("chat").href = `/static/chat.html?run=${encodeURIComponent(state.run_id)}`;
  const done = state.total_samples ? state.samples_applied / state.total_samples : 0;
  const bar = byId("progress");
  bar.firstElementChild.style.width = `${100 * done}%`;
  bar.setAttribute("aria-valuenow", Math.round(100 * done));
  bar.classList.toggle("over", state.is_over);
  const params = state.num_params ? `${number(state.num_params / (state.num_params < 1e6 ? 1e3 : 1e6), 3)}${state.num_params < 1e6 ? "k" : "M"} parameters` : "";
  const facts = [state.algorithm, state.model && `${state.model} on ${state.dataset}`, params,
    state.grid ? `${counted(state.num_ranks, "rank")}: ${state.grid}` : state.num_workers > 1 ? `${state.num_workers} workers` : "", state.batch_size ? `batch ${state.batch_size}` : "", state.codec === "none" ? "" : state.codec].filter(Boolean);
  say(byId("about"), [facts.join(" · "), state.is_over && state.reason ? state.reason : ""].filter(Boolean).join(" — "));
}

/** A workload's metrics by name, of the newest evaluation. */
function metrics(values) {
  return Object.entries(values)
    .filter(([key, value]) => key.startsWith("val_") && key !== "val_loss" && typeof value === "number")
    .map(([key, value]) => [key.slice(4), value]);
}

function drawFigures() {
  const done = state.total_samples ? state.samples_applied / state.total_samples : null;
  const now = state.is_over ? "" : "now";
  const figures = [
    ["progress", percent(done, done < 1 ? 1 : 0), state.total_samples ? `${compact(state.samples_applied)} of ${compact(state.total_samples)} samples` : ""],
    ["step", count(state.step), state.total_steps ? `of ${count(state.total_steps)}` : ""],
    ["epoch", state.num_epochs ? count(Math.min(state.epoch + 1, state.num_epochs)) : NONE, state.num_epochs ? `of ${count(state.num_epochs)}` : ""],
    ["training loss", number(state.loss), state.loss_is ?? ""],
    ["validation loss", number(state.val_loss), ""],
    ...metrics(state).map(([name, value]) => [name, name === "accuracy" ? percent(value, 1) : number(value), "validation"]),
    ...(state.learning_rate > 0 && !state.is_over ? [["learning rate", number(state.learning_rate, 3), ""]] : []),
    state.tokens_per_sample ? ["tokens/s", number(state.samples_per_s * state.tokens_per_sample, 3), `${number(state.samples_per_s, 3)} samples/s${now && ` ${now}`}`]
      : ["samples/s", number(state.samples_per_s, 3), now],
    state.is_over ? ["took", duration(state.wall_s), ""] : ["left", state.eta_s === null || state.eta_s === undefined ? NONE : duration(state.eta_s), `${duration(state.wall_s)} so far`],
  ];
  const box = byId("figures");
  const key = figures.map(([name]) => name).join();
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(...figures.map(([name]) => el("div", { "data-name": name }, el("dt", {}, name), el("dd"), el("small"))));
  }
  figures.forEach(([, value, beside], index) => {
    say(box.children[index].querySelector("dd"), value);
    say(box.children[index].querySelector("small"), beside);
  });
}

function drawProblems(problems) {
  const box = byId("problems");
  box.hidden = !problems.length;
  if (box.dataset.key !== problems.join("\n")) {
    box.dataset.key = problems.join("\n");
    box.replaceChildren(...problems.map((problem) => el("p", {}, problem)));
  }
}

function drawFreshness() {
  const note = byId("fresh");
  const isRefused = !state && !byId("problems").hidden;
  const isSilent = !isRefused && Date.now() - heardAt > SILENT_MS;
  document.body.classList.toggle("old", isSilent || Boolean(state?.is_old));
  if (isSilent) say(note, `no word from the dashboard for ${duration((Date.now() - heardAt) / 1000)}; trying again`);
  else if (!state) say(note, isRefused ? "" : "reading…");
  else if (state.is_old) say(note, `old: the server last wrote ${duration(state.age_s)} ago`);
  else say(note, state.is_over ? "" : "live");
}

function drawStaleness() {
  const { counts, is_sampled: isSampled } = state.staleness;
  const box = byId("staleness"), total = counts.reduce((sum, value) => sum + value, 0);
  const edges = state.staleness_edges;
  const labels = [...edges.map((edge, index) => (index === 0 || edge - edges[index - 1] === 1 ? String(edge) : `${edges[index - 1] + 1}–${edge}`)), `>${edges.at(-1)}`];
  const key = total ? "bars" : "none";
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(total
      ? el("ul", { class: "bars", "aria-label": "Applied pushes by staleness in steps" }, ...labels.map((label) => el("li", {}, el("i"), el("b"), el("span", {}, label))))
      : el("p", { class: "quiet" }, "no pushes yet"), el("p", { class: "quiet" }));
  }
  if (total) {
    const most = Math.max(...counts);
    counts.forEach((value, index) => {
      const bar = box.firstChild.children[index];
      bar.title = `staleness ${labels[index]}: ${count(value)} pushes`;
      bar.querySelector("i").style.height = `${value ? Math.max(2, (100 * value) / most) : 0}px`;
      say(bar.querySelector("b"), value ? percent(value / total) : "");
    });
    const bound = state.staleness_bound ? `; the bound is ${state.staleness_bound}` : "";
    say(box.lastChild, isSampled ? `steps behind, of ${count(total)} steps that were sampled${bound}` : `steps behind, of ${count(total)} applied pushes${bound}`);
  }
  const facts = Object.entries(state.pushes ?? {}).filter(([name, value]) => value || name === "applied");
  if (state.leases_returned) facts.push(["leases returned", state.leases_returned]);
  const list = byId("pushes"), pushes = facts.map(([name, value]) => `${name} ${value}`).join();
  list.previousElementSibling.hidden = !facts.length;
  if (list.dataset.key !== pushes) {
    list.dataset.key = pushes;
    list.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name.replace("_", "-")), el("dd", {}, count(value))]));
  }
}

// --- the theme

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* a browser that keeps nothing */ }
  say(byId("theme"), `Theme: ${theme}`);
  redrawCharts();
}

function setUp() {
  say(byId("theme"), `Theme: ${document.documentElement.dataset.theme ?? "auto"}`);
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "auto";
    setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
  byId("run").addEventListener("change", (event) => {
    history.pushState(null, "", `/?run=${encodeURIComponent(event.target.value)}`);
    show(event.target.value);
  });
  byId("run").addEventListener("focus", () => offerRuns().catch(() => {}));
  addEventListener("popstate", () => { run = null; start(); });
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    if (state) { drawCluster(state); fitWorkers(); redrawTimeline(); }
  }).observe(document.querySelector("main"));
  setUpCharts();
  setUpLogs();
  setInterval(drawFreshness, 1000);
}

async function start() {
  try {
    show(await offerRuns());
  } catch (error) {
    drawProblems([error.message]);
    setTimeout(start, 3000);
  }
}

setUp();
start();
