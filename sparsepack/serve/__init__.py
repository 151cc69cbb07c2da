"""A packed model behind HTTP, by OpenAI's protocol: `sparsepack serve`. Needs the extra `serve`; see docs/serve.md.

app.py        routes: a request, checked; its response
  guards.py     keys, host names, the size of a body
  prepare.py    from a body to prompts and options for the engine
    schema.py     the bodies of requests
    grammar.py    JSON schemas and grammars that a text keeps to
  answers.py    the bodies of responses, whole and in events
    tools.py      calls of tools in them
  delivery.py   a response on its way to its client
  metrics.py    counters for Prometheus
scheduler.py  the one thread that runs the engine, and the bounded queue before it
  batch.py      continuous batching: sequences join and leave between tokens
server.py     the socket, signals, the end
"""
