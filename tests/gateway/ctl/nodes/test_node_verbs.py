"""`mlxctl node`: keys exchanged by hand or over ssh, tables written and removed, and nodes asked over their agents."""

import asyncio
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gateway.config.remote_settings import FabricConfig, RemoteNodeConfig
from gateway.ctl.model_verbs.offline import read_config
from gateway.ctl.nodes import identity, node_table
from gateway.ctl.nodes.identity import NodeRow
from gateway.ctl.nodes.node_checks import examine_nodes, judge
from gateway.failed import CommandFailed
from gateway.nodes.node_keys import own_pair
from gateway.nodes.this_host import versions
from protocol.curve import fingerprint, make_pair
from protocol.node_agent import Described
from tests.gateway.nodes.hosts import Host, host
from tests.support.ctl import ctl
from tests.support.pool import short_home

CONFIG = """# the office
[server]
node = "studio1"

[node]
listen = "10.0.0.1:8486"  # the agent

[models.m]
path = "demo"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXD_HOME", str(tmp_path))
    (tmp_path / "mlxd.toml").write_text(CONFIG)
    return tmp_path


def test_a_node_that_is_added_is_in_the_file_which_keeps_all_else(home: Path) -> None:
    other = make_pair().public
    node_table.add(home, "studio2", "10.0.0.2:8486", other)

    text = (home / "mlxd.toml").read_text()
    assert text.startswith(CONFIG)
    node = read_config().nodes["studio2"]
    assert (node.address, Path(node.key).read_text().strip()) == ("10.0.0.2:8486", other)
    # Once more, with another address: the same table.
    node_table.add(home, "studio2", "10.0.0.9:8486", other)
    assert (home / "mlxd.toml").read_text().count("[nodes.studio2]") == 1
    assert read_config().nodes["studio2"].address == "10.0.0.9:8486"


def test_a_node_that_is_removed_leaves_the_file_as_it_was_and_no_key(home: Path) -> None:
    node_table.add(home, "studio2", "", make_pair().public)
    node_table.add(home, "studio3", "", make_pair().public)
    node_table.remove(home, "studio2")
    assert set(read_config().nodes) == {"studio3"}
    node_table.remove(home, "studio3")
    assert (home / "mlxd.toml").read_text().strip() == CONFIG.strip()
    assert not list((home / "keys").glob("*.public"))
    with pytest.raises(CommandFailed, match="no node 'studio2'"):
        node_table.remove(home, "studio2")


@pytest.mark.parametrize(
    ("name", "address", "key", "told"),
    [
        ("local", "", "", "is this machine"),
        ("a/b", "", "", "'/'"),
        ("-x", "", "", "begin with '-'"),
        ("studio2", "studio2", "", "HOST:PORT"),
        ("studio2", "studio2:1", "ssh-rsa AAAA", "no public key"),
    ],
)
def test_what_cannot_be_a_node_changes_nothing(home: Path, name: str, address: str, key: str, told: str) -> None:
    with pytest.raises(CommandFailed, match=told):
        node_table.add(home, name, address, key or make_pair().public)
    assert (home / "mlxd.toml").read_text() == CONFIG


def test_keys_are_exchanged_by_hand_with_what_each_side_prints(home: Path) -> None:
    said = ctl(home, "node", "add", "studio2")
    own = own_pair(home).public
    assert said.returncode == 0
    assert f"mlxctl node add studio1 10.0.0.1:8486 --key {own}" in said.stdout
    assert fingerprint(own) in said.stdout

    other = make_pair().public
    said = ctl(home, "node", "add", "studio2", "10.0.0.2:8486", "--key", other)
    assert said.returncode == 0
    assert fingerprint(other) in said.stdout
    assert fingerprint(own) in said.stdout
    listed = msgspec.json.decode(ctl(home, "node", "list", "--json").stdout, type=list[NodeRow])
    assert [(row.name, row.public, row.is_own) for row in listed] == [("studio1", own, True), ("studio2", other, False)]
    assert fingerprint(other) in ctl(home, "node", "list").stdout

    assert ctl(home, "node", "remove", "studio2").returncode == 0
    assert read_config().nodes == {}


def test_over_ssh_both_sides_learn_of_each_other(home: Path) -> None:
    own, *_ = identity.rows(home, read_config())
    other = NodeRow("studio2", "10.0.0.2:8486", make_pair().public, "", is_own=True)
    ran: list[list[str]] = []

    def run(command: Sequence[str]) -> str:
        ran.append(list(command))
        return msgspec.json.encode([other]).decode()

    assert identity.ask("me@studio2.local", run) == other
    identity.over_ssh("me@studio2.local", identity.add_command(own), run)

    assert [words[:4] for words in ran] == [["ssh", "-o", "ConnectTimeout=10", "--"]] * 2
    assert shlex.split(ran[1][-1]) == ["mlxctl", "node", "add", "studio1", "10.0.0.1:8486", "--key", own.public]
    assert own_pair(home).secret not in str(ran)


@pytest.mark.parametrize("target", ["-oProxyCommand=x", "a b", "me@-x", "me@host;rm", ""])
def test_no_target_of_ssh_is_an_option_or_a_command(target: str) -> None:
    with pytest.raises(CommandFailed, match="is no USER@HOST"):
        identity.ask(target, lambda _: "[]")


@pytest.mark.parametrize("said", ["", "[]", "{}", '[{"name": "x", "address": "", "public": "", "fingerprint": ""}]'])
def test_another_answer_than_a_key_is_told(said: str) -> None:
    with pytest.raises(CommandFailed):
        identity.ask("studio2", lambda _: said)


def test_an_address_that_stands_for_all_is_none_to_connect_to() -> None:
    assert [identity.reachable(each) for each in ("0.0.0.0:1", "*:1", "10.0.0.1:0", "")] == [""] * 4
    assert identity.reachable("10.0.0.1:8486") == "10.0.0.1:8486"


@contextmanager
def agent() -> Iterator[Host]:
    """An agent on a loop and a thread of its own, as in another daemon."""
    made: list[Host] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        with short_home() as folder:
            async with host(folder, "studio2") as served:
                made.append(served)
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield made[0]
    finally:
        over.set()
        thread.join()


def test_doctor_asks_a_node_and_tells_a_key_that_it_does_not_admit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ctl.nodes.node_checks.ANSWER_S", 0.5)
    with agent() as far:
        node_table.add(home, "studio2", far.agent.endpoint, far.keys.public)
        (stranger,) = examine_nodes(home, read_config())
        assert stranger.level == "bad"
        assert "key" in stranger.text

        monkeypatch.setattr("gateway.ctl.nodes.node_checks.ANSWER_S", 60.0)
        far.known[own_pair(home).public] = "studio1"
        answers, same = examine_nodes(home, read_config())
        assert (answers.level, same.level) == ("ok", "ok")
        assert "answers as studio2" in answers.text


def test_doctor_tells_other_versions_and_addresses_that_are_open_to_others() -> None:
    node = RemoteNodeConfig(name="studio2", address="a:1", key="k", fabric=FabricConfig(("192.168.0.2", "10.0.0.2")))
    other = msgspec.structs.replace(versions(), mlx="0.1.0")
    said = Described(1, "studio2", 1, other, "Darwin arm64", 1 << 30, 1 << 29, "", ("192.168.0.2",))
    levels = {finding.text: finding.level for finding in judge(node, said, versions())}
    assert [level for text, level in levels.items() if "mlx 0.1.0" in text] == ["bad"]
    assert levels["lets ranks listen at 192.168.0.2"] == "ok"
    assert [level for text, level in levels.items() if "at 10.0.0.2" in text] == ["bad"]
