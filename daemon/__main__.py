"""`python -m resilient_run.daemon` is `resilientd`."""

from .cli import resilientd

if __name__ == "__main__":
    resilientd(prog_name="resilientd")
