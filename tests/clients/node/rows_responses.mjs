// OpenAI's client for node: Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = "tiny";
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const connect = (url, key) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const respond = (url, key, options) =>
  connect(url, key).responses.create({
    model,
    input: "Who was there?",
    max_output_tokens: 16,
    temperature: 0,
    ...options,
  });
const row = (request, run) => ({ client: "openai", request, run });

export const rows = [
  row("responses", async (url, key) => {
    const response = await respond(url, key, {});
    assert(response.output_text);
    assert.equal(response.incomplete_details.reason, "max_output_tokens");
    return "16 tokens, incomplete for max_output_tokens";
  }),
  row("responses, stream", async (url, key) => {
    let text = "";
    for await (const event of await respond(url, key, { stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, (await respond(url, key, {})).output_text);
    return "the same text in pieces";
  }),
  row("responses.stream (helper)", async (url, key) => {
    const stream = connect(url, key).responses.stream({ model, input: "Who was there?", max_output_tokens: 16 });
    assert((await stream.finalResponse()).output[0].content[0].text);
    return "the whole response at the end";
  }),
  row("responses, function call, its output with previous_response_id", async (url, key) => {
    const first = await respond(url, key, { tools, tool_choice: "required", max_output_tokens: 500 });
    const [{ call_id, arguments: text }] = first.output;
    assert(["Oslo", "Rome"].includes(JSON.parse(text).city));
    const input = [{ type: "function_call_output", call_id, output: "sunny" }];
    assert((await respond(url, key, { input, previous_response_id: first.id, tools })).output_text);
    return "a call of weather whose arguments keep to its schema; then an answer";
  }),
];
