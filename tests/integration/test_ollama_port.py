"""A second port, where Ollama's clients look for it."""

import os
import socket
import subprocess
import sys

import httpx2

from tests.support.daemon import ROOT, DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_both_ports_serve_all_apis_and_one_says_that_ollama_is_running() -> None:
    with short_home() as home:
        port = free_port()
        write_config(home, ("a",), server=f"ollama_port = {port}")
        with DaemonProcess(home) as daemon, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as other:
            assert (other.get("/").text, other.head("/").status_code) == ("Ollama is running", 200)
            assert daemon.client.get("/").json()["name"] == "mlxd"
            for client in (other, daemon.client):
                body = {"model": "a:latest", "prompt": "hi", "stream": False, "options": {"num_predict": 2}}
                assert client.post("/api/generate", json=body).json()["response"] == "t0 t1 "
                assert client.post("/v1/completions", json={"model": "a", "prompt": "hi"}).status_code == 200


def test_a_port_that_another_server_has_is_named_with_its_key() -> None:
    with short_home() as home, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        write_config(home, ("a",), server=f"ollama_port = {other.getsockname()[1]}")
        command = [sys.executable, "-m", "tests.support.scripted_daemon"]
        env = os.environ | {"MLXD_HOME": str(home)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patient(60))

    assert done.returncode != 0
    assert "[server] ollama_port: port" in done.stderr
    assert "Traceback" not in done.stderr
