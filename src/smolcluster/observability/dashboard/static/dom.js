// Elements. Text of runs goes through text nodes only, so that HTML in it is shown as text.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** Set a node's text, only if it changes: a selection in it stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A colour of the style sheet, as the canvas wants it. */
export function colour(name) {
  const probe = colour.probe ??= document.body.appendChild(el("i", { class: "probe" }));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export const RANK_COLOURS = 8;
export const rankColour = (rank) => (rank === null || rank === undefined ? "server" : `rank-${rank % RANK_COLOURS}`);
