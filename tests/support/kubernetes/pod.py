"""One pod, in namespaces of its own: network, processes, and a root file system of its containers.

The root of each container is the machine's own, seen through an overlay, so that the image's
programs are those that are installed here. What the manifest mounts is mounted there, and the
rest is read-only if the manifest wants it. Containers run as the manifest's user, without
capabilities.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.valkey_binary import valkey_binary
from tests.support.kubernetes.manifests import Container, Objects, Workload
from tests.support.machines import Machine

ROOT = Path(__file__).parents[3]
IMAGE_VARIABLES = {
    # Those of the Dockerfile; the programs are the ones that are installed here.
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "PYTHONPATH": str(ROOT),
    "HOME": "/var/lib/baton",
    "BATON_DATA_DIR": "/var/lib/baton/data",
    "BATON_CACHE_DIR": "/var/cache/baton",
    "HF_HOME": "/var/cache/baton/huggingface",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
_ENTER = """
set -e
scratch=$1 uid=$2 gid=$3 readonly=$4 folder=$6
echo "$5" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
root=/mnt/root
mount --rbind /proc $root/proc
mount --rbind /dev $root/dev
mount --rbind /sys $root/sys
# The image's programs can be read by all; here they may be in a home folder.
chmod go+x $root/root 2>/dev/null || true
mkdir -p $root/var/lib/baton $root/var/cache/baton
chown $uid:$gid $root/var/lib/baton $root/var/cache/baton
cp $scratch/hosts $root/etc/hosts
while read -r source target options; do
  mkdir -p "$root$target"
  mount --bind "$source" "$root$target"
  if [ "$options" = ro ]; then mount -o remount,bind,ro "$root$target"; fi
done < $scratch/mounts
if [ "$readonly" = yes ]; then mount -o remount,ro $root; fi
shift 6
exec chroot $root env -C "$folder" setpriv --reuid $uid --regid $gid --clear-groups \\
  --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
_STEP_S = 30.0


@dataclass(slots=True)
class Running:
    """A running container."""

    container: Container
    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    started: bool = False
    """Whether its startup probe has succeeded, or there is none."""
    ready: bool = False
    failures: int = 0
    """Of its liveness probe, one after the other."""
    refusals: int = 0
    """Of its readiness probe."""
    restarts: int = 0
    asked_at: dict[str, float] = field(default_factory=dict)


