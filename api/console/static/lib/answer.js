// One answer of a model, followed to its end: over broken connections, over the death of the API process, and over a
// reload of the page.

import { api } from "./api.js";
import { serverSentEvents } from "./events.js";

const RETRY_MS = [200, 400, 800, 1_500, 3_000];
const PATIENCE_MS = 90_000;
const WAITS_S = 60;
// A stream sends something every 10 s (`--keep-alive`): one that is silent for so long has lost its other end.
const SILENT_MS = 25_000;
const INTERRUPTED = ["stream_interrupted", "shutting_down", "unavailable"];
const PLACE = /^queue position (\d{1,9})(?:, expected wait (\d{1,12}) ms)?$/;

// Milliseconds, the same over reloads of the page.
const clock = () => performance.timeOrigin + performance.now();

// Follows a request of /v1/chat/completions. `text`, `reasoning`, `state`, `place`, `usage`, `finish` and `error` change,
// and `changed()` is called after each change. `state`: "waiting", "answering", "resuming", "ended", "stopped" or "failed".
export class Answer {
  text = "";
  reasoning = "";
  state = "waiting";
  finish = null;
  usage = null;
  error = null;
  // The request's id, known from the headers of the stream on; the id of the last event that was taken.
  rid = null;
  resumed = 0;
  // Its place in the queue, `{position, waitMs}`, while it has one; `waitMs` is null where it is not known.
  place = null;
  #last = null;
  #done = false;
  #controller = new AbortController();
  // One key for all tries: a try whose answer was lost joins the request that it began.
  #key = `console-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
  #brokenAt = 0;
  #firstAt = 0;
  #lastAt = 0;

  constructor({ model, messages, temperature, max_tokens }, changed) {
    // In one order, also after a reload: the farm knows the same request by the bytes of its body.
    const asked = { model, messages, temperature, max_tokens };
    this.body = { ...asked, stream: true, stream_options: { include_usage: true }, on_disconnect: WAITS_S };
    this.changed = changed;
    this.began = clock();
  }

  // The state for a reload: `restore` makes the answer of it.
  record() {
    const { text, reasoning, state, finish, usage, error, rid, resumed, began } = this;
    const { model, temperature, max_tokens } = this.body;
    // Images are not kept: a request with some, which the farm may not have, is not asked for again.
    const again = this.open && !rid && this.body.messages.every(({ content }) => typeof content === "string");
    const asked = { model, temperature, max_tokens, messages: again ? this.body.messages : [] };
    const marks = { last: this.#last, key: this.#key, firstAt: this.#firstAt, lastAt: this.#lastAt };
    return { asked, text, reasoning, state, finish, usage, error, rid, resumed, began, ...marks };
  }

