// Vercel's AI SDK.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const question = { prompt: "Who was there?", maxOutputTokens: 16, maxRetries: 0 };

async function answers(model) {
  assert((await generateText({ model, ...question })).text);
  let text = "";
  for await (const piece of streamText({ model, ...question }).textStream) text += piece;
  assert(text);
  return "an answer, and one in pieces";
}

export const rows = [
  {
    client: "@ai-sdk/openai-compatible",
    request: "generateText and streamText (chat)",
    run: (url, key) => answers(createOpenAICompatible({ name: "own", baseURL: `${url}/v1`, apiKey: key })("tiny")),
  },
  {
    client: "@ai-sdk/openai",
    request: "generateText and streamText (Responses)",
    run: (url, key) => answers(createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).responses("tiny")),
  },
  {
    client: "@ai-sdk/anthropic",
    request: "generateText and streamText (messages)",
    run: (url, key) => answers(createAnthropic({ baseURL: `${url}/v1`, apiKey: key })("tiny")),
  },
];
