"""What the interpreters of `prepared.py` run: a launcher, or what their arguments name, a script, code or a module."""

import atexit
import os
import runpy
import sys
import threading

import prepared

if called := os.environ.pop(prepared.ZYGOTE_FD, None):
    import launchers

    from resilient_run.launcher.cli import main

    launchers.offer_zygote(*map(int, called.split(":")))
    launchers.offer_daemon(*map(int, os.environ.pop(prepared.DAEMON_FD).split(":")))
    exec(os.environ.pop(prepared.BEFORE, ""))
    main()
    # As Python ends, but for taking its modules apart, which takes a fork longer than all that it did.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
else:
    del sys.argv[0], sys.path[0]
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1))
    elif sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
