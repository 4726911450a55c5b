"""The exit codes of `baton`, each with one meaning in all commands.

docs/reference/cli.md lists them.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command, as a shell receives it."""

    OK = 0
    """The command did what it was asked to do."""
    FAILED = 1
    """The command could not do it: standard error says why."""
    USAGE = 2
    """The command line is wrong: an unknown option, a bad value, or no choice between clusters."""
    INCOMPLETE = 3
    """`batch`: some lines have no answer."""
    UNHEALTHY = 4
    """`status`, `doctor`, `certs show`: what the command examined has a problem."""
    LEAK = 5
    """`bench soak`: the cluster leaks memory, descriptors, blocks or keys."""
    OVER_BUDGET = 6
    """`plan`: no cluster within the budget meets the SLOs."""
    UNSUPPORTED = 7
    """`doctor --nccl`: this machine lacks the two GPUs that the test needs."""
    REFUSED = 8
    """A safety check stopped the command, and nothing was changed: it was not confirmed, or it acts
    on the last worker of a role or the last router without --force."""
    INTERRUPTED = 130
    """Ctrl-C ended the command."""
