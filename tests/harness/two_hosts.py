"""Two hosts made of namespaces of this one: networks, names and /etc/hosts of their own, joined by a link.

    outputs = run_on_two_hosts(folder, [sys.executable, "program.py"], names=("one", "two"))

The program runs on both at once with HOST_NUMBER 0 or 1; host 0 has the address ADDRESSES[0]. As Debian's installer
has it, a host's own name means 127.0.1.1 there. Everything ends with the call: the hosts have processes of their own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.harness.fork_server import REPOSITORY

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
_NO_SHAPING = 77
# Carries packets in place of a pair of devices that the kernel joins.
_SLOW_LINK = "-m tests.harness.slow_link"

# FOLDER NAME OTHER-NAME OWN-ADDRESS OTHER-ADDRESS SHAPING, on each host, which has its end of the link.
_HOST = f"""
set -e
hostname "$2"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$2" > "$1/hosts-$4"
test "$2" = "$3" || printf '%s %s\\n' "$5" "$3" >> "$1/hosts-$4"
mount --bind "$1/hosts-$4" /etc/hosts
ip link set lo up
ip addr add "$4/24" dev wire
ip link set wire up
test -z "$6" || tc qdisc add dev wire root $6 || exit {_NO_SHAPING}
"""

# FOLDER NAME OTHER-NAME SHAPING JOINING PROGRAM...
_BOTH = f"""
set -e
folder=$1 name=$2 other=$3 shaping=$4 joining=$5
shift 5
unshare --net --mount --uts sleep 1000 &
second=$!
while test "$(readlink /proc/$second/ns/mnt)" = "$(readlink /proc/self/ns/mnt)"; do sleep 0.01; done
while test "$(readlink /proc/$second/ns/uts)" = "$(readlink /proc/self/ns/uts)"; do sleep 0.01; done
on_second="nsenter --target $second --net --mount --uts"
if test -z "$joining"; then
    ip link add wire type veth peer name wire netns $second
else
    $joining $second "$folder" &
    while ! ip link show wire > "$folder/shown" 2>&1 || ! $on_second ip link show wire > "$folder/shown" 2>&1; do
        kill -0 $! || {{ wait $!; exit $?; }}
        sleep 0.05
    done
fi
$on_second sh "$folder/host.sh" "$folder" "$other" "$name" {ADDRESSES[1]} {ADDRESSES[0]} "$shaping"
sh "$folder/host.sh" "$folder" "$name" "$other" {ADDRESSES[0]} {ADDRESSES[1]} "$shaping"
HOST_NUMBER=1 $on_second "$@" > "$folder/output-1" 2>&1 &
run=$!
set +e
HOST_NUMBER=0 "$@" > "$folder/output-0" 2>&1
status=$?
wait $run || status=1
exit $status
"""


def run_on_two_hosts(
    folder: Path,
    program: Sequence[str],
    *,
    names: tuple[str, str],
    environment: Mapping[str, str],
    shaping: str = "",
    slowly: str = "",
    timeout_s: float = 150.0,
) -> tuple[str, str]:
    """What the program has written on both hosts; AssertionError with all of it where it fails on one.

    `shaping` is what tc does to the link in each direction; `slowly` has a program for a link (slow_link.py), which
    needs no such kernel. Skips the test, by name, where the system allows no namespaces, its kernel knows no such
    shaping, or there are no TUN devices.
    """
    unshare = ["unshare", *_NAMESPACES] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", *_NAMESPACES]
    trying = [*unshare, "sh", "-c", "ip link add wire type veth peer name other"]
    try:
        tried = subprocess.run(trying, capture_output=True, text=True, timeout=100, check=False)
    except OSError as error:
        pytest.skip(f"two hosts need namespaces: {error}")
    if tried.returncode != 0:
        pytest.skip(f"two hosts need namespaces and a veth link: {tried.stderr.strip()}")
    (folder / "host.sh").write_text(_HOST)
    (folder / "both.sh").write_text(_BOTH)
    limited = ["timeout", str(timeout_s), *program]
    joining = f"{sys.executable} {_SLOW_LINK} {slowly}" if slowly else ""
    running = [*unshare, "sh", str(folder / "both.sh"), str(folder), *names, shaping, joining, *limited]
    variables = {**os.environ, **environment}
    ran = subprocess.run(running, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=variables)
    if ran.returncode == _NO_SHAPING:
        pytest.skip(f"there is no link so: {shaping or slowly}: {ran.stderr.strip()}")
    outputs = [path.read_text() if path.exists() else "" for path in (folder / "output-0", folder / "output-1")]
    assert ran.returncode == 0, "\n".join([ran.stderr, *outputs])
    return outputs[0], outputs[1]
