// Acts of an operator on models, replicas and hosts. Each act that ends something asks first.

import { confirm } from "./dialogs.js";

const model = (name) => ({ model: name });

export function pause(view, name) {
  return view.act("/farm/models/pause", model(name));
}

export function resume(view, name) {
  return view.act("/farm/models/resume", model(name));
}

const REPLICAS = { name: "replicas", label: "Replicas", pattern: "[0-9]+([.][.][0-9]+)?" };
const RANGE = "2, or 0..4: as many as the requests need; with 0 the model sleeps without requests.";

const numberOrRange = (text) => (/^[0-9]+$/.test(text) ? Number(text) : text);

export function scale(view, { model: name, scale }) {
  return view.ask("/farm/models/scale", {
    title: `Scale ${name}`,
    text: "With fewer replicas, those that go finish their requests first.",
    fields: [{ ...REPLICAS, value: scale, required: true, help: RANGE }],
    act: "Scale",
    body: ({ replicas }) => ({ model: name, replicas: numberOrRange(replicas) }),
  });
}

export function reload(view, name) {
  return view.act("/farm/models/reload", model(name), {
    ask: {
      title: `Restart all replicas of ${name}?`,
      text: "They are replaced one by one; each finishes its requests first. A model that has failed is tried again.",
      act: "Restart replicas",
    },
  });
}

export function unload(view, name) {
  return view.act("/farm/models/unload", model(name), {
    ask: {
      title: `Unload ${name}?`,
      text: "No new request is taken. Its replicas end once the running requests have finished. Clients then get 404.",
      act: "Unload",
    },
  });
}

export function restart(view, name, replica) {
  return view.act("/farm/replicas/drain", { model: name, replica }, {
    ask: {
      title: `Restart replica ${replica} of ${name}?`,
      text: "It finishes its requests and ends; another one takes its place.",
      act: "Restart replica",
    },
  });
}

export function drain(view, host) {
  return view.act("/farm/hosts/drain", { host }, {
    ask: {
      title: `Drain ${host}?`,
      text: "Its replicas finish their requests and move to other hosts. It gets none until it is taken back.",
      act: "Drain host",
    },
  });
}

export function takeBack(view, host) {
  return view.act("/farm/hosts/drain", { host, undo: true });
}

// The name that a model of this source is served under, as the API makes it.
function nameOf(source) {
  const last = /^[./~]/.test(source) ? source.split("/").filter(Boolean).at(-1) ?? source : source;
  return last.replace(/\.gguf$/i, "");
}

const DTYPES = ["auto", "float32", "bfloat16", "float16", "float64"];

// Load a model, or with `spec` (GET /farm/models/spec) change the settings of one; `attach(update)`: `update(spec)` shows
// settings that were changed elsewhere.
export function load(view, spec = null, attach = () => {}) {
  const known = spec ?? { tp: 1, dtype: "auto", prefix_cache: true, images: true, lookup: 8, target_wait_s: 2, idle_s: 600, drain_s: 300, surge: true };
  const identity = spec
    ? []
    : [
        { name: "name", label: "Name", help: "The name that clients use. Empty: that of the source.", placeholder: "Qwen/Qwen3-8B" },
        { ...REPLICAS, help: `${RANGE} Empty: as many as now, or 1.` },
      ];
  return view.ask("/farm/models/load", {
    title: spec ? `Settings of ${spec.name}` : "Load a model",
    text: spec ? "After a change the replicas are restarted one by one; each finishes its requests first." : null,
    act: spec ? "Change settings" : "Load",
    attach: (update) => attach((changed) => update({ ...changed, devices: changed.devices.join(",") })),
    fields: [
      {
        name: "source",
        label: "Source",
        value: known.source,
        required: true,
        placeholder: "Qwen/Qwen3-8B",
        help: "A Hugging Face repository, or the path of a folder or GGUF file on the hosts. demo: the demonstration model.",
      },
      ...identity,
      { name: "tp", label: "Ranks of a replica", type: "number", value: known.tp, min: 1, max: 1024, help: "Tensor parallelism: one rank runs on one device." },
      ...settings(known),
    ],
    body: (values) => {
      // Of a new model what differs from the API's defaults is sent; of a known one everything that is set.
      const given = Object.entries(values).filter(([name, value]) => value !== null && (spec || value !== (known[name] ?? false)));
      const body = Object.fromEntries(given);
      if (body.replicas) body.replicas = numberOrRange(body.replicas);
      return { ...body, ...(spec ? { name: spec.name } : {}) };
    },
    before: spec ? null : (body) => replaces(view, body),
  });
}

// Ask before a model that the farm has is loaded with the settings of the form; true for a new one.
function replaces(view, body) {
  const name = body.name ?? nameOf(body.source);
  if (!view.farm.card?.models.some((one) => one.model === name)) return true;
  return confirm({
    title: `Change ${name}?`,
    text: "The farm has a model of this name. It gets the source and settings of this form, defaults where nothing was given, and its replicas are restarted one by one if that is a change. To change single settings, use “Change settings…” on the model's page.",
    act: "Change model",
  });
}

function settings(known) {
  const more = (field) => ({ ...field, value: known[field.name], more: true });
  return [
    { ...more({ name: "devices", label: "Devices", placeholder: "cpu or cuda:0,cuda:1" }), value: known.devices?.join(","), help: "One for each rank. Empty: the host chooses." },
    more({ name: "dtype", label: "Number type", type: "select", options: DTYPES }),
    more({ name: "quant", label: "Packing of weights on CPUs", placeholder: "int8" }),
    more({ name: "gguf", label: "GGUF file of the source", placeholder: "Q4_K_M" }),
    more({ name: "max_context", label: "Longest context, in tokens", type: "number", min: 16 }),
    more({ name: "kv_tokens", label: "KV memory of a replica, in tokens", type: "number", min: 16 }),
    more({ name: "lookup", label: "Prompt lookup: tokens guessed in a step", type: "number", min: 0, max: 64 }),
    more({ name: "target_wait_s", label: "With a range of replicas: expected wait, in seconds, beyond which one more runs", type: "number", min: 0, max: 86400 }),
    more({ name: "idle_s", label: "With 0..N replicas: seconds without requests until the model sleeps", type: "number", min: 1 }),
    more({ name: "drain_s", label: "Drain time: seconds that a replica may take to finish", type: "number", min: 0, max: 86400 }),
    more({ name: "prefix_cache", label: "Prefix cache: share the KV memory of equal beginnings", type: "check" }),
    more({ name: "images", label: "Take images, where the model does", type: "check" }),
    more({ name: "dequantize", label: "Dequantize the weights of a GGUF file", type: "check" }),
    more({ name: "deterministic", label: "Deterministic: no other request can change an answer", type: "check" }),
    more({ name: "spread", label: "Spread the ranks of a replica over hosts", type: "check" }),
    more({ name: "surge", label: "Surge: one more replica while others are replaced", type: "check" }),
  ];
}
