// Numbers, times and sizes as people read them. Unknown values are a dash.

export const NONE = "–";
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const known = (value) => value != null && Number.isFinite(value);

export function integer(value) {
  return known(value) ? NUMBER.format(value) : NONE;
}

// One decimal below 100: 4.2, 43.1, 1,204.
export function rate(value) {
  if (!known(value)) return NONE;
  return value < 100 ? value.toFixed(1) : NUMBER.format(value);
}

export function percent(part) {
  return known(part) ? `${Math.round(part * 100)} %` : NONE;
}

// Of milliseconds: 52 ms, 1.8 s, 4 min 10 s, 3 h 20 min, 2 d 4 h.
export function duration(ms) {
  if (!known(ms)) return NONE;
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1_000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1_000);
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return pair(minutes, "min", seconds % 60, "s");
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return pair(hours, "h", minutes % 60, "min");
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

function pair(large, unit, small, smaller) {
  return small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

export function bytes(size) {
  if (!known(size)) return NONE;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) (size /= 1024), unit++;
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

// A moment in ms since 1970 as the visitor's clock shows it: 14:03:22 today, else 2026-11-23 14:03:22.
export function moment(ms, now = Date.now()) {
  if (!known(ms) || ms <= 0) return NONE;
  const [date, time] = stamp(ms);
  return date === stamp(now)[0] ? time : `${date} ${time}`;
}

function stamp(ms) {
  const at = new Date(ms);
  const two = (number) => String(number).padStart(2, "0");
  const date = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join("-");
  return [date, [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")];
}

export function ago(ms, now = Date.now()) {
  return known(ms) && ms > 0 ? `${duration(Math.max(0, now - ms))} ago` : NONE;
}

export function count(number, one, many = `${one}s`) {
  return `${integer(number)} ${number === 1 ? one : many}`;
}
