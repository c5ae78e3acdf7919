// Log lines: the newest at the bottom. The server searches the files; what comes later is filtered here.

import { ask } from "./ask.js";
import { el, byId, say, rankColour } from "./dom.js";
import { clock, count, moment, title } from "./format.js";

const MAX_LINES = 2000;
const LEVELS = { DEBUG: 10, INFO: 20, WARNING: 30, ERROR: 40, CRITICAL: 50 };
const number = (level) => LEVELS[level] ?? 20;
const form = byId("log-filter"), box = byId("log-lines");
let run = null, search = null, isLoading = false, isCut = false, shown = "", known = new Set(), waiting = [];

const wanted = () => {
  const { node, rank, level, text } = form.elements;
  return { node: node.value, rank: rank.value, level: level.value, text: text.value };
};

function accepts(entry) {
  const { node, rank, level, text } = wanted();
  return (!node || entry.node === node) && (rank === "" || String(entry.rank) === rank)
    && (!level || number(entry.level) >= number(level))
    && (!text || `${entry.message}\n${entry.detail}`.toLowerCase().includes(text.toLowerCase()));
}

export async function openLogs(chosen) {
  run = chosen;
  search?.abort();
  const { signal } = search = new AbortController();
  [isLoading, isCut, waiting] = [true, false, []];
  const query = new URLSearchParams(Object.entries(wanted()).filter(([, value]) => value !== ""));
  const address = `/api/runs/${encodeURIComponent(run)}/logs?${query}`;
  let found;
  try {
    found = await (await ask(address, { signal })).json();
  } catch (error) {
    if (signal.aborted) return;
    isLoading = false;
    say(byId("log-note"), `the log lines could not be read: ${error.message}`);
    return;
  }
  const place = address === shown ? box.scrollTop : box.scrollHeight;
  shown = address;
  known = new Set();
  box.replaceChildren();
  append(found.entries);
  const early = waiting;
  [isLoading, waiting] = [false, []];
  append(early.filter(accepts));
  say(byId("log-note"), note(found));
  box.scrollTop = form.elements.follow.checked ? box.scrollHeight : place;
  if (isCut) openLogs(run);
}

function note(found) {
  if (!found.entries.length) return "no lines";
  return found.is_all ? "" : `the newest ${count(found.entries.length)} lines; the files have older ones`;
}

export function closeLogs() {
  search?.abort();
  [run, isLoading, isCut, shown, waiting] = [null, false, false, "", []];
  known = new Set();
  box.replaceChildren();
  say(byId("log-note"), "");
}

/** Lines that have come; where the server left some out, all are read again. */
export function newLines({ entries, is_all: isAll }) {
  if (isAll === false && !isLoading) { openLogs(run); return; }
  if (isLoading) { waiting.push(...entries); isCut ||= isAll === false; }
  append(entries.filter(accepts));
  if (box.children.length && byId("log-note").textContent === "no lines") say(byId("log-note"), "");
  scroll(false);
}

function append(entries) {
  const fresh = entries.filter((entry) => !known.has(`${entry.file}:${entry.offset}`));
  for (const entry of fresh) known.add(`${entry.file}:${entry.offset}`);
  box.append(...fresh.map(line));
  while (box.children.length > MAX_LINES) {
    known.delete(box.firstChild.dataset.key);
    box.firstChild.remove();
  }
}

function line(entry) {
  const text = el("span", { class: "message" }, printable(entry.message));
  const row = el("div", { class: `line level-${LEVELS[entry.level] ? entry.level : "none"}` },
    el("time", { title: moment(entry.t) }, clock(entry.t, true)),
    el("span", { class: "level" }, entry.level),
    el("span", { class: "who" }, el("i", { class: `dot ${rankColour(entry.rank)}` }), title(entry, entry.component || "")),
    text);
  row.dataset.key = `${entry.file}:${entry.offset}`;
  if (entry.detail) row.append(el("details", {}, el("summary", {}, "traceback"), el("pre", {}, printable(entry.detail, true))));
  if (entry.more) row.append(moreButton(entry, row, text));
  return row;
}

/** Control characters, which could hide what is said, as their numbers. */
function printable(text, isLong = false) {
  const shown = isLong ? text : text.replaceAll("\n", " ⏎ ");
  return shown.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (character) => `\\x${character.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

function moreButton(entry, row, text) {
  const button = el("button", { type: "button", class: "plain more" }, `more (${count(entry.more)} characters)`);
  button.addEventListener("click", async () => {
    const query = new URLSearchParams({ file: entry.file, offset: entry.offset });
    let whole;
    try {
      whole = await (await ask(`/api/runs/${encodeURIComponent(run)}/line?${query}`)).json();
    } catch {
      say(button, "it is not there any more");
      return;
    }
    say(text, printable(whole.message));
    const detail = row.querySelector("pre");
    if (detail) say(detail, printable(whole.detail, true));
    button.remove();
  });
  return button;
}

function scroll(always) {
  if (always || form.elements.follow.checked) box.scrollTop = box.scrollHeight;
}

/** Nodes and workers of the run, as choices. */
export function offerSources(state) {
  const nodes = [...new Set([state.server.node, ...state.workers.map((worker) => worker.node)].filter(Boolean))];
  offer(form.elements.node, nodes.map((node) => [node, node]));
  offer(form.elements.rank, state.workers.map((worker) => [String(worker.rank), title(worker, worker.role)]));
}

function offer(select, choices) {
  const key = choices.map(([value]) => value).join("\n");
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const before = select.value;
  select.replaceChildren(select.options[0], ...choices.map(([value, label]) => el("option", { value }, label)));
  select.value = choices.some(([value]) => value === before) ? before : "";
}

export function setUpLogs() {
  let timer = 0;
  const again = () => { clearTimeout(timer); timer = setTimeout(() => { if (run) openLogs(run); }, 200); };
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, (event) => { if (event.target.name !== "follow") again(); });
  }
  form.elements.follow.addEventListener("change", () => scroll(false));
  box.addEventListener("wheel", (event) => { if (event.deltaY < 0) form.elements.follow.checked = false; }, { passive: true });
  box.addEventListener("keydown", (event) => { if (["ArrowUp", "PageUp", "Home"].includes(event.key)) form.elements.follow.checked = false; });
}
