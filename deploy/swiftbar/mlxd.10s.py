#!/usr/bin/env python3
"""SwiftBar menu of mlxd, updated every ten seconds from `mlxctl status --json`. Runs on any Python 3, even macOS's 3.9.

Put this file into SwiftBar's plugin folder. MLXCTL sets the path of mlxctl if it is not found, MLXD_HOME another home.
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
# SwiftBar's PATH contains only system folders.
PLACES = ("~/.mlxd/current/bin", "/opt/mlxd/current/bin", "~/.local/bin", "/opt/homebrew/bin", "/usr/local/bin")
LOADED = ("ready", "draining")
COMING = ("starting", "loading")
# Argument with which a menu item calls this script.
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
    """Return the path of mlxctl; None if it is not found."""
    named = os.environ.get("MLXCTL")
    if named:
        return named
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(os.path.expanduser, PLACES)])
    return shutil.which("mlxctl", path=path)


def open_page(command):
    """Open the page, logged in. The link contains a login code, so it must not be an argument of a process."""
    done = subprocess.run([command, "ui", "--print"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    webbrowser.open(done.stdout.strip())


def menu(status, command):
    """Yield the menu's lines: title, separator, the daemon, and each model with its actions."""
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
    """Yield a model's line, and the lines of its actions below it."""
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
    """Return a line that runs a command."""
    parameters = " ".join(f"param{at}={word(text)}" for at, text in enumerate(words, 1))
    return f"{title} | bash={word(command)} {parameters} terminal=false refresh=true"


def word(text):
    """Quote a parameter's value. Quotation marks, `|`, backslashes and line ends are removed, because SwiftBar would
    end the value there."""
    return '"' + "".join(c for c in text if c.isprintable() and c not in '"\\|') + '"'


def plain(text):
    """Return text for a line: `|` is replaced, because it would begin the line's parameters."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "¦")


def gib(count):
    return f"{count / 1024**3:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
