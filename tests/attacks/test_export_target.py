"""What another user has put where `resilientctl export` is to write gets nothing of the state, and is not followed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from second_user import MALLORY, as_mallory, make_public
from test_export import make_slot, state

from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import Format, export
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.tier import Tier

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def directory(to: Path, _: Path) -> None:
    """An empty one, in which its owner may replace what is written: a DCP checkpoint has pickles."""
    to.mkdir()


def link(to: Path, home: Path) -> None:
    to.symlink_to(home)


def dangling(to: Path, home: Path) -> None:
    to.symlink_to(home / "new")


def exported(tier: Path, to: Path, format_: Format) -> str:
    """Return what the command said."""
    options = ["--run-id", "run", "--from", "persist", "--target", str(tier), "--to", str(to), "--format", format_]
    return CliRunner().invoke(resilientctl, ["export", *options]).output


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A persistent tier with a step."""
    slot = make_slot(tmp_path / "slot", state(0), rank=0, world_size=1)
    header, tier = slot.header(), Tier(str(tmp_path / "tier"), "run")
    writer = tier.write((1, 3), 0)
    writer.write(slot.buffer[: header.used_bytes])
    file = RankFile(
        capacity_bytes=header.used_bytes, payload_offset=header.payload_offset, stored_bytes=writer.finish()
    )
    slot.close()
    tier.publish(Persisted(run_id="run", pair=(1, 3), world_size=1, ranks={0: file}))
    return tmp_path / "tier"


@pytest.mark.parametrize("format_", ["dcp", "torch"])
@pytest.mark.parametrize("plant", [directory, link, dangling])
def test_nothing_is_written_to_what_was_planted(
    plant: Callable[[Path, Path], None], format_: Format, tier: Path, tmp_path: Path
) -> None:
    to, home = make_public(tmp_path / "public") / "out", tmp_path / "home"
    home.mkdir(mode=0o700)
    assert as_mallory(lambda: plant(to, home)) == 0
    assert f"{to} exists already, and is not an empty directory of yours" in exported(tier, to, format_)
    # Nor does whoever comes after that look.
    slot = make_slot(tmp_path / "own", state(0), rank=0, world_size=1)
    with pytest.raises(FileExistsError):
        export(of_slots([slot]), to, format_)
    slot.close()
    assert list(home.iterdir()) == []
    assert to.lstat().st_uid == MALLORY
    assert plant is not directory or list(to.iterdir()) == []


def test_an_empty_directory_of_ones_own_is_taken(tier: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    to.mkdir()
    assert "wrote step 3" in exported(tier, to, "dcp")
    assert (to / ".metadata").is_file()
