// Checks of one client: run each, tell what came of it as a line of JSON.
export const baseURL = process.env.COMPAT_BASE_URL;
export const model = process.env.COMPAT_MODEL;
export const apiKey = process.env.COMPAT_KEY;

export function assert(condition, what) {
  if (!condition) throw new Error(`not so: ${what}`);
}

// A logit_bias under which a small model that must write JSON comes to its end, instead of blanks and long texts.
export async function terse() {
  const bias = {};
  for (const prompt of '"{}[],:') {
    const answer = await fetch(`${baseURL}/tokenize`, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${apiKey}` },
      body: JSON.stringify({ model, prompt, add_special_tokens: false }),
    });
    bias[(await answer.json()).tokens[0]] = prompt === '"' ? 100 : 50;
  }
  return bias;
}

export const silent = "stopped leader";
// A question whose answer is long enough to be disturbed in its middle.
export const long = "Count from 1 to 60.";

// Check that a stream in whose middle the leader is stopped says the same; nothing where the run can't stop it.
export function pausing(title, texts) {
  const url = process.env.COMPAT_PAUSE_URL;
  if (!url) return {};
  const run = async () => {
    let said = "";
    let pausedAt = null;
    for await (const text of texts()) {
      said += text;
      if (pausedAt === null && said.length > 5) {
        await fetch(url, { method: "POST" });
        pausedAt = performance.now();
      }
    }
    assert(pausedAt !== null && performance.now() - pausedAt > 500, `a silence in ${said}`);
    let whole = "";
    for await (const text of texts()) whole += text;
    assert(said === whole, `${said} is the whole text`);
  };
  return { [title]: run };
}

export async function main(checks) {
  for (const [check, run] of Object.entries(checks)) {
    let ok = true;
    let detail = "";
    try {
      await run();
    } catch (error) {
      ok = false;
      detail = `${error?.name}: ${String(error?.message).slice(0, 300)}`;
    }
    console.log(`{"check": ${JSON.stringify(check)}, "ok": ${ok}, "detail": ${JSON.stringify(detail)}}`);
  }
}
