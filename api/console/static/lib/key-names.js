// The names of API keys by id, read while a page is open.

export class KeyNames {
  #names = new Map();

  constructor(view) {
    view.poll(30, async (api) => {
      const { data } = await api.get("/farm/keys", { signal: view.signal });
      this.#names = new Map(data.map((key) => [key.id, key.name]));
    });
  }

  // The name of a key, its id where it has none; "" where there is no key.
  of(id) {
    return this.#names.get(id) || id;
  }
}
