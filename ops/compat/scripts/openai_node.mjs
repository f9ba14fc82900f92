// The official client for Node.
import OpenAI from "openai";
import { apiKey, assert, baseURL, long, loop, main, model, terse, turns, undisturbed } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is a poisoned replica?" }];
const base = { model, messages, max_tokens: 24, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const counted = { model, stream: true, temperature: 0 };

async function* chatTexts() {
  const asked = { ...counted, messages: [{ role: "user", content: long }], max_tokens: 150 };
  for await (const chunk of await client.chat.completions.create(asked)) yield chunk.choices[0].delta.content ?? "";
}

async function* completionTexts() {
  const asked = { ...counted, prompt: long, max_tokens: 150, min_tokens: 150 };
  for await (const chunk of await client.completions.create(asked)) yield chunk.choices[0].text;
}

async function* responseTexts() {
  const asked = { ...counted, input: long, max_output_tokens: 150 };
  for await (const event of await client.responses.create(asked))
    if (event.type === "response.output_text.delta") yield event.delta;
}

await main({
  "a chat, whole": async () => {
    const answer = await client.chat.completions.create(base);
    assert(answer.choices[0].message.content.length > 0, "it says something");
    assert(answer.usage.total_tokens === answer.usage.prompt_tokens + answer.usage.completion_tokens, "usage adds up");
  },
  "a streamed chat with usage, equal to the whole one": async () => {
    const whole = await client.chat.completions.create(base);
    const stream = await client.chat.completions.create({
      ...base,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text === whole.choices[0].message.content, `${text} is the whole text`);
    assert(usage.total_tokens === whole.usage.total_tokens, "usage is the same");
  },
  "the streaming helper": async () => {
    const runner = client.chat.completions.stream({ ...base, max_tokens: 200 });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    const final = await runner.finalChatCompletion();
    assert(final.choices[0].message.content === text, "deltas make up the message");
  },
  "log probabilities and bytes": async () => {
    const answer = await client.chat.completions.create({ ...base, logprobs: true, top_logprobs: 2 });
    const bytes = answer.choices[0].logprobs.content.flatMap((token) => token.bytes);
    assert(Buffer.from(bytes).toString() === answer.choices[0].message.content, "bytes make up the text");
  },
  "completions: echo with log probabilities": async () => {
    const answer = await client.completions.create({ model, prompt: "One two", max_tokens: 0, echo: true, logprobs: 1 });
    const { token_logprobs: values } = answer.choices[0].logprobs;
    assert(values[0] === null && values.slice(1).every((value) => value < 0), "each token has a value but the first");
  },
  "models, listed and retrieved": async () => {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert(names.includes(model), "the model is listed");
    assert((await client.models.retrieve(model)).id === model, "the model is retrieved");
  },
  "errors as the client's exceptions, with param and code": async () => {
    const refused = await client.chat.completions.create({ ...base, temperature: 6 }).catch((error) => error);
    assert(refused instanceof OpenAI.BadRequestError && refused.param === "temperature", `${refused} names the field`);
    const absent = await client.chat.completions.create({ ...base, model: "no-such-model" }).catch((error) => error);
    assert(absent instanceof OpenAI.NotFoundError && absent.code === "model_not_found", `${absent} names the code`);
  },
  "an aborted stream": async () => {
    const stream = await client.chat.completions.create({ ...base, max_tokens: 2000, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content) break;
    }
    assert(stream.controller.signal.aborted, "the stream was aborted");
  },
  "a required tool, whole and streamed": async () => {
    const fields = { ...base, max_tokens: 200, tools: [weather], tool_choice: "required" };
    const answer = await client.chat.completions.create(fields);
    assert("city" in JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments), "a city was named");
    const final = await client.chat.completions.stream(fields).finalChatCompletion();
    assert("city" in JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), "a city was streamed");
  },
  [`chat: ${loop}`]: async () => {
    const asked = [];
    const get_weather = ({ city }) => (asked.push(city), "sunny");
    const tool = { type: "function", function: { ...weather.function, function: get_weather, parse: JSON.parse } };
    let said = [];
    for (const content of turns) {
      said.push({ role: "user", content });
      const runner = client.chat.completions.runTools({ model, messages: said, tools: [tool] });
      assert((await runner.finalContent()).length > 0, `${content} is answered`);
      said = runner.messages;
    }
    assert(asked.length > 0, "the tool was called");
  },
  "structured output by a JSON schema": async () => {
    const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
    const answer = await client.chat.completions.create({
      ...base,
      logit_bias: await terse(),
      response_format: { type: "json_schema", json_schema: { name: "a", schema, strict: true } },
    });
    assert(typeof JSON.parse(answer.choices[0].message.content).ok === "boolean", "it is what the schema says");
  },
  "the responses API, whole and streamed": async () => {
    const answer = await client.responses.create({ model, input: "Hello", max_output_tokens: 16 });
    assert(answer.output_text.length > 0, "it says something");
    const kinds = [];
    const stream = await client.responses.create({ model, input: "Hello", max_output_tokens: 8, stream: true });
    for await (const event of stream) kinds.push(event.type);
    assert(kinds[0] === "response.created" && kinds.includes("response.output_text.delta"), `${kinds} is the order`);
  },
  ...undisturbed(chatTexts, "chat"),
  ...undisturbed(completionTexts, "completions"),
  ...undisturbed(responseTexts, "responses"),
});
