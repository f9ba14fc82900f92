// API keys with their limits, and what they used.

import { withQuery } from "../lib/api.js";
import { show } from "../lib/dialogs.js";
import { h } from "../lib/dom.js";
import { ago, count } from "../lib/format.js";
import { badge, button, command, empty, head, link, section, table } from "../lib/parts.js";
import { hrefTo } from "../lib/router.js";
import { copyable } from "../lib/secret.js";
import { period, usageTable } from "../lib/usage.js";
import { limitsOf, limitFields, limitsAsked } from "../lib/limits.js";

export default { path: "/keys", title: "Keys and usage", nav: "Keys", open };

function open(view) {
  const state = { keys: null, usage: null, days: 30 };
  const read = view.poll(5, async (api) => {
    const [keys, usage] = await Promise.all([
      api.get("/farm/keys", { signal: view.signal }),
      api.get(withQuery("/farm/usage", { days: state.days, key: view.query.key }), { signal: view.signal }),
    ]);
    Object.assign(state, { keys: keys.data, usage: usage.data });
  });
  return () => {
    const acts = button("Create key", () => create(view, read), { kind: "primary" });
    if (!state.keys) return [head("Keys and usage", { acts }), h("p", { class: "muted", key: "wait" }, "Reading the keys…")];
    return [
      head("Keys and usage", { acts }),
      section("API keys", state.keys.length ? keys(view, state.keys, read) : noKeys(), { note: state.keys.length ? count(state.keys.length, "key") : null }),
      section("Usage", usageTable(state.usage, new Map(state.keys.map((key) => [key.id, key.name]))), { acts: period(state.days, (days) => ((state.days = days), read())), note: view.query.key ? ["of one key ", link("Show all", ["keys"])] : "by day (UTC), model and key" }),
    ];
  };
}

function noKeys() {
  return empty("No API key was made.", ["Make one here, or with ", command("furrow keys create"), ". Clients need keys where the API was started with --keys, or listens beyond loopback."]);
}

async function create(view, read) {
  const made = await view.ask("/farm/keys", {
    title: "Create an API key",
    act: "Create",
    fields: [
      { name: "name", label: "Name", required: true, help: "Whose it is; shown in lists and logs." },
      { name: "tenant", label: "Tenant", help: "Keys of one tenant share its part of the queue. Empty: a tenant of its own." },
      { name: "admin", label: "Operator", type: "check", help: "It opens this console and the operator's routes." },
      ...limitFields({}).map((field) => ({ ...field, more: true })),
    ],
    body: ({ name, tenant, admin, ...limits }) => ({ name: name ?? "", tenant: tenant ?? "", admin, ...limitsAsked(limits, {}) }),
  });
  if (!made) return;
  read();
  await show({ title: "The key is made", content: copyable(made.secret), act: "Done" });
}

function change(view, key, read) {
  return view
    .ask("/farm/keys/limits", {
      title: `Limits of ${key.name || key.id}`,
      text: "An empty field means no limit.",
      act: "Change",
      fields: limitFields(key),
      body: (values) => ({ key: key.id, ...limitsAsked(values, key) }),
    })
    .then((answer) => answer && read());
}

async function revoke(view, key, read) {
  const ask = { title: "Revoke this key?", text: `Requests with it are refused within a second, for ever. Running ones are finished. Key ${key.name || key.id}.`, act: "Revoke" };
  if (await view.act("/farm/keys/revoke", { key: key.id }, { ask })) read();
}

function keys(view, found, read) {
  const columns = [
    { name: "Name", cell: (key) => [h("bdi", {}, key.name || "–"), h("p", { class: "note mono" }, key.id)] },
    { name: "Tenant", cell: (key) => h("bdi", {}, key.tenant) },
    { name: "State", cell: (key) => [badge(key.state), key.admin ? h("span", { class: "note" }, " operator") : null] },
    { name: "Limits", cell: (key) => h("ul", {}, limitsOf(key).map((text) => h("li", {}, text))) },
    { name: "Last used", cell: (key) => (key.last_used ? ago(key.last_used * 1_000) : "never") },
    {
      name: "",
      cell: (key) =>
        h(
          "div",
          { class: "acts" },
          h("a", { class: "button", href: hrefTo(["keys"], { key: key.id }), "aria-label": `Usage of ${key.name || key.id}` }, "Usage"),
          key.state === "revoked" ? null : button("Limits", () => change(view, key, read), { label: `Limits of ${key.name || key.id}` }),
          key.state === "revoked" ? null : button("Revoke", () => revoke(view, key, read), { kind: "danger", label: `Revoke ${key.name || key.id}` }),
        ),
    },
  ];
  return table(columns, found, { key: (key) => key.id, label: "API keys" });
}