  // An answer as it was. `record` was checked; one that was under way goes on with `run`.
  static restore({ asked, last, key, firstAt, lastAt, ...rest }, changed) {
    const answer = new Answer(asked, changed);
    Object.assign(answer, rest);
    [answer.#last, answer.#key, answer.#firstAt, answer.#lastAt] = [last, key, firstAt, lastAt];
    if (!answer.open) return answer;
    answer.state = "resuming";
    // The farm may have taken it or not: it is asked for again while it would have gone on.
    if (!answer.rid && (!asked.messages.length || clock() - answer.began > 1_000 * WAITS_S)) {
      answer.state = "failed";
      answer.error = "The page was closed before the farm had taken this message. Send it again.";
    }
    return answer;
  }

  get open() {
    return ["waiting", "answering", "resuming"].includes(this.state);
  }

  // Tokens per second from the first piece of the answer to its last one, breaks included; null where that says nothing.
  get rate() {
    const span = this.#lastAt - this.#firstAt;
    return this.usage && span > 0 && this.usage.completion_tokens > 1 ? ((this.usage.completion_tokens - 1) * 1_000) / span : null;
  }

  get firstMs() {
    return this.#firstAt ? this.#firstAt - this.began : null;
  }

  // Ask, and follow the answer to its end.
  async run() {
    for (let failures = 0; this.open; ) {
      const taken = this.#last;
      const silence = new Silence();
      try {
        await this.#follow(await this.#request(AbortSignal.any([this.#controller.signal, silence.signal])), silence);
        if (this.#done) return this.#set("ended");
        if (!this.open) return;
      } catch (error) {
        if (!this.open) return;
        if (!passes(error)) return this.#fail(error.message);
      } finally {
        silence.end();
      }
      // A process that answered and then said nothing may have another --keep-alive: that is no failed try.
      if (this.#last !== taken || silence.afterAnswer) failures = 0;
      if (!failures) this.#brokenAt = clock();
      if (clock() - this.#brokenAt > PATIENCE_MS) return this.#fail("The API process did not come back. The answer ends here.");
      this.#set("resuming");
      await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], this.#controller.signal);
    }
  }

  // End the answer here: the request is cancelled.
  async stop() {
    if (!this.open) return;
    this.#set("stopped");
    this.#controller.abort();
    if (this.rid) await api.post(`/v1/requests/${encodeURIComponent(this.rid)}/cancel`, {}, { keepalive: true }).catch(() => {});
  }

  // The same request again from the last event on, whichever API process answers. Its first try is the POST.
  #request(signal) {
    if (!this.rid) return api.request("POST", "/v1/chat/completions", this.body, { signal, headers: { "idempotency-key": this.#key } });
    const headers = this.#last ? { "last-event-id": this.#last } : {};
    return api.request("GET", `/v1/requests/${encodeURIComponent(this.rid)}/events`, undefined, { signal, headers });
  }

  async #follow(response, silence) {
    const heard = (comment = "") => {
      silence.heard();
      if (comment) this.#note(comment);
    };
    heard();
    silence.answered = true;
    this.rid ??= response.headers.get("x-request-id");
    if (this.state === "resuming") {
      this.resumed += 1;
      this.#set(this.text || this.reasoning ? "answering" : "waiting");
    }
    for await (const { data, id } of serverSentEvents(response, heard)) {
      if (!this.open) return;
      if (data === "[DONE]") this.#done = true;
      else if (data) this.#take(JSON.parse(data), id);
    }
  }

  // A comment of the stream: of the queue, or of its end.
  #note(comment) {
    const found = PLACE.exec(comment);
    if (!found && comment !== "claimed") return;
    this.place = found && { position: Number(found[1]), waitMs: found[2] ? Number(found[2]) : null };
    this.changed();
  }

  #take(chunk, id) {
    if (chunk.error) {
      const error = Object.assign(new Error(chunk.error.message), { status: 503, code: chunk.error.code });
      if (INTERRUPTED.includes(error.code)) throw error;
      this.#fail(error.message);
      return;
    }
    // With its text: whoever saves the answer after this change goes on behind it.
    if (id) this.#last = id;
    const [choice] = chunk.choices;
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (content || reasoning) {
      this.#lastAt = clock();
      this.#firstAt ||= this.#lastAt;
      this.text += content ?? "";
      this.reasoning += reasoning ?? "";
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (chunk.usage) this.usage = chunk.usage;
    this.#set(this.text || this.reasoning ? "answering" : this.state);
  }

  #fail(message) {
    this.error = message;
    this.#set("failed");
  }

  #set(state) {
    this.state = state;
    if (state !== "waiting") this.place = null;
    this.changed();
  }
}

// Aborts its signal once nothing was heard for SILENT_MS.
class Silence {
  // The headers of the answer have come.
  answered = false;
  #controller = new AbortController();
  #timer = null;

  constructor() {
    this.signal = this.#controller.signal;
    this.heard();
  }

  heard() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#controller.abort(new DOMException("The stream is silent.", "TimeoutError")), SILENT_MS);
  }

  get afterAnswer() {
    return this.answered && this.signal.aborted;
  }

  end() {
    clearTimeout(this.#timer);
  }
}

// True for what another try can mend: no connection or a silent one, a process that stops, a farm without Redis.
function passes(error) {
  return !error.status || [502, 504].includes(error.status) || INTERRUPTED.includes(error.code);
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
