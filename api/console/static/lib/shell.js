// The frame of every page: navigation, the banner about the connection, and the question for a key.

import { key, refusals } from "./api.js";
import { h, patch } from "./dom.js";
import { moment } from "./format.js";
import { button } from "./parts.js";
import { route } from "./router.js";
import { View } from "./view.js";

export class Shell {
  #view = null;
  #shown = null;
  #refusal = null;
  // The key is no operator's: pages that are not `ordinary` would be refused.
  #ordinary = false;

  // `entries`: `[name, address]` of the navigation; `ordinary`: of that without an operator's key.
  constructor(farm, pages, entries, ordinary) {
    Object.assign(this, { farm, pages, entries, ordinary });
    this.main = document.getElementById("main");
    addEventListener("hashchange", () => this.open());
    document.querySelector(".skip").onclick = (event) => (event.preventDefault(), this.main.focus());
    refusals.add((error) => this.#ask(error));
    farm.addEventListener("status", () => this.#status());
    setInterval(() => this.#banner(), 1_000);
  }

  // Open the page that the address names.
  open() {
    let found = route(this.pages, location.hash || "#/");
    if (this.#ordinary && !found?.page.ordinary) {
      history.replaceState(null, "", this.ordinary[0][1]);
      found = route(this.pages, location.hash);
    }
    const first = this.#shown === null;
    // Another view of the same page, such as that of another model in a list: the focus stays where it is.
    const same = !this.#refusal && this.#view && found?.page === this.#view.page && samePlace(found.params, this.#view.params);
    this.#view?.close();
    this.#shown = found?.page ?? {};
    if (!same) patch(this.main);
    this.#navigation();
    if (this.#refusal) return this.#form();
    const page = found?.page ?? LOST;
    const title = typeof page.title === "function" ? page.title(found.params) : page.title;
    document.title = `${title} · Furrow`;
    this.#view = new View(this.main, this.farm, { page, params: {}, query: {}, ...found });
    this.#view.open();
    if (same) return;
    scrollTo(0, 0);
    // A change of pages is heard as a load of one would be.
    if (!first) (this.main.querySelector("h1") ?? this.main).focus();
  }

  #navigation() {
    const current = this.#shown?.nav;
    const entries = this.#ordinary ? this.ordinary : this.entries;
    const links = entries.map(([name, address]) =>
      h("li", { key: name }, h("a", { href: address, "aria-current": name === current ? "page" : null }, name)));
    patch(document.getElementById("navigation"), h("ul", {}, links));
    const forget = () => (key.forget(), location.reload());
    patch(document.getElementById("session"), this.#connection(), key.get() ? button("Forget key", forget, { key: "forget" }) : null);
  }

  #connection() {
    if (this.#ordinary) return h("span", { class: "badge plain", key: "connection" }, "no operator");
    const [tone, text] = {
      connecting: ["busy", "connecting"],
      live: ["good", "live"],
      late: ["warn", "late"],
      redis: ["bad", "Redis is away"],
      api: ["bad", "no connection"],
      refused: ["warn", "key needed"],
    }[this.farm.status];
    return h("span", { class: `badge ${tone}`, key: "connection" }, text);
  }

  #status() {
    this.#navigation();
    this.#banner();
    if (this.farm.status === "live" && (this.#refusal || this.#ordinary)) {
      this.#refusal = null;
      this.#ordinary = false;
      this.open();
    }
  }

  #banner() {
    const { status, reason, at } = this.farm;
    const stale = ["redis", "api", "late"].includes(status);
    document.body.classList.toggle("stale", stale && at > 0);
    const since = at ? ` This page shows the state of ${moment(at)}.` : "";
    const text = {
      redis: ["Redis does not answer.", `${reason} It is tried again every second.${since}`],
      api: ["The API process does not answer.", `${reason} It is tried again every few seconds.${since}`],
      late: ["No news from the farm.", `The last snapshot came at ${moment(at)}.`],
    }[status];
    const shown = text ? h("div", { class: "banner" }, h("p", {}, h("strong", {}, text[0]), ` ${text[1]}`)) : null;
    patch(document.getElementById("banner"), shown);
  }

  #ask(error) {
    if (error.status === 403 && key.get()) {
      if (this.#ordinary) return;
      this.#ordinary = true;
      this.#refusal = null;
      this.open();
      return;
    }
    this.#ordinary = false;
    if (this.#refusal) {
      patch(document.getElementById("key-fault") ?? h("p"), said(error));
      return;
    }
    this.#refusal = error;
    this.open();
  }

  #form() {
    document.title = "Key needed · Furrow";
    const sent = (event) => {
      event.preventDefault();
      key.set(document.getElementById("key").value.trim());
      this.farm.retry();
      this.#navigation();
    };
    const input = h("input", { id: "key", type: "password", required: true, autocomplete: "off", "aria-describedby": "key-help key-fault" });
    patch(
      this.main,
      h(
        "form",
        { class: "key", onsubmit: sent },
        h("h1", { tabindex: -1 }, "This farm asks for a key"),
        h("div", { class: "field" },
          h("label", { for: "key" }, "API key"),
          input,
          h("p", { class: "help", id: "key-help" }, "An operator's, made with ", h("code", {}, "furrow keys create --admin"), ", opens every page; another one Chat and its own usage. This tab keeps it until it is closed.")),
        h("p", { class: "fault", id: "key-fault", role: "alert" }, said(this.#refusal)),
        h("div", { class: "acts" }, h("button", { type: "submit", class: "button primary" }, "Continue")),
      ),
    );
    input.focus();
  }
}

const samePlace = (one, other) => JSON.stringify(one) === JSON.stringify(other);

// The message of a refusal; the form itself says that a key is missing.
function said(error) {
  return error.status === 401 && !key.get() ? "" : error.message;
}

const LOST = {
  path: "",
  title: "No such page",
  open: () => () => h("div", { class: "empty" }, h("h1", { tabindex: -1 }, "No such page"), h("p", {}, h("a", { href: "#/" }, "Go to the farm"))),
};
