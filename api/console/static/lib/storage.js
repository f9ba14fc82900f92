// Texts that are kept for this tab alone, over reloads: in the browser's sessionStorage, or in the page where the browser
// refuses it (switched off, or full).

const inPage = new Map();

export const tab = {
  // The text, or null.
  get(name) {
    try {
      return sessionStorage.getItem(name) ?? inPage.get(name) ?? null;
    } catch {
      return inPage.get(name) ?? null;
    }
  },

  // True where a reload will find the text. Where the browser has no room for it, its older text is gone too.
  set(name, text) {
    try {
      sessionStorage.setItem(name, text);
      inPage.delete(name);
      return true;
    } catch {
      this.remove(name);
      inPage.set(name, text);
      return false;
    }
  },

  remove(name) {
    inPage.delete(name);
    try {
      sessionStorage.removeItem(name);
    } catch {
      // Nothing was kept.
    }
  },
};
