// The usage of the key of this tab: for those who are no operators.

import { withQuery } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { head, section } from "../lib/parts.js";
import { period, usageTable } from "../lib/usage.js";

export default { path: "/usage", title: "Usage", nav: "Usage", ordinary: true, open };

function open(view) {
  const state = { usage: null, days: 30 };
  const read = view.poll(5, async (api) => {
    const { data } = await api.get(withQuery("/v1/usage", { days: state.days }), { signal: view.signal });
    state.usage = data;
  });
  const acts = () => period(state.days, (days) => ((state.days = days), read()));
  return () => {
    if (!state.usage) return [head("Usage"), h("p", { class: "muted", key: "wait" }, "Reading the usage…")];
    return [head("Usage"), section("Usage of this key", usageTable(state.usage, null), { acts: acts(), note: "by day (UTC) and model" })];
  };
}
