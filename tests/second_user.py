"""Another user of this host, for tests that root runs."""

import os
from collections.abc import Callable

MALLORY = 65534


def as_mallory(act: Callable[[], object]) -> int:
    """Return the errno that `act` fails with as another user without any group, 0 when it succeeds."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups([])
            os.setresgid(MALLORY, MALLORY, MALLORY)
            os.setresuid(MALLORY, MALLORY, MALLORY)
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
