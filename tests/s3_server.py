"""A local S3 server (moto) in its own process, for the fixture `s3` of conftest.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

# A share of the answers, FAULTS of each kind, fails, is slow, or has a changed byte.
PROGRAM = """
import logging, os, random, sys, time
import boto3
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket="tests")
share = float(os.environ.get("FAULTS", 0))
handle, draw = server._server.app, random.Random(0)


def handle_badly(environ, start_response):
    if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(".bin"):
        return handle(environ, start_response)
    kind = int(draw.random() / share)
    if kind == 0:
        start_response("503 Slow Down", [("Content-Length", "0")])
        return [b""]
    if kind == 1:
        time.sleep(0.2)
    content = bytearray(b"".join(handle(environ, start_response)))
    if kind == 2 and draw.random() < 0.3:
        content[len(content) // 2] ^= 1
    return [bytes(content)]


if share:
    server._server.app = handle_badly
print(port, flush=True)
sys.stdin.read()
"""
SECRET = "a-secret-of-the-tests"


@contextmanager
def serve(faults: float = 0.0) -> Iterator[dict[str, str]]:
    """Yield the environment variables by which S3 clients find the server, which then runs.

    faults: share of the answers that fail, and of those that are slow; some are damaged.
    """
    if missing := [
        name for name in ("s3fs", "obstore", "moto", "flask_cors") if find_spec(name) is None
    ]:
        pytest.skip(f"{', '.join(missing)} of the dev extra not installed")
    command = [sys.executable, "-P", "-c", PROGRAM]
    variables = {**os.environ, "FAULTS": str(faults)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as process:
        port = int(process.stdout.readline())
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "a-key-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        process.stdin.close()
