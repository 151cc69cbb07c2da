// Ollama's client for node.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const model = "tiny";
const messages = [{ role: "user", content: "Who was there?" }];
const options = { temperature: 0, num_predict: 16 };
const connect = (url, key) => new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
const row = (request, run) => ({ client: "ollama", request, run });

export const rows = [
  row("list, show", async (url, key) => {
    const { models } = await connect(url, key).list();
    assert.deepEqual(models.map(({ name }) => name), [`${model}:latest`]);
    const shown = await connect(url, key).show({ model });
    assert(shown.capabilities.includes("completion"));
    return `the model ${models[0].name}`;
  }),
  row("chat, stream", async (url, key) => {
    const whole = await connect(url, key).chat({ model, messages, options });
    let text = "";
    for await (const piece of await connect(url, key).chat({ model, messages, options, stream: true })) {
      text += piece.message.content;
    }
    assert.equal(text, whole.message.content);
    assert.equal(whole.eval_count, 16);
    return "the same text in pieces";
  }),
  row("generate", async (url, key) => {
    const answer = await connect(url, key).generate({ model, prompt: "There was", raw: true, options });
    assert(answer.response);
    assert.equal(answer.done_reason, "length");
    return "16 tokens, done_reason length";
  }),
];
