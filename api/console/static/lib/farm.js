// The state of the farm, followed on GET /farm/events: the last snapshot, its history, and whether it is current.

import { api, asksForKey } from "./api.js";
import { serverSentEvents } from "./events.js";
import { History } from "./history.js";

const LATE_MS = 4_000;
const SILENT_MS = 15_000;
const RETRY_MS = [250, 500, 1_000, 2_000, 3_000];

// `status`: "connecting", "live", "redis" (Redis is away), "late" (no snapshot for some seconds), "api" (this process
// does not answer) or "refused" (another key is needed). `card` is the last snapshot, null before the first.
export class Farm extends EventTarget {
  card = null;
  at = 0;
  status = "connecting";
  reason = "";
  history = new History();
  #heard = 0;
  #recalled = false;
  #failures = 0;
  #controller = null;
  #wake = () => {};

  // Follow for as long as the page lives. A page that is hidden follows nothing: a browser has six connections for
  // all pages of a process.
  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.#wake()));
    setInterval(() => this.#watch(), 500);
    this.#run();
  }

  // Try again now, for example with another key.
  retry() {
    this.#failures = 0;
    this.status = "connecting";
    this.#controller?.abort();
    this.#wake();
  }

  async #run() {
    for (;;) {
      if (document.hidden) await this.#sleep(2 ** 30);
      await this.#follow();
      if (document.hidden) continue;
      const refused = this.status === "refused";
      await this.#sleep(refused ? 2 ** 30 : RETRY_MS[Math.min(this.#failures++, RETRY_MS.length - 1)]);
    }
  }

  async #follow() {
    const controller = (this.#controller = new AbortController());
    this.#heard = Date.now();
    try {
      const response = await api.request("GET", "/farm/events", undefined, { signal: controller.signal });
      for await (const { event, data } of serverSentEvents(response)) this.#take(event, JSON.parse(data));
      throw new Error("The API process has ended the stream.");
    } catch (error) {
      if (controller.signal.aborted) return;
      this.#set(error.status && asksForKey(error) ? "refused" : "api", error.message);
    }
  }

  #take(event, data) {
    this.#heard = Date.now();
    this.#failures = 0;
    if (event === "farm") {
      this.card = data;
      this.at = Date.now();
      this.history.add(data, this.at);
      this.#recall();
      this.#set("live", "");
      this.dispatchEvent(new Event("snapshot"));
    } else if (event === "away") {
      this.#set("redis", data.error);
    }
  }

  // The farm's own samples, once a page.
  async #recall() {
    if (this.#recalled) return;
    this.#recalled = true;
    try {
      const { data } = await api.get("/farm/plots");
      this.history.load(data);
      this.dispatchEvent(new Event("snapshot"));
    } catch {
      this.#recalled = false;
    }
  }

  #watch() {
    const silent = Date.now() - this.#heard;
    if (document.hidden || !["live", "connecting", "redis", "late"].includes(this.status)) return;
    if (silent > SILENT_MS) {
      this.#controller?.abort();
      this.#set("api", `The API process at ${location.host} has sent nothing for ${Math.round(silent / 1000)} s.`);
    } else if (silent > LATE_MS && this.status !== "redis") {
      this.#set("late", "");
    }
  }

  #pause() {
    this.#controller?.abort();
    if (this.status === "live") this.status = "connecting";
  }

  #set(status, reason) {
    if (status === this.status && reason === this.reason) return;
    Object.assign(this, { status, reason });
    this.dispatchEvent(new Event("status"));
  }

  #sleep(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => (clearTimeout(timer), resolve());
    });
  }
}
