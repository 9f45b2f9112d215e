"""The tests with other versions of Python and torch than CI has. `nox -l` lists the sessions.

torch's wheels for these bring CUDA, several GB each. What ran with what is in docs/internals/versions.md.
"""

from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """Install as the README does, but for the versions, and run the tests; arguments after ``--`` are pytest's."""
    pins = Path(session.create_tmp(), "constraints.txt").resolve()
    # torch 2.12 needs an older setuptools than the one that is pinned.
    lines = Path("constraints.txt").read_text().splitlines()
    pins.write_text(
        "\n".join([*(line for line in lines if not line.startswith(("torch==", "setuptools=="))), f"torch=={torch}"])
    )
    session.install("-c", str(pins), ".[test]")
    session.run("python", "-P", "-m", "pytest", *session.posargs)


@nox.session(python="3.11")
def engines(session: nox.Session) -> None:
    """Kill training with engines and frameworks, and compare; CI has few. Results: docs/internals/engines.md."""
    session.install("-c", "constraints.txt", "torch==2.13.0")
    session.install("-c", "constraints.txt", ".[engines,test,zoo]", env={"DS_BUILD_OPS": "0"})
    names = ("megatron", "reshape_megatron", "deepspeed", "fsdp1", "elastic_flat", "frameworks", "framework_loops")
    files = [f"tests/test_{name}.py" for name in names]
    every = ["-m", "nightly or not nightly"]
    session.run("python", "-P", "-m", "pytest", "-n", "0", *every, *(session.posargs or files))
