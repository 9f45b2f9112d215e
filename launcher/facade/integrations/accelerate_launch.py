"""accelerate launch, behind resilient-run: see docs/frameworks/accelerate.md."""

from resilient_run.ckpt.integrations.accelerate import launch as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
