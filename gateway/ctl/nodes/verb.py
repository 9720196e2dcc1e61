"""`mlxctl node`: add, list, remove and check other machines whose mlxd may run ranks of this one's groups."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.ctl.printing import Json, console, print_json
from gateway.state_dir.home_paths import default_home

if TYPE_CHECKING:
    from gateway.ctl.nodes.identity import NodeRow

app = typer.Typer(help="Add, show, remove and check machines for groups over several of them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the other machine, as groups call it.", show_default=False)]


@app.command("list")
def list_nodes(json: Json = False) -> None:
    """Show this machine's key and those of the nodes, with their fingerprints. Makes the key if there is none.

    Example: mlxctl node list
    """
    from rich.text import Text

    from gateway.ctl.model_verbs.offline import read_config
    from gateway.ctl.nodes.identity import rows
    from gateway.ctl.tables import table

    home = default_home()
    known = rows(home, read_config())
    if json:
        print_json(known)
        return
    shown = table(("NODE",), (), ("ADDRESS", "FINGERPRINT", "NOTE"))
    for row in known:
        shown.add_row(
            Text(row.name), Text(row.address or "-"), Text(row.fingerprint), Text("this machine" if row.is_own else "")
        )
    console().print(shown)


@app.command()
def add(
    name: Name,
    address: Annotated[str, typer.Argument(help="Where its agent listens, HOST:PORT.", show_default=False)] = "",
    key: Annotated[str, typer.Option(help="Its public key, as 'mlxctl node list --json' shows it there.")] = "",
    ssh: Annotated[str, typer.Option(help="Exchange the keys over ssh with USER@HOST.", metavar="USER@HOST")] = "",
    json: Json = False,
) -> None:
    """Add a machine: keep its key and write [nodes.NAME]. Without a key or ssh, say what to run there.

    Example: mlxctl node add studio2 10.0.0.2:8486 --ssh me@studio2.local
    """
    from gateway.ctl.model_verbs.offline import read_config
    from gateway.ctl.nodes import identity, node_table

    if key and ssh:
        raise typer.BadParameter("give either --key or --ssh")
    home = default_home()
    own, *_ = identity.rows(home, read_config())
    command = identity.add_command(own)
    if not key and not ssh:
        _advise(name, own, shlex.join(command), json)
        return
    if ssh:
        other = identity.ask(ssh, identity.run_here)
        key, address = other.public, address or identity.reachable(other.address)
        identity.over_ssh(ssh, command, identity.run_here)
    written = node_table.add(home, name, address, key)
    row = identity.NodeRow(name, address, key, identity.fingerprint(key))
    if json:
        print_json(row)
        return
    typer.echo(f"{name} is in {written.path}; put it into force with: mlxctl config reload")
    typer.echo(f"  its fingerprint: {row.fingerprint}")
    typer.echo(f"  ours:            {own.fingerprint}")
    typer.echo("Compare both with what 'mlxctl node list' shows there.")
    if not ssh:
        typer.echo(f"If {name} does not know this machine yet, run there:\n  {shlex.join(command)}")


@app.command()
def remove(name: Name, json: Json = False) -> None:
    """Remove a machine and its key from this one. Its ranks here end with the next reload.

    Example: mlxctl node remove studio2
    """
    from gateway.ctl.nodes import node_table

    written = node_table.remove(default_home(), name)
    if json:
        print_json(written)
    else:
        typer.echo(f"{name} is no longer in {written.path}; put it into force with: mlxctl config reload")


@app.command()
def doctor(
    name: Annotated[str, typer.Argument(help="Only this one.", show_default=False)] = "", json: Json = False
) -> None:
    """Ask each machine over its agent, and check keys, versions, memory and networks. Exit status 1 if any is bad.

    Example: mlxctl node doctor
    """
    from gateway.ctl.doctor.doctor_verb import report
    from gateway.ctl.model_verbs.offline import read_config
    from gateway.ctl.nodes.node_checks import examine_nodes
    from gateway.failed import CommandFailed

    config = read_config()
    if name and name not in config.nodes:
        raise CommandFailed(f"there is no node {name!r}; see mlxctl node list")
    report(list(examine_nodes(default_home(), config, name)), json)


def _advise(name: str, own: "NodeRow", command: str, json: bool) -> None:
    if json:
        print_json(own)
        return
    typer.echo(f"Run on {name}:\n  {command}")
    typer.echo("It prints what to run here.")
    typer.echo(f"The fingerprint of this machine's key is {own.fingerprint}")
    if not own.address:
        typer.echo(f"Set [node] listen in mlxd.toml here if {name} shall start ranks on this machine.")
