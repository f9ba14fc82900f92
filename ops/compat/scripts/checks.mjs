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

export const loop = "two turns and a tool loop, default settings";
export const turns = ["What is the weather in Paris?", "What is 2 + 3?"];
// A question whose answer is long enough to be disturbed in its middle.
export const long = "Count from 1 to 60.";
const faults = { "stopped leader": "pause", "killed leader": "kill" };

// Streams of which one must be hit by the fault: a slow reader may see the beginning of an answer after its end.
const attempts = 3;

// The text of a stream with a fault in its middle; `hit` where the stream waited for a leader after it.
async function disturbed(texts, fault, url) {
  let said = "";
  let leader = null;
  let at = 0;
  for await (const text of texts) {
    said += text;
    if (leader === null && said.length > 5) {
      leader = await (await fetch(`${url}/${fault}`, { method: "POST" })).text();
      at = performance.now();
    }
  }
  const hit = fault === "kill" ? (await (await fetch(url)).text()) !== leader : performance.now() - at > 500;
  return { said, hit: leader !== null && hit };
}

// Checks that a stream is unchanged by each fault of the leader in its middle; none where the run has no faults.
export function undisturbed(texts, name = "") {
  const url = process.env.COMPAT_FAULT_URL;
  const checks = {};
  for (const [title, fault] of url ? Object.entries(faults) : []) {
    checks[name ? `${name}: ${title}` : title] = async () => {
      let whole = "";
      for await (const text of texts()) whole += text;
      for (let attempt = 0; attempt < attempts; attempt++) {
        const { said, hit } = await disturbed(texts(), fault, url);
        assert(said === whole, `${said} is the whole text`);
        if (hit) return;
      }
      throw new Error("each answer had ended before the fault");
    };
  }
  return checks;
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
