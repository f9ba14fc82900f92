// Anthropic's official client for Node.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { apiKey, assert, baseURL, long, main, model, undisturbed } from "./checks.mjs";

const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is a poisoned replica?" }];
const base = { model, messages, max_tokens: 24, temperature: 0 };
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "The weather in a city", input_schema };

async function* texts() {
  const asked = { model, messages: [{ role: "user", content: long }], max_tokens: 400, temperature: 0 };
  for await (const event of client.messages.stream(asked)) {
    if (event.type === "content_block_delta") yield event.delta.text;
  }
}

await main({
  "a message, whole": async () => {
    const answer = await client.messages.create({ ...base, system: "You are brief." });
    assert(answer.type === "message" && answer.content[0].text.length > 0, "it says something");
    assert(answer.usage.output_tokens > 0, "usage is counted");
  },
  "a streamed message, equal to the whole one": async () => {
    const whole = await client.messages.create(base);
    const stream = client.messages.stream(base);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const final = await stream.finalMessage();
    assert(text === final.content[0].text && text === whole.content[0].text, `${text} is the whole text`);
  },
  "counting of tokens": async () => {
    const counted = await client.messages.countTokens({ model, messages });
    assert(counted.input_tokens === (await client.messages.create(base)).usage.input_tokens, "it is the usage's");
  },
  "errors as the client's exceptions": async () => {
    const absent = await client.messages.create({ ...base, model: "no-such-model" }).catch((error) => error);
    assert(absent instanceof Anthropic.NotFoundError, `${absent} is a NotFoundError`);
    const refused = await client.messages.create({ ...base, messages: [] }).catch((error) => error);
    assert(refused instanceof Anthropic.BadRequestError, `${refused} is a BadRequestError`);
  },
  "two turns and a tool loop, default settings": async () => {
    const asked = [];
    const get_weather = betaTool({ ...weather, inputSchema: input_schema, run: ({ city }) => (asked.push(city), "sunny") });
    const said = [];
    for (const content of ["What is the weather in Paris?", "What is 2 + 3?"]) {
      said.push({ role: "user", content });
      const runner = client.beta.messages.toolRunner({ model, max_tokens: 400, messages: said, tools: [get_weather] });
      const answer = await runner.runUntilDone();
      assert(answer.content.at(-1).text?.length > 0, `${content} is answered`);
      said.splice(0, said.length, ...runner.params.messages, { role: "assistant", content: answer.content });
    }
    assert(asked.length > 0, "the tool was called");
  },
  "an aborted stream": async () => {
    const stream = client.messages.stream({ ...base, max_tokens: 2000 });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    assert(stream.controller.signal.aborted, "the stream was aborted");
  },
  ...undisturbed(texts),
});
