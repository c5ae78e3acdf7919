// Numbers and times as people read them.

export const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NONE);

/** How many: 1 worker, 3 workers. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** About four digits: 0.1279, 12.4, 14,870, 1.2e-5. */
export function number(value, digits = 4) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return count(value);
  return Number(value.toPrecision(digits)).toString();
}

/** A count in little room: 950, 12.4k, 2.4M. */
export function compact(value) {
  if (!known(value)) return NONE;
  if (value >= 999500) return `${number(value / 1e6, 3)}M`;
  return value >= 10000 ? `${number(value / 1e3, 3)}k` : count(value);
}

export const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)}%` : NONE);

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let scaled = Math.abs(value), unit = 0;
  while (scaled >= 999.5 && unit < units.length - 1) { scaled /= 1000; unit += 1; }
  return `${scaled >= 100 || unit === 0 ? scaled.toFixed(0) : scaled.toPrecision(2)} ${units[unit]}`;
}

/** Bytes in MB, to two digits at least: what links carry is told in MB/s everywhere. */
export function megabytes(value) {
  if (!known(value)) return NONE;
  const scaled = value / 1e6;
  if (scaled >= 9.95) return count(scaled);
  return scaled >= 0.001 ? Number(scaled.toPrecision(2)).toString() : scaled >= 5e-5 ? scaled.toFixed(4) : "0";
}

export const rate = (value) => (known(value) ? `${megabytes(value)} MB/s` : NONE);

export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 1) return seconds === 0 ? "0 s" : `${number(seconds * 1000, 2)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1).replace(/\.0$/, "")} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (days) return `${days} d ${two(hours)} h`;
  if (hours) return `${hours} h ${two(minutes)} min`;
  if (minutes >= 10) return `${minutes} min`;
  return minutes ? `${minutes} min ${two(whole % 60)} s` : `${whole} s`;
}

const pad = (value, width = 2) => String(value).padStart(width, "0");

/** The time of day, of this browser's zone. */
export function clock(seconds, thousandths = false) {
  const date = new Date(seconds * 1000);
  const text = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return thousandths ? `${text}.${pad(date.getMilliseconds(), 3)}` : text;
}

export const moment = (seconds) => new Date(seconds * 1000).toISOString();

/** A process as all views call it, from what has its rank and node: `worker 2 (pi5)`, of a mesh `rank 1 (pi5)`;
 *  `worker 2` of the node `worker2`. */
export function title({ rank, node }, role = "server") {
  if (role === "rank") return `rank ${rank ?? 0} (${node})`;
  if (rank === null || rank === undefined) return `${role} ${node}`.trim();
  return node === `worker${rank + 1}` ? `worker ${rank + 1}` : `worker ${rank + 1} (${node})`;
}
export const sentence = (kind) => kind.replaceAll("_", " ");
