"""The machine as the key of measured times: another chip, another build, another number of cores is another machine."""

from collections.abc import Sequence

from worker.engine.scheduling.timing_profile_file import darwin_facts, device_facts, linux_facts, machine

IOREG = """+-o AGXAcceleratorG14X  <class AGXAcceleratorG14X, id 0x1000003f5, registered, matched, active, busy 0>
    {
      "IOClass" = "AGXAcceleratorG14X"
      "gpu-core-count" = 60
      "vendor-id" = <6b100000>
    }
"""


def mac(command: Sequence[str]) -> str:
    assert command[0].startswith("/usr/sbin/"), "a service has no /usr/sbin in its PATH"
    if command[0].endswith("ioreg"):
        return IOREG
    return {"machdep.cpu.brand_string": "Apple M2 Ultra\n", "kern.osversion": "25A354\n"}[command[-1]]


def test_a_mac_is_its_chip_its_gpu_cores_and_its_build() -> None:
    assert darwin_facts(mac) == ["Apple M2 Ultra", "60 GPU cores", "macOS 25A354"]


def test_a_mac_that_says_nothing_is_still_told_from_others_by_what_is_known() -> None:
    assert darwin_facts(lambda _command: "") == ["", "? GPU cores", "macOS "]


def test_a_linux_machine_is_its_processor_what_may_be_used_of_it_and_its_kernel() -> None:
    info = "processor\t: 0\nmodel name\t: EPYC 9754\nflags\t\t: fpu\n"
    assert linux_facts(info, 2, "6.1") == ["EPYC 9754", "2 CPUs", "Linux 6.1"]


def test_the_device_is_what_mlx_names_it() -> None:
    assert device_facts({"device_name": "Apple M2 Ultra", "architecture": "applegpu_g14d", "memory_size": 1}) == [
        "Apple M2 Ultra",
        "applegpu_g14d",
    ]
    assert machine() == machine() != ""
