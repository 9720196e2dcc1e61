#!/usr/bin/env python3
"""Menu of mlxd for SwiftBar, every ten seconds, from `mlxctl status --json`. Any Python 3 runs it, a Mac's own 3.9 too.

Put it into SwiftBar's plugin folder. MLXCTL names the command where it is not found, MLXD_HOME another home.
"""

# <swiftbar.title>mlxd</swiftbar.title>
# <swiftbar.desc>Models of mlxd: state, memory, load and unload</swiftbar.desc>
# <swiftbar.dependencies>mlxd</swiftbar.dependencies>
# <swiftbar.hideAbout>true</swiftbar.hideAbout>

import json
import os
import shutil
import subprocess
import sys
import webbrowser

TIMEOUT_S = 8
NOT_RUNNING = 3
# SwiftBar's path is the system's alone.
PLACES = ("~/.mlxd/current/bin", "/opt/mlxd/current/bin", "~/.local/bin", "/opt/homebrew/bin", "/usr/local/bin")
LOADED = ("ready", "draining")
COMING = ("starting", "loading")
# Argument with which the menu calls this script itself.
PAGE = "page"


def main():
    command = find()
    if command is None:
        print("mlxd ?\n---\nmlxctl was not found: set MLXCTL | color=red")
        return
    if sys.argv[1:] == [PAGE]:
        open_page(command)
        return
    try:
        done = subprocess.run([command, "status", "--json"], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print("mlxd …\n---\nmlxd does not answer in time | color=red")
        return
    if done.returncode == NOT_RUNNING:
        print(f"mlxd –\n---\nmlxd does not run\n{item('Start the service', command, 'service', 'start')}")
    elif done.returncode:
        print(f"mlxd !\n---\n{plain(done.stderr.strip())} | color=red")
    else:
        print("\n".join(menu(json.loads(done.stdout), command)))


def find():
    """The command of mlxctl; None where there is none."""
    named = os.environ.get("MLXCTL")
    if named:
        return named
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(os.path.expanduser, PLACES)])
    return shutil.which("mlxctl", path=path)


def open_page(command):
    """Open the page, logged in. The link has a code in it, so it is no argument of a program of ours."""
    done = subprocess.run([command, "ui", "--print"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    webbrowser.open(done.stdout.strip())


def menu(status, command):
    """Lines: the title, a rule, then the daemon and each model with what can be done with it."""
    models = status["models"]
    ready = sum(model["state"] in LOADED for model in models)
    running = sum(model["running"] for model in models)
    waiting = any(model["state"] in COMING or model.get("is_waiting") for model in models)
    yield f"mlxd {ready}{f' · {running}' if running else ''}{' …' if waiting else ''}"
    yield "---"
    yield f"mlxd {plain(status['version'])} at {plain(status['url'])} | href={word(status['url'])}/"
    memory = status.get("memory")
    if memory:
        yield f"{gib(memory['footprint_bytes'])} of {gib(memory['budget_bytes'])} in use"
    yield item("Open the page", os.path.abspath(__file__), PAGE)
    yield "---"
    for model in models:
        yield from entry(model, command)
    yield "---"
    yield "Refresh | refresh=true"


def entry(model, command):
    """One model: a line, and below it its verbs."""
    name, state = model["name"], model["state"]
    facts = [state]
    if state == "loading" and model["total_bytes"]:
        facts = [f"loading {model['loaded_bytes'] * 100 // model['total_bytes']} %"]
    if model.get("is_waiting"):
        facts = ["waits for memory"]
    if model["running"] or model["waiting"]:
        facts.append(f"{model['running']} running, {model['waiting']} waiting")
    if model.get("footprint_bytes"):
        facts.append(gib(model["footprint_bytes"]))
    failed = model["last_failure"] and state not in LOADED
    yield f"{plain(name)}: {', '.join(facts)}" + (" | color=red" if failed else "")
    if failed:
        yield f"--{plain(model['last_failure'])}"
    if state in LOADED:
        yield "--" + item("Unload", command, "unload", name)
        yield "--" + item("Restart", command, "restart", name)
        yield "--" + (
            item("Unpin", command, "unpin", name) if model.get("is_pinned") else item("Pin", command, "pin", name)
        )
    elif state not in COMING:
        yield "--" + item("Load", command, "load", name)


def item(title, command, *words):
    """A line that runs a command."""
    parameters = " ".join(f"param{at}={word(text)}" for at, text in enumerate(words, 1))
    return f"{title} | bash={word(command)} {parameters} terminal=false refresh=true"


def word(text):
    """A value of a parameter: SwiftBar ends it at a quotation mark, and a line at its end."""
    return '"' + "".join(c for c in text if c.isprintable() and c not in '"\\|') + '"'


def plain(text):
    """Text of a line: `|` would begin parameters."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "¦")


def gib(count):
    return f"{count / 1024**3:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
