// Anthropic's client for node.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const model = "tiny";
const messages = [{ role: "user", content: "Who was there?" }];
const input_schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ name: "weather", input_schema }];
const connect = (url, key) => new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const send = (url, key, options) => connect(url, key).messages.create({ model, messages, max_tokens: 16, ...options });
const row = (request, run) => ({ client: "@anthropic-ai/sdk", request, run });

export const rows = [
  row("messages", async (url, key) => {
    const { content, stop_reason } = await send(url, key, { system: "Be brief." });
    assert(content[0].text);
    assert.equal(stop_reason, "max_tokens");
    return "16 tokens, stop_reason max_tokens";
  }),
  row("messages.stream (helper)", async (url, key) => {
    let text = "";
    const stream = connect(url, key).messages.stream({ model, messages, max_tokens: 16 });
    stream.on("text", (piece) => (text += piece));
    assert.equal((await stream.finalMessage()).content[0].text, text);
    return "the text in pieces, then the whole message";
  }),
  row("messages, tool_choice any, then the tool's result", async (url, key) => {
    const { content } = await send(url, key, { tools, tool_choice: { type: "any" }, max_tokens: 500 });
    assert(["Oslo", "Rome"].includes(content[0].input.city));
    const result = { type: "tool_result", tool_use_id: content[0].id, content: "sunny" };
    const turns = [{ role: "assistant", content }, { role: "user", content: [result] }];
    assert((await send(url, key, { tools, messages: [...messages, ...turns] })).content.length);
    return "a use of weather whose input keeps to its schema; then an answer";
  }),
  row("messages.countTokens", async (url, key) => {
    assert((await connect(url, key).messages.countTokens({ model, messages })).input_tokens > 0);
    return "the number of tokens";
  }),
  row("messages, a key that is wrong", async (url) => {
    await assert.rejects(send(url, "wrong", {}), Anthropic.AuthenticationError);
    return "AuthenticationError";
  }),
];
