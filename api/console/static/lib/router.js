// The page that the address names after its `#`: `#/models/org%2Fname?tab=faults`.

// The address of a page: its parts, and parameters of its query. hrefTo(["models", "org/name"]) is "#/models/org%2Fname".
export function hrefTo(parts, query = {}) {
  const path = `#/${parts.map(encodeURIComponent).join("/")}`;
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value != null && value !== ""));
  return given.size ? `${path}?${given}` : path;
}

// The page of an address with `params` and `query`; null for an address that no page has.
export function route(pages, address) {
  const [path, query = ""] = address.replace(/^#/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean);
  for (const page of pages) {
    const params = match(page.path.split("/").filter(Boolean), parts);
    if (params) return { page, params, query: Object.fromEntries(new URLSearchParams(query)) };
  }
  return null;
}

function match(pattern, parts) {
  if (pattern.length !== parts.length) return null;
  const params = {};
  for (const [index, expected] of pattern.entries()) {
    if (expected.startsWith(":")) {
      try {
        params[expected.slice(1)] = decodeURIComponent(parts[index]);
      } catch {
        return null;
      }
    } else if (expected !== parts[index]) {
      return null;
    }
  }
  return params;
}
