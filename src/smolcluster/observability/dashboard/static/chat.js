// The chat page: what is typed is sent with all that stands before it, and what the run's model writes is shown as it comes.

import { ask } from "./ask.js";
import { el, byId, say } from "./dom.js";
import { count } from "./format.js";

const MAX_CHARS = 4000;
const run = new URLSearchParams(location.search).get("run") ?? "latest";
const form = byId("prompt"), said = byId("said"), { text, max_tokens: tokens, temperature } = form.elements;
let writing = null;

async function send() {
  const typed = el("b", {}, `${text.value}\n`), written = el("span");
  said.append(typed, written);
  text.value = "";
  const { signal } = writing = new AbortController();
  draw();
  const prompt = said.textContent.slice(-MAX_CHARS);
  const query = new URLSearchParams({ prompt, max_tokens: tokens.value, temperature: temperature.value });
  let problem = "";
  try {
    const answer = await ask(`/api/runs/${encodeURIComponent(run)}/chat?${query}`, { signal });
    say(byId("step"), `step ${count(Number(answer.headers.get("Checkpoint-Step")))}`);
    await show(answer.body.pipeThrough(new TextDecoderStream()).getReader(), written);
  } catch (error) {
    if (!signal.aborted) problem = error.message;
  }
  if (problem && !written.textContent) {
    text.value ||= typed.textContent.trimEnd();
    typed.remove();
  } else written.append("\n");
  writing = null;
  draw(problem);
  text.focus();
}

async function show(reader, written) {
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    written.append(piece.value);
    said.scrollTop = said.scrollHeight;
  }
}

function draw(problem = "") {
  [byId("send").hidden, byId("stop").hidden] = [Boolean(writing), !writing];
  said.setAttribute("aria-busy", Boolean(writing));
  byId("problems").hidden = !problem;
  say(byId("problems"), problem);
  said.scrollTop = said.scrollHeight;
}

document.title = `Chat · ${run} · smolcluster`;
say(byId("run"), `← ${run}`);
byId("run").href = `/?run=${encodeURIComponent(run)}`;
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!writing) send();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
byId("stop").addEventListener("click", () => writing?.abort());
