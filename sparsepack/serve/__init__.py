"""A packed model behind HTTP, by OpenAI's protocol: `sparsepack serve`. Needs the extra `serve`; see docs/serve.md.

app.py        routes: what is asked, checked; what is answered
  schema.py     the bodies of requests
  guards.py     keys, host names, the size of a body
  answers.py    the bodies of answers, whole and in events
worker.py     the one thread that runs the engine, and the bounded queue before it
  texts.py      one text continued, on top of what the cache holds already
server.py     the socket, signals, the end
"""
