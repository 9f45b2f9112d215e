"""What another user makes in a persistent tier's target where others may write, before the run or beside it."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from second_user import MALLORY, as_mallory, make_public

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.tier import files
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.tier import Tier, TierError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

OWN = "what only its owner may change\n"
REFUSED = rf"belongs to uid {MALLORY}, in a directory where others may write: remove it, or choose another target"


@pytest.fixture(params=[0o1777, 0o770, 0o1775], ids=["everybody", "group", "sticky-group"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory as the scratch space of a cluster, or of a group that the attacker is in."""
    made = make_public(tmp_path / "scratch")
    os.chown(made, -1, MALLORY)
    made.chmod(request.param)
    return made


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of ours with files of the names that a tier has."""
    made = tmp_path / "project"
    made.mkdir()
    for name in ("manifest.json", "rank0.zst", "profile"):
        (made / name).write_text(OWN)
    return made


def is_whole(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == dict.fromkeys(
        ("manifest.json", "rank0.zst", "profile"), OWN
    )


def store(tier: Tier, pair: Pair) -> None:
    writer = tier.write(pair, 0)
    writer.write(memoryview(bytes(9000)))
    file = RankFile(capacity_bytes=9000, payload_offset=8192, stored_bytes=writer.finish())
    tier.publish(Persisted(run_id="run", pair=pair, world_size=1, ranks={0: file}))


def link_of_run(run: Path, victim: Path) -> None:
    run.symlink_to(victim)


def link_of_pair(run: Path, victim: Path) -> None:
    run.mkdir()
    (run / "1-8").symlink_to(victim)


def link_of_file(run: Path, victim: Path) -> None:
    (run / "1-8").mkdir(parents=True)
    for name in ("rank0.zst.part", "manifest.json.part"):
        (run / "1-8" / name).symlink_to(victim / "profile")


def pipe(run: Path, _: Path) -> None:
    (run / "1-8").mkdir(parents=True)
    for name in ("manifest.json", "rank0.zst.part"):
        os.mkfifo(run / "1-8" / name)


def forged(run: Path, _: Path) -> None:
    """A step of the attacker's, as whole as any."""
    store(Tier(str(run.parent), run.name), (1, 8))


PLANTS = [link_of_run, link_of_pair, link_of_file, pipe, forged]


def plant_as_mallory(plant: Callable[[Path, Path], None], run: Path, victim: Path) -> None:
    def act() -> None:
        os.umask(0)
        plant(run, victim)

    assert as_mallory(act) == 0


@pytest.mark.parametrize("plant", PLANTS)
def test_what_was_planted_is_neither_written_nor_read_nor_deleted(
    plant: Callable[[Path, Path], None], target: Path, victim: Path
) -> None:
    plant_as_mallory(plant, target / "run", victim)
    planted = sorted(target.rglob("*"))
    tier = Tier(str(target), "run")
    acts: list[Callable[[], object]] = [
        tier.published,
        lambda: tier.manifest((1, 8)),
        lambda: tier.write((1, 8), 0),
        lambda: store(tier, (1, 9)),
        lambda: tier.refuse((1, 8)),
        lambda: tier.prune(1),
        lambda: tier.read_ranges((1, 8), 0, [(0, 8)]),
    ]
    for act in acts:
        with pytest.raises(TierError, match=REFUSED):
            act()
    assert is_whole(victim)
    assert sorted(target.rglob("*")) == planted
    # Another run is in nobody's way.
    store(Tier(str(target), "other"), (1, 8))
    assert Tier(str(target), "other").published() == [(1, 8)]


@pytest.mark.parametrize("plant", PLANTS[1:])
def test_nor_in_a_directory_of_the_run_that_stands_open(
    plant: Callable[[Path, Path], None], target: Path, victim: Path
) -> None:
    """It was made by an older version with a umask of 0."""
    tier = Tier(str(target), "run")
    store(tier, (1, 9))
    (target / "run").chmod(0o777)
    plant_as_mallory(lambda run, victim: plant(run / "x", victim), target / "run", victim)
    (target / "run" / "x" / "1-8").rename(target / "run" / "1-8")
    for act in (lambda: tier.manifest((1, 8)), lambda: tier.write((1, 8), 0), lambda: tier.prune(1)):
        with pytest.raises((TierError, SlotError), match=REFUSED):
            act()
    assert is_whole(victim)


def test_a_part_is_written_to_nothing_that_has_its_name(target: Path, victim: Path) -> None:
    """Also in a directory of ours: whoever may write there may put a link into it."""
    tier = Tier(str(target), "run")
    store(tier, (1, 8))
    for name in ("rank0.zst.part", "manifest.json.part"):
        (target / "run" / "1-8" / name).symlink_to(victim / "profile")
    store(tier, (1, 8))
    assert is_whole(victim)
    assert {path.name for path in (target / "run" / "1-8").iterdir()} == {"rank0.zst", "manifest.json"}


def test_what_a_run_persists_is_for_its_user_alone(target: Path) -> None:
    tier = Tier(str(target), "run")
    umask = os.umask(0)
    try:
        store(tier, (1, 8))
    finally:
        os.umask(umask)
    assert as_mallory(lambda: os.listdir(target / "run")) == errno.EACCES
    assert as_mallory((target / "run" / "1-8" / "rank0.zst").read_bytes) == errno.EACCES
    # What the user opens to others stays open.
    (target / "run").chmod(0o755)
    store(tier, (1, 9))
    assert stat.S_IMODE((target / "run").stat().st_mode) == 0o755


def test_a_user_may_read_what_another_has_persisted_there(target: Path) -> None:
    """`PersistedReader` and `resilientctl export --target` are told whose run it is."""
    plant_as_mallory(forged, target / "run", target)
    assert Tier(str(target), "run", of_others=True).published() == [(1, 8)]


def test_a_server_that_has_other_names_for_users_is_no_stranger(
    target: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS knows root as nobody, and so whatever root makes there."""
    plant_as_mallory(forged, target / "run", victim)

    def squashed(**where: str) -> object:
        made = make(**where)
        os.fchown(made.fileno(), MALLORY, MALLORY)
        return made

    make = files.tempfile.TemporaryFile
    monkeypatch.setattr(files.tempfile, "TemporaryFile", squashed)
    assert Tier(str(target), "run").published() == [(1, 8)]
