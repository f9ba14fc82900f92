// The Vercel AI SDK, through its provider for servers of OpenAI's kind.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { apiKey, assert, baseURL, long, loop, main, model, terse, turns, undisturbed } from "./checks.mjs";

const farm = createOpenAICompatible({ name: "furrow", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
const base = { model: farm.chatModel(model), maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
const prompt = "What is a poisoned replica?";

await main({
  "a text, whole": async () => {
    const { text, usage } = await generateText({ ...base, prompt });
    assert(text.length > 0 && usage.totalTokens > 0, "text and usage are there");
  },
  "a streamed text with usage, equal to the whole one": async () => {
    const result = streamText({ ...base, prompt });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert(text === (await generateText({ ...base, prompt })).text, `${text} is the whole text`);
    assert((await result.usage).totalTokens > 0, "usage is there");
  },
  "a completion": async () => {
    const { text } = await generateText({ ...base, model: farm.completionModel(model), prompt: "One two three" });
    assert(text.length > 0, "it says something");
  },
  "errors with the server's message": async () => {
    const error = await generateText({ ...base, model: farm.chatModel("no-such-model"), prompt }).catch((found) => found);
    assert(error.statusCode === 404 && error.message.includes("no-such-model"), `${error} is a 404`);
  },
  "a required tool": async () => {
    const weather = tool({ description: "The weather", inputSchema: z.object({ city: z.string() }) });
    const fields = { ...base, maxOutputTokens: 200, tools: { weather }, toolChoice: "required", prompt };
    const { toolCalls } = await generateText(fields);
    assert(typeof toolCalls[0].input.city === "string", "a city was named");
  },
  [loop]: async () => {
    const asked = [];
    const execute = async ({ city }) => (asked.push(city), "sunny");
    const weather = tool({ description: "The weather in a city", inputSchema: z.object({ city: z.string() }), execute });
    const messages = [];
    for (const content of turns) {
      messages.push({ role: "user", content });
      const fields = { model: farm.chatModel(model), messages, tools: { get_weather: weather }, stopWhen: stepCountIs(4) };
      const result = streamText(fields);
      assert((await result.text).length > 0, `${content} is answered`);
      messages.push(...(await result.response).messages);
    }
    assert(asked.length > 0, "the tool was called");
  },
  "an object by a JSON schema": async () => {
    const providerOptions = { furrow: { logit_bias: await terse() } };
    const { object } = await generateObject({ ...base, providerOptions, schema: z.object({ ok: z.boolean() }), prompt });
    assert(typeof object.ok === "boolean", "it is what the schema says");
  },
  ...undisturbed(() => streamText({ ...base, maxOutputTokens: 150, prompt: long }).textStream),
});
