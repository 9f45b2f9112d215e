"""Give every reader of what others wrote changed documents: each is read, or refused with a documented error.

    python tests/fuzz.py --inputs 1000000 --seed 1 --json fuzz.json

Readers are those of the wire, the unix socket's and the peers' messages, every etcd value by itself and all the keys of
a run together, on which the root then decides, slots with their headers, tables and manifests, `job.json`, and the
manifests of the persistent tier. An input is an honest document with a few changes, to its bytes or to its structure.
Anything but the reader's documented errors is a failure, and so is a slot that restores another state than one that
was captured, or memory that grows with what an input only claims.
"""

import argparse
import base64
import contextlib
import copy
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hosts import MANIFEST, publish

from resilient_run.ckpt.errors import DaemonError, SlotError, WireError
from resilient_run.ckpt.format import digests, manifest, wire
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, plan_layout
from resilient_run.daemon.base.fields import Fields
from resilient_run.daemon.base.policy import Policy, RootPolicy
from resilient_run.daemon.base.record import JobRecord
from resilient_run.daemon.base.spec import read_etcd
from resilient_run.daemon.comparison.digests import EqualLeaves
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.etcd.config import EtcdConfig
from resilient_run.daemon.peers.daemon_transport import Offer
from resilient_run.daemon.root.decide import decide
from resilient_run.daemon.root.requests import Request
from resilient_run.daemon.root.root import transaction
from resilient_run.daemon.root.state import RootState
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.commit import Agreed, HeldPair, Missed
from resilient_run.daemon.run.faults import Order
from resilient_run.daemon.run.mirror import parse_pairs
from resilient_run.daemon.run.observation import Observation, parse_observations
from resilient_run.daemon.run.quarantine import Quarantine
from resilient_run.daemon.run.records import (
    Agreement,
    Closed,
    Failure,
    Fingerprint,
    Introduction,
)
from resilient_run.daemon.run.recoveries import Recoveries
from resilient_run.daemon.run.report import Report, Said
from resilient_run.daemon.run.rounds import Member, Round, Seat
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.persist_plan import PersistAnswer, PersistRequest
from resilient_run.launcher.inject.injection import Outcome, Sight
from resilient_run.launcher.rendezvous.rounds import View, broken, rendezvous_mirror

MAX_GROWTH_BYTES = 256 << 20
_KEPT_FAILURES = 20
_SLOT_PAYLOAD_BYTES = 20_000
_ATOMS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 1 << 70, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "0", "-1", "²", "9" * 5000, "\x00", "\ud800", "é" * 200, [], {}, [[]], [0], [0, 1], {"": None}, {"0": []},
)  # fmt: skip

