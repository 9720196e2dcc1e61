"""CURVE between machines: who may connect, what a wrong key gets, and that recorded bytes are of no use."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from protocol import sockets
from protocol.sockets import AllowedKeys, KeyPair, encoded, make_pair
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(own: KeyPair, *admitted: KeyPair) -> AsyncGenerator[tuple[Any, list[str]]]:
    """A ROUTER on a port of its own, and the keys that it has refused."""
    context, refused = zmq.asyncio.Context(), list[str]()
    keys = {pair.public for pair in admitted}
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=AllowedKeys(lambda: keys, refused.append))
    router = sockets.bind_secure_router(context, "tcp://127.0.0.1:*", own)
    try:
        yield router, refused
    finally:
        authenticator.stop()
        router.close(0)
        context.destroy(0)


@asynccontextmanager
async def connected(router: Any, server_public: str, own: KeyPair) -> AsyncGenerator[Any]:
    context = zmq.asyncio.Context()
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = sockets.connect_secure_dealer(context, address, b"client", server_public, own)
    try:
        yield dealer
    finally:
        dealer.close(0)
        context.destroy(0)


def test_a_pair_is_known_by_its_secret_and_shown_without_it() -> None:
    pair = make_pair()
    assert zmq.curve_public(encoded(pair.secret)) == encoded(pair.public)
    assert pair.secret not in repr(pair)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        encoded("no key")


async def test_frames_of_an_admitted_key_go_both_ways() -> None:
    server, client = make_pair(), make_pair()
    async with served(server, client) as (router, refused), connected(router, server.public, client) as dealer:
        async with asyncio.timeout(patient(10)):
            await dealer.send(b"hello")
            identity, payload = await router.recv_multipart()
            assert (identity, payload) == (b"client", b"hello")
            await router.send_multipart((b"client", b"welcome"))
            assert await dealer.recv() == b"welcome"
        assert refused == []


async def test_a_key_that_is_not_admitted_is_refused_and_named() -> None:
    server, stranger = make_pair(), make_pair()
    async with served(server) as (router, refused), connected(router, server.public, stranger) as dealer:
        async with asyncio.timeout(patient(10)):
            while stranger.public not in refused:  # noqa: ASYNC110 - libzmq tells nobody
                await asyncio.sleep(0.01)
        with pytest.raises(zmq.Again):
            await dealer.send(b"hello", zmq.NOBLOCK)
        with pytest.raises(zmq.Again):
            await router.recv(zmq.NOBLOCK)


async def test_a_client_speaks_to_no_server_of_another_key() -> None:
    server, other, client = make_pair(), make_pair(), make_pair()
    async with served(server, client) as (router, refused), connected(router, other.public, client) as dealer:
        monitor = dealer.get_monitor_socket()
        async with asyncio.timeout(patient(10)):
            while True:
                event = int.from_bytes((await monitor.recv_multipart())[0][:2], "little")
                if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                    break
        dealer.disable_monitor()
        assert refused == []
        with pytest.raises(zmq.Again):
            await dealer.send(b"a prompt", zmq.NOBLOCK)


async def test_a_client_without_curve_reaches_nothing() -> None:
    server = make_pair()
    async with served(server) as (router, _):
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        monitor = dealer.get_monitor_socket()
        dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        # The handshake may have failed already, and then there is no connection to send to.
        with suppress(zmq.Again):
            await dealer.send(b"plain", zmq.NOBLOCK)
        async with asyncio.timeout(patient(10)):
            while int.from_bytes((await monitor.recv_multipart())[0][:2], "little") not in (
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_DISCONNECTED,
            ):
                pass
        dealer.disable_monitor()
        with pytest.raises(zmq.Again):
            await router.recv(zmq.NOBLOCK)
        dealer.close(0)
        context.destroy(0)


async def test_recorded_bytes_of_a_connection_say_nothing_to_the_server_again() -> None:
    server, client = make_pair(), make_pair()
    async with served(server, client) as (router, _):
        port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        said = await _recorded(router, port, server.public, client)
        assert b"an order" not in said

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(patient(10)):
            while await reader.read(4096):  # it closes: the handshake is about another secret of its own
                pass
        writer.close()
        with pytest.raises(zmq.Again):
            await router.recv(zmq.NOBLOCK)


async def _recorded(router: Any, port: int, server_public: str, client: KeyPair) -> bytes:
    """Bytes that a client says while it sends one order, as an eavesdropper between the two has them."""
    said = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            while data := await far_reader.read(4096):
                writer.write(data)

        task = asyncio.create_task(back())
        while data := await reader.read(4096):
            said.extend(data)
            far_writer.write(data)
        far_writer.close()
        task.cancel()
        writer.close()

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    context = zmq.asyncio.Context()
    dealer = sockets.connect_secure_dealer(context, address, b"client", server_public, client)
    async with asyncio.timeout(patient(10)):
        await dealer.send(b"an order")
        assert (await router.recv_multipart())[1] == b"an order"
    dealer.close(0)
    context.destroy(0)
    proxy.close()
    await proxy.wait_closed()
    return bytes(said)
