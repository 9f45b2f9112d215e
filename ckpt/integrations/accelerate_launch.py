"""`accelerate launch` behind resilient-run, as a module: runs this rank's script as Accelerate's file configures it.

Accelerate's launcher passes that on by environment variables alone. Ranks and their number are resilient-run's.
"""

import os
import runpy
import sys

from .common import framework

_REQUIREMENT = "accelerate>=1.15"
_OURS = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def main() -> None:
    """Run `[OPTION…] SCRIPT [ARGUMENT…]`, as `accelerate launch` takes them, in this process.

    Raises:
        ImportError: Accelerate is not installed.
        SystemExit: An option is unknown.
    """
    launch = framework("accelerate.commands.launch", _REQUIREMENT)
    prepare = framework("accelerate.utils.launch", _REQUIREMENT)
    asked, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args())
    asked.num_machines, asked.main_process_port = 1, 0
    if asked.use_deepspeed and not asked.cpu:
        _, environ = prepare.prepare_deepspeed_cmd_env(asked)
    elif asked.use_fsdp or asked.use_megatron_lm or asked.multi_gpu:
        environ = prepare.prepare_multi_gpu_env(asked)
    else:
        _, environ = prepare.prepare_simple_launcher_cmd_env(asked)
    os.environ.update({name: value for name, value in environ.items() if name not in _OURS})
    sys.argv = [asked.training_script, *asked.training_script_args]
    if asked.module:
        runpy.run_module(asked.training_script, run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.abspath(asked.training_script))
        runpy.run_path(asked.training_script, run_name="__main__")
