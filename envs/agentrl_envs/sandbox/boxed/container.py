"""The agent as the one program of a container: its channel is standard input and output, the engine sets the limits."""

import os
import sys

from . import agent, commands, keeper, linux, seccomp


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
    linux.install_filter(seccomp.program())
    home = os.open("/workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    agent.start(3, 4, home, commands.Runner(limits, reader=3))
