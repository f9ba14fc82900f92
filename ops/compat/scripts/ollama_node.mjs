// Ollama's official client for JavaScript.
import { Ollama } from "ollama";
import { apiKey, assert, baseURL, long, loop, main, model, turns, undisturbed } from "./checks.mjs";

const host = baseURL.replace(/\/v1$/, "");
const client = new Ollama({ host, headers: { authorization: `Bearer ${apiKey}` } });
const messages = [{ role: "user", content: "What is a poisoned replica?" }];
const short = { temperature: 0, num_predict: 24 };
const rounds = 4;
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

async function* chatTexts() {
  const asked = { model, messages: [{ role: "user", content: long }], options: { temperature: 0, num_predict: 150 } };
  for await (const part of await client.chat({ ...asked, stream: true })) yield part.message.content;
}

async function* generateTexts() {
  const asked = { model, prompt: long, options: { temperature: 0, num_predict: 150 } };
  for await (const part of await client.generate({ ...asked, stream: true })) yield part.response;
}

async function refused(ask, status) {
  try {
    await ask();
  } catch (error) {
    assert(error.status_code === status && error.error, `${error.status_code} is ${status}, with a message`);
    return;
  }
  throw new Error("a wrong request was answered");
}

await main({
  "a chat, whole, with counts and durations": async () => {
    const answer = await client.chat({ model, messages, options: short });
    assert(answer.done && answer.message.role === "assistant" && answer.message.content, "it says something");
    assert(answer.prompt_eval_count > 0 && answer.eval_count > 0 && answer.eval_count <= 24, "tokens are counted");
    const parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration;
    assert(parts === answer.total_duration, "durations add up");
  },
  "a streamed chat, equal to the whole one": async () => {
    const whole = await client.chat({ model, messages, options: short });
    let text = "";
    let last = null;
    for await (const part of await client.chat({ model, messages, options: short, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert(text === whole.message.content, `${text} is the whole text`);
    assert(last.done && last.eval_count === whole.eval_count, "the last part has the counts");
  },
  "a stream that the client ends": async () => {
    const stream = await client.chat({ model, messages, options: { ...short, num_predict: 200 }, stream: true });
    let ended = false;
    try {
      for await (const _ of stream) stream.abort();
    } catch (error) {
      ended = error.name === "AbortError";
    }
    assert(ended, "it ends with the client's own error");
  },
  "a prompt, streamed and whole, raw and with a system message": async () => {
    const prompt = messages[0].content;
    const answer = await client.generate({ model, prompt, options: short });
    const chat = await client.chat({ model, messages, options: short });
    assert(answer.response === chat.message.content, "it is the chat's answer");
    let text = "";
    for await (const part of await client.generate({ model, prompt, options: short, stream: true }))
      text += part.response;
    assert(text === answer.response, "the stream is the same");
    assert((await client.generate({ model, prompt, raw: true, options: short })).done, "raw prompts work");
    assert((await client.generate({ model, prompt, system: "You are brief.", options: short })).response, "and systems");
  },
  "limits, stop strings and seeds": async () => {
    const cut = await client.chat({ model, messages, options: { num_predict: 2 } });
    assert(cut.done_reason === "length", "a limit ends an answer");
    const said = (await client.chat({ model, messages, options: short })).message.content;
    const word = said.split(/\s+/)[2];
    const stopped = await client.chat({ model, messages, options: { ...short, stop: [word] } });
    assert(stopped.done_reason === "stop" && !stopped.message.content.includes(word), "a stop string is cut off");
    const warm = { temperature: 1.5, seed: 7, num_predict: 24, num_ctx: 4096 };
    const texts = new Set();
    for (let index = 0; index < 2; index++)
      texts.add((await client.chat({ model, messages, options: warm })).message.content);
    assert(texts.size === 1, "a seed repeats an answer");
  },
  "structured output": async () => {
    const format = {
      type: "object",
      properties: { state: { enum: ["healthy", "poisoned"] }, ranks: { type: "integer", minimum: 0, maximum: 64 } },
      required: ["state", "ranks"],
      additionalProperties: false,
    };
    const answer = await client.chat({ model, messages, format, options: { temperature: 0 } });
    const value = JSON.parse(answer.message.content);
    assert(["healthy", "poisoned"].includes(value.state) && Number.isInteger(value.ranks), "it fits the schema");
  },
  "errors as the client's exceptions": async () => {
    await refused(() => client.chat({ model: "no-such-model", messages }), 404);
    await refused(() => client.chat({ model, messages: [{ role: "wizard", content: "x" }] }), 400);
    await refused(() => client.chat({ model: "no-such-model", messages, stream: true }), 404);
  },
  "models: listed, shown, running": async () => {
    assert((await client.list()).models.some((one) => one.model === model), "it is listed");
    const shown = await client.show({ model });
    assert(shown.capabilities.includes("completion") && shown.model_info, "it is shown");
    assert((await client.ps()).models.some((one) => one.model === model), "it runs");
    assert((await client.version()).version, "the server has a version");
  },
  "a model that is loaded is pulled at once": async () => {
    assert((await client.pull({ model })).status === "success", "whole");
    let status = "";
    for await (const part of await client.pull({ model, stream: true })) status = part.status;
    assert(status === "success", "streamed");
  },
  [loop]: async () => {
    const said = [];
    let called = false;
    for (const content of turns) {
      said.push({ role: "user", content });
      for (let round = 0; round < rounds; round++) {
        const { message } = await client.chat({ model, messages: said, tools: [weather] });
        said.push(message);
        if (!message.tool_calls?.length) break;
        called = true;
        for (const call of message.tool_calls) {
          assert(typeof call.function.arguments.city === "string", "arguments are an object");
          said.push({ role: "tool", tool_name: call.function.name, content: "sunny" });
        }
      }
      assert(said.at(-1).content, "each turn ends with a text");
    }
    assert(called, "the tool was called");
  },
  ...undisturbed(chatTexts, "chat"),
  ...undisturbed(generateTexts, "generate"),
});
