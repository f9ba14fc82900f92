// The focus of the keyboard: where it can stop, and the nearest place where its element goes.

const STOPS = "a[href], button:enabled, input:enabled, select:enabled, textarea:enabled, summary, [tabindex='0']";

export const stopsIn = (place) => [...place.querySelectorAll(STOPS)].filter((one) => one.checkVisibility());

// Remembers what has the focus now. The function that is returned puts it back there; if that is gone or disabled, to the
// same place in the row that follows, else to its form, its section's title or the page's.
export function remembered() {
  const at = document.activeElement;
  const row = at?.closest("tbody tr, li");
  const list = row?.parentElement;
  const index = row ? [...list.children].indexOf(row) : 0;
  const fromEnd = row ? stopsIn(row).indexOf(at) - stopsIn(row).length : 0;
  const [form, section] = [at?.closest("form"), at?.closest("section")];
  return () => {
    const title = section?.isConnected ? section.querySelector("h2") : null;
    const found = [
      () => (at?.isConnected && !at.disabled && at !== document.body ? at : null),
      () => (list?.isConnected ? stopsOf(list.children[Math.min(index, list.children.length - 1)])?.at(fromEnd) : null),
      () => (form?.isConnected ? stopsIn(form)[0] : null),
      () => (title?.setAttribute("tabindex", "-1"), title),
      () => document.querySelector("main h1"),
      () => document.querySelector("main"),
    ];
    for (const candidate of found) {
      const element = candidate();
      if (!element) continue;
      element.focus();
      if (document.activeElement === element) return;
    }
  };
}

const stopsOf = (row) => (row ? stopsIn(row) : null);

// Do `draw`; what had the focus in `place` keeps it, or gives it to the nearest place.
export function keepingFocus(place, draw) {
  const at = document.activeElement;
  if (!at || !place.contains(at) || at === place) return draw();
  const back = remembered();
  draw();
  if (!at.isConnected || at.disabled) back();
}
