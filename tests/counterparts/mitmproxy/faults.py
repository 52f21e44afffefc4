"""Breaks connections as a request asks for: an addon for mitmdump, which does the breaking.

Header `fault` says where, `fault-times` how often for one `operation`; then it lets all pass.

before  reset once the request is read: the origin never sees it
after   reset once the origin has answered: not one byte of the answer is passed on
inside  the answer's head and body are passed on, then a reset in place of the last byte
busy    a 429 with a date to come back at, in place of the origin
"""

import os
import socket
import struct
import sys
import threading
import time
from email.utils import formatdate

from mitmproxy import ctx, http

RETRY_AFTER_SECONDS = 2
seen = {}


def end_with_input():
    sys.stdin.read()
    os._exit(0)


def proxyserver():
    return ctx.master.addons.get("proxyserver")


def running():
    threading.Thread(target=end_with_input, daemon=True).start()
    for _, port in proxyserver().listen_addrs():
        print(port, flush=True)


def close_with_reset(client):
    """Whatever closes this connection from now on, it will be by RST."""
    for handler in proxyserver().connections.values():
        if handler.client is client:
            writer = handler.transports[client].writer
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def break_off(flow):
    close_with_reset(flow.client_conn)
    flow.kill()


def come_back():
    now = time.time()
    dates = {"date": now, "retry-after": now + RETRY_AFTER_SECONDS}
    return {name: formatdate(at, usegmt=True) for name, at in dates.items()}


def request(flow):
    headers = flow.request.headers
    fault = headers.pop("fault", None)
    times = int(headers.pop("fault-times", "0"))
    operation = headers.get("operation")
    seen[operation] = seen.get(operation, 0) + 1
    flow.metadata["fault"] = fault if seen[operation] <= times else None
    if flow.metadata["fault"] == "before":
        break_off(flow)
    elif flow.metadata["fault"] == "busy":
        flow.response = http.Response.make(429, b"", come_back())


def response(flow):
    if flow.metadata["fault"] == "after":
        break_off(flow)
    elif flow.metadata["fault"] == "inside":
        close_with_reset(flow.client_conn)
        flow.response.headers["content-length"] = str(len(flow.response.raw_content) + 1)
        flow.response.headers["connection"] = "close"
