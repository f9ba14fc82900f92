// The API of this process: JSON in and out, with the key of this tab.

import { tab } from "./storage.js";

const ROOT = new URL("../../", import.meta.url);
const STORED = "furrow.key";

// An answer that is no success. `message` is for people; `status` is 0 where the API did not answer at all.
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

// Called before the tab gets another key, or none: what was done with the last one is to be dropped.
export const farewells = new Set();

// The key lives as long as the tab, and is sent as a header alone.
export const key = {
  get: () => tab.get(STORED) ?? "",
  set(secret) {
    if (secret !== key.get()) leave();
    tab.set(STORED, secret);
  },
  forget() {
    leave();
    tab.remove(STORED);
  },
};

function leave() {
  for (const listener of farewells) listener();
}

// Called with the ApiError of each answer that asks for another key.
export const refusals = new Set();

export const api = {
  get: (path, options) => json("GET", path, undefined, options),
  post: (path, body = {}, options) => json("POST", path, body, options),
  delete: (path, options) => json("DELETE", path, undefined, options),
  request,
};

const LONGEST_MS = 15_000;
// An answer may be a second old, also that of another API process behind one address, which does not know of our acts.
const OLD_MS = 2_000;
let actedAt = -OLD_MS;

// The JSON of an answer, read now if `fresh`. Throws as `request`, and ApiError where it is not there in time: the host
// of an API process can vanish without a word.
async function json(method, path, body, { signal, fresh = false, ...options } = {}) {
  const late = AbortSignal.timeout(LONGEST_MS);
  // A browser sends `Cache-Control: no-cache` with "no-store": the API then reads anew, for this page alone.
  const shared = !fresh && method === "GET" && path.startsWith("/farm") && performance.now() - actedAt > OLD_MS;
  const cache = shared ? "default" : "no-store";
  try {
    const response = await request(method, path, body, { ...options, cache, signal: signal ? AbortSignal.any([signal, late]) : late });
    return response.status === 204 ? null : await response.json();
  } catch (error) {
    if (!late.aborted || signal?.aborted || error.status) throw error;
    const maybe = method === "GET" ? "" : " It may have done what it was asked for.";
    throw new ApiError(`The API process at ${location.host} has not answered for ${LONGEST_MS / 1_000} s.${maybe}`);
  } finally {
    if (method !== "GET") actedAt = performance.now();
  }
}

// A Response whose status is a success. `path` begins with a slash; `headers` and `signal` may be given, and `keepalive`
// for a request that outlives the page, and `cache` as of fetch.
// Throws ApiError, or the AbortError of `signal`.
async function request(method, path, body, { signal, headers = {}, keepalive = false, cache = "no-store" } = {}) {
  const sent = new Headers(headers);
  if (key.get()) sent.set("authorization", `Bearer ${key.get()}`);
  if (body !== undefined) sent.set("content-type", "application/json");
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), ROOT), {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      keepalive,
      cache,
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The API process at ${location.host} does not answer.`);
  }
  if (response.ok) return response;
  const error = await failure(response);
  if (asksForKey(error)) for (const listener of refusals) listener(error);
  throw error;
}

export function asksForKey(error) {
  return error.status === 401 || (error.status === 403 && error.code === "forbidden");
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const told = body?.error ?? {};
  const message = told.message ?? `${response.status} ${response.statusText}`.trim();
  return new ApiError(message, { status: response.status, code: told.code, param: told.param });
}

// The address of a path with these query parameters, null ones left out.
export function withQuery(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value != null && value !== "") query.set(name, value);
  return query.size ? `${path}?${query}` : path;
}
