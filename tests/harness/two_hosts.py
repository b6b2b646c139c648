"""Hosts made of namespaces of this one: networks, names and /etc/hosts of their own, joined by a link or a switch.

    outputs = run_on_hosts(folder, [sys.executable, "program.py"], names=("one", "two"))

The program runs on all at once with HOST_NUMBER 0, 1, ...; host 0 has the address ADDRESSES[0]. Two are joined by a
link, more by a switch, a bridge in a namespace of its own; each has its end as `wire`. As Debian's installer has it, a
host's own name means 127.0.1.1 there. Everything ends with the call: the hosts have processes of their own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fork_server import REPOSITORY

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))
_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
_NO_SHAPING = 77
# Carries packets in place of a pair of devices that the kernel joins.
_SLOW_LINK = "-m tests.harness.slow_link"

# FOLDER NAME OWN-ADDRESS SHAPING OTHER-NAMES-AND-ADDRESSES, on each host, which has its end of the link.
_HOST = f"""
set -e
folder=$1 name=$2 own=$3 shaping=$4
shift 4
hostname "$name"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$name" > "$folder/hosts-$own"
for other in "$@"; do
    test "$name" = "${{other%=*}}" || printf '%s %s\\n' "${{other#*=}}" "${{other%=*}}" >> "$folder/hosts-$own"
done
mount --bind "$folder/hosts-$own" /etc/hosts
ip link set lo up
ip addr add "$own/24" dev wire
ip link set wire up
test -z "$shaping" || tc qdisc add dev wire root $shaping || exit {_NO_SHAPING}
"""

# FOLDER SHAPING JOINING NUM-HOSTS NAME=ADDRESS... PROGRAM...; this shell is on the first host.
_ALL = """
set -e
folder=$1 shaping=$2 joining=$3 count=$4
shift 4
namespace() {  # starts a namespace with a process in it, and says which
    unshare --net --mount --uts sleep 1000 &
    made=$!
    for kind in mnt uts net; do
        while test "$(readlink /proc/$made/ns/$kind)" = "$(readlink /proc/self/ns/$kind)"; do sleep 0.01; done
    done
}
hosts="" number=0
while test $number -lt $count; do
    hosts="$hosts $1"
    shift
    if test $number = 0; then pids=$$; else namespace; pids="$pids $made"; fi
    number=$((number + 1))
done
on() {  # PID COMMAND..., on the host of that process
    where=$1
    shift
    if test $where = $$; then "$@"; else nsenter --target $where --wd --net --mount --uts "$@"; fi
}
second=${pids#* } second=${second%% *}
if test -n "$joining"; then
    $joining $second "$folder" &
    while ! ip link show wire > "$folder/shown" 2>&1 || ! on $second ip link show wire > "$folder/shown" 2>&1; do
        kill -0 $! || { wait $!; exit $?; }
        sleep 0.05
    done
elif test $count = 2; then
    ip link add wire type veth peer name wire netns $second
else
    namespace
    switch=$made
    on $switch ip link add switch type bridge
    on $switch ip link set switch up
    for pid in $pids; do
        on $switch ip link add port$pid type veth peer name wire netns $pid
        on $switch ip link set port$pid master switch up
    done
fi
left="$hosts"
for pid in $pids; do
    host=${left# } host=${host%% *} left=${left# $host}
    on $pid sh "$folder/host.sh" "$folder" "${host%=*}" "${host#*=}" "$shaping" $hosts
done
number=0 running=""
for pid in $pids; do
    HOST_NUMBER=$number on $pid "$@" > "$folder/output-$number" 2>&1 &
    running="$running $!"
    number=$((number + 1))
done
set +e
status=0
for run in $running; do
    wait $run || status=1
done
exit $status
"""


def run_on_two_hosts(
    folder: Path, program: Sequence[str], *, names: tuple[str, str], environment: Mapping[str, str], **how: Any
) -> tuple[str, str]:
    """The program's output on both of two hosts, as `run_on_hosts` runs it."""
    one, other = run_on_hosts(folder, program, names=names, environment=environment, **how)
    return one, other


def run_on_hosts(
    folder: Path,
    program: Sequence[str],
    *,
    names: Sequence[str],
    environment: Mapping[str, str],
    shaping: str = "",
    slowly: str = "",
    timeout_s: float = 150.0,
) -> list[str]:
    """The program's output on each host; AssertionError with all of it where it fails on one.

    `shaping` is what tc does to each end of the link; `slowly` has a program for a link of two (slow_link.py), which
    needs no such kernel. Skips the test, by name, where the system allows no namespaces, its kernel knows no such
    shaping, or there are no TUN devices.
    """
    unshare = ["unshare", *_NAMESPACES] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", *_NAMESPACES]
    making = "ip link add wire type veth peer name other"
    if len(names) > 2:
        making = f"{making} && ip link add switch type bridge"
    try:
        tried = subprocess.run([*unshare, "sh", "-c", making], capture_output=True, text=True, timeout=100, check=False)
    except OSError as error:
        pytest.skip(f"hosts need namespaces: {error}")
    if tried.returncode != 0:
        pytest.skip(f"hosts need namespaces, and a veth link or a bridge: {tried.stderr.strip()}")
    (folder / "host.sh").write_text(_HOST)
    (folder / "all.sh").write_text(_ALL)
    hosts = [f"{name}={address}" for name, address in zip(names, ADDRESSES, strict=False)]
    joining = f"{sys.executable} {_SLOW_LINK} {slowly}" if slowly else ""
    script = ["sh", str(folder / "all.sh"), str(folder), shaping, joining, str(len(hosts)), *hosts]
    variables = {**os.environ, **environment}
    ran = subprocess.run(
        [*unshare, *script, "timeout", str(timeout_s), *program],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=variables,
    )
    if ran.returncode == _NO_SHAPING:
        pytest.skip(f"there is no link so: {shaping or slowly}: {ran.stderr.strip()}")
    paths = [folder / f"output-{number}" for number in range(len(hosts))]
    outputs = [path.read_text() if path.exists() else "" for path in paths]
    assert ran.returncode == 0, "\n".join([ran.stderr, *outputs])
    return outputs