class Pod:
    """A pod from its creation until its end. Its methods block."""

    def __init__(
        self, name: str, workload: Workload, number: int, switch: Machine, folder: Path
    ) -> None:
        """``number`` is the last part of its address. ``folder`` is for its files and logs."""
        self.name = name
        self.workload = workload
        self.revision = workload.revision
        self.machine = Machine(number, switch)
        self.folder = folder / name
        self.folder.mkdir()
        programs = folder.parent / "bin"
        self._variables = IMAGE_VARIABLES | {"PATH": f"{programs}:{IMAGE_VARIABLES['PATH']}"}
        self.running: dict[str, Running] = {}
        self.ending = False
        self.is_gone = False
        self.created_at = time.monotonic()

    @property
    def address(self) -> str:
        """Its IP address."""
        return self.machine.address

    @property
    def is_ready(self) -> bool:
        """Whether Services send connections to it."""
        serving = [self.running.get(one.name) for one in self.workload.containers]
        return not self.ending and all(one is not None and one.ready for one in serving)

    def facts(self) -> Mapping[str, str]:
        """The values of the downward API."""
        return {
            "status.podIP": self.address,
            "status.hostIP": "10.77.0.250",
            "metadata.name": self.name,
            "metadata.namespace": "default",
            "spec.nodeName": "node",
        }

    def prepare(self, objects: Objects, hosts: Mapping[str, str]) -> None:
        """Write its volumes. ``hosts`` are addresses of Services by name."""
        lines = ["127.0.0.1 localhost", f"{self.address} {self.name}"]
        lines += [f"{address} {name}" for name, address in hosts.items()]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "volumes").mkdir()
        for volume in self.workload.spec.get("volumes", ()):
            self._make_volume(volume, objects)
        for claim in self.workload.claims:
            kept = self.folder.parents[1] / "claims" / self.name / claim
            kept.mkdir(parents=True, exist_ok=True)
            os.chown(kept, *self._user())
            self._volume(claim).symlink_to(kept)

    def _volume(self, name: str) -> Path:
        return self.folder / "volumes" / name

    def _make_volume(self, volume: Mapping[str, Any], objects: Objects) -> None:
        path = self._volume(str(volume["name"]))
        if "hostPath" in volume:
            path.symlink_to(volume["hostPath"]["path"])
            return
        path.mkdir()
        os.chown(path, *self._user())
        self._write(volume, objects)

    def refresh(self, objects: Objects) -> None:
        """Write the files of Secrets and ConfigMaps again, as the kubelet does some time after
        they have changed."""
        for volume in self.workload.spec.get("volumes", ()):
            self._write(volume, objects)

    def _write(self, volume: Mapping[str, Any], objects: Objects) -> None:
        files: dict[str, tuple[bytes, int]] = {}
        told = volume.get("projected") or volume
        for source in told.get("sources") or [volume]:
            for kind, key in (("Secret", "secret"), ("ConfigMap", "configMap")):
                if key in source:
                    mode = source[key].get("defaultMode") or told.get("defaultMode", 0o644)
                    found = _files(objects, kind, source[key])
                    files |= {name: (data, int(mode)) for name, data in found.items()}
        if files:
            _replace_files(self._volume(str(volume["name"])), files, self._user())

    def _user(self) -> tuple[int, int]:
        told = self.workload.spec.get("securityContext") or {}
        return int(told.get("runAsUser", 0)), int(told.get("runAsGroup", 0))

    def start(self, container: Container, objects: Objects) -> Running:
        """Start a container."""
        variables = container.environment(objects, self.facts())
        mounts = [
            f"{self._volume(one['name']).resolve()} {one['mountPath']} "
            + ("ro" if one.get("readOnly") else "rw")
            for one in container.spec.get("volumeMounts", ())
        ]
        scratch = self.folder / f"{container.name}.scratch"
        scratch.mkdir(exist_ok=True)
        (scratch / "mounts").write_text("".join(f"{line}\n" for line in mounts))
        shutil.copy(self.folder / "hosts", scratch / "hosts")
        uid, gid = self._user()
        security = container.spec.get("securityContext") or {}
        read_only = "yes" if security.get("readOnlyRootFilesystem") else "no"
        command = (
            "bash",
            "-c",
            _ENTER,
            "enter",
            str(scratch),
            str(uid),
            str(gid),
            read_only,
            self.name,
            container.spec.get("workingDir", "/"),
        )
        with (self.folder / f"{container.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.machine.command(
                    *("unshare", "--mount", "--uts", *command, *container.command(variables))
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables | variables,
                start_new_session=True,
            )
        known = self.running.get(container.name)
        restarts = 0 if known is None else known.restarts + 1
        made = self.running[container.name] = Running(
            container, process, variables, restarts=restarts
        )
        return made

    def run_init(self, container: Container, objects: Objects, deadline_s: float) -> int:
        """Run an init container to its end, and return its exit status."""
        try:
            return self.start(container, objects).process.wait(deadline_s)
        finally:
            del self.running[container.name]

    def run_in(self, one: Running, command: Sequence[str], timeout_s: float) -> int:
        """Run a command of a probe or hook in a container, and return its status."""
        children = psutil.Process(one.process.pid).children()
        if not children:
            return 1
        enter = ["nsenter", "-t", str(children[0].pid), "-n", "-p", "-m", "-u", "-r", "--"]
        done = subprocess.run(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**self._variables, **one.variables},
            timeout=timeout_s,
            check=False,
        )
        return done.returncode

    def end(self) -> float:
        """End it in order: preStop, SIGTERM, and SIGKILL after the grace period. Returns how long
        that took, in seconds."""
        self.ending = True
        began = time.monotonic()
        for one in self.running.values():
            if one.container.pre_stop is not None:
                self.run_in(one, one.container.pre_stop, self.workload.grace_s)
        for one in self.running.values():
            self.machine.terminate(one.process)
        for one in self.running.values():
            left = max(0.1, self.workload.grace_s - (time.monotonic() - began))
            try:
                one.process.wait(left)
            except subprocess.TimeoutExpired:
                break
        took_s = time.monotonic() - began
        self.kill()
        return took_s

    def kill(self) -> None:
        """End it at once, as when its node is lost."""
        self.ending = self.is_gone = True
        self.machine.power_off()
        for one in self.running.values():
            one.process.wait(_STEP_S)

    def text(self) -> str:
        """What its containers have printed."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{self.name}/{log.stem}:\n{log.read_text()}" for log in logs)


def _files(objects: Objects, kind: str, source: Mapping[str, Any]) -> dict[str, bytes]:
    name = source.get("secretName") or source["name"]
    data = objects.data_of(kind, str(name))
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    return {str(item["path"]): data[item["key"]] for item in items}


def _replace_files(
    volume: Path, files: Mapping[str, tuple[bytes, int]], user: tuple[int, int]
) -> None:
    """Replace all files at once, as the kubelet does: names are links through the link ``..data``
    to a folder, and a new one takes its place."""
    data = volume / f"..{time.monotonic_ns()}"
    data.mkdir()
    for name, (content, mode) in files.items():
        path = data / name
        path.write_bytes(content)
        path.chmod(mode)
        os.chown(path, *user)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    link, old = volume / "..data_tmp", volume / "..data"
    before = old.readlink() if old.is_symlink() else None
    link.symlink_to(data.name)
    link.rename(old)
    if before is not None:
        shutil.rmtree(volume / before)


def signal_of(status: int) -> str:
    """Return how a process has ended, in words."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def make_programs(folder: Path) -> None:
    """Write the programs of other images that this machine has by other names."""
    folder.mkdir()
    # As quick as the program that it stands for: a probe has a deadline.
    ask = (
        "exec 3<>/dev/tcp/127.0.0.1/6379; "
        "printf 'AUTH %s\\r\\nPING\\r\\n' \"$REDISCLI_AUTH\" >&3; "
        'read -r -t 2 answer <&3; read -r -t 2 answer <&3; echo "$answer"'
    )
    programs = {
        "valkey-server": f'exec {shlex.quote(valkey_binary())} "$@"',
        "valkey-cli": ask,
    }
    for name, line in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
