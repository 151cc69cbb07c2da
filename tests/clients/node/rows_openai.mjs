// OpenAI's client for node: models, completions and chats.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = "tiny";
const messages = [{ role: "user", content: "Who was there?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const connect = (url, key) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const chat = (url, key, options) =>
  connect(url, key).chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, ...options });
const row = (request, run) => ({ client: "openai", request, run });

export const rows = [
  row("models.list", async (url, key) => {
    const names = (await connect(url, key).models.list()).data.map(({ id }) => id);
    assert.deepEqual(names, [model]);
    return `the model ${names[0]}`;
  }),
  row("completions", async (url, key) => {
    const options = { model, prompt: "There was a king who", max_tokens: 24, temperature: 0 };
    const { choices, usage } = await connect(url, key).completions.create(options);
    assert.equal(choices[0].finish_reason, "length");
    assert.equal(usage.completion_tokens, 24);
    return "24 tokens, finish_reason length";
  }),
  row("chat", async (url, key) => {
    const { choices } = await chat(url, key, {});
    assert(choices[0].message.content);
    assert.equal(choices[0].finish_reason, "length");
    return "16 tokens, finish_reason length";
  }),
  row("chat, stream", async (url, key) => {
    let text = "";
    for await (const chunk of await chat(url, key, { stream: true })) text += chunk.choices[0].delta.content ?? "";
    assert.equal(text, (await chat(url, key, {})).choices[0].message.content);
    return "the same text in pieces";
  }),
  row("chat.completions.stream (helper)", async (url, key) => {
    const stream = connect(url, key).chat.completions.stream({ model, messages, max_tokens: 16 });
    assert((await stream.finalContent()).length);
    return "the whole text at the end";
  }),
  row("chat, tool_choice required", async (url, key) => {
    const { choices } = await chat(url, key, { tools, tool_choice: "required", max_tokens: 500 });
    const [call] = choices[0].message.tool_calls;
    assert(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
    return "a call of weather whose arguments keep to its schema";
  }),
  row("chat, response_format json_schema", async (url, key) => {
    const response_format = { type: "json_schema", json_schema: { name: "weather", schema: parameters } };
    const { choices } = await chat(url, key, { response_format, max_tokens: 500 });
    assert(["Oslo", "Rome"].includes(JSON.parse(choices[0].message.content).city));
    return "JSON of the schema";
  }),
  row("chat, a key that is wrong", async (url) => {
    await assert.rejects(chat(url, "wrong", {}), OpenAI.AuthenticationError);
    return "AuthenticationError";
  }),
];
