"""The agent as the one program of a container: its channel is standard input and output, the engine sets the limits."""

import os
import sys

from . import agent, commands, keeper, linux, seccomp, warden

_USER = 1000


def main():
    """Of the container's interpreter; the limits are its arguments."""
    os.dup2(0, 3, inheritable=False)
    os.dup2(1, 4, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if os.getpid() != 1:
        sys.exit("the agent must be process 1, where commands cannot kill it")
    limits = keeper.Limits(sys.argv[1:])
    keeper.limit(limits, None)  # a uid's limit on processes would count those of other containers
    linux.no_new_privileges()
    linux.undumpable()
    apart = not os.getuid()
    linux.install_filter(seccomp.program())
    home = os.open("/workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not apart:
        agent.start(3, 4, home, commands.Runner(limits, reader=3))
    # Under gVisor any process of a uid may look into any other, whatever that one has asked for, so that the agent has
    # another uid than commands. Neither the engine's limit on processes nor the one on files holds: the agent looks.
    watch = warden.Watch(limits, (b"/workspace", b"/tmp"), own_uid=False)
    agent.start(3, 4, home, commands.Runner(limits, restrict=_become_user, reader=3, watch=watch), owner=_USER)


def _become_user():
    os.setgroups([])
    os.setresgid(_USER, _USER, _USER)
    os.setresuid(_USER, _USER, _USER)
