// Requests to the dashboard. Each carries the token in a header: a cookie would go to every program that serves a
// page on another port of this machine.

import { compact } from "./format.js";

const KEY = "smolcluster-token", RETRY_MS = 1000, REFUSED_RETRY_MS = 3000;
const UNKNOWN = "This page needs its token: open the whole address that `smolcluster dashboard` prints in its terminal; it ends in #token=…";

/** The token that came behind the # of the printed address, which browsers send nobody; kept for this address and port. */
const token = (() => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given === null) return localStorage.getItem(KEY) ?? "";
    localStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.search);
  } catch { /* a browser that keeps nothing: the address keeps it */ }
  return given ?? "";
})();

class Refused extends Error {}

/** The answer, or an error that says in a sentence why there is none. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { Authorization: `Bearer ${token}` } });
  if (answer.status === 401) throw new Refused(UNKNOWN);
  if (!answer.ok) throw new Refused((await answer.text()).trim() || `the dashboard answers ${compact(answer.status)}`);
  return answer;
}

/**
 * Follow a stream of server-sent events until `close()`, again after each break.
 *
 * `on` has a function for each name of an event, which is given its JSON, and two more: `opened()`, and
 * `broken(reason)`, whose reason is empty where the connection has just ended.
 */
export function follow(path, on) {
  const stopped = new AbortController();
  run(path, on, stopped.signal);
  return { close: () => stopped.abort() };
}

async function run(path, on, signal) {
  while (!signal.aborted) {
    let reason = "";
    try {
      const answer = await ask(path, { signal });
      on.opened();
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), on, signal);
    } catch (error) {
      if (error instanceof Refused) reason = error.message;
    }
    if (signal.aborted) return;
    on.broken(reason);
    await new Promise((resume) => setTimeout(resume, reason ? REFUSED_RETRY_MS : RETRY_MS));
  }
}

async function read(reader, on, signal) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done || signal.aborted) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) tell(block, on);
  }
}

function tell(block, on) {
  const fields = { event: "", data: "" };
  for (const line of block.split("\n")) {
    const [, name, value] = line.match(/^(\w+): ?(.*)$/s) ?? [];
    if (name in fields) fields[name] += value;
  }
  if (fields.data) on[fields.event]?.(JSON.parse(fields.data));
}
