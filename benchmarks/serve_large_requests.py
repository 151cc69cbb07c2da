"""How long `/health` of `sparsepack serve` takes while clients send large requests; prints a table.

    python benchmarks/serve_large_requests.py MODEL.gguf --clients 8 --seconds 5 --bytes 4000000

For each kind of request, so many clients, each a process, send it again and again, while this process asks for
`/health`. The last columns say what the requests were answered with and how much memory the server has afterwards.
"""

import argparse
import http.client
import multiprocessing
import socket
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import psutil


def requests(size: int) -> dict[str, bytes]:
    """Bodies of about so many bytes, by kind."""
    return {
        "spaces": b'{"model": "m", "prompt": "' + b" " * size + b'"}',
        "one word": b'{"model": "m", "prompt": "' + b"a" * size + b'"}',
        "emoji": b'{"model": "m", "prompt": "' + "\U0001f600".encode() * (size // 4) + b'"}',
        "escapes": b'{"model": "m", "prompt": "' + b"\\u0001" * (size // 6) + b'"}',
        "ids": b'{"model": "m", "prompt": [' + b"1," * (size // 2) + b"1]}",
        "deep": b'{"model": "m", "prompt": ' + b"[" * size + b"}",
        "lists": b'{"model": "m", "metadata": [' + b"[]," * (size // 3) + b"[]]}",
        "messages": b'{"model": "m", "messages": [' + b'{"role":"user","content":""},' * (size // 29) + b"{}]}",
    }


def send(port: int, body: bytes, stop: Event, statuses: "Queue[int]") -> None:
    """Send a request until told to stop, and tell what it was answered with; 0: the connection was closed."""
    path = "/v1/chat/completions" if b'"messages"' in body[:40] else "/v1/completions"
    while not stop.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            statuses.put(answer.status)
        except OSError:
            statuses.put(0)
        connection.close()


def health(port: int) -> float:
    """Milliseconds until an answer."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    return 1000 * (time.perf_counter() - began)


def row(name: str, bodies: list[bytes], port: int, clients: int, seconds: float, server: psutil.Process) -> str:
    """One line of the table."""
    stop, statuses = multiprocessing.Event(), multiprocessing.Queue()
    senders = [
        multiprocessing.Process(target=send, args=(port, bodies[n % len(bodies)], stop, statuses))
        for n in range(clients)
    ]
    for sender in senders:
        sender.start()
    end, taken = time.monotonic() + seconds, []
    while time.monotonic() < end:
        taken.append(health(port))
        time.sleep(0.01)
    stop.set()
    found = Counter[int]()
    while any(sender.is_alive() for sender in senders) or not statuses.empty():
        while not statuses.empty():
            found[statuses.get()] += 1
        time.sleep(0.05)
    taken.sort()
    answers = ", ".join(f"{count} x {status or 'closed'}" for status, count in sorted(found.items()))
    memory = server.memory_info().rss / 2**20
    middle, most = taken[len(taken) // 2], taken[-1]
    return f"| {name} | {middle:.1f} | {taken[int(0.95 * len(taken))]:.1f} | {most:.1f} | {answers} | {memory:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bytes", type=int, default=4_000_000)
    asked = parser.parse_args()
    kinds = requests(asked.bytes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sparsepack.cli", "serve", asked.model, "--port", str(port), "--model-name", "m"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                try:
                    health(port)
                    break
                except OSError:
                    time.sleep(0.2)
                    assert server.poll() is None, "the server ended; start it by hand to see why"
            process = psutil.Process(server.pid)
            print("| request | /health median, ms | 95 % | most | answers | server's memory, MiB |")
            print("|---|---|---|---|---|---|")
            print(row("none", [], port, 0, asked.seconds, process), flush=True)
            for name, body in kinds.items():
                print(row(name, [body], port, asked.clients, asked.seconds, process), flush=True)
            print(row("all of them", list(kinds.values()), port, asked.clients, asked.seconds, process))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
