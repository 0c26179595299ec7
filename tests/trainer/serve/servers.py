"""Servers of tests: Weft's own on a tiny model, and one that answers what it is told."""

import contextlib
import http.server
import json
import threading
import time
from types import SimpleNamespace

import uvicorn

from trainer.serve import command


def app(folder):
  """The application that serves a Hugging Face folder."""
  return command.make_app(SimpleNamespace(workdir=None, hf=str(folder), step=None, template="plain", tensor=1, rows=4,
                                          name="tiny", prefill_chunk=0, kept_texts=0))


@contextlib.contextmanager
def serving(app):
  """The address of a server of the application."""
  server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  while not server.started:
    time.sleep(0.01)
  try:
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
  finally:
    server.should_exit = True
    thread.join()


@contextlib.contextmanager
def answering(answer):
  """The address of a server whose answer to (route, body) is (status, JSON-able)."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      status, told = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
      self._send(status, told)

    def do_GET(self):
      self._send(200, {"data": [{"id": "scripted"}]})

    def _send(self, status, told):
      text = json.dumps(told).encode()
      self.send_response(status)
      self.send_header("Content-Length", str(len(text)))
      self.end_headers()
      self.wfile.write(text)

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
