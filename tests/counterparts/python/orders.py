"""Orders in SQLite, behind an idempotency library that somebody else wrote.

usage: orders.py LIBRARY    prints its port; ends when its standard input does

POST /orders  {"operation": NAME}   stores an order; header `handler` makes the first run of NAME
              go wrong: `refuse` (503, nothing stored), `lie` (503 although stored),
              `hold` (stored, not answered until released), `raise` (stored, then an exception)
GET  /orders  {NAME: orders}
GET  /release/NAME
"""

import asyncio
import os
import socket
import sqlite3
import sys
import threading
from collections import defaultdict

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

store = sqlite3.connect(":memory:")
store.execute("create table orders (operation text)")
seen = set()
released = defaultdict(asyncio.Event)


def commit(operation):
    return store.execute("insert into orders values (?)", (operation,)).lastrowid


async def create(request):
    operation = (await request.json())["operation"]
    first = operation not in seen
    seen.add(operation)
    how = request.headers.get("handler") if first else None
    if how == "refuse":
        return JSONResponse({"error": "not now"}, 503)
    order = commit(operation)
    if how == "lie":
        return JSONResponse({"error": "it was stored"}, 503)
    if how == "raise":
        raise RuntimeError("after the order was stored")
    if how == "hold":
        await released[operation].wait()
    return JSONResponse({"order": order}, 201)


async def count(_):
    return JSONResponse(dict(store.execute("select operation, count(*) from orders group by 1")))


async def release(request):
    released[request.path_params["operation"]].set()
    return JSONResponse({})


def behind(library, app):
    if library.startswith("idemkit"):
        from idemkit import HttpConfig, IdempotencyMiddleware, InMemoryBackend

        mode = "stripe" if library == "idemkit-stripe" else "default"
        config = HttpConfig(
            scope_mode="single_tenant",
            compat_mode=mode,
            wait_timeout_seconds=0.1,
            # Also what it says in Retry-After while the first request runs.
            lease_ttl_seconds=4,
        )
        return IdempotencyMiddleware(app, backend=InMemoryBackend(), config=config)
    if library == "fastapi-idempotency":
        from fastapi_idempotency import IdempotencyMiddleware

        return IdempotencyMiddleware(app, wait_seconds=0.1)
    if library == "asgi-idempotency-header":
        from idempotency_header_middleware import IdempotencyHeaderMiddleware
        from idempotency_header_middleware.backends import MemoryBackend

        return IdempotencyHeaderMiddleware(app, backend=MemoryBackend())
    sys.exit(f"unknown library: {library}")


def end_with_input():
    sys.stdin.read()
    os._exit(0)


routes = [Route("/orders", create, methods=["POST"]), Route("/orders", count)]
routes.append(Route("/release/{operation}", release))
app = behind(sys.argv[1], Starlette(routes=routes))
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=end_with_input, daemon=True).start()
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
