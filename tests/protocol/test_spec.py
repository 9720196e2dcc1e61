import msgspec

from protocol.spec import WorkerSpec

REQUIRED = {"name": "a", "path": "p", "epoch": 1, "down": "d", "up": "u"}


def test_a_default_is_not_written_wherever_its_value_came_from() -> None:
    """A decoded number is equal to its default, and another object."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(WorkerSpec) if not field.required}
    spec = msgspec.json.decode(msgspec.json.encode(REQUIRED | defaults), type=WorkerSpec)

    for same in (spec, msgspec.structs.replace(spec, epoch=1)):
        assert msgspec.json.decode(msgspec.json.encode(same)) == REQUIRED


def test_a_value_of_its_own_is_written() -> None:
    spec = WorkerSpec(**REQUIRED, context=77, orphan_max_s=1.0)

    assert msgspec.json.decode(msgspec.json.encode(spec)) == REQUIRED | {"context": 77, "orphan_max_s": 1.0}
