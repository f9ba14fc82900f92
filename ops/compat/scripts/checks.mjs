// Checks of one client: run each, tell what came of it as a line of JSON.
export const baseURL = process.env.COMPAT_BASE_URL;
export const model = process.env.COMPAT_MODEL;
export const apiKey = process.env.COMPAT_KEY;

export function assert(condition, what) {
  if (!condition) throw new Error(`not so: ${what}`);
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
