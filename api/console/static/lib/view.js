// One open page: what its module may use, for as long as it is open.

import { api } from "./api.js";
import { confirm, form } from "./dialogs.js";
import { h, patch } from "./dom.js";
import { keepingFocus } from "./focus.js";
import { notify } from "./notices.js";

export class View {
  #controller = new AbortController();
  #draw = null;
  #place;
  #error = null;

  constructor(place, farm, { page, params, query }) {
    this.#place = place;
    // `farm.card`: the last snapshot of GET /farm, null before the first; `farm.history`: the last minutes.
    this.farm = farm;
    this.api = api;
    this.params = params;
    this.query = query;
    this.page = page;
  }

  // Ends when the visitor leaves the page.
  get signal() {
    return this.#controller.signal;
  }

  open() {
    const again = () => this.redraw();
    for (const name of ["snapshot", "status"]) this.farm.addEventListener(name, again, { signal: this.signal });
    this.#draw = this.page.open(this);
    this.redraw();
  }

  close() {
    this.#controller.abort();
  }

  // Draw the page again, after a change of what the module knows.
  redraw() {
    if (this.signal.aborted || !this.#draw) return;
    const error = this.#error;
    const content = [error ? h("p", { class: "fault", role: "alert", key: "fault" }, error.message) : null, this.#draw()];
    keepingFocus(this.#place, () => patch(this.#place, content));
  }

  // Call `read(api)` now and every `seconds` while the page is open and visible; draw after each. What it throws is
  // shown above the page until it succeeds again. Returns a function that reads at once.
  poll(seconds, read) {
    let timer = null;
    const turn = async () => {
      clearTimeout(timer);
      if (this.signal.aborted) return;
      try {
        if (!document.hidden) await read(this.api);
        this.#error = null;
      } catch (error) {
        if (error.name === "AbortError") return;
        this.#error = error.status === 401 ? null : error;
      }
      clearTimeout(timer);
      timer = setTimeout(turn, seconds * 1_000);
      this.redraw();
    };
    this.signal.addEventListener("abort", () => clearTimeout(timer));
    this.farm.addEventListener("status", () => this.farm.status === "live" && this.#error && turn(), { signal: this.signal });
    turn();
    return turn;
  }

  // POST `body` to `path` and say the answer's `done`. `ask`: the question before it, as of `confirm`. Returns the
  // answer; null where it was not confirmed or failed, which is said.
  async act(path, body, { ask = null } = {}) {
    if (ask && !(await confirm(ask))) return null;
    try {
      const answer = await this.api.post(path, body);
      notify(answer?.done ?? "Done.");
      return answer;
    } catch (error) {
      notify(error.message, "bad");
      return null;
    }
  }

  // A form whose values go to `path`; `body(values)` makes the body of them. If `before(body)` is false, nothing is sent
  // and the form stays. An error stays in the form. Returns the answer, or null.
  ask(path, { body = (values) => values, before = null, ...options }) {
    return form({
      ...options,
      submit: async (values) => {
        const sent = body(values);
        if (before && !(await before(sent))) return false;
        const answer = await this.api.post(path, sent);
        notify(answer?.done ?? "Done.");
        return answer;
      },
    });
  }
}
