// The usage of the key of this tab: for those who are no operators.

import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { empty, head, section } from "../lib/parts.js";
import { period, usageTable } from "../lib/usage.js";

export default { path: "/usage", title: "Usage", nav: "Usage", ordinary: true, open };

function open(view) {
  const state = { usage: null, keyless: false, days: 30 };
  const read = view.poll(5, async (api) => {
    try {
      const { data } = await api.get(withQuery("/v1/usage", { days: state.days }), { signal: view.signal });
      state.usage = data;
    } catch (error) {
      if (error.code !== "no_api_key") throw error;
      state.keyless = true;
    }
  });
  const acts = () => period(state.days, (days) => ((state.days = days), read()));
  return () => {
    if (state.keyless) return [head("Usage"), section("Usage of this key", empty("This tab has no key.", "Usage is counted for API keys alone."))];
    if (!state.usage) return [head("Usage"), h("p", { class: "muted", key: "wait" }, "Reading the usage…")];
    return [head("Usage"), section("Usage of this key", usageTable(state.usage, null), { acts: acts(), note: "by day (UTC) and model" })];
  };
}
