"""A packed model behind HTTP, by protocols of its clients: `sparsepack serve`. Needs the extra `serve`; docs/serve.md.

app.py        routes: a request, checked; its response
  guards.py     keys, host names, the size of a body
  prepare.py    from a body to prompts and options for the engine
    schema.py     the form of requests that all protocols are read into
    grammar.py    JSON schemas and grammars that a text keeps to
  answer.py     an answer while it is generated, and how a protocol writes it
    tools.py      calls of tools in them
  protocols/    a module for each protocol of clients: routes, how requests are read and answers written
  delivery.py   a response on its way to its client
  metrics.py    counters for Prometheus
scheduler.py  the one thread that runs the engine, and the bounded queue before it
  batch.py      continuous batching: sequences join and leave between tokens
server.py     the socket, signals, the end
"""
