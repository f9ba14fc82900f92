// The limits of an API key: in words, as fields of a form, and as the body of a change.

import { integer } from "./format.js";

const NUMBERS = [
  ["rpm", "Requests per minute", "requests per minute"],
  ["tpm", "Tokens per minute", "tokens per minute"],
  ["max_concurrent", "Requests at one time", "at one time"],
];

export function limitsOf(key) {
  const found = NUMBERS.filter(([name]) => key[name]).map(([name, , words]) => `${integer(key[name])} ${words}`);
  if (key.priority_cap && key.priority_cap !== "high") found.push(`priority at most ${key.priority_cap}`);
  if (key.models.length) found.push(`models ${key.models.join(", ")}`);
  if (key.expires) found.push(`until ${new Date(key.expires * 1_000).toISOString().slice(0, 10)}`);
  return found.length ? found : ["none"];
}

export function limitFields(key) {
  return [
    ...NUMBERS.map(([name, label]) => ({ name, label, type: "number", min: 0, value: key[name] || null })),
    { name: "priority_cap", label: "Best priority", type: "select", options: ["high", "normal", "low"], value: key.priority_cap ?? "high" },
    { name: "models", label: "Models", value: (key.models ?? []).join(", "), help: "Names with commas between them. Empty: all." },
    { name: "days", label: "Days until it expires", type: "number", min: 0, help: key.expires ? "Empty: as it is. 0: never." : "Empty: never." },
  ];
}

// The body of a form's values; `before` are the limits that the key has.
export function limitsAsked({ models, days, priority_cap, ...numbers }, before) {
  const asked = { priority_cap };
  for (const [name] of NUMBERS) if (numbers[name] != null || before[name]) asked[name] = numbers[name] ?? 0;
  const named = (models ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  if (named.length || before.models?.length) asked.models = named;
  if (days != null) asked.expires = days ? Math.round(Date.now() / 1_000 + days * 86_400) : 0;
  return asked;
}
