"""The bench in a container as docker and Kubernetes make one: root, or a user, without CAP_SYS_ADMIN and namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import anyone
from pods import pod


def run_in_pod(area: Path, options: Namespace) -> list[dict[str, Any]]:
    """Run the cases there as the uid of the option `pod`; what it prints but for errors is dropped."""
    work, sources = area / "pod", []
    (work / "home").mkdir(parents=True)
    for source in options.repo:  # git wants it to be the user's
        sources.append(work / source.name)
        subprocess.run(["cp", "-rH", source, sources[-1]], check=True)
    subprocess.run(["chown", "-R", f"{options.pod}:{options.pod}", work], check=True)
    result = work / "bench.json"
    words = ["--area", str(work), "--json", str(result), "--rounds", str(options.rounds)]
    words += ["--cases", *options.cases, *(f"--repo={source}" for source in sources)]
    with pod(work, drops=options.cap_drop) as made:
        user = ("--user", str(options.pod), "--env", f"HOME={work}/home", "--workdir", str(work))
        bench = [*anyone.python(), str(Path(__file__).with_name("bench.py")), *words]
        command = [made.engine.program, "exec", *user, made.name, *bench]
        subprocess.run(command, env=made.engine.environment, stdout=subprocess.DEVNULL, check=True)
    who = "a user" if options.pod else "root"
    without = ", ".join(("sys_admin", *options.cap_drop)).upper()
    ran: list[dict[str, Any]] = json.loads(result.read_text())
    for each in ran:
        each["repository"]["name"] += f", {who} in a container without {without}"
    return ran
