"""A packed model behind HTTP, by OpenAI's protocol: `sparsepack serve`. Needs the extra `serve`; see docs/serve.md.

app.py        routes: what is asked, checked; what is answered
  guards.py     keys, host names, the size of a body
  preparing.py  from a body to texts for the engine
    schema.py, messages.py  the bodies of requests
    prompts.py    their prompts, in tokens
    grammar.py    JSON schemas and grammars that a text keeps to
  answers.py    the bodies of answers, whole and in events
    tools.py      calls of tools in them
    likelihoods.py  how likely tokens were
  delivery.py   an answer on its way to its client
  metrics.py    what was done, counted
worker.py     the one thread that runs the engine, and the bounded queue before it
  texts.py      one text continued, on top of what the cache holds already
server.py     the socket, signals, the end
"""
