// The rows of the table of clients, as the modules rows_*.mjs export them: lists of {client, request, run}.
// `node rows.mjs URL KEY` runs them all and prints a JSON line for each. A row's `run` gets the server's URL and key,
// checks what comes back and returns that in a few words, which are the same every time.
import { readdirSync, readFileSync } from "node:fs";

const here = new URL(".", import.meta.url);
const [url, key] = process.argv.slice(2);
for (const name of readdirSync(here).filter((name) => /^rows_.*\.mjs$/.test(name)).sort()) {
  for (const { client, request, run } of (await import(new URL(name, here))).rows) {
    const { version } = JSON.parse(readFileSync(new URL(`node_modules/${client}/package.json`, here)));
    const result = { client: `${client} ${version} (node)`, request };
    try {
      console.log(JSON.stringify({ ...result, passed: true, result: await run(url, key) }));
    } catch (error) {
      console.log(JSON.stringify({ ...result, passed: false, result: `${error.name}: ${error.message}` }));
    }
  }
}