Reader = Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One reader.

    Attributes:
        name: Of what it reads.
        honest: A document that it takes.
        read: Reads one; raises what it makes of a bad one.
        errors: What it may raise.
        is_json: Whether the document's structure can be changed, too.
    """

    name: str
    honest: bytes
    read: Reader
    errors: tuple[type[Exception], ...]
    is_json: bool = True


def etcd(name: str, value: Mapping[str, Any], parse: Callable[[dict[str, Any]], object]) -> Target:
    """Return the reader of an etcd value or a message, which is a JSON object by the time that it is parsed."""

    def read(data: bytes) -> object:
        return parse(wire.decode(data))

    return Target(name=name, honest=json.dumps(value).encode(), read=read, errors=(DaemonError, WireError))


def json_targets() -> list[Target]:
    """Return the readers of JSON objects."""
    file = RankFile(capacity_bytes=1 << 20, payload_offset=8192, stored_bytes=1000)
    seat = Seat(host="a", session="s", nproc=2, role="default", label="rack")
    round_ = Round(generation=2, seats=(seat, Seat(host="b", session="t", nproc=2)), restore=(1, 5))
    failure = Failure(generation=1, host="a", kind="worker_exit", rank=0, pid=7, exitcode=-9, unix_s=1.0, message="m")
    pair = {"generation": 1, "step": 5}
    agreed = {"watermark": pair, "next": {"generation": 1, "step": 6}, "older": []}
    offer = {"rank": 0, **pair, "used_bytes": 1 << 20, "payload_offset": 8192, **agreed, "patience_s": 0.5}
    observation = {"kind": "disk", "severity": "warn", "rank": None, "generation": 1, "step": None, "value": 1.0}
    observation |= {"limit": 5.0, "message": "little room", "unix_s": 1.0}
    mark = Fingerprint(user="ann", script="t.py", content="1" * 64, arguments="2" * 64, torch="2", formats="wire 2")
    job = Agreement(
        incarnation="i",
        min_nodes=1,
        max_nodes=2,
        token="t",
        key_proof="p",
        fingerprint=mark,
        closed=Closed(reason="over", failed=True),
    )
    member = Member(host="a", session="s", nproc=2, role="r", label="", addr="a", pid=1, ready=0)
    answer = PersistAnswer(pair=(1, 5), world_size=2, ranks={0: file, 1: file}, error=None)
    term = {"term": 2, "election": 9}
    claims = [[1, 5, "0" * 16, "1" * 16, "2" * 16, [[0, 1], [4, 4]]]]
    report = {**term, "complete": [[1, 5]], "claims": claims, "absent": ["b"], "unhealthy": [[1, 6, 5, 0]]}
    report["work"] = [[0, 5, 1.5, 9.0, 64]]
    report["missed"] = Missed(next=(1, 6), step=7, late=True).to_value()
    said = {**term, "number": 3, "watermark_revision": 8, **agreed, "persist": {**pair, "unix_s": 1.0}}
    etcd_config = EtcdConfig(endpoints=("host:2379",), user="u", password="p")
    outcome = {"ok": True, "what": "w", "host": "a", "kind": "kill-rank", "unix_s": 1.0, **pair}
    return [
        etcd("agreement", job.to_value(), Agreement.parse),
        etcd("member", member.to_value(), lambda value: Member.parse(value, host="a", arrival=1)),
        etcd("round", round_.to_value(), lambda value: Round.parse(value, revision=1)),
        etcd("failure", failure.to_value(), lambda value: Failure.parse(value, generation=1)),
        etcd("closed", {"reason": "over", "failed": False}, Closed.parse),
        etcd("quarantine", asdict(Quarantine(since_unix_s=1.0, until_unix_s=2.0, reason="r")), Quarantine.parse),
        etcd("held", {**pair, "ranks": [0, 2]}, HeldPair.parse),
        etcd("report", report, Report.parse),
        etcd("said", said, Said.parse),
        etcd(
            "equal",
            {"generation": 1, "count": 9, "leaves": base64.b64encode(b"\xff\x80").decode()},
            EqualLeaves.parse,
        ),
        etcd(
            "introduction", {"addr": "a", "port": 1, "every": 1, "sign": "busy", "injection": True}, Introduction.parse
        ),
        etcd("missed", Missed(next=(1, 6), step=7, late=True).to_value(), Missed.parse),
        etcd("observation", observation, Observation.parse),
        etcd("observations", {"observations": [observation] * 2}, parse_observations),
        etcd("persist request", PersistRequest(pair=(1, 5), unix_s=1.0).to_value(), PersistRequest.parse),
        etcd("persist answer", answer.to_value(), PersistAnswer.parse),
        etcd("published", {"pairs": [[1, 5], [1, 9]]}, parse_pairs),
        etcd("order", {"kind": "kill-rank", "host": "a", "rank": 0, "after_s": 1.0}, lambda v: Order.parse(v, "order")),
        etcd("outcome", outcome, Outcome.parse),
        etcd("policy", Policy().to_value(), Policy.parse),
        etcd("agreed", agreed, Agreed.parse),
        etcd("offer", offer, Offer.parse),
        Target(
            name="etcd configuration",
            honest=json.dumps(etcd_config.to_dict()).encode(),
            read=lambda data: read_etcd(Fields({"etcd": wire.decode(data)}, "open_job"), "etcd"),
            errors=(DaemonError, WireError),
        ),
        Target(
            name="manifest of the tier",
            honest=Persisted(run_id="run", pair=(1, 5), world_size=2, ranks={0: file, 1: file}).dump(),
            read=lambda data: Persisted.load(data, run_id="run", pair=(1, 5)),
            errors=(SlotError,),
        ),
    ]


def run_targets() -> list[Target]:
    """Return what reads all the keys of a run: the root, which also decides on them, launchers, and the injector.

    A document has the key of the run or, for a folder, the value of each name in it.
    """
    seat = Seat(host="a", session="s", nproc=2, role="default", label="rack")
    member = Member(host="a", session="s", nproc=2, role="r", label="", addr="a", pid=1, ready=0)
    round_ = Round(generation=2, seats=(seat, Seat(host="b", session="t", nproc=2)), restore=(1, 5))
    failure = Failure(generation=1, host="b", kind="worker_exit", rank=2, exitcode=-9, unix_s=1.0, message="m")
    hang = Failure(generation=2, host="b", kind="hang", rank=2, step=9, began_step=5, unix_s=1.0, message="m")
    sick = {"kind": "gpu", "severity": "fail", "rank": None, "generation": 2, "step": None, "value": 1.0}
    sick |= {"limit": 5.0, "message": "XID 79", "unix_s": 1.0}
    recovery = {"event": "recovery", "run_id": "run", "host": "a", "kind": "worker_exit", "cause": "m", "steps_lost": 1}
    recovery |= {"generation": 2, "complete": True, "unix_s": 1e9, "total_s": 0.5, "rendezvous_s": 0.1}
    host = {"addr": "a", "port": 1, "every": 1, "sign": "alive", "injection": True}
    mark = Fingerprint(user="ann", script="t.py", content="1" * 64, arguments="2" * 64, torch="2", formats="wire 2")
    job = Agreement(incarnation="i", min_nodes=1, max_nodes=2, token="t", key_proof="p", fingerprint=mark)
    request = Request(host="b", generation=2, unix_s=1.0, known=("a", "c"))
    document: dict[str, Any] = {
        keys.JOB: job.to_value(),
        keys.MEMBERS: {"a": member.to_value(), "c": {**member.to_value(), "ready": 3}},
        keys.ROUND: round_.to_value(),
        keys.COMMITTED: {"world_size": 4},
        keys.STORES: {"2": {"addr": "a", "port": 29500}},
        keys.FAILURES: {"1": failure.to_value(), "2": hang.to_value()},
        keys.DONE: {"2": {"a": {}}},
        keys.RECOVERED: {"2": {"a": recovery}},
        keys.QUARANTINES: {"b": asdict(Quarantine(since_unix_s=1.0, until_unix_s=2e9, reason="r"))},
        keys.LEADER: {"host": "a"},
        keys.DECISIONS: {"decisions": [{"kind": "quarantine", "generation": 1, "host": "b"}, {"kind": "replace"}]},
        keys.REQUESTS: {"requests": [request.to_value(), {**request.to_value(), "host": "", "answer": "d"}]},
        keys.HISTORY: {"failures": [failure.to_item()] * 3},
        keys.HOSTS: {"a": host, "b": {**host, "sign": ""}},
        keys.HELD: {"b": {"generation": 1, "step": 5, "ranks": [0, 2]}},
        keys.WATERMARK: {"generation": 1, "step": 5},
        keys.NEXT: {"generation": 2, "step": 6},
        keys.PERSISTED: {"pairs": [[1, 4]]},
        keys.OBSERVATIONS: {"a": {"observations": [sick]}, "b": {"observations": [{**sick, "kind": "hang"}]}},
        keys.OUTCOMES: {"7": {"ok": True, "what": "w", "host": "a", "kind": "kill-rank", "unix_s": 1.0}},
    }
    folders = {key: 2 if key in (keys.DONE, keys.RECOVERED) else 1 for key in document if isinstance(key, keys.Folder)}

    def entries(data: bytes) -> dict[str, Entry]:
        values: dict[str, Any] = {}

        def see(key: str, value: Any, depth: int) -> None:
            if not depth:
                values[key] = value
            elif isinstance(value, dict):
                for name, inner in value.items():
                    see(f"{key}/{name}", inner, depth - 1)

        for key, value in wire.decode(data).items():
            see(key, value, folders.get(key, 0))
        return {
            key: Entry(value=value, revision=number, created=number)
            for number, (key, value) in enumerate(values.items(), 1)
            if isinstance(value, dict)
        }

    def root(data: bytes) -> object:
        state, recoveries = RootState("a", 2), Recoveries()
        found = entries(data)
        state.apply(found)
        for key, entry in found.items():
            if key.startswith(keys.RECOVERED()):
                with contextlib.suppress(DaemonError):
                    recoveries.see(key, entry.value)
        recoveries.describe(1.0)
        decision = decide(state.view, RootPolicy(), 1e9)
        json.dumps(transaction(state.view, decision, 1e9), allow_nan=False)
        return decision, state.agreed, state.get(keys.PERSIST), state.get(keys.COMMITTED)

    def launcher(data: bytes) -> object:
        view = View.of(rendezvous_mirror().apply(entries(data)))
        return broken(view, 2), view.bound, view.generation, view.keeping(view), view.cool_down_s(1e9)

    def injector(data: bytes) -> object:
        sight = Sight()
        sight.see(entries(data))
        return sight.is_whole, sight.step, sight.host_of(0)

    honest = json.dumps(document).encode()
    return [
        Target(name="keys, by the root", honest=honest, read=root, errors=(DaemonError, WireError)),
        Target(name="keys, by launchers", honest=honest, read=launcher, errors=(WireError,)),
        Target(name="keys, by the injector", honest=honest, read=injector, errors=(WireError,)),
    ]


def byte_targets(directory: Path) -> list[Target]:
    """Return the readers of files and streams, which may write below `directory`."""
    record = JobRecord(run_id="run", host="a", incarnation="i", replicas=2, attached=True, launcher_pid=1)
    record.save(directory)
    job_path = directory / "job.json"

    def job(data: bytes) -> object:
        job_path.write_bytes(data)
        return JobRecord.load(directory)

    def stream(data: bytes) -> object:
        frame, at = wire.Frame(4096), 0
        while at < len(data):
            piece = data[at : at + frame.missing]
            at += len(piece)
            if frame.feed(piece) is not None:
                frame = wire.Frame(4096)
        return frame.is_empty

    messages = ({"op": "hello", "run_id": "run", "to": "b"}, {"id": 1, "op": "get", "rank": 0, "size": 1000})
    tree = {
        "version": 1,
        "tensors": [
            {"kind": "torch", "dtype": "float32", "shape": [2, 3], "device": "cpu", "offset": 0, "nbytes": 24},
            {"kind": "numpy", "dtype": "<f8", "shape": [4], "device": "cpu", "offset": 64, "nbytes": 32},
        ],
        "tree": ["d", ["a", "b", "c"], [["x", 0], ["l", ["x", 1], 3, None], ["t", "text", True]]],
    }
    digested = b'{"x":1,"digests":"' + b"0" * 16 + base64.b64encode(bytes(16)) + b'"}'
    return [
        Target(
            name="stream", honest=b"".join(map(wire.encode, messages)), read=stream, errors=(WireError,), is_json=False
        ),
        Target(name="job.json", honest=job_path.read_bytes(), read=job, errors=(DaemonError,)),
        Target(
            name="manifest of a slot",
            honest=json.dumps(tree).encode(),
            read=lambda data: manifest.parse(data, 128),
            errors=(SlotError,),
        ),
        Target(name="digests", honest=digested, read=digests.parse, errors=(SlotError,), is_json=False),
        slot_target(directory / "rank0.0.slot"),
    ]


def slot_target(path: Path) -> Target:
    """Return the reader of a slot file: what it takes is a capture that was made, whole."""
    payload_offset, capacity_bytes = plan_layout(len(MANIFEST), _SLOT_PAYLOAD_BYTES)

    def captured(step: int) -> tuple[bytes, tuple[int, bytes, bytes]]:
        path.unlink(missing_ok=True)
        slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
        publish(slot, run_id="run", rank=0, world_size=1, pair=(1, step), size_bytes=_SLOT_PAYLOAD_BYTES)
        slot.close()
        return path.read_bytes(), restored()

    def restored() -> tuple[int, bytes, bytes]:
        slot = Slot.open(path)
        try:
            header = slot.verify()
            return header.step, slot.manifest(), bytes(slot.buffer[header.payload_offset : header.used_bytes])
        finally:
            slot.close()

    (_, one), (second, two) = captured(1), captured(2)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = restored()
        assert found in (one, two), "a slot restores what was never captured"
        return found

    return Target(name="slot", honest=second, read=read, errors=(SlotError, OSError), is_json=False)


def changed_bytes(honest: bytes, chance: random.Random) -> bytes:
    """Return `honest` after a few changes to its bytes; places at which headers have numbers are hit most."""
    changed = bytearray(honest)
    for _ in range(chance.randint(1, 4)):
        near = min(len(changed), 300 if chance.random() < 0.5 else HEADER_BYTES + 200)
        at = chance.randint(0, near if chance.random() < 0.7 else len(changed))
        size = chance.choice((1, 1, 2, 4, 8, 24, 64))
        match chance.randrange(6):
            case 0:
                changed[at : at + size] = chance.randbytes(size)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[max(0, at - size) : at]
            case 3:
                changed[at : at + 8] = chance.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 4:
                del changed[at:]
            case 5:
                if at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def changed_json(honest: bytes, chance: random.Random) -> bytes:
    """Return `honest` with one to three places of its structure replaced, removed, doubled or moved."""
    document = json.loads(honest)
    for _ in range(chance.randint(1, 3)):
        place: Any = document
        while True:
            names = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not names:
                break
            key = chance.choice(names)
            if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.7:
                place = place[key]
                continue
            change = chance.randrange(5)
            if change == 0:
                del place[key]
            elif change == 1 and isinstance(place, dict):
                place[chance.choice(("", "0", "9" * 5000, str(chance.choice(_ATOMS))))] = copy.deepcopy(place[key])
            elif change == 2 and isinstance(place, list):
                place.extend(copy.deepcopy(place * chance.choice((1, 3))))
            else:
                place[key] = copy.deepcopy(chance.choice(_ATOMS))
            break
    return json.dumps(document).encode()


def run(inputs: int, seed: str, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Give the readers `inputs` documents in turn and return what came of it."""
    chance, counts, failures = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as scratch:
        targets = [*json_targets(), *run_targets(), *byte_targets(Path(scratch))]
        for target in targets:
            target.read(target.honest)
        before_kib, begun_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        for number in range(inputs):
            target = targets[number % len(targets)]
            by_structure = target.is_json and chance.random() < 0.7
            data = (changed_json if by_structure else changed_bytes)(target.honest, chance)
            try:
                target.read(data)
                counts[f"{target.name}: read"] += 1
            except target.errors:
                counts[f"{target.name}: refused"] += 1
            except Exception as error:  # noqa: BLE001 - what is looked for
                counts[f"{target.name}: failed"] += 1
                if len(failures) < _KEPT_FAILURES:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    failures.append(
                        {
                            "target": target.name,
                            "error": f"{type(error).__name__}: {str(error)[:200]}",
                            "where": f"{Path(where.filename).name}:{where.lineno}",
                            "input": base64.b64encode(data[:2000]).decode(),
                        }
                    )
            if number % 50_000 == 0:
                say(f"{number} inputs, {len(failures)} failures")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10
    if grown > MAX_GROWTH_BYTES:
        failures.append({"target": "memory", "error": f"the process grew by {grown} bytes", "where": "", "input": ""})
    table = {
        target.name: {what: counts[f"{target.name}: {what}"] for what in ("read", "refused", "failed")}
        for target in targets
    }
    return {
        "inputs": inputs,
        "seed": seed,
        "seconds": round(time.monotonic() - begun_s, 1),
        "grown_bytes": grown,
        "failures": failures,
        "readers": table,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = run(args.inputs, args.seed, say=partial(print, file=sys.stderr, flush=True))
    for name, row in found["readers"].items():
        print(f"{name:24}{row['read']:>10} read{row['refused']:>10} refused{row['failed']:>6} failed")
    for failure in found["failures"]:
        print(f"{failure['target']}: {failure['error']} ({failure['where']}): {failure['input'][:200]}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
