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
