// Tables of usage by day, model and key.

import { h } from "./dom.js";
import { integer } from "./format.js";
import { empty, table } from "./parts.js";

const PERIODS = [1, 7, 30, 90, 400];
const KINDS = [["Requests", "requests"], ["Prompt", "prompt_tokens"], ["Cached", "cached_tokens"], ["Answer", "completion_tokens"]];

// A choice of days; `changed(days)` is called with another one.
export function period(chosen, changed) {
  const onchange = (event) => changed(Number(event.target.value));
  return h("select", { "aria-label": "Period", onchange }, PERIODS.map((days) => h("option", { value: days, selected: days === chosen }, days === 1 ? "today" : `${days} days`)));
}

// Rows of /farm/usage or /v1/usage, the newest first, under their sum. `names`: of keys by id; null: all rows are one key's.
export function usageTable(rows, names) {
  if (!rows.length) return empty("Nothing was used in this time.", "Requests with a key are counted when they end; those without one are not.");
  const sum = Object.fromEntries(KINDS.map(([, name]) => [name, rows.reduce((total, row) => total + row[name], 0)]));
  const columns = [
    { name: "Day", cell: (row) => row.date ?? h("span", { class: "strong" }, "Sum") },
    { name: "Model", cell: (row) => row.model ?? "" },
    ...(names ? [{ name: "Key", cell: (row) => (row.key === undefined ? "" : h("bdi", {}, names.get(row.key) || row.key)) }] : []),
    ...KINDS.map(([name, kind]) => ({ name, right: true, cell: (row) => integer(row[kind]) })),
  ];
  return table(columns, [sum, ...[...rows].reverse()], { key: (row) => `${row.date} ${row.model} ${row.key}`, kind: (row) => (row === sum ? "sum" : null), label: "Usage" });
}
